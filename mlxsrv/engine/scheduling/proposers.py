"""Proposers: where tokens are proposed. Whether it is worth it, `Speculation` decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from mlxsrv.engine.events import KVCost, kv_bytes
from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import Proposal
from mlxsrv.engine.scheduling.groups import GROWTH
from mlxsrv.engine.scheduling.prompt_index import common_prefix
from mlxsrv.engine.scheduling.prompt_lookup import AT_ONCE, PromptLookup
from mlxsrv.engine.scheduling.row import Row

MOST = 8  # proposals to a row in a step; more than so many in a row rarely hold
MOST_UNREAD = 16  # tokens of a text that a proposer reads on the way to its first proposal


class Proposer:
    """Proposes tokens to the rows of one model.

    Attributes:
        most_rows: to which it can propose in one step.
        computes: it runs on the device. So it has texts to read and memory of its own, and a
            speculative step that fails may be its fault. All that only concerns these does nothing
            for others.
        fits: there is memory for what it reads of the only row in this round.
        evicted: the runner is to drop what it has read.
    """

    most_rows: ClassVar[int] = 1 << 30
    computes: ClassVar[bool] = False
    fits = True
    evicted = False

    def find(
        self, rows: Sequence[Row], most: Sequence[int], inputs: Mapping[int, int]
    ) -> list[Proposal]:
        """Find what could be proposed to each of these rows, so many tokens at `most`. `inputs` are
        the rows' next inputs by id, as far as they are known."""
        raise NotImplementedError

    def find_unread(self, row: Row) -> tuple[int, int]:
        """The tokens of the row's text that are to be read first: the first of them, and how many;
        0 if there are so few that it reads them on the way."""
        return 0, 0

    def saw_reading(self, row: Row | None, begin: int, tokens: int) -> None:
        """Note that so many tokens of the row's text were read, behind the first `begin`; None if
        the row has ended meanwhile, so that its text is gone."""

    def saw_step(self, proposed: Mapping[int, int], accepted: Mapping[int, int]) -> None:
        """Note how many tokens were proposed to rows and how many accepted, by their ids."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of what it has read, at most."""
        return 0

    def growth(self, row: Row) -> int:
        """Bytes by which that grows at most, if it proposes to the only row in this round."""
        return 0

    def evict(self) -> int:
        """Have it dropped with the next plan. Returns its bytes."""
        return 0

    def take_evicted(self) -> bool:
        """Whether the runner is to drop it with this plan."""
        evicted, self.evicted = self.evicted, False
        return evicted


class DraftModel(Proposer):
    """A small model, which proposes to a row that is alone.

    It has a KV cache of one row's text. That is kept when the row has ended, since the next turn of
    a chat begins with it. It may be dropped at any time, and read again.

    Args:
        costs: of the KV cache.
    """

    most_rows = 1
    computes = True

    def __init__(self, costs: Sequence[KVCost] = ()) -> None:
        self._costs = costs
        self._room = 0  # tokens that the KV cache has had at most: a cut keeps their memory
        self._row: Row | None = None  # whose text it has read
        self._read = 0  # how many of its tokens

    def find(
        self, rows: Sequence[Row], most: Sequence[int], inputs: Mapping[int, int]
    ) -> list[Proposal]:
        [row] = rows
        ready = row is self._row and row.length - self._read <= MOST_UNREAD
        return [most[0] if ready else 0]

    def find_unread(self, row: Row) -> tuple[int, int]:
        begin = 0
        if row is self._row:
            begin = self._read
            if row.length - begin <= MOST_UNREAD:
                return begin, 0
        elif self._row is not None:
            begin = common_prefix(self._row.text[: self._read], row.text)
        return begin, row.length - begin

    def saw_reading(self, row: Row | None, begin: int, tokens: int) -> None:
        self._row, self._read = row, begin + tokens
        self._room = max(self._room, self._read) if begin else tokens

    def saw_step(self, proposed: Mapping[int, int], accepted: Mapping[int, int]) -> None:
        assert self._row is not None
        [count], [held] = proposed.values(), accepted.values()
        # It was fed the row's input and all proposals but the last, and then cut back.
        self._read = self._row.length - (held == count)
        self._room = max(self._room, self._row.length + count)

    @property
    def cache_bytes(self) -> int:
        return self._measure(self._room)

    def growth(self, row: Row) -> int:
        return self._measure(max(self._room, row.length + MOST + 1)) - self.cache_bytes

    def evict(self) -> int:
        bytes = self.cache_bytes
        self.evicted |= bytes > 0
        self._row, self._room = None, 0
        return bytes

    def _measure(self, tokens: int) -> int:
        return kv_bytes(self._costs, tokens + GROWTH) if tokens else 0


class Lookup(Proposer):
    """Prompt lookup: tokens of the rows' own texts, which come with the plan.

    A row's next input is drawn already, and not delivered. So it is guessed, unless a speculative
    step came before. To see whether a guess is right, the runner waits for the step under way
    instead of launching the next one meanwhile: so a wrong guess may cost time, too.
    """

    def find(
        self, rows: Sequence[Row], most: Sequence[int], inputs: Mapping[int, int]
    ) -> list[Proposal]:
        left = AT_ONCE
        for row in rows:
            left -= self._look(row, inputs.get(row.id), left)
        return [
            self._continue(row, tokens, inputs.get(row.id))
            for row, tokens in zip(rows, most, strict=True)
        ]

    def _look(self, row: Row, following: int | None, limit: int) -> int:
        """Look at what is new of the row's text and its next input; at most so many tokens.
        Returns how many."""
        if row.lookup is None:
            row.lookup = PromptLookup()
        known, prompt = len(row.lookup), row.job.prompt
        fresh = [*prompt[known:], *row.drawn[max(known - len(prompt), 0) :]]
        if known <= row.length and following is not None:
            fresh.append(following)
        return row.lookup.extend(fresh, limit)

    def _continue(self, row: Row, most: int, following: int | None) -> tuple[int, ...]:
        """The row's next input, and at least one token behind it; or none."""
        assert row.lookup is not None
        if most < 1:
            return ()
        known = () if following is None else (following,)
        found = (*known, *row.lookup.propose(most + 1 - len(known)))
        return found if len(found) > 1 and found[0] not in row.job.end_tokens else ()


def make_proposer(facts: TextFacts) -> Proposer | None:
    """Make what proposes tokens to the rows of a model; None if nothing does."""
    if facts.drafts:
        return DraftModel(facts.draft_costs)
    return Lookup() if facts.lookup else None
