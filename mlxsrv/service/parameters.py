"""What a request's fields make of a job's parameters, with the model's own for those not given."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

from mlxsrv.generation import Sampling
from mlxsrv.wire.requests import GenerationRequest

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer


def sampling(request: GenerationRequest, tokenizer: Tokenizer, copy: int) -> Sampling:
    """The request's parameters, or the model's own, or none; each copy has its own seed."""
    given = tokenizer.defaults
    seed = random.getrandbits(63) if request.seed is None else request.seed + copy
    return Sampling(
        temperature=_first(request.temperature, given.temperature, 1.0),
        top_p=_first(request.top_p, given.top_p, 1.0),
        top_k=max(_first(request.top_k, given.top_k, 0), 0),
        min_p=_first(request.min_p, given.min_p, 0.0),
        seed=seed,
        frequency_penalty=_first(request.frequency_penalty, 0.0),
        presence_penalty=_first(request.presence_penalty, 0.0),
        repetition_penalty=_first(request.repetition, given.repetition_penalty, 1.0),
        logit_bias=tuple(sorted((request.logit_bias or {}).items())),
    )


def end_tokens(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    *,
    chat: bool,
    guided: bool,
    more: frozenset[int] = frozenset(),
) -> frozenset[int]:
    """The tokens that end an answer, in no text; `more` are the prompt's own. One that
    follows a grammar ends where that does, whatever is to be ignored: nothing else may come then.
    """
    own = tokenizer.turn_ends if chat or guided else tokenizer.end_tokens
    own |= more
    if request.ignore_eos and not guided:
        own = frozenset()
    return own.union(request.stop_token_ids or ())


V = TypeVar("V")


def _first(*values: V | None) -> V:
    """The first that is given; the last always is."""
    return next(value for value in values if value is not None)
