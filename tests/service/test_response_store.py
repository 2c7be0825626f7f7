"""The store of responses: what is found again, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.errors import PreviousResponseNotFound, ResponseNotFound, StoredItemNotFound
from mlxsrv.service.response_store import ResponseStore, StoredItem, StoredResponse


def response(id: str, *, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(
        id=id,
        body=b"{}",
        input=[StoredItem(f"in {id}", b"x" * size)],
        output=[StoredItem(f"out {id}", b"y")],
        previous=previous,
    )


def store(most: int = 10, most_bytes: int = 10**6) -> ResponseStore:
    return ResponseStore(most, most_bytes)


def test_a_conversation_is_all_items_of_the_chain() -> None:
    kept = store()
    kept.put(response("a"))
    kept.put(response("b", previous="a"))
    assert [item.id for item in kept.conversation("b")] == ["in a", "out a", "in b", "out b"]
    assert kept.conversation(None) == []
    assert kept.item("in a", "input[0]").body == b"x" * 10


def test_what_is_deleted_is_gone() -> None:
    kept = store()
    kept.put(response("a"))
    kept.put(response("b", previous="a"))
    kept.delete("a")
    for again in (kept.get, kept.delete):
        with pytest.raises(ResponseNotFound, match="Response with id 'a' not found"):
            again("a")
    with pytest.raises(PreviousResponseNotFound, match="Previous response with id 'a'") as error:
        kept.conversation("b")
    assert error.value.param == "previous_response_id"
    with pytest.raises(StoredItemNotFound) as missing:
        kept.item("in a", "input[3]")
    assert missing.value.param == "input[3]"
    assert kept.get("b").id == "b"


def test_the_least_recently_used_goes_first() -> None:
    kept = store(most=2)
    kept.put(response("a"))
    kept.put(response("b"))
    kept.get("a")
    kept.put(response("c"))
    with pytest.raises(ResponseNotFound):
        kept.get("b")
    assert kept.get("a").id == "a"


def test_a_response_that_never_fits_pushes_nobody_out() -> None:
    kept = store(most_bytes=10_000)
    kept.put(response("a"))
    kept.put(response("b", size=10_001))
    assert kept.get("a").id == "a"
    with pytest.raises(ResponseNotFound):
        kept.get("b")


def test_going_on_keeps_the_whole_chain() -> None:
    kept = store(most=3)
    kept.put(response("a"))
    kept.put(response("b", previous="a"))
    kept.put(response("other"))
    kept.conversation("b")
    kept.put(response("c", previous="b"))
    assert len(kept.conversation("c")) == 6
    with pytest.raises(ResponseNotFound):
        kept.get("other")


@pytest.mark.parametrize(("most", "most_bytes"), [(0, 10**6), (10, 0), (10, 1000)])
def test_what_does_not_fit_is_not_kept(most: int, most_bytes: int) -> None:
    kept = store(most, most_bytes)
    kept.put(response("a"))
    with pytest.raises(ResponseNotFound):
        kept.get("a")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000)), max_size=40))
def test_bounds_hold_whatever_is_put(puts: list[tuple[int, int]]) -> None:
    kept = ResponseStore(4, 10_000)
    for number, (name, size) in enumerate(puts):
        # Items of one id may be in several responses.
        one = StoredResponse(id=f"{number}", body=b"{}", input=[StoredItem(f"{name}", b"x" * size)])
        kept.put(one)
        there = [*kept._responses.values()]
        assert len(there) <= 4
        assert kept._bytes == sum(each.size for each in there) <= 10_000
        ids = {item.id for each in there for item in each.input}
        assert kept._items.keys() <= ids
        if there and there[-1] is one:
            assert kept.item(f"{name}", "input").body == b"x" * size
