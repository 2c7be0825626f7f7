"""Texts to embed within the memory budget: which wait, what is evicted for them, and the event
MemoryShort."""

from __future__ import annotations

import msgspec
import pytest

from mlxsrv.engine.events import Embedded, Progress, Shortage
from mlxsrv.engine.orders import Budget, Job
from mlxsrv.engine.outcomes import EmbedFacts, TextFacts
from mlxsrv.engine.plans import EmbedSlice, Forget, LoadSlice, Rewind
from mlxsrv.engine.scheduling.groups import STEP
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import CHUNK, MODEL, ORDER, Bench, expected, job, make, read_order

SLOT = STEP * FACTS.kv_bytes(1)  # a row of up to STEP tokens
NOTHING_KEPT = msgspec.structs.replace(FACTS, prompt_cache_bytes=0)
DECODER = EmbedFacts(slices=True, kv_costs=FACTS.kv_costs, token_bytes=100)
LARGE = 4 * STEP + 1  # tokens whose KV cache takes 5 slots
ENCODER = EmbedFacts(slices=False, token_bytes=5 * SLOT // LARGE)


def bounded(
    slots: float,
    embed: EmbedFacts = DECODER,
    text: TextFacts = NOTHING_KEPT,
    *,
    max_gap: float = 10.0,
    models: str = "m",
) -> Bench:
    """Models whose rows and texts may take so many times SLOT. The runner checks that."""
    bench = make(FakeDevice(text, embed), max_gap=max_gap)
    for name in models[1:]:
        order = msgspec.structs.replace(ORDER, model=name, path=f"/{name}", max_gap=max_gap)
        bench.load(order)
    bench.runner.items.clear()
    bench.send(Budget(int(slots * SLOT)))
    return bench


def texts(number: int, *lengths: int, model: str = "m") -> Job:
    return Job(number, model, texts=tuple((1,) * length for length in lengths))


def read(bench: Bench, number: int) -> list[tuple[int, int]]:
    """The parts of a job's texts that were read, in their order."""
    spans = [text for work in bench.items(EmbedSlice) for text in work.texts]
    return [(text.begin, text.end) for text in spans if text.job == number]


def embedded(bench: Bench, number: int) -> bool:
    return any(isinstance(event, Embedded) for event in bench.job(number).events)


@pytest.mark.parametrize("embed", [DECODER, ENCODER])
def test_a_large_text_waits_for_memory_and_small_ones_do_not(embed: EmbedFacts) -> None:
    bench = bounded(6.5, embed)
    bench.submit(job(1, 300, 100))
    bench.rounds(8)
    bench.submit(texts(2, LARGE))
    bench.submit(texts(3, 50, 60))
    bench.rounds(20)
    assert not read(bench, 2)
    assert embedded(bench, 3)
    assert not bench.job(1).ended
    bench.finish()
    assert bench.job(1).tokens == expected(bench, 1, 100)
    assert embedded(bench, 2)
    assert not bench.items(Rewind)


def test_an_encoder_reads_a_large_text_in_one_slice() -> None:
    bench = bounded(6.5, ENCODER)
    bench.submit(texts(1, LARGE, 50))
    bench.finish()
    assert (0, LARGE) in read(bench, 1)


def test_a_large_text_has_its_place_among_rows() -> None:
    bench = bounded(6.5)
    bench.submit(job(1, 300, 100))
    bench.rounds(8)
    bench.submit(texts(2, LARGE))
    bench.submit(job(3, 20, 4))
    bench.finish()
    assert read_order(bench) == [1, 3]
    ended, begun = bench.job(1).ended_at, bench.job(3).first_at
    assert ended is not None
    assert begun is not None
    assert begun > ended, "there was room for the row, but it came later"


def test_a_large_text_that_waits_is_counted_and_does_not_look_stalled() -> None:
    bench = bounded(6.5)
    bench.submit(job(1, 300, 100))
    bench.rounds(8)
    bench.submit(texts(2, LARGE))
    bench.rounds(40)
    assert not read(bench, 2)
    assert Progress(2) in bench.job(2).events
    assert bench.scheduler._models[MODEL].rows.statistics()["waiting_for_memory"] == 1


def test_kept_prompts_give_way_to_a_large_text() -> None:
    bench = bounded(6, text=FACTS)
    bench.submit(job(1, 400, 4))
    bench.finish()
    assert bench.runner.text(1).kept_bytes
    bench.submit(texts(2, LARGE))
    bench.finish()
    assert embedded(bench, 2)
    assert bench.items(Forget)
    assert not bench.shortages


@pytest.mark.parametrize("embed", [DECODER, ENCODER])
def test_a_text_that_never_fits_is_refused_with_the_numbers_before_it_is_read(
    embed: EmbedFacts,
) -> None:
    bench = bounded(3, embed)
    bench.submit(texts(1, 20 * STEP))
    bench.submit(job(2, 20, 4))
    bench.finish()
    [(_, missing)] = bench.shortages
    assert bench.job(1).failed is None, "the client may unload models"
    assert not bench.job(2).ended, "its turn is not yet"
    bench.send(Budget(3 * SLOT))
    bench.finish()
    failed = bench.job(1).failed
    assert failed is not None
    assert failed.shortage == Shortage(3 * SLOT + missing, 3 * SLOT, 20 * STEP)
    assert not read(bench, 1)
    assert bench.job(2).tokens == expected(bench, 2, 4)
    assert bench.runner.empty, "the runner has forgotten its texts"


@pytest.mark.parametrize("embed", [DECODER, ENCODER])
def test_texts_whose_turn_comes_when_a_prompt_is_refused_wait_for_memory(embed: EmbedFacts) -> None:
    for more in ((50,), ()):
        bench = bounded(3, embed)
        bench.submit(job(1, 20 * STEP), texts(2, LARGE, *more))
        bench.rounds(2)
        bench.send(Budget(3 * SLOT))
        bench.finish()  # the runner looks at the bytes
        assert bench.job(1).failed is not None
        assert read(bench, 2) == [(0, 50) for _ in more]
        assert len(bench.shortages) == 2, "the second is for the large text"
        bench.send(Budget(3 * SLOT))
        bench.finish()
        assert bench.job(2).failed is not None


def test_a_larger_budget_is_an_answer() -> None:
    bench = bounded(3)
    bench.submit(texts(1, LARGE))
    bench.finish()
    [(_, missing)] = bench.shortages
    bench.send(Budget(3 * SLOT + missing))
    bench.finish()
    assert embedded(bench, 1)


@pytest.mark.parametrize("younger", ["row", "text"])
def test_the_younger_of_a_row_and_a_text_that_has_begun_gives_way(younger: str) -> None:
    tokens = 60_000  # in slices of at most CHUNK, while the row grows
    bench = bounded((tokens + STEP - 1) / STEP + 2.5, max_gap=0.001)
    row, text = (2, 1) if younger == "row" else (1, 2)
    for number in (1, 2):
        bench.submit(texts(text, tokens) if number == text else job(row, 100, 1000))
        bench.rounds(2)
    bench.finish()
    assert {each for work in bench.items(Rewind) for each in work.rows} == {2}
    assert embedded(bench, text)
    assert bench.job(row).tokens == expected(bench, row, 1000)


def test_a_text_that_has_begun_gives_way_to_a_load_and_is_read_again() -> None:
    bench = bounded(6)
    bench.submit(texts(1, 50, LARGE))
    bench.rounds(3)
    assert len(read(bench, 1)) == 3
    bench.send(Budget(SLOT))
    bench.ask(msgspec.structs.replace(ORDER, model="n", path="/n"))
    bench.finish()
    assert bench.items(LoadSlice)
    assert not bench.job(1).ended, "the client may answer MemoryShort"
    bench.send(Budget(6 * SLOT))
    bench.finish()
    assert embedded(bench, 1)
    assert read(bench, 1).count((0, 50)) == 1, "what is done is done"


def test_jobs_take_turns_with_large_texts() -> None:
    bench = bounded(6)
    bench.submit(texts(1, *[LARGE] * 3))
    bench.submit(texts(2, LARGE))
    ended = []
    while not bench.done:
        bench.round()
        ended += [n for n in (1, 2) if n not in ended and embedded(bench, n)]
    assert ended == [2, 1]


@pytest.mark.parametrize("slots", [9, 2.1])
def test_a_small_text_is_read_in_one_slice_where_there_is_no_room_for_several(slots: float) -> None:
    bench = bounded(slots, max_gap=0.001)
    bench.submit(job(1, 20, 100))
    bench.rounds(4)
    bench.submit(texts(2, CHUNK))
    bench.finish()
    assert embedded(bench, 2)
    assert (len(read(bench, 2)) > 1) == (slots == 9)
    assert bench.job(1).tokens == expected(bench, 1, 100)


@pytest.mark.parametrize(("slots", "most"), [(1000, 400), (3, 280), (1, 120), (0.1, 60)])
def test_small_texts_share_a_pass_as_large_as_there_is_room_for(slots: float, most: int) -> None:
    bench = bounded(slots, EmbedFacts(slices=True, token_bytes=SLOT // 100, score_bytes=1))
    bench.submit(texts(1, *[20] * 4))
    bench.finish()
    bench.submit(texts(2, *[20] * 20))
    bench.finish()
    sizes = [20 * len(work.texts) for work in bench.items(EmbedSlice)]
    assert max(sizes) == most


def test_a_long_text_is_read_in_parts_for_whose_attention_there_is_room() -> None:
    """Each part attends to all before it, so the later it is, the fewer tokens it has."""
    tokens, room = 30_000, 40
    facts = msgspec.structs.replace(DECODER, score_bytes=1)
    bench = bounded((tokens + STEP) / STEP + room, facts)
    bench.submit(texts(1, 300))
    bench.finish()
    bench.submit(texts(2, tokens))
    bench.finish()  # the runner looks at each part's bytes
    sizes = [end - begin for begin, end in read(bench, 2)[:-1]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]
    assert (sizes[-1] + 1 - CHUNK) * tokens > room * SLOT / 2, "the room is used"


def test_texts_of_two_models_do_not_take_the_same_memory() -> None:
    bench = bounded(3, max_gap=0.001, models="mn")
    bench.submit(job(1, 20, 100))
    bench.rounds(4)
    bench.submit(texts(2, CHUNK, model="m"))
    bench.submit(texts(3, CHUNK, model="n"))
    bench.finish()
    assert sorted(len(read(bench, number)) > 1 for number in (2, 3)) == [False, True]
