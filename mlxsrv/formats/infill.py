"""Fill-in-the-middle layouts: where prefix and suffix stand in a prompt, by family of models.

A family is known by its marker tokens. Its layout is the one that the model was trained on, by its
paper, model card or reference tokenizer. Other files stand where the family has a place for them,
else before the prefix, each after the line that llama.cpp's server writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from mlxsrv.generation.spec import ProjectFile


class InfillText(Struct, frozen=True):
    """Text in a prompt, to be tokenized.

    Attributes:
        joined: it follows other text. So a tokenizer that writes a space before each text must
            write none.
    """

    text: str
    joined: bool = False


Marker = str
"""The name of one token in the vocabulary."""


class Hole(Enum):
    """The places in a layout for the client's texts."""

    PREFIX = "prefix"
    SUFFIX = "suffix"


PREFIX, SUFFIX = Hole.PREFIX, Hole.SUFFIX


class InfillFamily(Struct, frozen=True):
    """The layout of one family of models.

    Attributes:
        layout: markers and places, in the order of the prompt.
        repository: a marker and text before all files, with `{}` for the repository's name.
        file: a marker and text before another file, with `{}` for its name.
        this_file: a marker and text before the file that is to be filled in.
        ends: tokens that end the filled-in text, besides those that end any answer.
    """

    layout: tuple[Marker | Hole, ...]
    repository: tuple[Marker, str] | None = None
    file: tuple[Marker, str] | None = None
    this_file: tuple[Marker, str] | None = None
    ends: tuple[Marker, ...] = ()

    @property
    def markers(self) -> tuple[Marker, ...]:
        """The tokens by which a model of the family is known."""
        around = (self.repository, self.file, self.this_file)
        return (
            *(part for part in self.layout if isinstance(part, str)),
            *(each[0] for each in around if each is not None),
        )


_QWEN = ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>")
_STARCODER = ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>")

FAMILIES: Mapping[str, InfillFamily] = {
    # arxiv.org/abs/2409.12186, and the model card: file and repository level.
    "Qwen2.5-Coder, Qwen3-Coder": InfillFamily(
        _QWEN,
        repository=("<|repo_name|>", "{}\n"),
        file=("<|file_sep|>", "{}\n"),
        this_file=("<|file_sep|>", "{}\n"),
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    ),
    # ai.google.dev/gemma/docs/codegemma (the separator ends an answer); Granite 4's model card.
    "CodeGemma, Granite 4": InfillFamily(_QWEN, ends=("<|file_separator|>", "<|fim_pad|>")),
    # arxiv.org/abs/2402.19173, section 3.3.
    "StarCoder2": InfillFamily(
        _STARCODER,
        repository=("<repo_name>", "{}"),
        file=("<file_sep>", "{}\n"),
        this_file=("<file_sep>", ""),
        ends=("<fim_pad>", "<file_sep>"),
    ),
    # arxiv.org/abs/2305.06161 and arxiv.org/abs/2405.04324.
    "StarCoder, Granite Code": InfillFamily(_STARCODER, ends=("<fim_pad>",)),
    # The model card of bigcode/santacoder.
    "SantaCoder": InfillFamily(("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>")),
    # github.com/deepseek-ai/DeepSeek-Coder: the hole is where the middle goes.
    "DeepSeek-Coder": InfillFamily(
        (
            "<\uff5cfim\u2581begin\uff5c>",
            PREFIX,
            "<\uff5cfim\u2581hole\uff5c>",
            SUFFIX,
            "<\uff5cfim\u2581end\uff5c>",
        )
    ),
    # arxiv.org/abs/2308.12950, and Hugging Face's CodeLlamaTokenizer.
    "CodeLlama": InfillFamily(
        ("\u2581<PRE>", PREFIX, "\u2581<SUF>", SUFFIX, "\u2581<MID>"), ends=("\u2581<EOT>",)
    ),
    # mistral-common, encode_fim: the suffix goes first, and nothing stands after the prefix.
    "Codestral": InfillFamily(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
}
"""A model belongs to the first family whose markers its vocabulary has. Families with more markers
stand earlier."""

_SNIPPET = "\n\n--- snippet ---\n\n"  # as in llama.cpp, for families without a marker for files

# Names in prompts of files, where a request has none; as in llama.cpp.
_REPOSITORY = "myproject"
_THIS_FILE = "filename"


def find_family(vocabulary: Container[str]) -> InfillFamily | None:
    """Return the family of a model with these tokens, or None if it has no fill-in-the-middle."""
    known = (each for each in FAMILIES.values() if all(m in vocabulary for m in each.markers))
    return next(known, None)


def lay_out(
    family: InfillFamily, prefix: str, suffix: str, files: Sequence[ProjectFile] = ()
) -> Iterator[Marker | InfillText]:
    """Yield the prompt in order, without the token that begins any text."""
    if files:
        yield from _files(family, files)
    for part in family.layout:
        if isinstance(part, str):
            yield part
        else:
            yield InfillText(prefix) if part is PREFIX else InfillText(suffix, joined=True)


def _files(family: InfillFamily, files: Sequence[ProjectFile]) -> Iterator[Marker | InfillText]:
    if family.repository is not None:
        yield from _headed(family.repository, _REPOSITORY)
    for file in files:
        if family.file is not None:
            yield from _headed(family.file, file.name, file.text)
        else:
            yield InfillText(f"{_SNIPPET}{file.text}", joined=True)
    if family.this_file is not None:
        yield from _headed(family.this_file, _THIS_FILE)


def _headed(head: tuple[Marker, str], name: str, text: str = "") -> Iterator[Marker | InfillText]:
    marker, form = head
    yield marker
    yield InfillText(form.replace("{}", name) + text, joined=True)


def to_tokens(
    parts: Iterable[Marker | InfillText],
    vocabulary: Mapping[str, int],
    encode: Callable[[InfillText], Sequence[int]],
) -> list[int]:
    """Return the token ids of a prompt; `encode` returns those of a text."""
    tokens: list[int] = []
    for part in parts:
        tokens.extend([vocabulary[part]] if isinstance(part, str) else encode(part))
    return tokens
