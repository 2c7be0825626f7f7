"""Checkpoints: after which tokens of a prompt a copy of its KV cache is kept.

Recurrent layers, and sliding windows that are full, cannot be cut back. A cached prompt of such a
model is of use only to prompts that begin with all of it. So copies are cached at the places where
later prompts will differ from this one:

- where its job says so: behind the system message, and where the next turn of the chat goes on;
- every so many tokens of a long prompt, for prompts that nobody could foresee;
- at its end, and at the end of the answer.

A copy takes as many bytes as the KV cache has by then. So those of a long prompt are some powers of
two apart: the longer it is, the farther. New ones supersede old ones: see `prompt_index`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.prompt_index import LEAST

STEP = 2048
"""Tokens between two checkpoints of a long prompt, or a power of two times as many."""
MOST_STEPS = 8
"""The most checkpoints of a prompt besides those that its job names."""
WORTH = 256
"""Tokens that a checkpoint must save before a prompt is read alone for its sake, where it could be
read in one pass with others."""

_SHARE = 4  # the checkpoints of one prompt may take 1 / so many of the prompt cache's bytes


def choose_checkpoints(
    named: Iterable[int], cached: int, last: int, facts: TextFacts
) -> tuple[int, ...]:
    """The places of a prompt at which a copy is kept, in order.

    Each is at least `LEAST` tokens behind the one before it: fewer take less time to read again
    than the pass over the weights that ends there.

    Args:
        named: those that the job names.
        cached: tokens of the prompt that need no reading.
        last: the prompt's tokens but for the last one. What is kept at its end is not chosen here.
        facts: of the model.
    """
    chosen = _spread((place for place in sorted(named) if place < last), cached)
    for place in _steps(cached, last, facts):
        if all(abs(place - other) >= LEAST for other in (cached, last, *chosen)):
            chosen.append(place)
    return tuple(sorted(chosen))


def _spread(places: Iterable[int], begin: int) -> list[int]:
    """The places that are far enough behind the one before."""
    chosen: list[int] = []
    for place in places:
        if place - (chosen[-1] if chosen else begin) >= LEAST:
            chosen.append(place)
    return chosen


def _steps(cached: int, last: int, facts: TextFacts) -> range:
    """Places that are the same for every prompt of about this length, so that two that begin alike
    share them."""
    step, most = STEP, facts.prompt_cache_bytes // _SHARE
    while step < last:
        places = range(step, last, step)
        if len(places) <= MOST_STEPS and sum(map(facts.kv_bytes, places)) <= most:
            return range(step * (cached // step + 1), last, step)
        step *= 2
    return range(0)


def widest_part(cached: int, checkpoints: Sequence[int]) -> int:
    """The most tokens that one of the checkpoints saves beyond the one before it."""
    return max((b - a for a, b in pairwise((cached, *checkpoints))), default=0)
