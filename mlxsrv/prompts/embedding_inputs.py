"""Texts to be embedded or judged -> token ids, as the model's sentence-transformers files say.

Runs in a worker thread, with the tokenizer to itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from mlxsrv.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from mlxsrv.formats.pooling import PoolingConfig
from mlxsrv.prompts.encoding import TokenBudget, Truncation
from mlxsrv.prompts.planning import check_ids, check_length
from mlxsrv.wire.embeddings import EmbeddingRequest, TruncationFields

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

_INSTRUCTION = re.compile(r"(?<=^Instruct: ).*?(?=\n)", re.DOTALL)  # Qwen3-Embedding, e5-instruct
_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""What models call the prompts that a client chooses by `input_type`."""


class EmbeddingInputs(msgspec.Struct, frozen=True):
    """Texts as token ids; of pairs, how many tokens come before each second text."""

    texts: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


def plan_embedding(
    request: EmbeddingRequest,
    config: PoolingConfig,
    longest: int | None,
    tokenizer: Tokenizer,
) -> EmbeddingInputs:
    """The texts with their prompt, each of at most `longest` tokens: those that the tokenizer
    gives, or the client.

    Raises:
        InvalidRequest, ContextLengthExceeded, UnsupportedParameter
    """
    prompt, cut = _prompt(request, config), _cut(request, longest)
    texts: list[tuple[int, ...]] = []
    for i, text in enumerate(request.texts):
        path = request.path(i)
        limit = _limit(longest, path)
        if isinstance(text, str):
            whole = _cased(prompt + text, config)
            tokens = tokenizer.split(whole, special=True, limit=limit, cut=cut)
        else:
            check_length(text, limit if cut is None else None)
            check_ids(text, path, tokenizer)
            tokens = text if cut is None else _cut_ids(text, cut)
        _check_length(tokens, longest, path)
        texts.append(tuple(tokens))
    return EmbeddingInputs(tuple(texts))


def plan_texts(
    texts: Sequence[tuple[str, str]],
    request: TruncationFields,
    config: PoolingConfig,
    longest: int | None,
    tokenizer: Tokenizer,
) -> EmbeddingInputs:
    """Texts, each with its path in the request, as they are embedded where nothing else is asked.

    Raises:
        InvalidRequest, ContextLengthExceeded
    """
    prompt = config.prompts.get(config.default_prompt or "", "")
    cut = _cut(request, longest)
    made: list[tuple[int, ...]] = []
    for text, path in texts:
        whole, limit = _cased(prompt + text, config), _limit(longest, path)
        tokens = tokenizer.split(whole, special=True, limit=limit, cut=cut)
        _check_length(tokens, longest, path)
        made.append(tuple(tokens))
    return EmbeddingInputs(tuple(made))


def plan_pairs(
    pairs: Sequence[tuple[str, str, str]],
    request: TruncationFields,
    longest: int | None,
    tokenizer: Tokenizer,
) -> EmbeddingInputs:
    """Pairs of texts as a cross-encoder reads them, each with the path that is to blame where it is
    too long.

    Raises:
        InvalidRequest, ContextLengthExceeded
    """
    cut = _cut(request, longest)
    texts: list[tuple[int, ...]] = []
    firsts: list[int] = []
    for one, other, path in pairs:
        tokens, first = tokenizer.pair(one, other, _limit(longest, path), cut)
        _check_length(tokens, longest, path)
        texts.append(tuple(tokens))
        firsts.append(first)
    return EmbeddingInputs(tuple(texts), tuple(firsts))


def _cased(text: str, config: PoolingConfig) -> str:
    return text.lower() if config.lowercase else text


def _cut(request: TruncationFields, longest: int | None) -> Truncation | None:
    """How texts are cut, if they are to be. Raises InvalidRequest."""
    asked = request.truncate_prompt_tokens
    if asked is not None and asked > 0:
        if longest is not None and asked > longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {asked} are more than this model's maximum context "
                f"length of {longest} tokens",
                param="truncate_prompt_tokens",
            )
        return Truncation(asked, request.cut_side)
    if not request.truncates or longest is None:
        return None
    return Truncation(longest, request.cut_side)


def _cut_ids(tokens: list[int], cut: Truncation) -> list[int]:
    return tokens[: cut.tokens] if cut.side == "right" else tokens[-cut.tokens :]


def _limit(longest: int | None, path: str) -> TokenBudget | None:
    return None if longest is None else TokenBudget(longest, path)


def _prompt(request: EmbeddingRequest, config: PoolingConfig) -> str:
    """What is written before each text."""
    names = _PROMPTS["query" if request.instruction else request.input_type or "document"]
    found = next((config.prompts[name] for name in names if name in config.prompts), "")
    if request.instruction is not None:
        if not _INSTRUCTION.search(found):
            raise UnsupportedParameter(
                "instruction: this model's files have no prompt that holds one",
                param="instruction",
            )
        return _INSTRUCTION.sub(lambda _: request.instruction or "", found)
    if request.input_type is None:
        return config.prompts.get(config.default_prompt or "", "")
    return found


def _check_length(tokens: Sequence[int], longest: int | None, path: str) -> None:
    if not tokens:
        raise InvalidRequest(f"{path}: the model's tokenizer makes no token of it", param=path)
    if longest is not None and len(tokens) > longest:
        raise ContextLengthExceeded(
            f"{path}: this model's maximum context length is {longest} tokens; the text has "
            f"{len(tokens)}; truncate: true would have it cut",
            param=path,
        )
