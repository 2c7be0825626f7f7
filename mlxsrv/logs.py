"""Log lines: an event with fields, as text for people or as JSON for machines.

The library only emits, on loggers below "mlxsrv"; who owns the process configures. `configure` is
what the command line does.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

_FIELDS = "mlxsrv_fields"


def log(
    logger: logging.Logger, level: int, event: str, *, traceback: bool = False, **fields: Any
) -> None:
    """Log `event` with its fields; those that are None are left out. `traceback`: with that of the
    exception that is being handled."""
    if logger.isEnabledFor(level):
        present = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, event, exc_info=traceback, extra={_FIELDS: present})


def configure(level: str, form: str) -> None:
    """Send all lines to stderr in one form: mlxsrv's from `level` on, warnings of others."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel("WARNING")
    logging.captureWarnings(True)
    logging.getLogger("mlxsrv").setLevel(level.upper())
    # uvicorn's own notes on starting and stopping say nothing that ours do not.
    logging.getLogger("uvicorn").setLevel("WARNING")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """`12:00:01.234 info  stream end  model=demo tokens=12`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = getattr(record, _FIELDS, {})
        text = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
        line = f"{time} {record.levelname.lower():<7} {record.getMessage()}  {text}".rstrip()
        if not record.exc_info:
            return line
        # Set in, since what a client sent may be in the error's message, and have lines of its own.
        traceback = self.formatException(record.exc_info).splitlines()
        return "\n".join([line, *(f"    {_printable(text)}" for text in traceback)])


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _plain(value: Any) -> str:
    """A value that stays on its line: what a client sent cannot forge another."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)
