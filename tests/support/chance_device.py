"""A device without MLX whose work items fail, and whose rows end, by chance."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
from hypothesis import strategies as st

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import EmbedFacts, Fault, RowFailure, TextFacts
from mlxsrv.engine.plans import Decode, EmbedSlice, Read, ReadDraft, Release, WorkItem
from mlxsrv.generation.parameters import Steering
from tests.support.fake_device import FakeDevice, Pass
from tests.support.scheduling import JobLog

END = 7
PER_TOKEN = 100  # bytes of a KV cache
STEERINGS = (None, None, None, Steering(attachment=5, values=((1, 2.0),)), Steering(attachment=6))


class Rates(msgspec.Struct, frozen=True):
    """The probability of each mishap, from 0 to 1."""

    fault: float = 0.0
    memory: float = 0.0
    nan: float = 0.0
    stop: float = 0.0
    refusal: float = 0.0
    end: float = 0.0
    lost: float = 0.0


class ChanceDevice(FakeDevice):
    """Everything happens by chance, the same at each run with the same seed."""

    def __init__(self, text: TextFacts | None, embed: EmbedFacts, seed: int, rates: Rates) -> None:
        self._random = Random(seed)
        super().__init__(text, embed, load_slices=self._random.randint(1, 3))
        self._seed = seed
        self._rates = rates
        self.faults = 0

    def _happens(self, rate: float, *what: object) -> bool:
        """The same for the same thing, whenever it is asked."""
        return rate > 0 and Random(repr((self._seed, *what))).random() < rate

    def time(self, work: WorkItem, passes: Sequence[Pass]) -> float:
        return self._random.choice([1e-7, 0.001, 0.02, 0.5])

    def fail(self, work: WorkItem) -> Fault | None:
        if not isinstance(work, (Read, Decode, ReadDraft, Release, EmbedSlice)):
            return None
        number = self._random.random()
        if number < self._rates.fault:
            self.faults += 1
            return Fault("by chance", memory=self._random.random() < self._rates.memory)
        return None

    def tells(self, work: Decode) -> bool:
        return self._random.random() < 0.5

    def draw(self, job: Job, place: int) -> int:
        ends = self._happens(self._rates.end, "end", job.id, place)
        # Some answers repeat themselves, most of the time.
        repeats = self._happens(0.5, "repeats", job.id)
        slips = self._happens(0.1, "slips", job.id, place)
        return END if ends else super().draw(job, place % 5 if repeats and not slips else place)

    def breaks(self, job: Job, place: int) -> bool:
        return self._happens(self._rates.nan, "nan", job.id, place)

    def stop(self, job: Job, place: int) -> RowFailure | None:
        stops = self._happens(self._rates.stop, "stop", job.id, place)
        return RowFailure(job.id, "the grammar cannot go on") if stops else None

    def refuse(self, job: Job) -> RowFailure | None:
        refused = job.steering is not None and self._happens(self._rates.refusal, job.steering)
        return RowFailure(job.id, "no such steering", "it is gone") if refused else None

    def refuse_load(self, path: str) -> str | None:
        return "it cannot be read" if "bad" in path else None

    def accept(self, job: Job, place: int, proposals: int) -> int:
        return self._random.randint(0, proposals)

    def binds(self, job: Job, place: int) -> bool:
        return job.id % 3 == 0 and self._happens(0.5, "binds", job.id, place // 4)

    def keeps(self, entry: int) -> bool:
        return not self._happens(self._rates.lost, "keep", entry)


@st.composite
def text_facts(draw: Any) -> TextFacts:
    batched = draw(st.sampled_from([True, True, True, False]))
    kind = draw(st.sampled_from(["attention", "attention", "window", "recurrent"]))
    costs = {
        "attention": (KVCost(PER_TOKEN),),
        "window": (KVCost(PER_TOKEN // 2), KVCost(PER_TOKEN // 2, window=128)),
        "recurrent": (KVCost(PER_TOKEN // 4), KVCost(0, fixed=2000)),
    }[kind]
    proposer = draw(st.sampled_from(["draft", "lookup", "nobody"]))
    return TextFacts(
        batched=batched,
        shares=batched and draw(st.booleans()),
        cuts=kind == "attention",
        pads=draw(st.booleans()),
        drafts=kind == "attention" and proposer == "draft",
        draft_costs=(KVCost(PER_TOKEN),) if kind == "attention" and proposer == "draft" else (),
        lookup=kind == "attention" and proposer == "lookup",
        padding=draw(st.sampled_from([0, 4 * PER_TOKEN, 64 * PER_TOKEN, 1 << 30])),
        vocabulary=draw(st.sampled_from([300, 1 << 21])),
        prompt_cache_bytes=draw(st.sampled_from([0, 200 * PER_TOKEN, 1 << 30])),
        kv_costs=costs,
    )


def most_rounds(logs: Sequence[JobLog], faults: int) -> int:
    """A bound of the rounds that the last of these jobs takes, the others being those before it
    that had not ended when it came; or after a fault, of any of them.

    - A prompt that can have a row has every second slice once it is the oldest. So it is read
      after twice as many rounds as it and those before it have slices; beside texts to embed,
      after four times as many. A slice has LEAST_SLICE tokens at least; one more may end at each
      checkpoint, and one is for joining.
    - While it can have no row, those before it have them all. They are read, or draw a token in
      each round.
    - After a fault all rows may be read anew, and then each is tried for a few tokens.
    """
    slices = tokens = 0
    for log in logs:
        order = log.order
        if order.prompt:
            slices += -(-(len(order.prompt) + faults * order.max_tokens) // 8) + 2
            slices += len(order.checkpoints)
            tokens += order.max_tokens + 3
        else:
            slices += sum(-(-len(text) // 8) + 1 for text in order.texts)
    return (1 + faults) * (4 * slices + tokens) + 4
