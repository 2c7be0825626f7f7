"""Profiles on the disk: what is kept, writers at the same time, and files that are damaged."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxsrv.errors import ProfileExists, ProfileNotFound, StoreFailed
from mlxsrv.generation.steering import ProfileObject
from mlxsrv.models import profile_store as module
from mlxsrv.models.profile_store import ProfileStore, new_id
from tests.support.serving import PATIENCE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "profiles.sqlite3"


@pytest.fixture
def store(file: Path) -> ProfileStore:
    return ProfileStore(file.parent)


def profile(name: str, **fields: Any) -> ProfileObject:
    values: dict[str, Any] = {
        "id": new_id(),
        "description": "What it does",
        "mode": "additive",
        "steering": {3: 1.5, 17: -200.0},
        "model_id": "demo",
        "sae_id": "demo",
        "layer": 1,
        "created_at": 1753000000.25,
        "updated_at": 1753000000.125,
    }
    return ProfileObject(name=name, **(values | fields))


def names(store: ProfileStore) -> list[str]:
    return [profile.name for profile in store.profiles()]


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(StoreFailed) as caught:
        call()
    assert "'profiles.sqlite3' under --data-dir" in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is kept.


def test_a_profile_comes_back_as_it_was(store: ProfileStore, file: Path) -> None:
    one = profile("Pirate", mode="clamp", steering={0: 0.1, 2**40: 1e-30})
    two = profile("other", description="", steering={})
    store.add(one)
    store.add(two)
    again = ProfileStore(file.parent)
    assert again.profile(one.id) == again.named("Pirate") == one
    assert again.profiles() == [one, two]  # 'P' is before 'o'
    assert re.fullmatch("prof_[0-9a-f]{12}", one.id)
    assert one.id != two.id


def test_profiles_change_and_go(store: ProfileStore) -> None:
    one, two = profile("one"), profile("two")
    store.add(one)
    store.add(two)
    changed = msgspec.structs.replace(one, name="eins", steering={1: 2.0}, layer=0, updated_at=2e9)
    store.replace(changed)
    assert store.profiles() == [changed, two]
    store.remove(two.id)
    assert store.profiles() == [changed]
    store.add(profile("one"))  # the name is free


def test_a_name_is_given_once(store: ProfileStore) -> None:
    one, two = profile("one"), profile("two")
    store.add(one)
    store.add(two)
    with pytest.raises(ProfileExists, match="named 'one'") as caught:
        store.add(profile("one"))
    assert caught.value.param == "name"
    with pytest.raises(ProfileExists, match="named 'one'"):
        store.replace(msgspec.structs.replace(two, name="one"))
    with pytest.raises(ProfileExists, match=one.id) as caught:
        store.add(profile("three", id=one.id))
    assert caught.value.param == "id"
    store.add(profile("ONE"))
    assert names(store) == ["ONE", "one", "two"]
    assert store.profile(one.id) == one


@pytest.mark.parametrize(
    "name",
    ["'; DROP TABLE profiles; --", "a\0b", "é", "日本 🦜", "\n", "%_", " x ", "", "n" * 100_000],
    ids=lambda name: ascii(name)[:20],
)
def test_a_name_is_only_text(store: ProfileStore, name: str) -> None:
    one = profile(name, description=name, sae_id=name, model_id=name)
    store.add(one)
    assert store.named(name) == one
    with pytest.raises(ProfileExists):
        store.add(profile(name))
    assert names(store) == [name]


def test_names_that_differ_after_a_zero_are_two(store: ProfileStore) -> None:
    store.add(profile("a\0b"))
    store.add(profile("a\0c"))
    store.add(profile("e\u0301"))
    store.add(profile("\u00e9"))
    assert len(store.profiles()) == 4


# The file.


def test_reading_makes_nothing(store: ProfileStore, file: Path) -> None:
    assert store.profiles() == []
    for call in (
        lambda: store.profile("prof_0"),
        lambda: store.named("x"),
        lambda: store.remove("prof_0"),
        lambda: store.replace(profile("x")),
    ):
        with pytest.raises(ProfileNotFound, match="there is no profile"):
            call()
    assert not file.parent.exists()
    store.add(profile("x"))
    with pytest.raises(ProfileNotFound, match="'prof_0'"):
        store.profile("prof_0")


def test_the_folder_is_made_and_may_be_below_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = ProfileStore(Path("~/a/b?c=d#e%20 f"))
    store.add(profile("x"))
    assert names(store) == ["x"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / "a" / "b?c=d#e%20 f" / "profiles.sqlite3"]  # nothing beside it


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    store = ProfileStore(Path("~/x"))
    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert "no home directory" in failure(store.profiles)


def test_the_file_says_whose_it_is_and_that_readers_need_no_other(
    store: ProfileStore, file: Path
) -> None:
    store.add(profile("x"))
    _made(file, "PRAGMA journal_mode = WAL")  # as former versions made it
    store.add(profile("y"))
    with closing(sqlite3.connect(file)) as connection:
        for pragma, value in (
            ("application_id", int.from_bytes(b"mlxs")),
            ("user_version", 1),
            ("journal_mode", "delete"),
            ("integrity_check", "ok"),
        ):
            assert connection.execute(f"PRAGMA {pragma}").fetchone() == (value,)


def test_a_reader_does_not_wait_for_a_writer(
    store: ProfileStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(profile("x"))
    monkeypatch.setattr(module, "_BUSY", 0.05)
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM profiles")
        assert names(store) == ["x"]
        assert "locked; try again" in failure(lambda: store.add(profile("y")))
        writer.execute("ROLLBACK")
    store.add(profile("y"))
    assert names(store) == ["x", "y"]


@pytest.mark.parametrize("size", [0, 4096])
@pytest.mark.slow
def test_a_process_that_was_killed_while_it_made_the_file(
    store: ProfileStore, file: Path, size: int
) -> None:
    """The kernel kills it when it writes beyond this size: before or after the first page."""
    code = """
import resource, signal, sys
from pathlib import Path
from mlxsrv.models.profile_store import ProfileStore
from tests.models.test_profile_store import profile
one = profile("one")
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
ProfileStore(Path(sys.argv[1])).add(one)
"""
    arguments = [sys.executable, "-c", code, str(file.parent), str(size)]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGXFSZ
    assert file.stat().st_size == size
    assert store.profiles() == []
    store.add(profile("x"))
    assert names(store) == ["x"]


# Many at once.


def _add_some(folder: Path, start: int, count: int) -> None:
    store = ProfileStore(folder)
    for i in range(start, start + count):
        store.add(profile(f"{i:04}"))


@pytest.mark.slow
def test_no_writer_loses_anything(file: Path) -> None:
    """Threads and processes write at once, and begin before the file is there."""
    count, spawn = 6, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn) as processes, ThreadPoolExecutor(4) as threads:
        jobs = [
            pool.submit(_add_some, file.parent, count * (4 * i + j), count)
            for i, pool in enumerate((processes, threads))
            for j in range(4)
        ]
        store = ProfileStore(file.parent)
        while not all(job.done() for job in jobs):
            store.profiles()
        for job in jobs:
            job.result()
    assert names(store) == [f"{i:04}" for i in range(8 * count)]


def test_of_two_with_one_name_one_is_told(file: Path) -> None:
    def add(i: int) -> bool:
        try:
            ProfileStore(file.parent).add(profile("x", layer=i))
        except ProfileExists:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(add, range(8))) == 1
    assert names(ProfileStore(file.parent)) == ["x"]


@pytest.mark.slow
def test_a_killed_writer_leaves_a_sound_file(store: ProfileStore, file: Path) -> None:
    code = """
import itertools, sys
from pathlib import Path
from mlxsrv.models.profile_store import ProfileStore
from tests.models.test_profile_store import profile
store = ProfileStore(Path(sys.argv[1]))
for i in itertools.count():
    store.add(profile(f"{i:04}", description="x" * 20000))
    print(i, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(file.parent)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        try:
            for _ in range(20):
                assert process.stdout.readline()
        finally:
            process.kill()
        told = 20 + len(process.stdout.readlines())
    assert process.returncode == -signal.SIGKILL
    kept = names(store)
    assert kept == [f"{i:04}" for i in range(len(kept))]
    assert told <= len(kept) <= told + 1
    store.add(profile("after"))
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# Files that are not ours to write.


def _made(file: Path, *statements: str) -> None:
    file.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(file)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def _ours(file: Path) -> bytes:
    ProfileStore(file.parent).add(profile("x", description="y" * 20_000))
    return file.read_bytes()


def newer(file: Path) -> None:
    _ours(file)
    _made(file, "PRAGMA user_version = 2")


def anothers(file: Path) -> None:
    _made(file, "CREATE TABLE notes (text)", "PRAGMA application_id = 7")


def anothers_without_a_mark(file: Path) -> None:
    _made(file, "PRAGMA journal_mode = WAL", "CREATE TABLE profiles (id, name)")


def anothers_to_be_recovered(file: Path) -> None:
    """A connection that may write also writes the log's content into the file."""
    anothers_without_a_mark(file)
    code = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("INSERT INTO profiles VALUES (1, 2)")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(file)], check=False)
    assert file.with_name(f"{file.name}-wal").stat().st_size > 0


def no_database(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("[profiles]\n" * 100)


def short(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"x")


def zeros(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(bytes(8192))


def cut_off(file: Path) -> None:
    content = _ours(file)
    file.write_bytes(content[:4096])


def overwritten(file: Path) -> None:
    content = _ours(file)
    file.write_bytes(content[:100] + b"\xa5" * (len(content) - 100))


def wrong_values(file: Path) -> None:
    _ours(file)
    _made(file, "UPDATE profiles SET steering = '{\"a\": 1}'")


@pytest.mark.parametrize(
    ("make", "reason", "help"),
    [
        (newer, "newer mlxsrv", "use that one"),
        (anothers, "another program's database", "choose another --data-dir"),
        (anothers_without_a_mark, "another program's database", "choose another --data-dir"),
        (anothers_to_be_recovered, "another program's database", "choose another --data-dir"),
        (no_database, "damaged, or no database", "move it away"),
        (short, "damaged, or no database", "move it away"),
        (zeros, "damaged, or no database", "move it away"),
        (cut_off, "damaged, or no database", "put a sound copy"),
        (overwritten, "damaged, or no database", "put a sound copy"),
        (wrong_values, "damaged, or no database", "put a sound copy"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.served
def test_a_bad_file_is_told_and_left_as_it_is(
    store: ProfileStore, file: Path, make: Callable[[Path], None], reason: str, help: str
) -> None:
    make(file)
    content = contents(file.parent)
    calls = [store.profiles, lambda: store.named("x")]
    if make is not wrong_values:  # in which other rows may be right
        calls += [lambda: store.remove("prof_0"), lambda: store.add(profile("y"))]
    for call in calls:
        message = failure(call)
        assert reason in message
        assert help in message
    assert contents(file.parent) == content


def test_a_newer_schema_is_seen_in_the_log_as_well(store: ProfileStore, file: Path) -> None:
    """The file itself still says version 1 while the other process has it open, as former versions
    made it."""
    _ours(file)
    _made(file, "PRAGMA journal_mode = WAL")
    content = file.read_bytes()
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("PRAGMA user_version = 2")
        assert file.read_bytes() == content
        for call in (store.profiles, lambda: store.add(profile("y"))):
            assert "newer mlxsrv" in failure(call)
        assert other.execute("SELECT name FROM profiles").fetchall() == [("x",)]


def test_what_is_no_file_is_told(store: ProfileStore, file: Path) -> None:
    file.mkdir(parents=True)
    assert "not a file" in failure(store.profiles)
    file.rmdir()
    os.mkfifo(file)
    assert "not a file" in failure(lambda: store.add(profile("x")))
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("")
    assert "Not a directory" in failure(store.profiles)
    assert "Not a directory" in failure(lambda: store.add(profile("x")))


@contextmanager
def nobody(folder: Path) -> Iterator[None]:
    """Run as a user who may not write here: root becomes another user meanwhile."""
    mode = folder.stat().st_mode
    if os.geteuid() == 0:
        folder.chmod(0o755)
        chain = [path for path in folder.parents if path.stat().st_mode & 0o001 == 0]
        for path in chain:
            path.chmod(path.stat().st_mode | 0o011)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
            for path in chain:
                path.chmod(path.stat().st_mode & ~0o011)
    else:
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(mode)


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    new, old = ProfileStore(tmp_path / "new" / "data"), ProfileStore(tmp_path / "old")
    (tmp_path / "new").mkdir()
    old.add(profile("x"))
    with nobody(tmp_path / "new"):
        assert new.profiles() == []
        assert "see who may write there" in failure(lambda: new.add(profile("x")))
    assert not (tmp_path / "new" / "data").exists()
    with nobody(tmp_path / "old"):
        assert "see who may write there" in failure(lambda: old.add(profile("y")))
    assert names(old) == ["x"]


def test_a_full_disk_can_be_read(store: ProfileStore, file: Path) -> None:
    """Where no file may grow, as on a full disk."""
    _ours(file)
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, size[1]))
    try:
        assert names(store) == ["x"]
        assert "its free space" in failure(lambda: store.add(profile("y")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size)


def test_a_full_disk(store: ProfileStore, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite may not let the file grow. Its error is then the same as on a full disk."""
    _ours(file)
    content = file.read_bytes()
    connect = sqlite3.connect

    def full(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 1")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        message = failure(lambda: store.add(profile("y", description="y" * 20_000)))
        assert "the disk is full; free some space" in message
    assert file.read_bytes() == content
    assert names(store) == ["x"]


def test_waiting_has_an_end() -> None:
    assert module._BUSY < PATIENCE
