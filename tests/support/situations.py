"""Situations for a scheduler: jobs, a model that is loaded, and work items that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.orders import (
    Job,
    Load,
)
from mlxsrv.engine.outcomes import Fault, TextFacts
from mlxsrv.engine.plans import (
    Decode,
    Read,
    ReadDraft,
    WorkItem,
)
from mlxsrv.generation.parameters import Sampling, Steering
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import Bench

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
