"""The storage thread: what goes first, and what it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from mlxsrv.engine.storage.storage_thread import StorageThread
from tests.support.serving import PATIENCE, wait_for


def test_a_read_interrupts_a_write() -> None:
    thread, done = StorageThread(), list[str]()
    begun, added = threading.Event(), threading.Event()

    def write() -> Iterator[None]:
        for piece in range(20):
            done.append(f"piece {piece}")
            if piece == 3:
                begun.set()
                added.wait(PATIENCE)
            yield

    def read() -> Iterator[None]:
        done.append("read")
        yield
        done.append("read on")

    thread.add_write(write())
    assert begun.wait(PATIENCE)
    thread.add_read(read())
    added.set()
    assert thread.flush(PATIENCE)
    assert done[4:7] == ["read", "read on", "piece 4"], "a read is not interrupted"
    assert len(done) == 22


def test_what_is_not_written_in_time_is_given_up() -> None:
    thread, over = StorageThread(), threading.Event()

    def write() -> Iterator[None]:
        while not over.is_set():
            time.sleep(0.001)
            yield

    thread.add_write(write())
    thread.add_write(write())
    assert not thread.flush(0.05)
    over.set()
    wait_for(lambda: thread.flush(0.0), why="the thread lives, and has nothing to do")


def test_an_error_ends_a_task_and_not_the_thread() -> None:
    thread, done = StorageThread(), list[str]()

    def fail() -> Iterator[None]:
        yield
        raise RuntimeError("by order")

    def write() -> Iterator[None]:
        done.append("written")
        yield

    thread.add_write(fail())
    thread.add_read(fail())
    thread.add_write(write())
    assert thread.flush(PATIENCE)
    assert done == ["written"]
