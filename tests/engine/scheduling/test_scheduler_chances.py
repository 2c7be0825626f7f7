"""The scheduler under random orders and random outcomes: every plan may be done, every job ends
once, in time, and nothing is left."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
from hypothesis import given, note, settings
from hypothesis import strategies as st

from mlxsrv.engine.orders import (
    Attach,
    Close,
    Detach,
    Embed,
    GetMemory,
    Job,
    Load,
    MakeReport,
    Unload,
    Watch,
)
from mlxsrv.engine.outcomes import EmbedFacts, Fault, KVCost, RowFailure, TextFacts
from mlxsrv.engine.plans import (
    Decode,
    EmbedSlice,
    Read,
    ReadDraft,
    Release,
    Work,
)
from mlxsrv.generation.parameters import Sampling, Steering
from tests.support.effort import examples
from tests.support.fake_device import FakeDevice, Pass
from tests.support.scheduling import Bench, JobLog

END = 7
PER_TOKEN = 100  # bytes of a KV cache
STEERINGS = (None, None, None, Steering(attachment=5, values=((1, 2.0),)), Steering(attachment=6))


class Rates(msgspec.Struct, frozen=True):
    """How often, of one, something happens."""

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

    def time(self, work: Work, passes: Sequence[Pass]) -> float:
        return self._random.choice([1e-7, 0.001, 0.02, 0.5])

    def fail(self, work: Work) -> Fault | None:
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
        return END if ends else super().draw(job, place)

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
    return TextFacts(
        batched=batched,
        cuts=kind == "attention",
        pads=draw(st.booleans()),
        drafts=kind == "attention" and draw(st.booleans()),
        padding=draw(st.sampled_from([0, 4 * PER_TOKEN, 64 * PER_TOKEN, 1 << 30])),
        vocabulary=draw(st.sampled_from([300, 1 << 21])),
        prompt_cache_bytes=draw(st.sampled_from([0, 200 * PER_TOKEN, 1 << 30])),
        kv_costs=costs,
    )


def make_prompt(family: int, size: int, tail: int) -> tuple[int, ...]:
    """A prompt of one family: all begin alike, and those with a `tail` end with it."""
    tokens = Random(family).choices(range(10, 90), k=size)
    return (*tokens[: size - 1], 200 + tail) if tail else tuple(tokens)


@st.composite
def jobs(draw: Any) -> dict[str, Any]:
    """What is asked in a job, but for its id and model."""
    scores = draw(st.sampled_from([None, None, None, None, 0, 2]))
    least = 1 if scores is None else 0
    size = draw(st.sampled_from([1, 2, 9, 30, 65, 80, 100, 150, 300]))
    prompt = make_prompt(draw(st.integers(0, 2)), size, draw(st.integers(0, 2)))
    return {
        "prompt": prompt,
        "max_tokens": draw(st.sampled_from([least, 1, 2, 3, 10, 40])),
        "end_tokens": frozenset([END]),
        "sampling": Sampling(presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0]))),
        "checkpoint": draw(st.sampled_from([0, 0, 20, 64, 70])),
        "logprobs": draw(st.sampled_from([None, None, 2])),
        "scores": scores,
        "steering": draw(st.sampled_from(STEERINGS)),
    }


# An action of a client's, by which model or job it concerns; what there is not is ignored.
PLACE = st.integers(0, 20)
MODEL = st.sampled_from(["m", "m", "m", "n"])
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), MODEL, jobs(), st.integers(1, 3)),
    st.tuples(st.just("submit"), MODEL, jobs(), st.integers(1, 3)),
    st.tuples(st.just("submit"), MODEL, jobs(), st.integers(1, 3)),
    st.tuples(st.just("follow"), PLACE),
    st.tuples(st.just("cancel"), PLACE),
    st.tuples(st.just("embed"), MODEL, st.lists(st.integers(1, 90), min_size=1, max_size=5)),
    st.tuples(st.just("load"), MODEL, st.sampled_from(["/a", "/b", "/bad"])),
    st.tuples(st.just("unload"), MODEL),
    st.tuples(st.just("attach"), MODEL, st.sampled_from(["/sae", "/bad"])),
    st.tuples(st.just("detach"), MODEL),
    st.tuples(st.just("watch"), MODEL, st.integers(0, 1)),
    st.tuples(st.just("ask")),
    st.tuples(st.just("close")),
)
SCRIPT = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from([1, 1, 1, 2]), ACTIONS), max_size=25
)


class Play:
    """Plays a script of actions."""

    def __init__(self, device: ChanceDevice, max_rows: int, chunk: int, max_gap: float) -> None:
        self.bench = Bench(device, clients=(1, 2))
        self._device = device
        self._order = Load(
            model="m", path="/a", max_rows=max_rows, prefill_chunk=chunk, max_gap=max_gap
        )
        self._next = {1: 1, 2: 1}
        self._number = 0
        self.bench.load(self._order)
        self.bench.load(self._order, client=2)

    def act(self, client: int, action: tuple[Any, ...]) -> None:
        bench = self.bench
        match action:
            case ("submit", model, what, count):
                for _ in range(count):
                    bench.submit(Job(self._take_id(client), model, **what), client=client)
            case ("follow", place):
                self._follow(client, place)
            case ("cancel", place):
                bench.cancel(place, client=client)
            case ("embed", model, sizes):
                texts = tuple((1,) * size for size in sizes)
                bench.embed(Embed(self._take_id(client), model, texts), client=client)
            case ("load", model, path):
                bench.ask(msgspec.structs.replace(self._order, model=model, path=path), client)
            case ("unload", model):
                bench.send(Unload(model), client)
            case ("attach", model, path):
                self._number += 1
                bench.ask(Attach(model, self._number, path, 1), client)
            case ("detach", model):
                bench.send(Detach(model), client)
            case ("watch", model, top):
                bench.send(Watch(model, (), top), client)
            case ("ask",):
                bench.ask(GetMemory(), client)
                bench.ask(MakeReport(), client)
            case ("close",) if client == 2:
                bench.send(Close(), client)

    def _take_id(self, client: int) -> int:
        self._next[client] += 1
        return self._next[client] - 1

    def _follow(self, client: int, place: int) -> None:
        """A chat goes on: the prompt and its answer begin the next prompt."""
        log = self.bench.jobs.get((client, place))
        if log is None or not isinstance(log.order, Job):
            return
        prompt = (*log.order.prompt, *log.tokens, 11, 12)
        job = msgspec.structs.replace(log.order, id=self._take_id(client), prompt=prompt)
        self.bench.submit(job, client=client)


def most_rounds(logs: Sequence[JobLog], faults: int) -> int:
    """A bound of the rounds that a job takes which came with or behind these others.

    Each other round goes to the oldest prompt, so all texts are read after twice as many rounds as
    they have slices. A slice has at least LEAST_SLICE tokens; one more goes to a checkpoint, and
    one to joining. Rows are decoded in each round. Beside texts to embed, prompts have every second
    round. After a fault, all rows may be read anew and are tried one after the other.
    """
    slices = tokens = 0
    for log in logs:
        order = log.order
        if isinstance(order, Job):
            slices += (len(order.prompt) + order.max_tokens) // 8 + 3
            tokens += order.max_tokens + 3
        else:
            slices += sum(len(text) // 8 + 2 for text in order.texts)
    return (1 + faults) * (4 * slices + tokens) + 8


@settings(max_examples=examples(200))
@given(
    facts=text_facts(),
    rates=st.builds(
        Rates,
        fault=st.sampled_from([0.0, 0.02, 0.2]),
        memory=st.sampled_from([0.0, 0.5, 1.0]),
        nan=st.sampled_from([0.0, 0.02]),
        stop=st.sampled_from([0.0, 0.05]),
        refusal=st.sampled_from([0.0, 0.5]),
        end=st.sampled_from([0.0, 0.1]),
        lost=st.sampled_from([0.0, 0.3]),
    ),
    seed=st.integers(0, 1 << 30),
    max_rows=st.integers(1, 8),
    chunk=st.sampled_from([8, 16, 64, 128]),
    max_gap=st.sampled_from([0.001, 0.1, 10.0]),
    script=SCRIPT,
)
def test_every_job_ends_once_and_nothing_is_left(
    facts: TextFacts,
    rates: Rates,
    seed: int,
    max_rows: int,
    chunk: int,
    max_gap: float,
    script: list[tuple[int, int, tuple[Any, ...]]],
) -> None:
    device = ChanceDevice(facts, EmbedFacts(slices=True), seed, rates)
    play = Play(device, max_rows, chunk, max_gap)
    bench = play.bench
    for wait, client, action in script:
        note(f"{action}")
        if client not in bench.closed:
            play.act(client, action)
        bench.rounds(wait)
    bench.finish()
    for (client, number), log in bench.jobs.items():
        assert log.ended or client in bench.closed, f"job {number} of {client} does not end"
    assert bench.runner.empty, "rows are left"
    assert bench.scheduler.idle
    assert bench.scheduler.plan().works == ()
