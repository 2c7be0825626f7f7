"""The scheduler's own time: `python -m benchmarks.scheduler`.

It is host code between two steps of the device, so all of it is lost to every stream. A round is
`plan` and the `settle` of each work; the runner does nothing here. Each line is a situation at
`--rows` rows, with microseconds a round: the mean, the median, and the 99th percentile. All runs
have the same rounds, since no plan depends on the clock here. Of each round the fastest of `--runs`
counts, which leaves out most of what other programs cost.

- `decoding`: all rows are decoded, and nothing else happens.
- `waiting`: the same, while `--waiting` prompts wait for a row.
- `coming and going`: answers of `--answer` tokens on average, a half more or less, while as many
  prompts wait. With 40 tokens a row leaves and another joins in most rounds. What that takes longer
  than `decoding`, by the number of jobs that have ended, is the time of one job: from its order to
  its row's end, but for its tokens.
- `reading`: a long prompt is read beside the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from time import thread_time_ns
from typing import NamedTuple

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.orders import Ask, Budget, Job, Load, Open, Submit
from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.scheduler import Received, Scheduler
from mlxsrv.generation.parameters import Sampling
from tests.support.fake_device import FakeDevice
from tests.support.fake_runner import FakeRunner

_FACTS = TextFacts(
    batched=True,
    cuts=True,
    pads=True,
    padding=1 << 30,
    vocabulary=150_000,
    prompt_cache_bytes=1 << 30,
    kv_costs=(KVCost(100_000),),
)
_CLIENT = 1
_ENDLESS = (1 << 20,)
_PROMPT = 300
_CHANGING = "coming and going"


class _Rounds:
    """Rounds of a scheduler with one model, and what each took. `ended`: jobs that have."""

    def __init__(self, rows: int, budget: int) -> None:
        self._scheduler = Scheduler()
        self._runner = FakeRunner(FakeDevice(_FACTS))
        self._orders = [Received(_CLIENT, Open())]
        self._jobs = 0
        self.ended = 0
        order = Load(model="m", path="", max_rows=rows, prefill_chunk=2048, max_gap=0.2)
        self._orders += [Received(_CLIENT, Ask(1, order)), Received(_CLIENT, Budget(budget))]
        self.run(2)

    def submit(self, count: int, tokens: Sequence[int], prompt: int = _PROMPT) -> None:
        """Send jobs, whose answers take so many tokens by turns."""
        for _ in range(count):
            self._jobs += 1
            text = tuple((self._jobs + 7919 * place) % 150_000 for place in range(prompt))
            most = tokens[self._jobs % len(tokens)]
            job = Job(self._jobs, "m", text, most, frozenset([2]), Sampling())
            self._orders.append(Received(_CLIENT, Submit(job)))

    def run(self, count: int, tokens: Sequence[int] = ()) -> list[float]:
        """Do so many rounds. Returns the microseconds of each. With `tokens` another job comes for
        each that ends."""
        return [self._round(tokens) for _ in range(count)]

    def _round(self, tokens: Sequence[int]) -> float:
        orders, self._orders = self._orders, []
        spent = -thread_time_ns()
        plan = self._scheduler.plan(orders)
        events = self._scheduler.take_events()
        spent += thread_time_ns()
        ended = 0
        for work in plan.items:
            outcome = self._runner.run(work)
            spent -= thread_time_ns()
            self._scheduler.settle(work, outcome)
            events = self._scheduler.take_events()
            spent += thread_time_ns()
            ended += sum(getattr(e, "finish", None) is not None for _, sent in events for e in sent)
        self._runner.end_round()
        self.ended += ended
        if tokens:
            self.submit(ended, tokens)
        return spent / 1000


class _Situation(NamedTuple):
    """A situation, the microseconds of its rounds, and how many jobs have ended in each of them."""

    name: str
    spent: list[float]
    jobs: float = 0.0


def _measure(
    rows: int, waiting: int, rounds: int, budget: int, answer: int
) -> Iterator[_Situation]:
    decoding = _Rounds(rows, budget)
    decoding.submit(rows, _ENDLESS)
    decoding.run(4 * rows)
    yield _Situation("decoding", decoding.run(rounds))
    decoding.submit(waiting, _ENDLESS)
    decoding.run(10)
    yield _Situation("waiting", decoding.run(rounds))
    changing = _Rounds(rows, budget)
    answers = [
        most for first in range(3) for most in range(answer // 2 + first, answer * 3 // 2, 3)
    ]
    changing.submit(rows + waiting, answers)
    changing.run(max(8 * rows, 2 * answer), answers)
    before = changing.ended
    spent = changing.run(rounds, answers)
    yield _Situation(_CHANGING, spent, (changing.ended - before) / rounds)
    reading = _Rounds(rows, budget)
    reading.submit(rows - 1, _ENDLESS)
    reading.run(4 * rows)
    reading.submit(1, (1,), prompt=100_000)
    reading.run(10)
    yield _Situation("reading", reading.run(min(rounds, 100_000 // 2048 - 12)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--waiting", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument(
        "--budget", type=float, default=20e9, help="bytes for KV caches; the default is ample"
    )
    parser.add_argument("--answer", type=int, default=40, help="tokens of an answer, on average")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    given = (options.rows, options.waiting, options.rounds, int(options.budget), options.answer)
    mean: dict[str, float] = {}
    jobs: dict[str, float] = {}
    for runs in zip(*(_measure(*given) for _ in range(options.runs)), strict=True):
        name, _, jobs[name] = runs[0]
        spent = [min(times) for times in zip(*(run.spent for run in runs), strict=True)]
        p99, middle = quantiles(spent, n=100)[-1], median(spent)
        mean[name] = sum(spent) / len(spent)
        print(
            f"{name:>17}: mean {mean[name]:6.1f}, median {middle:6.1f}, p99 {p99:6.1f} us a round"
        )
    each = (mean[_CHANGING] - mean["decoding"]) / jobs[_CHANGING]
    print(f"{'a job':>17}: {each:6.1f} us; {jobs[_CHANGING]:.2f} of them come and go a round")


if __name__ == "__main__":
    main()
