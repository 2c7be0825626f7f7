"""The memory budget: the KV caches of all models of an app stay within a number of bytes, and
large texts to embed with them.

One number decides: need(t), the bytes that all rows need if each draws t tokens more. It follows
from their lengths; see `row_memory`. What is to be done is decided at the beginning of each round,
before a plan takes anything.

- **Growth.** While need(2) is more than the budget the youngest row is preempted: it loses its KV
  cache, keeps its slot and its place before all lines, and goes on later with the same tokens. No
  row is preempted for a younger one. The oldest of the app goes on until the budget is full of it
  alone; then it ends, as at its limit.
- **Admission.** A row gets a slot, and its text is read, when need(258) fits into the budget with
  it. So between two preemptions of a row each of the others draws 256 tokens, or all that it has
  left. Rows are given memory in the order of their turns: see `fair_queue`. The head of a line that
  does not fit waits, and none behind it is read before it. A text that does not fit even alone is
  refused.
- **Slack** is what need(2) leaves of the budget. Cached prompts, the draft model's KV cache, and
  what arrays take beyond what their rows need (see `groups`) share it. Arrays may have what the
  others leave, and a quarter in any case.
- **Texts to embed** need no memory to begin, so they get a slot at their turn. But a row with a
  large text is one of those that wait for memory, once for each such text, and it is preempted as
  others are.

If need(66) is too much, or a text waits, the app gets the event MemoryShort, since it may have
models that nobody uses. It answers with another budget, or with the same. Nothing waits for the
answer but texts that do not fit alone.
"""

from __future__ import annotations

from itertools import count

from mlxsrv.engine.events import Event, Progress, Shortage
from mlxsrv.engine.scheduling.groups import NEXT, STEP
from mlxsrv.engine.scheduling.memory_question import MemoryQuestion
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.row_memory import RowMemory

# Tokens for which rows have room.
_LAST = 1  # of the next step
_SOON = NEXT + 64  # before which memory is asked for: steps enough for an answer
_GROWN = NEXT + STEP  # of all rows, when a text is read

_UNBOUNDED = 1 << 62  # bytes
_ARRAYS = 4  # this part of the slack at least is not for cached prompts
_QUIET = 32  # rounds after which it is decided anew, and preempted rows give a sign of life


Holder = tuple[RowMemory, Row]


class MemoryBudget:
    """Keeps the KV caches of one client's models within their bytes.

    Attributes:
        bytes: that there are; None: as many as are wanted.
        numbers: of rows, in the order of their turns, over all models.
        free: bytes that nothing has taken or reserved in this round.
        exceeded: KV caches take more than the budget until the steps of this round are done.
        events: those to send to the client; the schedules of its models append theirs, too.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self.numbers = count()
        self.events: list[Event] = []
        self.free = _UNBOUNDED
        self.exceeded = False
        self._models: list[RowMemory] = []
        self._question = MemoryQuestion(self.events.append)
        self._rounds = 0

    def set(self, bytes: int) -> None:
        """Set the budget: the client's order `Budget`, which may be its answer to MemoryShort.

        Args:
            bytes: the most that KV caches and large texts to embed may take from now on.
        """
        self.bytes = bytes
        self._question.note_answer()

    def register(self, model: RowMemory) -> None:
        """Count the rows of a model from now on."""
        self._models.append(model)
        model.index.room = lambda tokens: self._find_room(model, model.measure(tokens))

    def unregister(self, model: RowMemory) -> None:
        """Count the rows of a model no more, if they were: it is gone."""
        if model in self._models:
            self._models.remove(model)

    @property
    def admits_more(self) -> bool:
        """Whether the next plan admits a text that waits for memory."""
        if self.bytes is None:
            return True
        waiting = self._find_candidates()
        if not waiting:
            return False
        model, row = min(waiting, key=_number)
        return self._count(_GROWN) + model.count_candidate(row, _GROWN) <= self.bytes

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
        for model in self._models:
            model.index.late = False
        self._rounds += 1
        if quiet and self._rounds % _QUIET and not any(map(_changes, self._models)):
            return
        self._send_progress()
        if short := self._count(_GROWN) > self.bytes:
            self._preempt(self.bytes)
        admitted, enough = self._admit(self.bytes)
        self._share_slack(self.bytes, admitted)
        self._fit_proposers()
        if short:
            self._question.ask(self._count(_SOON), self.bytes)
        elif enough:
            self._question.note_enough()

    def _count(self, tokens: int) -> int:
        """The bytes that all rows need, with room for so many tokens more of each."""
        return sum([model.count_bytes(tokens) for model in self._models])

    @property
    def _spare(self) -> int:
        """Bytes that can be evicted: of cached prompts, and of what proposers have read."""
        return sum([model.spare_bytes for model in self._models])

    # Growth.

    def _preempt(self, most: int) -> None:
        """Preempt rows until there is room for the next steps."""
        while self._count(NEXT) > most:
            holders = [(model, row) for model in self._models for row in model.rows]
            if not holders:
                return
            model, youngest = max(holders, key=_number)
            if len(holders) == 1 and self._count(_LAST) <= most:
                youngest.end_soon()
                return
            model.preempt(youngest)

    # Admission.

    def _find_candidates(self) -> list[Holder]:
        """The rows that wait for memory, those of each model in their order."""
        return [(model, row) for model in self._models for row in model.candidates]

    def _admit(self, most: int) -> tuple[int, bool]:
        """Admit waiting texts in their order, up to the first that does not fit. Returns two
        things: the bytes of admitted texts that need() does not count yet, and whether all were
        admitted."""
        for model in self._models:
            model.book.serve_texts()
        candidates = sorted(self._find_candidates(), key=_number)
        granted: dict[RowMemory, list[Row]] = {model: [] for model in self._models}
        taken, admitted, enough = self._count(_GROWN), 0, True
        for model, row in candidates:
            more = model.count_candidate(row, _GROWN, granted[model])
            if (needed := taken + more) > most:
                if self._refuse(model, row, most):
                    return self._admit(most)  # another may have its place
                self._question.ask(needed, most)
                enough = False
                break
            taken = needed
            admitted += 0 if row.embeds else more  # its text has begun when it is granted
            granted[model].append(row)
            if row.queued:
                model.book.serve_head()
                # The loop comes to those that may be next as well. Their numbers are higher.
                next_ones = [(model, each) for each in model.candidates]
                candidates += [holder for holder in next_ones if holder not in candidates]
        for model, rows in granted.items():
            # Where half of the memory is left, it is not counted how texts are padded.
            model.grant(rows, ample=enough and taken + self._spare <= most // 2)
        return admitted, enough

    def _refuse(self, model: RowMemory, row: Row, most: int) -> bool:
        """End a row whose text does not fit even alone, once the client has answered MemoryShort
        for it. Returns whether it ends."""
        needed = model.count_alone(row, _GROWN)
        refused = needed > most and self._question.ask_for(row.number, needed, most)
        if refused:
            model.book.refuse(row, Shortage(needed, most, model.count_tokens(row)))
        return refused

    # What is left.

    def _share_slack(self, most: int, admitted: int) -> None:
        """Let arrays take more than their rows need, and evict as much.

        Args:
            most: the budget.
            admitted: bytes that texts need which are read in this round.
        """
        slack = most - admitted - self._count(NEXT)
        room = max(slack - self._spare, slack // _ARRAYS)
        taken = 0
        for model in self._models:
            taken += model.groups.arrange(room - taken)
        slack -= taken
        self._give_way(self._spare - slack)
        held = sum([model.held for model in self._models])  # before the steps
        self.free = min(slack - self._spare, most - held)
        self.exceeded = held > most

    def _give_way(self, bytes: int) -> None:
        """Evict cached prompts and what proposers have read until so many bytes are free, first
        those of models without rows, and no more than are needed."""
        models = sorted(self._models, key=lambda model: bool(model.rows)) if bytes > 0 else ()
        for model in models:
            if bytes > 0:
                bytes -= model.give_way(bytes)

    def _fit_proposers(self) -> None:
        """Find room for what proposers read in this round. Cached prompts are evicted for it, but
        no row is preempted."""
        for model in self._models:
            if (proposer := model.book.proposer) is not None:
                growth = model.proposer_growth
                proposer.fits = not growth or self._find_room(model, growth)

    # Events.

    def _send_progress(self) -> None:
        """Send Progress now and then for rows that are preempted, or wait with a large text to
        embed, so that they do not look stalled."""
        if self._rounds % _QUIET == 0:
            for model in self._models:
                self.events += [Progress(row.id) for row in model.queue.preempted]
                self.events += [Progress(job) for job in model.book.texts.short]


def _changes(model: RowMemory) -> bool:
    """Whether a model needs other memory though its rows only draw tokens."""
    return model.groups.stale or model.proposer_grows


def _number(holder: Holder) -> int:
    return holder[1].number
