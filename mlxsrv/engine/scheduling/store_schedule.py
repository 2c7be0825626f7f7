"""Cached prompts on disk: which are written when, and which are fetched for whom.

All that is kept is written, one prompt at a time: at once while no row is there, and beside rows
after a while. What the disk does not take is tried again when cached prompts change. A prompt whose
beginning is on disk, and not in memory, waits at its place until that is fetched; others go on.
What is fetched is a cached prompt like others. It is given up where reading the prompt would have
been faster.

The scheduler does not know the disk: the outcome of `Admit` says what is there of each row's
prompt. So a row is not in the queue before that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum

import numpy as np

from mlxsrv.engine.orders import Fetched, StorageReport, Written
from mlxsrv.engine.outcomes import (
    Admitted,
    HandedOver,
    KeptPrompt,
    Outcome,
    Restored,
    TextFacts,
)
from mlxsrv.engine.plans import FetchPrompt, Keep, RestorePrompt, StorePrompts, WorkItem
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.prompt_index import LEAST, PromptIndex
from mlxsrv.engine.scheduling.prompt_queue import PromptQueue
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.states import follow

_PATIENCE = 64  # rounds that a prompt waits to be written while rows are there
_LONGEST_FETCH = 10.0  # seconds, while it is not known how fast prompts are read
_LEAST_FETCH = 0.1  # seconds; the first look at a disk that sleeps takes as long
_SLICE = 256 * 1024 * 1024  # bytes that are brought into the device's memory in a round
_SLICE_BESIDE_STEPS = 8 * 1024 * 1024


class FetchState(Enum):
    """The states of a fetch."""

    QUEUED = "queued"
    """It is behind others, or the next to begin."""
    READING = "reading"
    """The storage thread reads files; its report says how many tokens it has read."""
    RESTORING = "restoring"
    """Its KV cache is brought into the device's memory, a slice in each round."""
    OVER = "over"
    """Its rows go on from what there is."""


# A fetch may end at any time: its rows may end, a work item may fail, and files may be gone.
_NEXT = {
    FetchState.QUEUED: {FetchState.READING, FetchState.OVER},
    FetchState.READING: {FetchState.RESTORING, FetchState.OVER},
    FetchState.RESTORING: {FetchState.OVER},
    FetchState.OVER: set[FetchState](),
}


class Fetch:
    """The beginning of a prompt that is to be fetched.

    Args:
        row: the first that waits for it.
        tokens: of the prompt, that are on disk.

    Attributes:
        rows: all that wait for it.
        state: changed by `enter` only.
        entry: the cached prompt that it becomes, once it has begun.
        read: tokens that were read, once it is being restored.
    """

    def __init__(self, row: Row, tokens: int) -> None:
        self.rows = [row]
        self.tokens = tokens
        self.text = row.prompt[:-1]
        self.state = FetchState.QUEUED
        self.entry: int | None = None
        self.read = 0

    def enter(self, state: FetchState) -> None:
        """Go on to `state`.

        Raises:
            RuntimeError: it may not follow the fetch's state.
        """
        self.state = follow("the fetch", self.state, state, _NEXT)

    def serves(self, row: Row, tokens: int) -> bool:
        same = np.array_equal(row.prompt[:tokens], self.text[:tokens])
        return same and tokens == self.tokens


class StoreSchedule:
    """The stored prompts of one model.

    Args:
        model: the model's number.
        facts: of the model.
        pace: knows how fast prompts are read.
        index: prompts that are kept.
        queue: prompts that wait.
    """

    def __init__(
        self, model: int, facts: TextFacts, pace: Pace, index: PromptIndex, queue: PromptQueue
    ) -> None:
        self._model = model
        self._facts = facts
        self._pace = pace
        self._index = index
        self._queue = queue
        self._writing: int | None = None
        self._full_at = -1  # of the index's changes, when the disk took no more
        self._patience = _PATIENCE
        self._fetches: deque[Fetch] = deque()  # the first may be under way
        self._counts = {"files": 0, "bytes": 0, "hits": 0, "hit_tokens": 0, "writes": 0}
        if facts.store is not None:
            self._counts |= {"files": facts.store.files, "bytes": facts.store.bytes}

    @property
    def idle(self) -> bool:
        """Whether there is nothing to plan until the storage thread reports."""
        fetches = bool(self._fetches) and self._fetches[0].state is not FetchState.READING
        return not fetches and not self._list_unwritten()

    @property
    def waiting(self) -> int:
        """Rows that wait for a fetch."""
        return sum(not row.ended for fetch in self._fetches for row in fetch.rows)

    def counters(self) -> dict[str, int]:
        counts = {f"prompt_cache_disk_{name}": number for name, number in self._counts.items()}
        return {"fetching": self.waiting, **counts}

    # Reports.

    def note_admitted(self, rows: Iterable[Row], admitted: Admitted) -> None:
        """Have rows that were admitted wait for the disk, where that helps, else in the queue."""
        tokens = {stored.row: stored.tokens for stored in admitted.stored}
        for row in rows:
            stored = tokens.get(row.id, 0)
            if not stored or not self._helps(row, stored):
                self._queue.put_back([row])
            elif (fetch := self._find(row, stored)) is not None:
                fetch.rows.append(row)
            else:
                self._fetches.append(Fetch(row, stored))

    def note_report(self, order: StorageReport) -> None:
        """Take a report of the storage thread."""
        match order:
            case Written():
                self._writing = None
                if order.full:
                    self._index.note_stored(order.entry, stored=False)
                    self._full_at = self._index.changes
                self._counts["writes"] += order.files
                self._counts["files"] = order.held_files
                self._counts["bytes"] = order.held_bytes
            case Fetched() if self._fetches and self._fetches[0].entry == order.entry:
                if order.tokens:
                    self._fetches[0].enter(FetchState.RESTORING)
                    self._fetches[0].read = order.tokens
                else:
                    self._end_fetch()

    # Planning.

    def plan(self, *, streaming: bool, busy: bool) -> list[WorkItem]:
        """Plan the writes, fetches and restores of this round.

        Args:
            streaming: rows are being decoded.
            busy: there are rows to read or to decode.
        """
        return [*self._plan_fetch(streaming=streaming), *self._plan_write(busy=busy)]

    def plan_all(self, promised: Iterable[int]) -> list[WorkItem]:
        """Write all that is not written, and what is promised, since the model is unloaded."""
        entries = (*self._index.list_unwritten(), *promised)
        return [StorePrompts(model=self._model, entries=entries)] if entries else []

    def _plan_fetch(self, *, streaming: bool) -> list[WorkItem]:
        while self._fetches:
            fetch = self._fetches[0]
            if fetch.state is FetchState.READING:
                return []
            if fetch.state is FetchState.RESTORING:
                return [self._restore(fetch, streaming=streaming)]
            fetch.rows = [row for row in fetch.rows if not row.ended]
            # Meanwhile another fetch may have brought as much, and memory may be short.
            saves = bool(fetch.rows) and self._saves(fetch.rows[0], fetch.tokens)
            if saves and self._index.wants(fetch.text.size):
                return [self._begin(fetch)]
            self._end_fetch()
        return []

    def _begin(self, fetch: Fetch) -> WorkItem:
        row = fetch.rows[0]
        fetch.enter(FetchState.READING)
        fetch.entry = self._index.promise(fetch.text, fetched=True).entry
        known = self._queue.find_source(row).tokens
        estimate = self._pace.estimate(fetch.tokens - known)
        seconds = _LONGEST_FETCH if estimate is None else max(estimate, _LEAST_FETCH)
        return FetchPrompt(model=self._model, entry=fetch.entry, row=row.id, seconds=seconds)

    def _restore(self, fetch: Fetch, *, streaming: bool) -> WorkItem:
        assert fetch.entry is not None, "it has begun"
        limit = _SLICE_BESIDE_STEPS if streaming else _SLICE
        return RestorePrompt(model=self._model, entry=fetch.entry, limit=limit)

    def _plan_write(self, *, busy: bool) -> list[WorkItem]:
        unwritten = self._list_unwritten()
        if not unwritten:
            self._patience = _PATIENCE
            return []
        if busy and self._patience:
            self._patience -= 1
            return []
        self._patience = _PATIENCE
        self._writing = unwritten[0]
        self._index.note_stored(self._writing)
        return [StorePrompts(model=self._model, entries=(self._writing,))]

    def _list_unwritten(self) -> list[int]:
        """Entries that may be written now."""
        if self._writing is not None or self._full_at == self._index.changes:
            return []
        return self._index.list_unwritten()

    # Outcomes.

    def settle(self, work: WorkItem, outcome: Outcome) -> None:
        """Take the outcome of a work item."""
        match work:
            case StorePrompts():
                done = outcome.done if isinstance(outcome.done, HandedOver) else HandedOver()
                if self._writing is not None and self._writing not in done.entries:
                    self._writing = None
            case FetchPrompt():
                if outcome.fault is not None and self._fetches:
                    self._end_fetch()
            case RestorePrompt():
                self._settle_restore(outcome)

    def _settle_restore(self, outcome: Outcome) -> None:
        done = outcome.done if isinstance(outcome.done, Restored) else Restored(over=True)
        if not done.over or not self._fetches:
            return
        if done.prompt is not None:
            self._counts["hits"] += 1
            self._counts["hit_tokens"] += self._fetches[0].read
        self._end_fetch(done.prompt)

    def _end_fetch(self, prompt: KeptPrompt | None = None) -> None:
        """Have the rows of the first fetch wait to be read, from what there is; `prompt` is what
        was fetched, if it can be used."""
        fetch = self._fetches.popleft()
        fetch.enter(FetchState.OVER)
        if fetch.entry is not None:
            kept = () if prompt is None else (prompt,)
            self._index.confirm([Keep(fetch.entry, fetch.read)], kept)
        self._queue.put_back(row for row in fetch.rows if not row.ended)

    def _find(self, row: Row, tokens: int) -> Fetch | None:
        """The fetch that serves a row as well."""
        return next((each for each in self._fetches if each.serves(row, tokens)), None)

    def _helps(self, row: Row, tokens: int) -> bool:
        """Whether a row is better off with so many tokens of its prompt, which are stored."""
        if self._queue.reads_anew(row):
            return False
        fits = self._facts.kv_bytes(tokens) <= self._facts.prompt_cache_bytes
        return fits and self._saves(row, tokens)

    def _saves(self, row: Row, tokens: int) -> bool:
        """Whether so many tokens are many more than memory has of a row's prompt."""
        return tokens - self._queue.find_source(row).tokens >= LEAST
