"""The stores of responses, in memory and also in files: what is found again, and their bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.errors import PreviousResponseNotFound, ResponseNotFound, StoredItemNotFound
from mlxsrv.replicas.response_files import ResponseFiles
from mlxsrv.service.response_store import (
    Recalled,
    ResponseStore,
    StoredItem,
    StoredReference,
    StoredResponse,
)

Make = Callable[..., ResponseStore]


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def make(most: int = 10, most_bytes: int = 10**6) -> ResponseStore:
        if request.param == "memory":
            return ResponseStore(most, most_bytes)
        return ResponseFiles(most, most_bytes, tmp_path / "responses", "one")

    return make


def response(
    id: str, *, previous: str | None = None, size: int = 10, owner: str = "me", item: str = ""
) -> StoredResponse:
    return StoredResponse(
        id=id,
        owner=owner,
        body=b"{}",
        input=[StoredItem(item or f"in {id}", id, b"x" * size)],
        output=[StoredItem(f"out {id}", id, b"y")],
        previous=previous,
    )


def recall(
    kept: ResponseStore, previous: str | None = None, *references: str, owner: str = "me"
) -> tuple[Recalled, int]:
    """The items, and the bytes for which room was made."""
    taken: list[int] = []
    named = [(id, f"input[{i}]") for i, id in enumerate(references)]
    found = kept.recall(previous, named, owner, lambda size, path: taken.append(size))
    return found, sum(taken)


def ids(kept: ResponseStore, previous: str) -> list[str]:
    return [item.id for item in recall(kept, previous)[0].conversation]


def here(kept: ResponseStore, *names: str) -> list[bool]:
    """Whether responses are there. Each is deleted."""
    found = []
    for name in names:
        try:
            kept.delete(name)
            found.append(True)
        except ResponseNotFound:
            found.append(False)
    return found


def test_a_conversation_is_all_items_of_the_chain(store: Make) -> None:
    kept = store()
    kept.put(response("a"))
    kept.put(response("b", previous="a"))
    found, taken = recall(kept, "b", "in a")
    assert [item.id for item in found.conversation] == ["in a", "out a", "in b", "out b"]
    assert found.references["in a"].body == b"x" * 10
    assert taken == 10 + 1 + 10 + 1 + 10
    assert recall(kept) == (Recalled([], {}), 0)


def test_what_is_deleted_is_gone(store: Make) -> None:
    kept = store()
    kept.put(response("a"))
    kept.put(response("b", previous="a"))
    kept.delete("a")
    for again in (kept.get, kept.delete):
        with pytest.raises(ResponseNotFound, match="Response with id 'a' not found"):
            again("a")
    with pytest.raises(PreviousResponseNotFound, match="Previous response with id 'a'") as error:
        recall(kept, "b")
    assert error.value.param == "previous_response_id"
    with pytest.raises(StoredItemNotFound) as missing:
        recall(kept, None, "in b", "in a")
    assert missing.value.param == "input[1]"
    assert kept.get("b") == response("b", previous="a")


def test_the_least_recently_used_goes_first(store: Make) -> None:
    kept = store(most=3)
    for name in "abc":
        kept.put(response(name))
    kept.get("a")
    recall(kept, None, "in b")
    kept.put(response("d"))
    assert here(kept, *"abcd") == [True, True, False, True]


def test_a_response_that_never_fits_pushes_nobody_out(store: Make) -> None:
    kept = store(most_bytes=10_000)
    kept.put(response("a"))
    kept.put(response("b", size=10_001))
    assert here(kept, "a", "b") == [True, False]


def test_going_on_keeps_the_whole_chain(store: Make) -> None:
    kept = store(most=3)
    kept.put(response("a"))
    kept.put(response("b", previous="a"))
    kept.put(response("other"))
    recall(kept, "b")
    kept.put(response("c", previous="b"))
    assert len(ids(kept, "c")) == 6
    assert here(kept, "other") == [False]


@pytest.mark.parametrize(("most", "most_bytes"), [(0, 10**6), (10, 0), (10, 1000)])
def test_what_does_not_fit_is_not_kept(store: Make, most: int, most_bytes: int) -> None:
    kept = store(most, most_bytes)
    kept.put(response("a"))
    assert here(kept, "a") == [False]


# Ids that clients choose.


def test_an_id_means_the_item_of_its_own_client(store: Make) -> None:
    kept = store()
    kept.put(response("a", owner="me", item="msg_1", size=1))
    kept.put(response("b", owner="you", item="msg_1", size=2))
    for owner, size in (("me", 1), ("you", 2)):
        found, _ = recall(kept, None, "msg_1", owner=owner)
        assert len(found.references["msg_1"].body) == size
    with pytest.raises(StoredItemNotFound):
        recall(kept, None, "msg_1", owner="nobody")
    kept.delete("b")
    with pytest.raises(StoredItemNotFound):
        recall(kept, None, "msg_1", owner="you")
    assert len(recall(kept, "a")[0].conversation) == 2


def test_an_id_means_the_conversations_item_then_the_newest_one(store: Make) -> None:
    kept = store()
    for size, name in enumerate("abc", start=1):
        kept.put(response(name, item="msg_1", size=size))
    for previous, size in (("a", 1), ("b", 2), (None, 3)):
        found, _ = recall(kept, previous, "msg_1")
        assert len(found.references["msg_1"].body) == size
    kept.delete("c")
    found, _ = recall(kept, None, "msg_1")
    assert len(found.references["msg_1"].body) == 2, "the one before it is there again"


# References.


def test_what_is_referred_to_is_not_copied(store: Make) -> None:
    kept = store(most_bytes=50_000)
    kept.put(response("a", size=20_000))
    again = [StoredReference("in a", "a")] * 100
    refers = StoredResponse(id="b", owner="me", body=b"{}", input=again, output=[])
    assert refers.size < 25_000
    kept.put(refers)
    found, taken = recall(kept, "b")
    assert [item.body for item in found.conversation] == [b"x" * 20_000] * 100
    assert taken == 100 * 20_000, "the prompt has it a hundred times"
    assert kept.get("b") == refers
    item = kept.resolve(refers.input[0])
    assert item == StoredItem("in a", "a", b"x" * 20_000)
    kept.delete("a")
    assert kept.resolve(refers.input[0]) is None
    with pytest.raises(PreviousResponseNotFound, match="'a'"):
        recall(kept, "b")


def test_nothing_more_is_looked_for_without_room(store: Make) -> None:
    kept = store()
    kept.put(response("a", size=100))
    kept.put(response("b", previous="a", size=100))

    def take(size: int, path: str) -> None:
        asked.append(path)
        if len(asked) == 2:
            raise MemoryError

    for previous, references in (("b", []), (None, [("in a", "input[0]")] * 9)):
        asked: list[str] = []
        with pytest.raises(MemoryError):
            kept.recall(previous, references, "me", take)
        assert len(asked) == 2


# Shares.


def test_a_client_pushes_out_its_own_and_no_smaller_one(store: Make) -> None:
    kept = store(most=6)
    for name in "abcdef":
        kept.put(response(name, owner="first"))
    for name in "uvwxyz":
        kept.put(response(name, owner="second"))
    assert here(kept, *"abcdef") == [False] * 3 + [True] * 3
    assert here(kept, *"uvwxyz") == [False] * 3 + [True] * 3


def test_large_responses_push_out_those_of_the_client_with_most_bytes(store: Make) -> None:
    kept = store(most_bytes=100_000)
    kept.put(response("small", owner="small"))
    for name in "abc":
        kept.put(response(name, owner="large", size=45_000))
    assert here(kept, "small", *"abc") == [True, False, True, True]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 3000), st.sampled_from("xyz"), st.booleans()),
        max_size=40,
    )
)
def test_bounds_hold_whatever_is_put(puts: list[tuple[int, int, str, bool]]) -> None:
    kept = ResponseStore(4, 10_000)
    for number, (name, size, owner, twice) in enumerate(puts):
        # Items of one id may be in several responses, and twice in one.
        items = [StoredItem(f"{name}", f"{number}", b"x" * size)] * (1 + twice)
        one = StoredResponse(id=f"{number}", owner=owner, body=b"{}", input=items)
        kept.put(one)
        there = [*kept._responses.values()]
        assert len(there) <= 4
        sizes = Counter[str]()
        for each in there:
            sizes[each.owner] += each.size
        assert kept._bytes == sizes
        assert sizes.total() <= 10_000
        assert {id for ids in kept._owned.values() for id in ids} == kept._responses.keys()
        held = {(each.owner, item.id, each.id) for each in there for item in each.own_items}
        assert held == {(*key, id) for key, found in kept._items.items() for id in found}
        if there and there[-1] is one:
            found, _ = recall(kept, None, f"{name}", owner=owner)
            assert found.references[f"{name}"].body == b"x" * size
