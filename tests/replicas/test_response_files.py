"""Responses that one replica has stored, at the others: while it serves, and when it is gone."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from mlxsrv.errors import (
    PreviousResponseNotFound,
    ResponseNotFound,
    StoredItemNotFound,
    StoreFailed,
)
from mlxsrv.options import SettingsError
from mlxsrv.replicas import response_files
from mlxsrv.replicas.response_files import ResponseFiles, responses_folder
from mlxsrv.service.response_store import StoredItem, StoredReference, StoredResponse
from mlxsrv.settings import Settings

FIRST, SECOND = "resp_01", "resp_02"


def response(id: str, *, previous: str | None = None, size: int = 10) -> StoredResponse:
    number = id.partition("_")[2]
    return StoredResponse(
        id=id,
        owner="me",
        body=b"{}",
        input=[StoredItem(f"item_{number}", id, b"x" * size)],
        output=[StoredItem(f"msg_{number}", id, b"y")],
        previous=previous,
    )


def replica(folder: Path, name: str, most: int = 10) -> ResponseFiles:
    return ResponseFiles(most, 10**6, folder / "responses", name)


def conversation(kept: ResponseFiles, previous: str) -> list[str]:
    recalled = kept.recall(previous, [], "me", lambda size, path: None)
    return [item.id for item in recalled.conversation]


def test_a_conversation_goes_on_at_another_replica(tmp_path: Path) -> None:
    one, other = replica(tmp_path, "one"), replica(tmp_path, "other")
    one.put(response(FIRST))
    assert other.get(FIRST) == one.get(FIRST) == response(FIRST)
    other.put(response(SECOND, previous=FIRST))
    for each in (one, other, replica(tmp_path, "new")):
        assert conversation(each, SECOND) == ["item_01", "msg_01", "item_02", "msg_02"]


def test_an_item_of_an_output_is_found_by_its_own_client(tmp_path: Path) -> None:
    one, other = replica(tmp_path, "one"), replica(tmp_path, "other")
    one.put(response(FIRST))
    found = other.recall(None, [("msg_01", "input[0]")], "me", lambda size, path: None)
    assert found.references["msg_01"].body == b"y"
    assert other.resolve(StoredReference("item_01", FIRST)) == StoredItem(
        "item_01", FIRST, b"x" * 10
    )
    with pytest.raises(StoredItemNotFound):
        other.recall(None, [("msg_01", "input[0]")], "you", lambda size, path: None)


def test_an_item_is_no_response_at_another_replica(tmp_path: Path) -> None:
    one, other = replica(tmp_path, "one"), replica(tmp_path, "other")
    one.put(response(FIRST))
    for each in (one, other):
        with pytest.raises(ResponseNotFound):
            each.get("msg_01")
        with pytest.raises(ResponseNotFound):
            each.delete("msg_01")
        with pytest.raises(PreviousResponseNotFound):
            conversation(each, "msg_01")


def test_a_replica_that_was_taken_for_gone_stores_again(tmp_path: Path) -> None:
    one, other = replica(tmp_path, "one"), replica(tmp_path, "other")
    shutil.rmtree(tmp_path / "responses" / "one")
    one.note_alive()
    one.put(response(FIRST))
    assert other.get(FIRST) == response(FIRST)


def test_what_any_replica_deletes_is_gone_everywhere(tmp_path: Path) -> None:
    one, other = replica(tmp_path, "one"), replica(tmp_path, "other")
    one.put(response(FIRST))
    one.put(response(SECOND, previous=FIRST))
    other.delete(FIRST)
    for each in (one, other):
        with pytest.raises(ResponseNotFound):
            each.get(FIRST)
        with pytest.raises(PreviousResponseNotFound):
            conversation(each, SECOND)
        with pytest.raises(StoredItemNotFound):
            each.recall(None, [("msg_01", "input")], "me", lambda size, path: None)


def test_bounds_hold_for_files_as_well(tmp_path: Path) -> None:
    one = replica(tmp_path, "one", most=2)
    for number in range(9):
        one.put(response(f"resp_0{number}"))
    names = {each.name for each in (tmp_path / "responses" / "one").iterdir()}
    assert names == {"resp_07", "resp_08", "msg_07", "msg_08"}


def test_only_this_user_can_read_them(tmp_path: Path) -> None:
    replica(tmp_path, "one")
    for folder in (tmp_path / "responses", tmp_path / "responses" / "one"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_files_outlive_their_replica_for_a_day(tmp_path: Path) -> None:
    one = replica(tmp_path, "one")
    one.put(response(FIRST))
    day = 24 * 3600
    for ago, there in ((day - 60, True), (day + 60, False)):
        then = time.time() - ago
        os.utime(tmp_path / "responses" / "one", (then, then))
        new = replica(tmp_path, f"new {there}")
        assert (tmp_path / "responses" / "one").exists() == there
        if there:
            assert new.get(FIRST) == response(FIRST)
            one.note_alive()
            seen = (tmp_path / "responses" / "one").stat().st_mtime
            assert seen > then + 60


def test_of_many_that_are_gone_the_last_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_files, "_MOST_GONE", 2)
    for number in range(4):
        replica(tmp_path, f"gone {number}")
    for number in range(4):
        then = time.time() - 1000 * (number + 1)
        os.utime(tmp_path / "responses" / f"gone {number}", (then, then))
    for name in ("one", "two", "three"):
        replica(tmp_path, name)
    names = {each.name for each in (tmp_path / "responses").iterdir()}
    assert names == {"one", "two", "three", "gone 0", "gone 1"}


def test_an_id_of_a_client_is_no_path(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    one, other = replica(tmp_path, "one"), replica(tmp_path, "other")
    one.put(response(FIRST))
    for id in (f"../one/{FIRST}", f"{tmp_path}/responses/one/{FIRST}", "..", "", "\0", "x" * 5000):
        with pytest.raises(ResponseNotFound):
            other.delete(id)
    assert one.get(FIRST)


def test_half_a_file_is_none(tmp_path: Path) -> None:
    one, other = replica(tmp_path, "one"), replica(tmp_path, "other")
    one.put(response(FIRST))
    path = tmp_path / "responses" / "one" / FIRST
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ResponseNotFound):
        other.get(FIRST)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    one = replica(tmp_path, "one")
    shutil.rmtree(tmp_path / "responses")
    (tmp_path / "responses").write_text("in the way")
    for failing in (lambda: one.put(response(FIRST)), lambda: one.get(SECOND), one.note_alive):
        with pytest.raises(StoreFailed, match=r"stored responses below .*responses cannot be used"):
            failing()
    with pytest.raises(SettingsError, match=r"--data-dir: .*responses cannot be used"):
        replica(tmp_path, "two")
    (tmp_path / "responses").unlink()
    (tmp_path / "responses" / "one").mkdir(parents=True)
    with pytest.raises(ResponseNotFound):
        one.get(FIRST)
    one.put(response(SECOND))
    assert replica(tmp_path, "two").get(SECOND)


def test_a_folder_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert responses_folder(Settings(data_dir="/data"), "x") == Path("/data/responses-x")
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError))
    with pytest.raises(SettingsError, match="--data-dir: this user has no home directory"):
        responses_folder(Settings(), "x")
