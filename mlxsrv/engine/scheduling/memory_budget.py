"""The memory budget: the KV caches of all models of a client stay within a number of bytes, and
large texts to embed with them.

What is to be done is decided at the beginning of each round, before a plan takes anything.

- **Before a row gets a slot** all that its prompt needs is reserved: its KV cache, its row's place
  in a group, and a growth step of each row that is decoded, so that nobody has to go at once. Rows
  are given memory in the order of their turns: see `fair_queue`. The head of a line that does not
  fit waits, and none behind it is read before it.
- **Before arrays grow** it is counted what they will take. If it is too much: cached prompts give
  way first; then arrays are made as small as they can be; then the youngest rows are preempted.
  Such a row loses its KV cache, keeps its slot and its place before all lines, and goes on later
  with the same tokens: it is read again when it fits as a new one does, with a growth step for all.
  So between two preemptions of a row each of the others draws tokens of a growth step, or all that
  it has left.
  No row is preempted for a younger one, and the oldest row of the client is never.
- **Texts to embed** need no memory to begin, so they get a slot at their turn. But a row with a
  large text is one of those that wait for memory, once for each such text, and it is preempted as
  others are.
- **A draft model** follows the only row where there is room for what it reads. Cached prompts give
  way to that, and it gives way to rows.
- **The oldest row** goes on until the budget is full of it alone. Then it ends, as at its limit.
  A text that does not fit even alone is refused.

Before rows are preempted, or wait, the client gets the event MemoryShort, since it may have models
that nobody uses. It answers with another budget, or with the same. Nothing waits for the answer but
texts that do not fit alone: it is asked for while rows still have room for some tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import msgspec

from mlxsrv.engine.events import Event, Progress, Shortage
from mlxsrv.engine.scheduling.groups import STEP, Fit, Growth
from mlxsrv.engine.scheduling.memory_question import MemoryQuestion
from mlxsrv.engine.scheduling.proposers import MOST
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.row_memory import Forecast, RowMemory

_NEXT = 2  # tokens of each row that are reserved: of the next step, and one more to end with
_PROPOSED = MOST + 2  # the same where tokens are proposed
_FORESIGHT = 64  # tokens before which memory is asked for: steps enough for an answer

# What is counted.
_STEP = Growth(_NEXT)
_LEAST = Growth(_NEXT, Fit.EXACT)
_LAST = Growth(1, Fit.EXACT)
_SOON = Growth(_NEXT + _FORESIGHT, Fit.EXACT)
_GROWN = Growth(STEP + _NEXT, Fit.EXACT)  # reserved for all rows when a text is read
_AMPLE = Growth(_FORESIGHT + _PROPOSED, beyond_limits=True)
_AMPLE_WITH_MORE = Growth(STEP + _NEXT, beyond_limits=True)

_FITS = tuple(Fit)
_UNBOUNDED = 1 << 62  # bytes
_PADDING = 8  # a group's padding may take this part of the budget
_SIGN_OF_LIFE = 32  # rounds between two Progress events of a preempted row


Holder = tuple[RowMemory, Row]


class _Forecasts(msgspec.Struct, frozen=True):
    """The bytes that all models of a client will take, if certain texts are read.

    Attributes:
        rows: of each model's rows.
    """

    rows: dict[RowMemory, Forecast]

    def bytes_after(self, growth: Growth, *, settled: bool = False) -> int:
        """The bytes; see `Forecast.bytes`."""
        rows = self.rows.values()
        return sum([each.bytes_after(growth, settled=settled) for each in rows])

    def grant(self, *waiting: Holder) -> _Forecasts:
        """Return the forecast if these are admitted as well."""
        found = {**self.rows}
        granted: dict[RowMemory, list[Row]] = {}
        for model, row in waiting:
            granted.setdefault(model, []).append(row)
        for model, rows in granted.items():
            found[model] = model.foresee_granted(found[model], rows)
        return _Forecasts(found)


class MemoryBudget:
    """Keeps the KV caches of one client's models within their bytes.

    Attributes:
        bytes: that there are; None: as many as are wanted.
        numbers: of rows, in the order of their turns, over all models.
        free: bytes that nothing has taken or reserved in this round.
        events: those to send to the client; the schedules of its models append theirs, too.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self.numbers = count()
        self.events: list[Event] = []
        self.free = _UNBOUNDED
        self._models: list[RowMemory] = []
        self._question = MemoryQuestion(self.events.append)
        self._rounds = 0
        self._changes = 0  # of all groups, when it was last decided
        self._lasting = 0  # rounds for which that holds, if rows only draw tokens

    def set(self, bytes: int) -> None:
        """Set the budget: the client's order `Budget`, which may be its answer to MemoryShort.

        Args:
            bytes: the most that KV caches and large texts to embed may take from now on.
        """
        self.bytes = bytes
        self._question.note_answer()
        for model in self._models:
            model.limit_padding(bytes // _PADDING)

    def register(self, model: RowMemory) -> None:
        """Count the rows of a model from now on."""
        self._models.append(model)
        model.index.room = lambda tokens: self._find_room(model, model.measure(tokens))
        if self.bytes is not None:
            model.limit_padding(self.bytes // _PADDING)

    def unregister(self, model: RowMemory) -> None:
        """Count the rows of a model no more, if they were: it is gone."""
        if model in self._models:
            self._models.remove(model)

    @property
    def short(self) -> bool:
        """Whether memory is short, so that arrays grow by less than they would."""
        return any(model.groups.fit is not Fit.AMPLE for model in self._models)

    @property
    def exceeded(self) -> bool:
        """Whether arrays take more than the budget now, until they shrink in the next steps."""
        if self.bytes is None or self.free >= 0:
            return False
        return sum(model.held for model in self._models) > self.bytes

    @property
    def admits_more(self) -> bool:
        """Whether the next plan admits a text that waits for memory."""
        if self.bytes is None:
            return True
        waiting = self._find_candidates()
        if not waiting:
            return False
        return self._foresee().grant(min(waiting, key=_number)).bytes_after(_GROWN) <= self.bytes

    def _find_room(self, model: RowMemory, bytes: int) -> bool:
        """Reserve bytes for a KV cache that is to be cached. Other cached prompts of its model are
        evicted for it, where the plan still drops them before. Returns whether there was room."""
        if self.bytes is None:
            return True
        if bytes > self.free and not model.index.late:
            self.free += model.index.give_way(bytes - self.free)
        return self.reserve(bytes)

    def reserve(self, bytes: int) -> bool:
        """Reserve bytes for the rest of this round. Nothing is evicted for them.

        Args:
            bytes: that are wanted.

        Returns:
            Whether they were free, and are reserved.
        """
        if bytes > self.free:
            return False
        self.free -= bytes
        return True

    # A round.

    def begin_round(self, *, quiet: bool = False) -> None:
        """Decide, for the next plan, what is evicted or preempted, how much room arrays have, and
        which texts may be read. `quiet`: in the last plan rows only drew tokens, and no orders came
        since."""
        if self.bytes is None:
            self.free = _UNBOUNDED
            for model in self._models:
                while model.book.head is not None:
                    model.book.serve_head()
                model.book.texts.begin_large()
            return
        changes = 0
        for model in self._models:
            model.index.late = False
            changes += model.groups.changes
        self._send_progress()
        if quiet and self._lasting and changes == self._changes:
            self._lasting -= 1
            return
        self._changes, self._lasting = changes, 0
        for model in self._models:
            model.book.serve_texts()
        found = self._foresee()
        if not self._suffices(found, self.bytes):
            found = self._keep_within(found, self.bytes)
            self._fit(self._grant(found, self.bytes), self.bytes)
        self._fit_proposers()

    @property
    def _spare(self) -> int:
        """Bytes that can be evicted: of cached prompts, and of what proposers have read."""
        return sum([model.spare_bytes for model in self._models])

    def _foresee(self) -> _Forecasts:
        """Forecast what each model takes if no more texts are admitted."""
        return _Forecasts({model: model.forecast() for model in self._models})

    def _suffices(self, found: _Forecasts, most: int) -> bool:
        """Whether there is room for all waiting texts, and for what all rows need in the next
        steps. If so, all are admitted, and nothing else is to be decided."""
        waiting = sorted(self._find_candidates(), key=_number)
        left, growth = most - self._spare, _AMPLE_WITH_MORE if waiting else _AMPLE
        taken = found.bytes_after(growth)
        while waiting and taken <= left:
            found = found.grant(*waiting)
            taken = found.bytes_after(growth)
            if taken <= left:
                waiting = _serve_heads(waiting)
        if taken > left:
            return False
        for model, each in found.rows.items():
            # Where half of the memory is left, it is not counted how texts are padded.
            model.grant(each.granted, ample=left - taken >= most // 2)
            model.groups.fit, model.proposals_fit = growth.fit, True
        self.free = left - taken
        self._question.note_enough()
        if not any(model.proposer_grows for model in self._models):  # by itself, in any round
            self._lasting = _FORESIGHT
        return True

    # Eviction and preemption.

    def _keep_within(self, found: _Forecasts, most: int) -> _Forecasts:
        """Evict cached prompts, then preempt rows, until there is room for the next steps. Returns
        the forecast after that."""
        self._give_way(found.bytes_after(_STEP) + self._spare - most)
        needed = found.bytes_after(_SOON, settled=True)
        self._question.ask(needed, most)
        # Where there were more bytes until now, arrays are too large whoever goes, and shrink.
        while needed > most and found.bytes_after(_LEAST, settled=True) > most:
            holders = [(model, row) for model in self._models for row in model.rows]
            if not holders:
                break
            model, youngest = max(holders, key=_number)
            if len(holders) == 1 and found.bytes_after(_LAST, settled=True) <= most:
                youngest.end_soon()
                break
            model.preempt(youngest)
            found = self._foresee()
        return found

    def _give_way(self, bytes: int) -> None:
        """Evict cached prompts and what proposers have read until so many bytes are free, first
        those of models without rows, and no more than are needed."""
        models = sorted(self._models, key=lambda model: bool(model.rows)) if bytes > 0 else ()
        for model in models:
            if bytes > 0:
                bytes -= model.give_way(bytes)

    # Admission: whose text is read.

    def _find_candidates(self) -> list[Holder]:
        """The rows that wait for memory, those of each model in their order."""
        return [(model, row) for model in self._models for row in model.candidates]

    def _grant(self, now: _Forecasts, most: int) -> _Forecasts:
        """Admit waiting texts in their order, up to the first that does not fit. Returns the
        forecast after that."""
        found, taken = now, 0
        candidates = sorted(self._find_candidates(), key=_number)
        for waiting in candidates:
            wider = found.grant(waiting)
            needed = wider.bytes_after(_GROWN)
            if needed > most:
                if self._refuse(*waiting, most):
                    return self._grant(now, most)  # another may have its place
                self._question.ask(needed, most)
                break
            found, taken = wider, needed
            candidates += _serve_heads([waiting])  # the loop comes to these as well
        self._give_way(taken + self._spare - most)
        for model, each in found.rows.items():
            model.grant(each.granted)
        return found

    def _refuse(self, model: RowMemory, row: Row, most: int) -> bool:
        """End a row whose text does not fit even alone, once the client has answered MemoryShort
        for it. Returns whether it ends."""
        needed = model.count_alone(row, _GROWN)
        refused = needed > most and self._question.ask_for(row.number, needed, most)
        if refused:
            model.book.refuse(row, Shortage(needed, most, model.count_tokens(row)))
            model.book.serve_texts()  # a large text of theirs is asked for in this round
        return refused

    # How the arrays grow.

    def _fit(self, found: _Forecasts, most: int) -> None:
        """Choose how much room the arrays have when they change."""
        left = most - self._spare
        fit = next(
            (fit for fit in _FITS if found.bytes_after(Growth(_NEXT, fit)) <= left), Fit.EXACT
        )
        taken = found.bytes_after(Growth(_PROPOSED, fit, beyond_limits=True))
        for model in self._models:
            model.groups.fit, model.proposals_fit = fit, taken <= left
        self.free = left - (taken if taken <= left else found.bytes_after(Growth(_NEXT, fit)))

    def _fit_proposers(self) -> None:
        """Find room for what proposers read in this round. Cached prompts are evicted for it, but
        no row is preempted."""
        for model in self._models:
            if (proposer := model.book.proposer) is not None:
                growth = model.proposer_growth
                proposer.fits = not growth or self._find_room(model, growth)

    # Events.

    def _send_progress(self) -> None:
        """Send Progress now and then for rows that are preempted, so that they do not look
        stalled."""
        self._rounds += 1
        if self._rounds % _SIGN_OF_LIFE == 0:
            for model in self._models:
                self.events += [Progress(row.id) for row in model.queue.preempted]


def _serve_heads(admitted: Iterable[Holder]) -> list[Holder]:
    """Give slots to those of the admitted who are heads of their lines. Returns the next heads,
    whose numbers are higher than all others."""
    found: list[Holder] = []
    for model, row in admitted:
        if row.queued:
            model.book.serve_head()
            if (head := model.book.head) is not None:
                found.append((model, head))
    return found


def _number(waiting: Holder) -> int:
    return waiting[1].number
