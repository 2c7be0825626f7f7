"""Embedding inputs: texts to be embedded or scored, as token ids with their prompts.

The model's pooling config says how texts are prepared. Runs in a worker thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from mlxsrv.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from mlxsrv.formats.pooling import PoolingConfig
from mlxsrv.generation.texts import Cut, EmbeddingSpec, PairsSpec
from mlxsrv.prompts.encoding import TokenBudget, Truncation
from mlxsrv.prompts.planning import check_ids, check_length

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
    spec: EmbeddingSpec, config: PoolingConfig, longest: int | None, tokenizer: Tokenizer
) -> EmbeddingInputs:
    """Prepare the texts of a request for embeddings, each with its prompt.

    Args:
        longest: tokens that a text may have; None for any number.

    Raises:
        InvalidRequest, ContextLengthExceeded, UnsupportedParameter: a text or a parameter cannot be
            used; the error has its path.
    """
    prompt, truncation = _prompt(spec, config), _truncation(spec.cut, longest)
    texts: list[tuple[int, ...]] = []
    for text, path in spec.texts:
        if isinstance(text, str):
            texts.append(_encode(prompt + text, path, config, longest, truncation, tokenizer))
        else:
            texts.append(_check_given(text, path, longest, truncation, tokenizer))
    return EmbeddingInputs(tuple(texts))


def plan_pairs(spec: PairsSpec, longest: int | None, tokenizer: Tokenizer) -> EmbeddingInputs:
    """Prepare pairs of texts for a cross-encoder.

    Raises:
        InvalidRequest, ContextLengthExceeded: a pair cannot be used; the error has the path of its
            second text.
    """
    truncation = _truncation(spec.cut, longest)
    texts: list[tuple[int, ...]] = []
    firsts: list[int] = []
    for i, k in spec.pairs:
        (one, _), (other, path) = spec.ones[i], spec.others[k]
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


def _truncation(cut: Cut | None, longest: int | None) -> Truncation | None:
    """Return how texts are truncated, or None if they are not. Raises InvalidRequest."""
    if cut is None:
        return None
    if cut.tokens is None:
        return None if longest is None else Truncation(longest, cut.side)
    if longest is not None and cut.tokens > longest:
        raise InvalidRequest(
            f"truncate_prompt_tokens: {cut.tokens} are more than this model's maximum context "
            f"length of {longest} tokens",
            param="truncate_prompt_tokens",
        )
    return Truncation(cut.tokens, cut.side)


def _budget(longest: int | None, path: str) -> TokenBudget | None:
    return None if longest is None else TokenBudget(longest, path)


def _prompt(spec: EmbeddingSpec, config: PoolingConfig) -> str:
    """Return what is written before each text. Raises UnsupportedParameter."""
    names = _PROMPTS["query" if spec.instruction else spec.input_type or "document"]
    found = next((config.prompts[name] for name in names if name in config.prompts), "")
    if spec.instruction is not None:
        if not _INSTRUCTION.search(found):
            raise UnsupportedParameter(
                "instruction: this model's files have no prompt with an instruction; leave it out",
                param="instruction",
            )
        return _INSTRUCTION.sub(lambda _: spec.instruction or "", found)
    if spec.input_type is None:
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
