"""The shared file: two replicas, which have it open both."""

from __future__ import annotations

import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlxsrv.errors import (
    PreviousResponseNotFound,
    ResponseNotFound,
    StoredItemNotFound,
    StoreFailed,
)
from mlxsrv.options import SettingsError
from mlxsrv.replicas.shared_file import NotedChange, SharedFile, StateChange, shared_path
from mlxsrv.service.response_store import StoredItem, StoredResponse
from mlxsrv.settings import Settings

Pair = tuple[SharedFile, SharedFile]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    settings = Settings(max_responses=3, max_responses_bytes=10_000, rate_limit=3)
    path = tmp_path / "data" / "shared"
    one, other = (SharedFile(path, settings, name) for name in ("one", "other"))
    yield one, other
    one.close()
    other.close()


def response(number: int, previous: str | None = None, size: int = 10) -> StoredResponse:
    id = f"resp_{number}"
    return StoredResponse(
        id=id,
        owner="me",
        body=b"x" * size,
        input=[StoredItem(f"in_{number}", id, b"asked")],
        output=[StoredItem(f"out_{number}", id, b"answered")],
        previous=previous,
    )


def no_bound(size: int, path: str) -> None:
    """Any item has room."""


def test_a_response_is_everywhere(pair: Pair) -> None:
    one, other = pair
    one.responses.put(response(1))
    other.responses.put(response(2, "resp_1"))
    assert other.responses.get("resp_1") == response(1)
    found = one.responses.recall("resp_2", [("out_2", "input[0]")], "me", no_bound)
    assert found.references == {"out_2": StoredItem("out_2", "resp_2", b"answered")}
    assert [item.id for item in found.conversation] == ["in_1", "out_1", "in_2", "out_2"]
    other.responses.delete("resp_1")
    with pytest.raises(ResponseNotFound):
        one.responses.get("resp_1")
    with pytest.raises(PreviousResponseNotFound):
        one.responses.recall("resp_2", [], "me", no_bound)
    with pytest.raises(StoredItemNotFound):
        one.responses.recall(None, [("in_1", "input[0]")], "me", no_bound)


def test_those_go_that_were_not_used_for_longest(pair: Pair) -> None:
    one, other = pair
    for number in range(3):
        one.responses.put(response(number))
    other.responses.get("resp_0")
    one.responses.put(response(3))
    with pytest.raises(ResponseNotFound):
        other.responses.get("resp_1")
    other.responses.put(response(4, size=8000))
    assert other.responses.get("resp_4").body == 8000 * b"x"
    with pytest.raises(ResponseNotFound):
        one.responses.get("resp_2")
    one.responses.put(response(5, size=20_000))
    with pytest.raises(ResponseNotFound):
        one.responses.get("resp_5")
    assert one.responses.get("resp_4")


def test_the_rate_is_that_of_all_together(pair: Pair) -> None:
    one, other = (each.rates for each in pair)
    assert one is not None
    assert other is not None
    assert [rates.take("a").remaining for rates in (one, other, one)] == [2, 1, 0]
    assert one.take("a").wait is not None
    assert other.take("a").wait is not None
    assert other.take(b"a").wait is None


def test_a_change_comes_to_the_others_once(pair: Pair) -> None:
    one, other = pair
    first = StateChange("feature 1", "POST", "/api/saes/steering", b"", b"1")
    second = StateChange("enabled", "POST", "/api/saes/steering/enable", b"", b"")
    one.add_change(first)
    one.add_change(second)
    assert other.changes_after(0) == [NotedChange(1, False, first), NotedChange(2, False, second)]
    assert other.changes_after(2) == []
    assert [(each.number, each.own) for each in one.changes_after(0)] == [(1, True), (2, True)]
    again = StateChange("feature 1", "POST", "/api/saes/steering", b"", b"2")
    other.add_change(again)
    assert one.changes_after(2) == [NotedChange(3, False, again)]
    numbers = [each.number for each in other.changes_after(0)]
    assert numbers == [2, 3], "the later one takes the place"


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_nothing_half_done(
    pair: Pair, tmp_path: Path
) -> None:
    one, other = pair
    one.responses.put(response(1))
    file = sqlite3.connect(tmp_path / "data" / "shared")
    [pages] = file.execute("PRAGMA page_count").fetchone()
    file.close()
    connection = one._file._connection
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFailed, match=r"'shared' .* the disk is full"):
        one.responses.put(response(2, size=8000))
    assert one.responses.get("resp_1") == response(1)
    with pytest.raises(ResponseNotFound):
        one.responses.get("resp_2")
    other.responses.put(response(3))  # nobody waits for a lock that was left behind
    connection.execute("PRAGMA max_page_count = 1000000")
    one.responses.put(response(2, size=8000))
    assert other.responses.get("resp_2").body == 8000 * b"x"


def test_a_table_that_is_lost_is_an_error_of_each_call(pair: Pair, tmp_path: Path) -> None:
    one, _ = pair
    file = sqlite3.connect(tmp_path / "data" / "shared")
    for table in ("owned_responses", "owned_items", "rates", "changes"):
        file.execute(f"DROP TABLE {table}")
    file.close()
    assert one.rates is not None
    rates = one.rates
    change = StateChange("feature 1", "POST", "/api/saes/steering", b"", b"1")
    calls: list[Callable[[], object]] = [
        lambda: one.responses.put(response(1)),
        lambda: one.responses.get("resp_1"),
        lambda: one.responses.delete("resp_1"),
        lambda: one.responses.recall("resp_1", [], "me", no_bound),
        lambda: one.responses.recall(None, [("out_1", "input")], "me", no_bound),
        lambda: rates.take("a"),
        lambda: one.add_change(change),
        lambda: one.changes_after(0),
    ]
    for call in calls:
        with pytest.raises(StoreFailed, match=r"'shared' under --data-dir .* 'no such table"):
            call()


@pytest.mark.slow
def test_two_open_a_new_file_at_once(tmp_path: Path) -> None:
    """Without a further try, one of the two fails in one of a hundred rounds."""
    together = threading.Barrier(2)

    def open_it(number: int) -> None:
        together.wait()
        SharedFile(tmp_path / f"{number}.sqlite3", Settings(), "x").close()

    with ThreadPoolExecutor(2) as pool:
        for number in range(600):
            for opened in [pool.submit(open_it, number) for _ in range(2)]:
                opened.result()


def test_replicas_on_several_machines_could_use_the_file(pair: Pair, tmp_path: Path) -> None:
    """They have no memory in common, which SQLite's WAL mode needs: it makes a file for that."""
    for number, each in enumerate(pair):
        each.responses.put(response(number))
        assert each.changes_after(0) == []
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["shared"]
    [mode] = pair[0]._file.execute("PRAGMA journal_mode")
    assert mode == ("delete",)


def test_a_command_forgets_all_files_of_before(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    SharedFile(path, Settings(), "one").close()
    for ending in ("-journal", "-wal", "-shm"):
        Path(f"{path}{ending}").touch()
    SharedFile.remove(path)
    assert list(tmp_path.iterdir()) == []


def test_texts_are_for_this_user_only(pair: Pair, tmp_path: Path) -> None:
    pair[0].responses.put(response(1))
    for path in (tmp_path / "data").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_what_cannot_be_a_file_is_an_error(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path))
    shared_path(settings, "x").mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"replicas-x\.sqlite3"):
        SharedFile(shared_path(settings, "x"), settings, "one")
    shared_path(settings, "y").write_bytes(b"no database" * 100)
    with pytest.raises(SettingsError, match="not a database"):
        SharedFile(shared_path(settings, "y"), settings, "one")
