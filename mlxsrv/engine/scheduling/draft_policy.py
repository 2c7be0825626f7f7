"""Proposals of a draft model: to a row that is alone, where that is faster.

The draft has a KV cache of one row's text. It is kept when the row has ended, since the next turn
of a chat begins with it. It may be dropped at any time, and read again. Masks, bans, penalties and
log-probabilities are computed for one token at a time, so rows that need these get no proposals. A
dormant constraint has no mask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.outcomes import Decoded, Outcome
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.engine.scheduling.prompt_index import common_prefix
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.speculation_controller import (
    MOST,
    MOST_UNREAD,
    SpeculationController,
)


class DraftPolicy:
    """Proposals of a draft model to the only row of a batch.

    Args:
        costs: of the draft's KV cache.

    Attributes:
        fits: there is memory for the KV cache to follow the only row in this round.
        evicted: the runner is to drop the KV cache.
    """

    def __init__(self, costs: Sequence[KVCost] = ()) -> None:
        self.controller = SpeculationController()
        self.fits = True
        self.evicted = False
        self._costs = costs
        self._room = 0  # tokens that the KV cache has had at most: a cut keeps their memory
        self._drafted = 0
        self._accepted = 0
        self._followed: Row | None = None  # whose text the draft has read
        self._read = 0  # how many of its tokens
        self._following: int | None = None  # the row's next input, if the last step was a round
        self._ended: float | None = None  # when the last step ended, if it was a round
        self._bound: frozenset[int] = frozenset()  # rows whose constraint binds the next token

    def counters(self) -> dict[str, int]:
        return {
            "speculating": int(self.controller.on),
            "drafted": self._drafted,
            "accepted": self._accepted,
            "draft_bytes": self.cache_bytes,
        }

    # Memory.

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache, at most."""
        return self._measure(self._room)

    def growth(self, row: Row) -> int:
        """Bytes by which the KV cache grows at most, if it follows a row in this round."""
        return self._measure(max(self._room, row.length + MOST + 1)) - self.cache_bytes

    def evict(self) -> int:
        """Drop the KV cache with the next plan. Returns its bytes."""
        bytes = self.cache_bytes
        self.evicted |= bytes > 0
        self._room = 0
        self.forget()
        return bytes

    def take_evicted(self) -> bool:
        """Whether the runner is to drop the KV cache with this plan."""
        evicted, self.evicted = self.evicted, False
        return evicted

    def _measure(self, tokens: int) -> int:
        # mlx-lm's KV cache grows by STEP, from whatever it has.
        return sum(cost.bytes(tokens + STEP - 1) for cost in self._costs) if tokens else 0

    # Proposals.

    def propose(self, row: Row) -> int:
        """Return how many tokens to propose to the only row now. It is 0 where a plain step is
        better, or the only way."""
        most = row.job.max_tokens - len(row.drawn) - 1  # the input is one of them
        if most < 1 or not self._may_propose(row) or self._following in row.job.end_tokens:
            return 0
        if row is not self._followed:
            return 0
        unread = row.length - self._read
        if unread > MOST_UNREAD or not self.controller.affords(unread):
            return 0
        proposals = self.controller.choose([most])
        self._room = max(self._room, row.length + proposals)
        return proposals

    def plan_reading(self, row: Row, limit: int) -> tuple[int, int] | None:
        """The tokens of the only row's text that the draft is to read: the first, and how many, at
        most `limit`; None if it has read enough, or need not."""
        # First whether any reading is worth it: to compare two long texts takes a while.
        if not self._may_propose(row) or not self.controller.affords(0):
            return None
        begin = self._read
        if row is not self._followed:
            begin = 0
            if self._followed is not None:
                # At least one token is left, for a reading of none has no time to learn from.
                begin = common_prefix(self._followed.text[: self._read], row.text[:-1])
        unread = row.length - begin
        if row is self._followed and unread <= MOST_UNREAD:
            return None
        if not self.controller.affords(unread):
            return None
        tokens = min(unread, self.controller.bound(limit))
        self._room = max(self._room, begin + tokens) if begin else tokens
        return begin, tokens

    def saw_reading(self, row: Row, begin: int, tokens: int, seconds: float) -> None:
        self._followed, self._read = row, begin + tokens
        self._following = self._ended = None
        self.controller.saw_reading(tokens, seconds)

    def saw_step(self, row: Row | None, done: Decoded, seconds: float | None) -> None:
        """Learn from a plain step; `row` is given if it was alone and nobody waited."""
        self._bound = frozenset(done.bound)
        self._following = self._ended = None
        if row is not None and seconds is not None and self._may_propose(row):
            self.controller.saw_step(seconds)

    def saw_round(self, row: Row, length: int, proposed: int, outcome: Outcome) -> None:
        """Learn from a round that proposed tokens to the row when its text had `length`."""
        done = outcome.done
        assert isinstance(done, Decoded)
        accepted = done.accepted.get(row.id, 0)
        self._drafted += proposed
        self._accepted += accepted
        begun = done.waited if self._ended is None else self._ended
        self.controller.saw_round([proposed], [accepted], 1, outcome.ended - begun)
        self._bound = frozenset(done.bound)
        self._following = done.following.get(row.id)
        self._ended = outcome.ended
        # The draft was fed the row's input and all proposals but the last, and then cut back.
        self._read = min(length + proposed, row.length)

    def forget(self) -> None:
        """Note that what the draft has read is of no use any more."""
        self._followed, self._read = None, 0
        self.skip()

    def skip(self) -> None:
        """Note that rows have changed, so that the next step follows no round."""
        self._following = self._ended = None

    def _may_propose(self, row: Row) -> bool:
        return takes_proposals(row, self._bound)


def takes_proposals(row: Row, bound: Collection[int]) -> bool:
    """Whether tokens may be proposed to a row. `bound`: rows whose constraint binds their next
    token."""
    job = row.job
    return (
        not row.fresh
        and row.id not in bound
        and job.logprobs is None
        and not job.sampling.changes_logits
        and (job.bans is None or not job.bans.bind(len(row.drawn) + 1))
    )
