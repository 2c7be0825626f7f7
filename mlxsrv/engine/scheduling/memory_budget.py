"""The memory budget: the KV caches of all models of a client stay within a number of bytes.

What is to be done is decided at the beginning of each round, before a plan takes anything.

- **Before a prompt is read** all that it needs is reserved: its KV cache, its row's place in a
  group, and a growth step of each row that is decoded, so that nobody has to go at once. Rows are
  given memory in the order in which they came. A row that does not fit waits, and none that came
  later is read before it. So it waits for those before it, and for nobody else.
- **Before arrays grow** it is counted what they will take. If it is too much: kept prompts give
  way first; then arrays are made as small as they can be; then the youngest rows are preempted.
  Such a row loses its KV cache, waits in its old place, and goes on later with the same tokens: it
  is read again when it fits as a new one does, with a growth step for all. So between two
  preemptions of a row each of the others draws tokens of a growth step, or all that it has left.
  No row is preempted for a younger one, and the oldest row of the client is never.
- **A draft model** follows the only row where there is room for what it reads. Kept prompts give
  way to that, and it gives way to rows.
- **The oldest row** goes on until the budget is full of it alone. Then it ends, as at its limit.
  A text that does not fit even alone is refused.

Before rows go, or wait, the client is told that memory is short, since it may have models that
nobody uses. It answers with another budget, or with the same. Nothing waits for the answer but
texts that do not fit alone: it is asked for while rows still have room for some tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import count

from mlxsrv.engine.events import Event, Progress, Shortage
from mlxsrv.engine.scheduling.groups import STEP, Fit
from mlxsrv.engine.scheduling.memory_question import MemoryQuestion
from mlxsrv.engine.scheduling.row import Row, RowState
from mlxsrv.engine.scheduling.row_memory import RowMemory
from mlxsrv.engine.scheduling.speculation_controller import MOST

_NEXT = 2  # tokens of each row that are reserved: of the next step, and one more to end with
_ROUND = MOST + 2  # the same where tokens are proposed
_FORESIGHT = 64  # tokens before which memory is asked for: steps enough for an answer
_PADDING = 8  # a group's padding may take this part of the budget
_SIGN_OF_LIFE = 32  # rounds after which the client is told that a preempted row goes on


class MemoryBudget:
    """Keeps the KV caches of one client's models within their bytes.

    Attributes:
        bytes: that there are; None: as many as are wanted.
        numbers: of rows, in the order in which they come, over all models.
        events: what the client is to be told.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self.numbers = count()
        self.events: list[Event] = []
        self._models: list[RowMemory] = []
        self._free = 0  # bytes that nothing has taken or reserved in this round
        self._question = MemoryQuestion(lambda event: self.events.append(event))
        self._rounds = 0

    def set(self, bytes: int) -> None:
        """Take the client's order, which may be the answer to MemoryShort."""
        self.bytes = bytes
        self._question.note_answer()
        for model in self._models:
            model.limit_padding(bytes // _PADDING)

    def add(self, model: RowMemory) -> None:
        """Count the rows of a model from now on."""
        self._models.append(model)
        model.index.room = lambda tokens: self._find_room(model, model.measure(tokens))
        if self.bytes is not None:
            model.limit_padding(self.bytes // _PADDING)

    def remove(self, model: RowMemory) -> None:
        """Count the rows of a model no more, if they were: it is gone."""
        if model in self._models:
            self._models.remove(model)

    @property
    def short(self) -> bool:
        """Whether arrays have less room than they would have."""
        return any(model.groups.fit is not Fit.AMPLE for model in self._models)

    def take_events(self) -> list[Event]:
        """The events that the client is to be told."""
        events, self.events = self.events, []
        return events

    @property
    def exceeded(self) -> bool:
        """Whether arrays are larger than they may be, until they shrink in the next steps."""
        if self.bytes is None or self._free >= 0:
            return False
        return sum(model.held for model in self._models) > self.bytes

    @property
    def admits_more(self) -> bool:
        """Whether the next plan lets the text of a row be read that waits."""
        if self.bytes is None:
            return True
        first = next(self._candidates(), None)
        if first is None:
            return False
        kept = sum(model.spare_bytes for model in self._models)
        return self._count_with([first]) - kept <= self.bytes

    def _find_room(self, model: RowMemory, bytes: int) -> bool:
        """Whether there is room for a KV cache of so many bytes that is kept. Others of its model
        give way, if they go before it comes."""
        if self.bytes is None:
            return True
        if bytes > self._free and not model.index.late:
            self._free += model.index.give_way(bytes - self._free)
        if bytes > self._free:
            return False
        self._free -= bytes
        return True

    # A round.

    def arrange(self) -> None:
        """Decide what goes, how much room arrays have, and which texts may be read, in the next
        plan."""
        if self.bytes is None:
            return
        for model in self._models:
            model.index.late = False
        self._tell_progress()
        if self._is_ample(self.bytes):
            return
        if not self._suffices(self.bytes):
            self._keep_within(self.bytes)
            granted = self._grant(self.bytes)
            self._fit(self.bytes, granted)
        self._fit_drafts()

    def _is_ample(self, most: int) -> bool:
        """Whether half of the memory is left, even if all who wait are let in. So it is on most
        servers, where to count each row would take longer than all other decisions."""
        taken = 0
        for model in self._models:
            bound = model.bound(_FORESIGHT + _ROUND)
            taken += most if bound is None else bound
        if 2 * taken > most:
            return False
        for model in self._models:
            model.grant(None)
            model.groups.fit, model.proposals_fit = Fit.AMPLE, True
            if model.book.drafts is not None:
                model.book.drafts.fits = True
        self._free = most - taken
        self._question.note_enough()
        return True

    def _suffices(self, most: int) -> bool:
        """Whether nobody waits, and no row needs memory soon that there is not."""
        if any(model.book.waits for model in self._models):
            return False
        taken = sum(
            model.count(_FORESIGHT + _ROUND, Fit.AMPLE, free=True) for model in self._models
        )
        if taken > most:
            return False
        for model in self._models:
            model.grant(())
            model.groups.fit, model.proposals_fit = Fit.AMPLE, True
        self._free = most - taken
        self._question.note_enough()
        return True

    # What goes.

    def _keep_within(self, most: int) -> None:
        """Have kept prompts and rows go until there is room for the next steps."""
        self._give_way(self._count(_NEXT, Fit.AMPLE) - most)
        kept = sum(model.spare_bytes for model in self._models)
        self._question.ask(self._count(_NEXT + _FORESIGHT, Fit.EXACT, settled=True) - kept, most)
        # Where there were more bytes until now, arrays are too large whoever goes, and shrink.
        while self._count(_NEXT, Fit.EXACT, settled=True) > most:
            holders = sorted(self._find_holders(), key=lambda holder: holder[1].number)
            if not holders:
                return
            model, youngest = holders[-1]
            if len(holders) == 1 and self._count(1, Fit.EXACT, settled=True) <= most:
                youngest.full = True
                return
            model.preempt(youngest)

    def _find_holders(self) -> Iterator[tuple[RowMemory, Row]]:
        for model in self._models:
            for row in model.rows:
                yield model, row

    def _give_way(self, bytes: int) -> int:
        """Have kept prompts and drafts give way to so many bytes, first those of models without
        rows. Returns the bytes that are free then."""
        freed = 0
        for model in sorted(self._models, key=lambda model: bool(model.rows)):
            if freed < bytes:
                freed += model.give_way(bytes - freed)
        return freed

    # Whose text is read.

    def _candidates(self) -> Iterator[tuple[RowMemory, Row]]:
        """The rows that may be given memory, in their order."""
        lists = [[(row.number, model, row) for row in model.candidates] for model in self._models]
        for _, model, row in merge(*lists, key=lambda each: each[0]):
            yield model, row

    def _grant(self, most: int) -> list[tuple[RowMemory, Row]]:
        """Let texts be read for which there is memory, up to the first for which there is none."""
        while (granted := self._choose(most)) is None:
            pass
        for model in self._models:
            model.grant([row for each, row in granted if each is model])
        return granted

    def _choose(self, most: int) -> list[tuple[RowMemory, Row]] | None:
        """The rows whose texts may be read; None if one was refused, so that another may have its
        place."""
        found = list(self._candidates())
        kept = sum(each.spare_bytes for each in self._models)
        fitting = self._find_fitting(found, most + kept)
        granted = found[:fitting]
        if granted:
            self._give_way(self._count_with(granted) - most)
        if fitting < len(found):
            if self._refuse(*found[fitting], most):
                return None
            self._question.ask(self._count_with(found[: fitting + 1]) - kept, most)
        return granted

    def _find_fitting(self, found: Sequence[tuple[RowMemory, Row]], most: int) -> int:
        """Return how many of the first of these rows fit.

        To count many takes long. So each attempt takes twice as many, and when these are too many
        one between the last two.
        """
        fitting, over = 0, len(found) + 1
        while over - fitting > 1:
            doubled = min(2 * fitting or 1, len(found))
            tried = doubled if over > len(found) else (fitting + over) // 2
            if self._count_with(found[:tried]) <= most:
                fitting = tried
            else:
                over = tried
        return fitting

    def _count_with(self, granted: Sequence[tuple[RowMemory, Row]]) -> int:
        """Bytes that are taken if these texts are read, and each row grows by a step."""
        step = _step(row for _, row in [*granted, *self._find_holders()])
        return self._count(step, Fit.EXACT, granted)

    def _refuse(self, model: RowMemory, row: Row, most: int) -> bool:
        """End a row whose text does not fit alone, if the client knows. Returns whether it ends."""
        needed = model.count_alone(row, _step([row]))
        if needed <= most or not self._question.ask_for(row.number, needed, most):
            return False
        model.book.refuse(row, Shortage(needed, most, row.length))
        return True

    # How the arrays grow.

    def _fit(self, most: int, granted: Sequence[tuple[RowMemory, Row]]) -> None:
        """Choose how much room the arrays have when they change."""
        fit = next(
            (fit for fit in Fit if self._count(_NEXT, fit, granted) <= most),
            Fit.EXACT,
        )
        proposing = self._count(_ROUND, fit, granted, free=True)
        for model in self._models:
            model.groups.fit, model.proposals_fit = fit, proposing <= most
        self._free = most - max(
            proposing if proposing <= most else 0, self._count(_NEXT, fit, granted)
        )

    def _count(
        self,
        tokens: int,
        fit: Fit,
        granted: Sequence[tuple[RowMemory, Row]] = (),
        *,
        free: bool = False,
        settled: bool = False,
    ) -> int:
        """Bytes that all KV caches take; see RowMemory.count."""
        rows = {model: [row for each, row in granted if each is model] for model in self._models}
        return sum(
            model.count(tokens, fit, own, free=free, settled=settled) for model, own in rows.items()
        )

    def _fit_drafts(self) -> None:
        """Find room for what drafts read in this round. Kept prompts give way to it; it gives way
        to rows."""
        for model in self._models:
            if (drafts := model.book.drafts) is not None:
                drafts.fits = self._find_room(model, model.draft_growth)

    # What the client is told.

    def _tell_progress(self) -> None:
        """Tell now and then that preempted rows are not forgotten."""
        self._rounds += 1
        if self._rounds % _SIGN_OF_LIFE == 0:
            for model in self._models:
                waiting = model.queue.waiting
                preempted = [row for row in waiting if row.state is RowState.PREEMPTED]
                self.events += [Progress(row.id) for row in preempted]


def _step(rows: Iterable[Row]) -> int:
    """The tokens of a growth step, or those that the rows have left if these are fewer."""
    left = max((row.most_length - row.length for row in rows), default=0)
    return min(STEP, left) + _NEXT
