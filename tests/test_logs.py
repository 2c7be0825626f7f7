"""Log lines: one a record, whatever a client sent."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import mlxsrv
from mlxsrv.logs import (
    Bytes,
    JsonFormatter,
    TextFormatter,
    configure,
    has_colours,
    log,
    on_terminal,
)
from mlxsrv.models.catalogue import progress
from tests.support.serving import DATED

NASTY = 'a\nb "c" \x1b[31m é'


@pytest.fixture
def record(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    logger = logging.getLogger("mlxsrv.test")
    with caplog.at_level(logging.INFO, "mlxsrv.test"):
        log(logger, logging.INFO, "stream end", model="demo", user=NASTY, tokens=3, gone=None)
    return caplog.records[0]


def test_text_is_one_line_with_fields(record: logging.LogRecord) -> None:
    line = TextFormatter().format(record)
    assert "info    stream end  model=demo" in line
    assert line.endswith("tokens=3")
    assert "\n" not in line
    assert "\x1b" not in line
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3} info ", line)
    assert re.match(f"{DATED} *stream", TextFormatter(dated=True).format(record))


def test_json_is_one_object_with_fields(record: logging.LogRecord) -> None:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "info",
        "event": "stream end",
        "model": "demo",
        "user": NASTY,
        "tokens": 3,
    }


def test_bytes_have_a_unit_for_people_only(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("mlxsrv.test")
    with caplog.at_level(logging.INFO, "mlxsrv.test"):
        log(logger, logging.INFO, "loaded", small=Bytes(999), bytes=Bytes(2_952_768), big=7 * 10**9)
    assert (
        TextFormatter().format(caplog.records[0]).endswith("small=999B bytes=2.95MB big=7000000000")
    )
    assert json.loads(JsonFormatter().format(caplog.records[0]))["bytes"] == 2_952_768


def test_colours_are_for_terminals_whose_user_does_not_mind(
    monkeypatch: pytest.MonkeyPatch, record: logging.LogRecord
) -> None:
    assert "\x1b[2m" in TextFormatter(colours=True).format(record)
    controller, terminal = os.openpty()
    with os.fdopen(controller, "rb"), os.fdopen(terminal, "w") as stream:
        for name, value, wanted in (
            ("TERM", "xterm", True),
            ("TERM", "dumb", False),
            ("NO_COLOR", "1", False),
            ("NO_COLOR", "", True),
        ):
            with monkeypatch.context() as patched:
                patched.delenv("NO_COLOR", raising=False)
                patched.setenv("TERM", "xterm")
                patched.setenv(name, value)
                assert has_colours(stream) is wanted, (name, value)
    with open(os.devnull, "w") as stream:
        assert not has_colours(stream)


def test_a_traceback_is_part_of_the_object(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("mlxsrv.test").exception("failed")
    fields = json.loads(JsonFormatter().format(caplog.records[0]))
    assert "ValueError: why" in fields["traceback"]


def test_a_traceback_in_text_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("why\n12:00:00.000 info    forged\x1b[31m")
    except ValueError:
        logging.getLogger("mlxsrv.test").exception("failed")
    first, *rest = TextFormatter().format(caplog.records[0]).split("\n")
    assert first.endswith("error   failed")
    assert len(rest) > 3
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_the_names_of_loggers_do_not_follow_the_files() -> None:
    """A parent app configures them by name."""
    [root] = mlxsrv.__path__
    sources = [path.read_text() for path in Path(root).rglob("*.py")]
    names = {name for text in sources for name in re.findall(r'getLogger\("(mlxsrv\..+?)"\)', text)}
    rooms = ("access", "engine", "models", "replicas", "security", "server", "service", "web")
    assert names == {f"mlxsrv.{room}" for room in rooms}


@contextmanager
def terminal_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of a terminal that has the log, and all that is written to stderr."""
    controller, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers)
    for logger in (root, logging.getLogger("mlxsrv"), logging.getLogger("uvicorn")):
        monkeypatch.setattr(logger, "level", logger.level)
    with os.fdopen(controller, "rb"), os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        configure("info", "text")
        logging.captureWarnings(False)
        yield controller


def test_a_line_is_written_while_a_thread_imports_the_library_of_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))  # as it is before its first line
    with terminal_log(monkeypatch) as terminal:
        assert on_terminal()
        logging.getLogger("mlxsrv").info("told")
        assert re.search(rb"\d\d:\d\d.*info +\S* told", os.read(terminal, 1000))


def test_a_load_is_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SUDDEN", 0.0)
    shown = below = b""
    with terminal_log(monkeypatch) as terminal, progress.LoadProgress("big", 3_050_000) as load:
        load.add(568_000)
        logging.getLogger("mlxsrv").info("told")  # which has the bar written anew
        while b"B/s]" not in below:
            shown += os.read(terminal, 10_000)
            below = shown.partition(b" told")[2]
    assert b"loading big: " in shown.removesuffix(below)
    assert b"loading big:  19%" in below
    assert b" 568kB/3.05MB [" in below
