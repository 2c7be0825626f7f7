"""Embedding inputs: texts to be embedded or scored, as token ids with their prompts.

The model's pooling config says how texts are prepared. Runs in a worker thread, which has the
tokenizer to itself.
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
from mlxsrv.wire.openai.embeddings import EmbeddingRequest, TruncationFields

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

_INSTRUCTION = re.compile(r"(?<=^Instruct: ).*?(?=\n)", re.DOTALL)  # Qwen3-Embedding, e5-instruct
_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""The names that models give to the prompt that a client chooses by `input_type`."""


class EmbeddingInputs(msgspec.Struct, frozen=True):
    """Texts as token ids.

    Attributes:
        texts: the ids of each text, or of each pair of texts.
        firsts: for pairs, how many tokens come before each second text; else empty.
    """

    texts: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


def plan_embedding(
    request: EmbeddingRequest, config: PoolingConfig, longest: int | None, tokenizer: Tokenizer
) -> EmbeddingInputs:
    """Prepare the texts of a request for embeddings, each with its prompt.

    Args:
        longest: tokens that a text may have; None for any number.

    Raises:
        InvalidRequest, ContextLengthExceeded, UnsupportedParameter: a text or a parameter cannot be
            used; the error has its path.
    """
    prompt, truncation = _prompt(request, config), _truncation(request, longest)
    texts: list[tuple[int, ...]] = []
    for i, text in enumerate(request.texts):
        path = request.path(i)
        if isinstance(text, str):
            texts.append(_encode(prompt + text, path, config, longest, truncation, tokenizer))
        else:
            texts.append(_check_given(text, path, longest, truncation, tokenizer))
    return EmbeddingInputs(tuple(texts))


def plan_texts(
    texts: Sequence[tuple[str, str]],
    request: TruncationFields,
    config: PoolingConfig,
    longest: int | None,
    tokenizer: Tokenizer,
) -> EmbeddingInputs:
    """Prepare texts, each with its path in the request, with the model's default prompt.

    Raises:
        InvalidRequest, ContextLengthExceeded: a text cannot be used; the error has its path.
    """
    prompt = config.prompts.get(config.default_prompt or "", "")
    truncation = _truncation(request, longest)
    return EmbeddingInputs(
        tuple(
            _encode(prompt + text, path, config, longest, truncation, tokenizer)
            for text, path in texts
        )
    )


def plan_pairs(
    pairs: Sequence[tuple[str, str, str]],
    request: TruncationFields,
    longest: int | None,
    tokenizer: Tokenizer,
) -> EmbeddingInputs:
    """Prepare pairs of texts for a cross-encoder.

    Args:
        pairs: two texts, and the path that an error names if they are too long.

    Raises:
        InvalidRequest, ContextLengthExceeded: a pair cannot be used; the error has its path.
    """
    truncation = _truncation(request, longest)
    texts: list[tuple[int, ...]] = []
    firsts: list[int] = []
    for one, other, path in pairs:
        tokens, first = tokenizer.pair_ids(one, other, _budget(longest, path), truncation)
        _check_length(tokens, longest, path)
        texts.append(tuple(tokens))
        firsts.append(first)
    return EmbeddingInputs(tuple(texts), tuple(firsts))


def _encode(
    text: str,
    path: str,
    config: PoolingConfig,
    longest: int | None,
    truncation: Truncation | None,
    tokenizer: Tokenizer,
) -> tuple[int, ...]:
    if config.lowercase:
        text = text.lower()
    budget = _budget(longest, path)
    tokens = tokenizer.token_ids(text, special=True, budget=budget, truncation=truncation)
    _check_length(tokens, longest, path)
    return tuple(tokens)


def _check_given(
    tokens: list[int],
    path: str,
    longest: int | None,
    truncation: Truncation | None,
    tokenizer: Tokenizer,
) -> tuple[int, ...]:
    """Check token ids that the client sent, and truncate them."""
    check_length(tokens, _budget(longest, path) if truncation is None else None)
    check_ids(tokens, path, tokenizer)
    if truncation is not None:
        right = truncation.side == "right"
        tokens = tokens[: truncation.tokens] if right else tokens[-truncation.tokens :]
    _check_length(tokens, longest, path)
    return tuple(tokens)


def _truncation(request: TruncationFields, longest: int | None) -> Truncation | None:
    """Return how texts are truncated, or None if they are not. Raises InvalidRequest."""
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


def _budget(longest: int | None, path: str) -> TokenBudget | None:
    return None if longest is None else TokenBudget(longest, path)


def _prompt(request: EmbeddingRequest, config: PoolingConfig) -> str:
    """Return what is written before each text. Raises UnsupportedParameter."""
    names = _PROMPTS["query" if request.instruction else request.input_type or "document"]
    found = next((config.prompts[name] for name in names if name in config.prompts), "")
    if request.instruction is not None:
        if not _INSTRUCTION.search(found):
            raise UnsupportedParameter(
                "instruction: this model's files have no prompt with an instruction; leave it out",
                param="instruction",
            )
        return _INSTRUCTION.sub(lambda _: request.instruction or "", found)
    if request.input_type is None:
        return config.prompts.get(config.default_prompt or "", "")
    return found


def _check_length(tokens: Sequence[int], longest: int | None, path: str) -> None:
    if not tokens:
        raise InvalidRequest(f"{path}: the model's tokenizer gives no token for it", param=path)
    if longest is not None and len(tokens) > longest:
        raise ContextLengthExceeded(
            f"{path}: this model's maximum context length is {longest} tokens; the text has "
            f"{len(tokens)}; truncate: true would cut it",
            param=path,
            tokens=len(tokens),
            most=longest,
        )
