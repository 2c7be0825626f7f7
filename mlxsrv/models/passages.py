"""Texts to be embedded or judged -> token ids, as the model's sentence-transformers files say.

Runs in a worker thread, with the tokenizer to itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from mlxsrv.engine.encoding import Limit
from mlxsrv.engine.recipe import Recipe
from mlxsrv.errors import ContextLengthExceeded, UnsupportedParameter
from mlxsrv.models.prompts import check_ids, check_length
from mlxsrv.wire.embeddings import EmbeddingRequest, RerankRequest

if TYPE_CHECKING:
    from mlxsrv.engine.tokenizer import Tokenizer

_INSTRUCTION = re.compile(r"(?<=^Instruct: ).*?(?=\n)", re.DOTALL)  # Qwen3-Embedding, e5-instruct
_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""What models call the prompts that a client chooses by `input_type`."""


class Passages(msgspec.Struct, frozen=True):
    """Texts as token ids; of pairs, how many tokens come before each second text."""

    texts: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


def plan_embedding(
    request: EmbeddingRequest, recipe: Recipe, longest: int | None, tokenizer: Tokenizer
) -> Passages:
    """The texts with their prompt, each of at most `longest` tokens.

    Raises:
        InvalidRequest, ContextLengthExceeded, UnsupportedParameter
    """
    prompt = _prompt(request, recipe)
    texts: list[tuple[int, ...]] = []
    for i, text in enumerate(request.texts):
        path = request.path(i)
        limit = _limit(longest, path)
        if isinstance(text, str):
            whole = prompt + text
            tokens = tokenizer.split(
                whole.lower() if recipe.lowercase else whole, special=True, limit=limit
            )
        else:
            check_length(text, limit)
            check_ids(text, path, tokenizer)
            tokens = list(text)
        if recipe.pooling == "last":
            tokens = tokenizer.ensure_end(tokens)
        _check_length(tokens, longest, path)
        texts.append(tuple(tokens))
    return Passages(tuple(texts))


def plan_rerank(request: RerankRequest, longest: int | None, tokenizer: Tokenizer) -> Passages:
    """The query with each document. Raises ContextLengthExceeded."""
    pairs = [
        tokenizer.pair(request.query, text, _limit(longest, f"documents[{i}]"))
        for i, text in enumerate(request.texts)
    ]
    for i, (tokens, _) in enumerate(pairs):
        _check_length(tokens, longest, f"documents[{i}]")
    return Passages(tuple(tuple(tokens) for tokens, _ in pairs), tuple(first for _, first in pairs))


def _limit(longest: int | None, path: str) -> Limit | None:
    return None if longest is None else Limit(longest, path)


def _prompt(request: EmbeddingRequest, recipe: Recipe) -> str:
    """What is written before each text."""
    names = _PROMPTS["query" if request.instruction else request.input_type or "document"]
    found = next((recipe.prompts[name] for name in names if name in recipe.prompts), "")
    if request.instruction is not None:
        if not _INSTRUCTION.search(found):
            raise UnsupportedParameter(
                "instruction: this model's files have no prompt that holds one",
                param="instruction",
            )
        return _INSTRUCTION.sub(lambda _: request.instruction or "", found)
    if request.input_type is None:
        return recipe.prompts.get(recipe.default_prompt or "", "")
    return found


def _check_length(tokens: Sequence[int], longest: int | None, path: str) -> None:
    if longest is not None and len(tokens) > longest:
        raise ContextLengthExceeded(
            f"{path}: this model's maximum context length is {longest} tokens; the text has "
            f"{len(tokens)}",
            param=path,
        )
