"""Simulate a server's rounds, without a model: `python -m benchmarks.simulate`.

The scheduler is the real one. Work items take what a cost model says, so thousands of requests take
seconds. Requests come at random times (Poisson); prompts and answers have log-normal lengths. As in
the HTTP server, a request waits for a row before its job is sent. Each line has the seconds to the
first token, the gaps between tokens, and tokens a second.

- `--machine NAME`: a machine and a model in the figures of their data sheets, which are ASSUMED.
- `--folder MODEL`: this model, here. Three runs of different requests are measured. Costs are
  fitted to the first and the last; the other is simulated, to show how far the two are apart. Time
  is the process's own (`time.process_time`), so MLX should have one thread: OPENBLAS_NUM_THREADS=1.
  Other processes still slow down memory and caches, for a while at a time. So the next lines
  simulate a machine that is as fast as this one was in each tenth of a second of that run: they
  show the simulator's own error. The last line has costs that are 5 % higher, compared with the
  first simulation. Near the most that a machine can do, and where few requests make the tail, a
  small change of the costs is a large one of the tail, and none of its figures can be predicted.
- `--prefill-chunk`, `--max-gap`, `--max-rows` with several values: a line for each combination.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import ClassVar, Protocol

import mlx.core as mx
import msgspec
import numpy as np

from benchmarks.costs import CostDevice, Costs, Machine, Speed, describe, fit, scale
from benchmarks.report import format_table
from mlxsrv.engine.events import Event, Failed, KVCost, Token
from mlxsrv.engine.orders import Ask, Job, Load, Open, Submit
from mlxsrv.engine.outcomes import LoadStep, Outcome, TextFacts
from mlxsrv.engine.plans import LoadSlice, WorkItem
from mlxsrv.engine.runner import Runner
from mlxsrv.engine.scheduling.scheduler import Received, Scheduler
from mlxsrv.generation.parameters import Sampling
from tests.support.fake_runner import FakeRunner
from tests.support.tiny import write_model

MACHINES = {
    # An 8B model in 4 bits, on a machine with 400 GB/s.
    "m-max-8b-4bit": Machine(
        bandwidth=400e9, flops=25e12, launch=0.0015,
        weights=4.7e9, parameters=8e9, kv_bytes=131_072, width=36 * 4096,
    ),
    "m-base-8b-4bit": Machine(
        bandwidth=120e9, flops=7e12, launch=0.0015,
        weights=4.7e9, parameters=8e9, kv_bytes=131_072, width=36 * 4096,
    ),
    # The same in bfloat16, on a data-centre GPU.
    "gpu-8b-bf16": Machine(
        bandwidth=3.3e12, flops=600e12, launch=0.003,
        weights=16e9, parameters=8e9, kv_bytes=131_072, width=36 * 4096,
    ),
}  # fmt: skip

_CLIENT = 1
_VOCABULARY = 300  # of prompts: special tokens are below 5


class Request(msgspec.Struct, frozen=True):
    """When it comes, in seconds, and how many tokens its prompt and its answer have."""

    at: float
    prompt: int
    answer: int


class Traffic(msgspec.Struct, frozen=True):
    """Requests by chance. Lengths are log-normal: a median each, and one standard deviation of
    their logarithms."""

    count: int
    rate: float  # a second
    prompt: int
    answer: int
    spread: float = 0.8

    def draw(self, seed: int) -> list[Request]:
        chance = random.Random(seed)
        now = 0.0
        requests: list[Request] = []
        for _ in range(self.count):
            now += chance.expovariate(self.rate)
            prompt, answer = (
                max(1, min(8 * median, round(median * chance.lognormvariate(0, self.spread))))
                for median in (self.prompt, self.answer)
            )
            requests.append(Request(now, prompt, answer))
        return requests


class Figures(msgspec.Struct, frozen=True):
    """The times that clients see, in seconds."""

    first_p50: float
    first_p95: float
    first_p99: float
    gap_p50: float
    gap_p95: float
    gap_p99: float
    tokens_a_second: float

    NAMES: ClassVar[tuple[str, ...]] = (
        "TTFT p50",
        "p95",
        "p99",
        "gap p50",
        "p95",
        "p99",
        "tokens/s",
    )

    def cells(self) -> list[str]:
        *times, rate = msgspec.structs.astuple(self)
        return [*(f"{1000 * each:.0f} ms" for each in times), f"{rate:.0f}"]


class _Side(Protocol):
    """A runner with a clock."""

    def now(self) -> float: ...

    def skip(self, seconds: float) -> None: ...

    def run(self, work: WorkItem) -> Outcome: ...

    def begin_round(self) -> None: ...

    def end_round(self) -> None: ...


class Simulated:
    """A FakeRunner on a device where work items take what they cost."""

    def __init__(self, device: CostDevice) -> None:
        self._device = device
        self._runner = FakeRunner(self._device, now=0.0)

    def now(self) -> float:
        return self._runner.now

    def skip(self, seconds: float) -> None:
        self._runner.now += seconds
        self._device.now += seconds

    def run(self, work: WorkItem) -> Outcome:
        return self._runner.run(work)

    def begin_round(self) -> None:
        pass

    def end_round(self) -> None:
        self._runner.end_round()


class Measured:
    """The real runner, by the process's own time; what rounds took is remembered.

    A FakeRunner does the same work items beside it, and reports the sizes of their passes.
    """

    def __init__(self) -> None:
        self._skipped = -time.process_time()
        self._runner = Runner(clock=self.now)
        self._shadow: FakeRunner | None = None
        self._sizes = _SizeDevice()
        self.began: list[float] = []
        self.features: list[list[float]] = []
        self.seconds: list[float] = []
        self.facts: TextFacts | None = None
        self._works: list[list[float]] = []
        self._began = 0.0
        self._order: Load | None = None

    def now(self) -> float:
        return time.process_time() + self._skipped

    def skip(self, seconds: float) -> None:
        self._skipped += seconds

    def run(self, work: WorkItem) -> Outcome:
        outcome = self._runner.run(work)
        assert outcome.fault is None, outcome.fault
        aside = time.process_time()
        if isinstance(work, LoadSlice):
            self._order = work.order or self._order
            if isinstance(outcome.done, LoadStep) and outcome.done.text is not None:
                self._sizes.text = self.facts = outcome.done.text
                self._shadow = FakeRunner(self._sizes)
                self._shadow.run(LoadSlice(model=work.model, limit=1, order=self._order))
        elif self._shadow is not None:
            self._shadow.run(work)
            self._works.append(self._sizes.taken)
        self._skipped -= time.process_time() - aside
        return outcome

    def begin_round(self) -> None:
        self._began = self.now()

    def end_round(self) -> None:
        if any(items[1] or items[4] for items in self._works):
            self.features.append(np.sum(self._works, axis=0).tolist())
            self.seconds.append(self.now() - self._began)
            self.began.append(self._began)
        self._works = []

    def find_speed(self, costs: Costs, first: float) -> Speed:
        """Return the speed of the machine; `first`: when the first request came, in seconds."""
        began = [each - self.began[0] + first for each in self.began]
        return Speed(began, self.seconds, (np.array(self.features) @ costs.values).tolist())


class _SizeDevice(CostDevice):
    """Remembers what the last work item took."""

    def __init__(self) -> None:
        super().__init__(
            Costs(),
            TextFacts(
                batched=True, cuts=True, pads=True, padding=0, vocabulary=0, prompt_cache_bytes=0
            ),
        )
        self.taken: list[float] = []

    def time(self, work: WorkItem, passes: Sequence[object]) -> float:
        self.taken = describe(work, passes)  # type: ignore[arg-type]
        return 0.0


def serve(side: _Side, requests: Sequence[Request], order: Load, seed: int = 0) -> Figures:
    """Have a scheduler serve these requests."""
    scheduler, chance = Scheduler(), random.Random(seed)
    orders = [Received(_CLIENT, Open()), Received(_CLIENT, Ask(1, order))]
    while orders or not scheduler.idle:
        _round(scheduler, side, orders)
        orders = []
    jobs = [_make_job(number, each, chance) for number, each in enumerate(requests)]
    begin = side.now()
    coming, gate = deque(enumerate(requests)), deque[Job]()
    arrived = {number: begin + request.at for number, request in enumerate(requests)}
    drawn: dict[int, list[float]] = {number: [] for number in arrived}
    live = 0
    while coming or gate or live:
        while coming and arrived[coming[0][0]] <= side.now():
            gate.append(jobs[coming.popleft()[0]])
        while gate and live < order.max_rows:
            live += 1
            orders.append(Received(_CLIENT, Submit(gate.popleft())))
        if not orders and scheduler.idle:
            side.skip(max(arrived[coming[0][0]] - side.now(), 0))
            continue
        for now, event in _round(scheduler, side, orders):
            assert not isinstance(event, Failed), event
            if isinstance(event, Token):
                drawn[event.job].append(now)
                live -= event.finish is not None
        orders = []
    firsts = [times[0] - arrived[number] for number, times in drawn.items()]
    gaps = np.concatenate([np.diff(times) for times in drawn.values()])
    tokens = sum(map(len, drawn.values()))
    shares = [0.5, 0.95, 0.99]
    times = [*np.quantile(firsts, shares).tolist(), *np.quantile(gaps, shares).tolist()]
    return Figures(*times, tokens / (side.now() - begin))  # type: ignore[call-arg]


def _make_job(number: int, request: Request, chance: random.Random) -> Job:
    prompt = tuple(chance.choices(range(5, _VOCABULARY), k=request.prompt))
    return Job(number, "m", prompt, request.answer, frozenset(), Sampling(0.0))


def _round(
    scheduler: Scheduler, side: _Side, orders: Sequence[Received]
) -> Iterator[tuple[float, Event]]:
    """A round of the device thread. Returns the events, and when they were delivered."""
    found: list[tuple[float, Event]] = []
    side.begin_round()
    plan = scheduler.plan(orders)
    for work in plan.items:
        scheduler.settle(work, side.run(work))
        found += [(side.now(), event) for _, events in scheduler.take_events() for event in events]
    side.end_round()
    return iter(found)


def measure(folder: Path, requests: Sequence[Request], order: Load) -> tuple[Measured, Figures]:
    """Serve these requests with the real runner."""
    side = Measured()
    figures = serve(side, requests, msgspec.structs.replace(order, path=str(folder)))
    return side, figures


def compare(folder: Path, traffic: Traffic, order: Load) -> list[list[str]]:
    """Fit the costs to two runs of requests; measure and simulate another. Returns a table."""
    requests = traffic.draw(1)
    # One run before, and one behind: a machine that is shared is not always as fast.
    before, _ = measure(folder, traffic.draw(2), order)
    between, real = measure(folder, requests, order)
    behind, _ = measure(folder, traffic.draw(3), order)
    costs = fit(before.features + behind.features, before.seconds + behind.seconds)
    print({name: f"{value:.2e}" for name, value in msgspec.structs.asdict(costs).items()})
    facts, blocks = before.facts, mx.default_device() == mx.cpu
    assert facts is not None

    def simulate(costs: Costs, speed: Speed | None = None) -> Figures:
        device = CostDevice(costs, facts, speed, blocks=blocks)
        return serve(Simulated(device), requests, order)

    found, slower = simulate(costs), simulate(scale(costs, 1.05))
    speed = between.find_speed(costs, requests[0].at)
    print(f"of what was expected, the rounds of the run that is compared took {speed.mean:.2f}")
    alike = simulate(costs, speed)
    return [
        ["measured", *real.cells()],
        ["simulated", *found.cells()],
        ["off by", *_compare(found, real)],
        ["at its speed", *alike.cells()],
        ["off by", *_compare(alike, real)],
        ["costs +5 %", *_compare(slower, found)],
    ]


def _compare(one: Figures, other: Figures) -> list[str]:
    pairs = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)
    return [f"{100 * (a / b - 1):+.0f} %" for a, b in pairs]


def sweep(
    machine: Machine, traffic: Traffic, order: Load, choices: dict[str, Sequence[float]]
) -> list[list[str]]:
    """Simulate each combination of settings. Returns a table."""
    facts = TextFacts(
        batched=True,
        cuts=True,
        pads=True,
        padding=int(machine.weights),
        shares=True,
        vocabulary=150_000,
        prompt_cache_bytes=1 << 30,
        kv_costs=(KVCost(int(machine.kv_bytes)),),
    )
    requests = traffic.draw(1)
    rows: list[list[str]] = []
    for values in product(*choices.values()):
        named = dict(zip(choices, values, strict=True))
        changed = msgspec.structs.replace(order, **named)
        figures = serve(Simulated(CostDevice(machine.estimate(), facts)), requests, changed)
        rows.append([*(f"{value:g}" for value in values), *figures.cells()])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", choices=MACHINES)
    parser.add_argument("--folder", help="a model's folder, or a family of the tests' models")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens; the median")
    parser.add_argument("--answer", type=int, default=200, help="tokens; the median")
    parser.add_argument("--max-rows", type=int, nargs="+", default=[32])
    parser.add_argument("--prefill-chunk", type=int, nargs="+", default=[2048])
    parser.add_argument("--max-gap", type=float, nargs="+", default=[0.2])
    options = parser.parse_args()
    traffic = Traffic(options.requests, options.rate, options.prompt, options.answer)
    choices = {
        "max_rows": options.max_rows,
        "prefill_chunk": options.prefill_chunk,
        "max_gap": options.max_gap,
    }
    order = Load(
        model="m",
        path="",
        max_rows=options.max_rows[0],
        prefill_chunk=options.prefill_chunk[0],
        max_gap=options.max_gap[0],
        prompt_cache_bytes=0,
    )
    if options.machine is not None:
        table = sweep(MACHINES[options.machine], traffic, order, choices)
        print(format_table([[*choices, *Figures.NAMES], *table]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.folder)
        if not path.exists():
            path = write_model(Path(folder) / "m", options.folder, plain=True)
        table = compare(path, traffic, order)
    print(format_table([["", *Figures.NAMES], *table]))


if __name__ == "__main__":
    main()
