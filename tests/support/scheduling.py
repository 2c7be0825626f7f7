"""Drives a Scheduler with a FakeRunner, as the device thread does, and checks what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from mlxsrv.engine.events import (
    Answered,
    Embedded,
    EngineStopped,
    Event,
    Failed,
    Finished,
    JobEvent,
    KVCost,
    Loaded,
    MemoryShort,
    PromptRead,
    Started,
    Token,
    WeightsRead,
)
from mlxsrv.engine.orders import (
    Ask,
    Budget,
    Cancel,
    Close,
    Job,
    Load,
    Open,
    Order,
    Submit,
)
from mlxsrv.engine.outcomes import Fault, TextFacts
from mlxsrv.engine.plans import (
    Decode,
    Read,
    ReadDraft,
    RoundPlan,
    WorkItem,
)
from mlxsrv.engine.scheduling.scheduler import Received, Scheduler
from mlxsrv.generation.parameters import Sampling, Steering
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.fake_runner import FakeRunner

_W = TypeVar("_W")
_MOST_ROUNDS = 20_000


class JobLog:
    """The events that one job was told of, which must be in order and end once.

    Attributes:
        sent_round, end_round: the rounds in which it was sent, and ended or was cancelled.
        rounds: so many rounds it took, or has taken so far.
        first_at, ended_at: by the runner's clock.
    """

    def __init__(self, order: Job, sent_round: int) -> None:
        self.order = order
        self.sent_round = sent_round
        self.end_round = float("inf")
        self.events: list[JobEvent] = []
        self.cancelled = False
        self.rounds = 0
        self.ended_at: float | None = None
        self.first_at: float | None = None

    @property
    def ended(self) -> bool:
        return self.cancelled or self.ended_at is not None

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]

    @property
    def read(self) -> PromptRead | None:
        return next((event for event in self.events if isinstance(event, PromptRead)), None)

    @property
    def failed(self) -> Failed | None:
        return next((event for event in self.events if isinstance(event, Failed)), None)

    def take(self, event: JobEvent, now: float) -> None:
        if self.cancelled and isinstance(event, Failed):
            return  # its model went in the same round; the client has forgotten the job
        assert not self.ended, f"{event} after the end of its job"
        began = any(isinstance(e, Started) for e in self.events)
        if isinstance(event, Started):
            assert not self.events, f"{event} behind {self.events}"
        elif not isinstance(event, Failed):
            assert began, f"{event} before its job has started"
        if isinstance(event, PromptRead):
            assert self.read is None, "the prompt was read twice"
        if isinstance(event, Token):
            assert self.read is not None, "a token before the prompt was read"
            self.first_at = now if self.first_at is None else self.first_at
        self.events.append(event)
        if isinstance(event, (Finished, Failed, Embedded)) or (
            isinstance(event, Token) and event.finish is not None
        ):
            self.ended_at = now


class Bench:
    """A scheduler, a runner, and clients.

    Args:
        device: what comes of work items.
        clients: their numbers.
    """

    def __init__(self, device: FakeDevice | None = None, clients: Iterable[int] = (1,)) -> None:
        self.scheduler = Scheduler()
        self.runner = FakeRunner(device)
        self.runner.record = True
        self.jobs: dict[tuple[int, int], JobLog] = {}
        self.answers: dict[tuple[int, int], Any] = {}
        self.weights_read: dict[tuple[int, str], int] = {}  # bytes by client and model
        self.shortages: list[tuple[int, int]] = []  # (client, bytes) as they were told
        self._shrunk: int | None = None  # the budget that holds when a round is over
        self.closed: set[int] = set()  # clients that have sent their last order
        self.plans: list[RoundPlan] = []
        self.checks: list[Callable[[RoundPlan], None]] = []
        self._orders: list[Received] = [Received(client, Open()) for client in clients]
        self._questions = 0

    # Orders.

    def send(self, order: Order, client: int = 1) -> None:
        """Queue an order for the next round."""
        self._orders.append(Received(client, order))

    def submit(self, *jobs: Job, client: int = 1) -> None:
        for job in jobs:
            self.jobs[client, job.id] = JobLog(job, len(self.plans))
            self.send(Submit(job), client)

    def cancel(self, *jobs: int, client: int = 1) -> None:
        for job in jobs:
            self.send(Cancel(job), client)

    def ask(self, question: Any, client: int = 1) -> int:
        """Send a question, a load or an attachment. Returns its number."""
        self._questions += 1
        self.send(Ask(self._questions, question), client)
        return self._questions

    def load(self, order: Load, client: int = 1) -> None:
        """Load a model, to the end."""
        number = self.ask(order, client)
        self.finish()
        assert isinstance(self.answers[client, number], Loaded), self.answers

    # Rounds.

    def round(self) -> RoundPlan:
        """One round of the device thread."""
        orders, self._orders = self._orders, []
        for received in orders:
            self._note(received)
        idle = self.scheduler.idle and not orders
        plan = self.scheduler.plan(orders)
        self.plans.append(plan)
        assert not (idle and plan.items), f"idle, and plans {plan}"
        assert idle or orders or plan.items, "not idle, and plans nothing"
        for check in self.checks:
            check(plan)
        self._deliver()
        for work in plan.items:
            self.scheduler.settle(work, self.runner.run(work))
            self._deliver()
        self.runner.end_round()
        if self._shrunk is not None:
            self.runner.budget, self._shrunk = self._shrunk, None
        for job in self.jobs.values():
            if not job.ended:
                job.rounds += 1
            elif job.end_round == float("inf"):
                job.end_round = len(self.plans)
        return plan

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    @property
    def done(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle and not self._orders

    def finish(self) -> None:
        """Go on until there is nothing to do."""
        for _ in range(_MOST_ROUNDS):
            if self.done:
                return
            self.round()
        raise AssertionError("it does not end")

    def _note(self, received: Received) -> None:
        """Note which jobs are told nothing any more."""
        client, order = received.client, received.order
        if isinstance(order, Cancel) and (client, order.job) in self.jobs:
            self.jobs[client, order.job].cancelled = True
        elif isinstance(order, Budget):
            # What is to go goes in the work items of the round.
            old, self._shrunk = self.runner.budget, order.bytes
            self.runner.budget = None if old is None else max(old, order.bytes)
        elif isinstance(order, Close):
            self.closed.add(client)
            for (owner, _), log in self.jobs.items():
                log.cancelled |= owner == client

    def _deliver(self) -> None:
        for client, events in self.scheduler.take_events():
            assert client not in self.closed, f"{events} for a client that is gone"
            for event in events:
                self._receive(client, event)

    def _receive(self, client: int, event: Event) -> None:
        match event:
            case EngineStopped():
                raise AssertionError(event)
            case Answered():
                assert (client, event.number) not in self.answers, "a question answered twice"
                self.answers[client, event.number] = event.value
            case MemoryShort(missing):
                self.shortages.append((client, missing))
            case WeightsRead(model, read):
                self.weights_read[client, model] = self.weights_read.get((client, model), 0) + read
            case _:
                self.jobs[client, event.job].take(event, self.runner.now)

    # What came of it.

    def job(self, number: int, client: int = 1) -> JobLog:
        return self.jobs[client, number]

    def items(self, kind: type[_W]) -> list[_W]:
        """The work items of this kind that were done."""
        return [work for work in self.runner.items if isinstance(work, kind)]


CHUNK = 64
MODEL = 1  # the number of the first model that is loaded
ORDER = Load(model="m", path="/a", max_rows=8, prefill_chunk=CHUNK, max_gap=10.0)
STEERED = Steering(attachment=1, values=((3, 1.0),))


def prompt(size: int, family: int = 1) -> tuple[int, ...]:
    """Prompts of two families differ from their first token on."""
    return tuple((family * 1000 + place) % 50_000 for place in range(size))


def job(number: int, size: int, max_tokens: int = 4, *, family: int = 0, **more: Any) -> Job:
    """A job whose prompt has `size` tokens; of its own, unless a family is given."""
    more.setdefault("sampling", Sampling())
    more.setdefault("end_tokens", frozenset())
    tokens = more.pop("prompt", None) or prompt(size, family or number)
    return Job(number, "m", tokens, max_tokens, **more)


def make(device: FakeDevice | None = None, **changes: Any) -> Bench:
    """A bench on which the model `m` is loaded."""
    bench = Bench(device)
    bench.load(msgspec.structs.replace(ORDER, **changes))
    bench.runner.items.clear()
    return bench


def read_order(bench: Bench) -> list[int]:
    """Jobs in the order in which their prompts were read."""
    spans = [span for work in bench.items(Read) for span in work.spans if span.joins is not None]
    return [row for span in spans for row in span.rows]


def expected(bench: Bench, number: int, count: int) -> list[int]:
    return [bench.runner.device.draw(job(number, 1), place) for place in range(count)]


class FaultyDevice(FakeDevice):
    """Fails the work items that `chooses` chooses, the first `times` of them."""

    def __init__(
        self,
        chooses: Callable[[WorkItem], bool],
        times: int = 1,
        *,
        memory: bool = False,
        text: TextFacts | None = FACTS,
    ) -> None:
        super().__init__(text)
        self._chooses = chooses
        self._times = times
        self._memory = memory

    def fail(self, work: WorkItem) -> Fault | None:
        if not self._times or not self._chooses(work):
            return None
        self._times -= 1
        return Fault("it broke", memory=self._memory)


class DraftDevice(FakeDevice):
    """A draft model whose proposals hold by this share; rounds take twice as long as steps.

    Args:
        share: of the proposals.
        facts: of the model, but for the draft.
        costs: of the draft's KV cache; none unless given.
    """

    def __init__(
        self, share: float, facts: TextFacts = FACTS, costs: tuple[KVCost, ...] = ()
    ) -> None:
        super().__init__(msgspec.structs.replace(facts, drafts=True, draft_costs=costs))
        self._share = share

    def accept(self, job: Job, place: int, proposals: int) -> int:
        return int(self._share * proposals)

    def time(self, work: WorkItem, passes: Sequence[Any]) -> float:
        if isinstance(work, ReadDraft):
            return 0.00001 * work.tokens
        return 0.002 if isinstance(work, Decode) and work.proposals else 0.001
