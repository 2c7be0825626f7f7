"""The server of the soak, and the stock of what its process holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.soak.witness import Holdings
from tests.support.encoder_folders import write as write_encoder
from tests.support.saes import write_sae
from tests.support.serving import Line, Server, environment, wait_for
from tests.support.tiny import write_model

WRITERS = ("plain", "window", "hybrid")
"""Models that nobody steers, so what they say is known."""
STEERED = "steered"
ENCODER, JUDGE = "encoder", "judge"
SAE = "sae"
FEATURES = 128

_ROOT = Path(__file__).parent.parent.parent
_OPTIONS = {
    "--max-models": "2",
    "--max-concurrency": "8",
    "--max-queue": "4",
    "--request-timeout": "60",
    "--keepalive": "0.5",
    "--prompt-cache-bytes": "2MB",
    "--max-body": "1MB",
}
_IDLE_WORKER = "AnyIO worker thread"
"""Kept for ten seconds after their work, so their number says little."""


def write_town(folder: Path) -> list[str]:
    """Write all models and an SAE; the options that serve them."""
    families = {"plain": "qwen3", "window": "gemma3_text", "hybrid": "qwen3_next", STEERED: "qwen3"}
    folders = {
        name: write_model(folder / name, family, plain=True, seed=seed)
        for seed, (name, family) in enumerate(families.items())
    }
    folders[ENCODER] = write_encoder(folder / ENCODER, "bert")
    folders[JUDGE] = write_encoder(folder / JUDGE, "bert-classifier")
    write_sae(folder / "saes" / SAE, d_sae=FEATURES)
    models = [part for name, path in folders.items() for part in ("--model", f"{name}={path}")]
    more = ["--sae-dir", str(folder / "saes"), "--data-dir", str(folder / "data")]
    more += ["--no-hf-cache", "--metrics"]
    return [*models, *more, *(part for pair in _OPTIONS.items() for part in pair)]


class Stock(msgspec.Struct, frozen=True, kw_only=True):
    """The stock of a process, by its own account and by the system's."""

    rss: int
    """Bytes."""
    descriptors: int
    native: int
    """Threads that are not Python's."""
    holdings: Holdings

    @property
    def steady(self) -> dict[str, int]:
        """The counts that must be the same whenever nobody is there."""
        told = self.holdings
        threads = {f"threads: {k}": n for k, n in told.threads.items() if k != _IDLE_WORKER}
        return {
            "descriptors": self.descriptors,
            "native threads": self.native,
            "tasks": told.tasks,
            **threads,
            **{f"borrowed: {name}": n for name, n in told.borrowed.items()},
            **{f"claims: {name}": n for name, n in told.claims.items()},
            **{f"objects: {name}": n for name, n in told.objects.items()},
        }


class Watched(Server):
    """A server with a witness in its process. Linux only."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        log = folder / "log"
        command = [sys.executable, "-m", "tests.soak.witness", "--port", "0", *arguments]
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, "--log-format", "json"], stderr=stderr, env=environment(), cwd=_ROOT
            )
        super().__init__(process, log)
        self._read = 0  # bytes of the log

    @property
    def _proc(self) -> Path:
        return Path("/proc", str(self.process.pid))

    @property
    def rss(self) -> int:
        pages = int((self._proc / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def take_stock(self) -> Stock:
        self._read = self._log.stat().st_size
        self.signal(signal.SIGUSR1)
        holdings = wait_for(self._told, why="the witness tells")
        threads = len(list((self._proc / "task").iterdir()))
        return Stock(
            rss=self.rss,
            descriptors=len(list((self._proc / "fd").iterdir())),
            native=threads - sum(holdings.threads.values()),
            holdings=holdings,
        )

    def _told(self) -> Holdings | None:
        with self._log.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if b'"witness"' in line and line.endswith(b"\n"):
                    return msgspec.json.decode(line, type=Holdings)
        return None

    def lines(self) -> Iterator[Line]:
        """The whole log."""
        with self._log.open("rb") as log:
            for line in log:
                yield json.loads(line)


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """A new town in `folder`, served."""
    server = Watched(folder, write_town(folder))
    try:
        yield server
    finally:
        server.close()


class Book(msgspec.Struct, frozen=True):
    """The server's log of all requests."""

    status: dict[str, list[int | None]]
    """By request id; None: its client left before there was a status."""
    begun: Counter[str]
    ended: Counter[str]
    """Generations, by request id."""
    events: Counter[str]
    bad: list[Line]
    """Lines that no run may have."""


def read_book(lines: Iterator[Line]) -> Book:
    book = Book({}, Counter(), Counter(), Counter(), [])
    for line in lines:
        _enter(book, line)
    return book


def _enter(book: Book, line: dict[str, Any]) -> None:
    book.events[line["event"]] += 1
    match line["event"]:
        case "request" | "request refused":
            book.status.setdefault(line["request"], []).append(line.get("status"))
        case "stream start":
            book.begun[line["request"]] += 1
        case "stream end":
            book.ended[line["request"]] += 1
    # "stream error" tells of time limits, too, at a level that is no error.
    if "traceback" in line or line.get("level") in ("error", "critical"):
        book.bad.append(line)
