"""The parameters of a job: those that the request gives, else the model's own."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

from mlxsrv.generation.parameters import Sampling
from mlxsrv.generation.spec import GenerationSpec

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer


def sampling(spec: GenerationSpec, tokenizer: Tokenizer, answer: int) -> Sampling:
    """The request's parameters, else the model's own, else none.

    Args:
        answer: which of the answers to the prompt the job makes; each has a seed of its own.
    """
    own, wishes = tokenizer.defaults, spec.sampling
    seed = random.getrandbits(63) if wishes.seed is None else wishes.seed + answer
    return Sampling(
        temperature=_first(wishes.temperature, own.temperature, 1.0),
        top_p=_first(wishes.top_p, own.top_p, 1.0),
        top_k=max(_first(wishes.top_k, own.top_k, 0), 0),
        min_p=_first(wishes.min_p, own.min_p, 0.0),
        seed=seed,
        frequency_penalty=_first(wishes.frequency_penalty, 0.0),
        presence_penalty=_first(wishes.presence_penalty, 0.0),
        repetition_penalty=_first(wishes.repetition_penalty, own.repetition_penalty, 1.0),
        logit_bias=tuple(sorted(wishes.logit_bias.items())),
    )


def end_tokens(
    spec: GenerationSpec,
    tokenizer: Tokenizer,
    *,
    chat: bool,
    constrained: bool,
    prompt_ends: frozenset[int] = frozenset(),
) -> frozenset[int]:
    """The tokens that end an answer and are not part of its text.

    An answer that follows a grammar may end with any end token, because the grammar allows none
    before its end. It ends there even with `ignore_eos`: nothing else may follow.

    Args:
        prompt_ends: the end tokens that the prompt adds.
    """
    own = tokenizer.turn_ends if chat or constrained else tokenizer.end_tokens
    own |= prompt_ends
    if spec.ignore_eos and not constrained:
        own = frozenset()
    return own.union(spec.stop_token_ids)


V = TypeVar("V")


def _first(*values: V | None) -> V:
    """The first value that is given. The last always is."""
    return next(value for value in values if value is not None)
