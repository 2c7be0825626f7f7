"""The scheduler under random orders and random outcomes: every plan may be done, every job ends
once, in time, and nothing is left."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
from hypothesis import given, note, settings
from hypothesis import strategies as st

from mlxsrv.engine.events import KVCost
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
from mlxsrv.engine.outcomes import EmbedFacts, Fault, RowFailure, TextFacts
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


# What a client does, and how often.
ACTIONS = {
    "submit": 60,
    "follow": 12,
    "cancel": 8,
    "embed": 8,
    "load": 6,
    "unload": 1,
    "attach": 2,
    "detach": 2,
    "watch": 2,
    "ask": 2,
    "close": 1,
}


class Play:
    """Clients that do something by chance."""

    def __init__(self, device: ChanceDevice, max_rows: int, chunk: int, max_gap: float) -> None:
        self.bench = Bench(device, clients=(1, 2))
        self._order = Load(
            model="m", path="/a", max_rows=max_rows, prefill_chunk=chunk, max_gap=max_gap
        )
        self._next = {1: 1, 2: 1}
        self._number = 0
        self.bench.load(self._order)
        self.bench.load(self._order, client=2)

    def act(self, random: Random) -> None:
        """Have a client do something; what cannot be done is refused."""
        client = random.choice([client for client in (1, 1, 2) if client not in self.bench.closed])
        model = random.choice("mmmmmn")
        [action] = random.choices(list(ACTIONS), list(ACTIONS.values()))
        note(f"{client}: {action} {model}")
        getattr(self, f"_{action}")(random, client, model)

    def _take_id(self, client: int) -> int:
        self._next[client] += 1
        return self._next[client] - 1

    def _submit(self, random: Random, client: int, model: str) -> None:
        job = make_job(random, model)
        for _ in range(random.choice([1, 1, 1, 2, 4])):
            job = msgspec.structs.replace(job, id=self._take_id(client))
            self.bench.submit(job, client=client)

    def _follow(self, random: Random, client: int, model: str) -> None:
        """A chat goes on: a prompt and its answer begin the next prompt."""
        logs = [log for (owner, _), log in self.bench.jobs.items() if owner == client]
        log = random.choice(logs) if logs else None
        if log is not None and isinstance(log.order, Job):
            prompt = (*log.order.prompt, *log.tokens, random.randint(10, 90))
            job = msgspec.structs.replace(log.order, id=self._take_id(client), prompt=prompt)
            self.bench.submit(job, client=client)

    def _cancel(self, random: Random, client: int, model: str) -> None:
        self.bench.cancel(random.randint(1, self._next[client]), client=client)

    def _embed(self, random: Random, client: int, model: str) -> None:
        sizes = random.choices([1, 3, 10, 40, 90], k=random.randint(1, 4))
        texts = tuple((1,) * size for size in sizes)
        self.bench.embed(Embed(self._take_id(client), model, texts), client=client)

    def _load(self, random: Random, client: int, model: str) -> None:
        path = random.choice(["/a", "/a", "/b", "/bad"])
        name = random.choice("mnn")
        self.bench.ask(msgspec.structs.replace(self._order, model=name, path=path), client)

    def _unload(self, random: Random, client: int, model: str) -> None:
        self.bench.send(Unload(model), client)

    def _attach(self, random: Random, client: int, model: str) -> None:
        self._number += 1
        path = random.choice(["/sae", "/sae", "/bad"])
        self.bench.ask(Attach(model, self._number, path, 1), client)

    def _detach(self, random: Random, client: int, model: str) -> None:
        self.bench.send(Detach(model), client)

    def _watch(self, random: Random, client: int, model: str) -> None:
        self.bench.send(Watch(model, (), random.randint(0, 1)), client)

    def _ask(self, random: Random, client: int, model: str) -> None:
        self.bench.ask(GetMemory(), client)
        self.bench.ask(MakeReport(), client)

    def _close(self, random: Random, client: int, model: str) -> None:
        if client == 2:
            self.bench.send(Close(), client)
            self.bench.closed.add(client)


def make_job(random: Random, model: str) -> Job:
    scores = random.choice([None] * 8 + [0, 2])
    size = random.choice([1, 2, 5, 9, 15, 20, 30, 50, 80, 100, 150, 300])
    begins = Random(random.randint(0, 2)).choices(range(10, 90), k=size)  # one of three families
    prompt = (*begins[: size - 1], random.randint(10, 12))
    least = 1 if scores is None else 0
    return Job(
        0,
        model,
        prompt,
        random.choice([least, 1, 2, 5, 20, 60]),
        frozenset([END]),
        Sampling(presence_penalty=random.choice([0.0, 0.0, 1.0])),
        checkpoints=random.choice([(), (), (20,), (64,), (70, 200), (64, 128, 280)]),
        logprobs=random.choice([None, None, 2]),
        scores=scores,
        steering=random.choice(STEERINGS),
    )


def check_bounds(bench: Bench, faults: int) -> None:
    """Check that no job has waited for longer than those before it explain."""
    logs = list(bench.jobs.values())
    for place, log in enumerate(logs):
        if not log.ended:
            others = logs if faults else logs[: place + 1]
            meanwhile = [other for other in others if other.end_round >= log.sent_round]
            assert log.rounds <= most_rounds(meanwhile, faults), "a job is starved"


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
        if isinstance(order, Job):
            slices += -(-(len(order.prompt) + faults * order.max_tokens) // 8) + 2
            slices += len(order.checkpoints)
            tokens += order.max_tokens + 3
        else:
            slices += sum(-(-len(text) // 8) + 1 for text in order.texts)
    return (1 + faults) * (4 * slices + tokens) + 4


RATES = st.builds(
    Rates,
    fault=st.sampled_from([0.0, 0.01, 0.1]),
    memory=st.sampled_from([0.0, 0.5, 1.0]),
    nan=st.sampled_from([0.0, 0.01]),
    stop=st.sampled_from([0.0, 0.01]),
    refusal=st.sampled_from([0.0, 0.5]),
    end=st.sampled_from([0.0, 0.1]),
    lost=st.sampled_from([0.0, 0.3]),
)


@settings(max_examples=examples(150))
@given(
    facts=text_facts(),
    rates=RATES,
    seed=st.integers(0, 1 << 30),
    max_rows=st.integers(1, 8),
    chunk=st.sampled_from([8, 64, 128, 512]),
    max_gap=st.sampled_from([0.001, 0.1, 10.0]),
    script=st.lists(st.integers(0, 1 << 20), min_size=12, max_size=40),
)
def test_every_job_ends_once_and_nothing_is_left(
    facts: TextFacts,
    rates: Rates,
    seed: int,
    max_rows: int,
    chunk: int,
    max_gap: float,
    script: list[int],
) -> None:
    device = ChanceDevice(facts, EmbedFacts(slices=True), seed, rates)
    play = Play(device, max_rows, chunk, max_gap)
    bench = play.bench
    for number in script:
        random = Random(number)
        play.act(random)
        for _ in range(random.choice([0, 0, 0, 0, 1, 2, 10, 30])):
            bench.round()
            check_bounds(bench, device.faults)
    while not bench.done:
        bench.round()
        check_bounds(bench, device.faults)
    for (client, number), log in bench.jobs.items():
        assert log.ended, f"job {number} of {client} does not end"
    assert bench.runner.empty, "rows are left"
    assert bench.scheduler.plan().works == ()
