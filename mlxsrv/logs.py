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


def log(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log `event` with its fields; those that are None are left out."""
    if logger.isEnabledFor(level):
        present = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, event, extra={_FIELDS: present})


def configure(level: str, form: str) -> None:
    """Send mlxsrv's and uvicorn's lines to stderr in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in ("mlxsrv", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
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
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: Any) -> str:
    """A value that stays on its line: what a client sent cannot forge another."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)
