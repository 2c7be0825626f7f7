"""The queue of texts: which texts share a slice, and whose turn it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.prompt_index import as_tokens
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.text_queue import TextQueue


def add(queue: TextQueue, job_id: int, *lengths: int) -> Row:
    job = Job(job_id, "m", texts=tuple((1,) * length for length in lengths))
    queue.add(row := Row(job, as_tokens(())))
    return row


def lengths(queue: TextQueue, limit: int = 100, most: int = 100) -> list[int]:
    return [text.length for text in queue.choose(limit, most)]


def test_texts_of_similar_length_share_a_slice_whoever_asked() -> None:
    queue = TextQueue(slices=True, most=1000)
    add(queue, 7, 20, 5)
    add(queue, 8, 19, 6)
    assert lengths(queue) == [19, 20]
    assert lengths(queue) == [5, 6]
    assert (len(queue), queue.tokens) == (0, 0)


def test_jobs_take_turns() -> None:
    queue = TextQueue(slices=True, most=1000)
    add(queue, 7, *[50] * 5)
    add(queue, 8, 10)
    assert [lengths(queue, most=50) for _ in range(3)] == [[50], [10], [50]]


def long(queue: TextQueue) -> int | None:
    return queue.long.length if queue.long is not None else None


def test_a_text_longer_than_a_slice_takes_turns_with_the_others() -> None:
    queue = TextQueue(slices=True, most=1000)
    row = add(queue, 7, 300)
    add(queue, 8, 40, 400)
    seen = [(lengths(queue), long(queue)) for _ in range(4)]
    assert seen == [([], 300), ([40], 300), ([], 300), ([], 300)]  # 400 waits for 300 to end
    queue.remove(row)
    assert long(queue) is None
    assert (lengths(queue), long(queue)) == ([], 400)


def test_a_long_text_whose_memory_others_need_waits_again() -> None:
    queue = TextQueue(slices=True, most=350)
    rows = [add(queue, 7, 300), add(queue, 8, 400, 40)]
    assert (lengths(queue), long(queue)) == ([], 300)
    queue.read_on(100)
    queue.begin_large()
    assert queue.holders == rows
    for row in rows:
        queue.put_back(row)
    assert (long(queue), queue.holders, len(queue), queue.tokens) == (None, [], 3, 340)
    assert queue.large is not None
    queue.begin_large()
    assert (lengths(queue), long(queue)) == ([], 400)
    assert queue.read_on(500)[1:] == (0, 400)
    assert (lengths(queue), long(queue)) == ([], 300)
    assert queue.read_on(500)[1:] == (0, 300)
    assert lengths(queue) == [40]


def test_short_texts_do_not_starve_a_long_one() -> None:
    queue = TextQueue(slices=True, most=1000)
    add(queue, 7, 300)
    add(queue, 8, *[40] * 3)
    assert [lengths(queue, most=40) for _ in range(6)] == [[], [40], [], [40], [], [40]]


def test_without_chunks_a_text_is_read_whole() -> None:
    queue = TextQueue(slices=False, most=1000)
    add(queue, 7, 300)
    assert lengths(queue) == [300]
    assert queue.long is None


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=1, max_size=6),
    st.integers(1, 80),
    st.integers(1, 200),
)
def test_each_text_comes_once(jobs: list[list[int]], limit: int, most: int) -> None:
    queue = TextQueue(slices=False, most=1000)
    for number, texts in enumerate(jobs):
        add(queue, number, *texts)
    taken = []
    for _ in range(sum(map(len, jobs))):
        slice = queue.choose(limit, most)
        if slice:
            assert len(slice) == 1 or len(slice) * slice[-1].length <= most
        taken += [(text.job, text.place) for text in slice]
    assert sorted(taken) == [(i, k) for i, texts in enumerate(jobs) for k in range(len(texts))]
    assert len(queue) == 0
