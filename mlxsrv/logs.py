"""Log lines: an event with fields, as text for people or as JSON for machines.

The package only logs, on loggers below "mlxsrv". The owner of the process configures logging; the
command line does so with `configure`.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

_FIELDS = "mlxsrv_fields"


BOLD, DIM, RED, GREEN, YELLOW = 1, 2, 31, 32, 33
"""Codes for `paint`."""

_LEVELS = {logging.WARNING: YELLOW, logging.ERROR: RED, logging.CRITICAL: RED}


class Bytes(int):
    """A number of bytes in a log line: with a unit in text, as it is in JSON."""

    def __str__(self) -> str:
        return sized(self).replace(" ", "")


def sized(bytes: float) -> str:
    """A number of bytes as people read it: `2.95 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if bytes < 999.5:  # what is more has four digits
            return f"{bytes:.3g} {unit}"
        bytes /= 1000
    return f"{bytes:.3g} TB"


def log(
    logger: logging.Logger, level: int, event: str, *, traceback: bool = False, **fields: Any
) -> None:
    """Log an event.

    Args:
        traceback: add the traceback of the exception that is being handled.
        fields: what the line says about the event; a field that is None is left out.
    """
    if logger.isEnabledFor(level):
        present = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, event, exc_info=traceback, extra={_FIELDS: present})


def configure(level: str, form: str) -> None:
    """Send log lines to stderr: mlxsrv's from `level` on, and warnings of other libraries.

    Args:
        form: "text" or "json".
    """
    handler = _BesideBars(sys.stderr)
    text = TextFormatter(colours=has_colours(sys.stderr), dated=not sys.stderr.isatty())
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel("WARNING")
    logging.captureWarnings(True)
    logging.getLogger("mlxsrv").setLevel(level.upper())
    # uvicorn's own lines about start and stop say nothing that ours do not.
    logging.getLogger("uvicorn").setLevel("WARNING")


def has_colours(stream: TextIO) -> bool:
    """Whether to write to the stream in colours: a terminal that has them, and a user who does not
    mind (no-color.org)."""
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not unwanted


def paint(text: str, code: int) -> str:
    """Text for a terminal, in a colour or weight of ECMA-48."""
    return f"\x1b[{code}m{text}\x1b[0m"


def on_terminal() -> bool:
    """Whether `configure` sends lines to a terminal, as text: somebody may look at a bar there."""
    handlers = logging.getLogger().handlers
    return any(isinstance(each, _BesideBars) and each.is_watched for each in handlers)


class _BesideBars(logging.StreamHandler[TextIO]):
    """Writes lines above the bars of downloads."""

    @property
    def is_watched(self) -> bool:
        return isinstance(self.formatter, TextFormatter) and self.stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        # Some thread may just import tqdm; until it has, there is no bar.
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None) if self.is_watched else None
        with bars.external_write_mode(self.stream) if bars else nullcontext():
            super().emit(record)


class JsonFormatter(logging.Formatter):
    """Makes each line a JSON object: time, level, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=_encode).decode()


def _encode(value: Any) -> Any:
    return int(value) if isinstance(value, Bytes) else str(value)


class TextFormatter(logging.Formatter):
    """Makes lines such as `12:00:01.234 info  stream end  model=demo tokens=12`.

    Args:
        colours: for a terminal: warnings and errors stand out, times and fields stand back.
        dated: for a file, which is read later or elsewhere: times have their date and offset.
    """

    def __init__(self, *, colours: bool = False, dated: bool = False) -> None:
        super().__init__()
        self._colours = colours
        self._dated = dated

    def format(self, record: logging.LogRecord) -> str:
        local = datetime.fromtimestamp(record.created)
        if self._dated:
            time = local.astimezone().isoformat(timespec="milliseconds")
        else:
            time = local.strftime("%H:%M:%S.%f")[:-3]
        fields = getattr(record, _FIELDS, {})
        text = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
        level = f"{record.levelname.lower():<7}"
        if self._colours:
            time, text = paint(time, DIM), text and paint(text, DIM)
            level = paint(level, _LEVELS.get(record.levelno, DIM))
        line = f"{time} {level} {record.getMessage()}  {text}".rstrip()
        if not record.exc_info:
            return line
        # Indented: the error's message may contain what a client sent, with lines of its own.
        traceback = self.formatException(record.exc_info).splitlines()
        return "\n".join([line, *(f"    {_printable(text)}" for text in traceback)])


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _plain(value: Any) -> str:
    """A value on one line, so that what a client sent cannot forge another line."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)
