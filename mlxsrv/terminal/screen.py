"""Writing on a terminal: dim text, a line that is written over, and questions.

A pipe gets plain text, and in place of such a line another one every few seconds.
"""

from __future__ import annotations

import re
import sys
from time import monotonic
from typing import TextIO

from mlxsrv.logs import DIM, has_colours, paint
from mlxsrv.options import SettingsError

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tabs and the ends of lines."""


def dim(text: str, stream: TextIO | None = None) -> str:
    """The text in grey on a terminal whose user wants colours; else as it is."""
    stream = sys.stdout if stream is None else stream
    return paint(text, DIM) if text and has_colours(stream) else text


def shown(text: str) -> str:
    """A model's text as a terminal may have it: without control characters, which could set its
    title, fill the clipboard or write over other lines. A pipe gets it as it is."""
    return _CONTROLS.sub("", text) if sys.stdout.isatty() else text


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows as a table, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def agreed(question: str, *, remedy: str) -> bool:
    """Ask on the terminal. Raises SettingsError, with the remedy, where there is none."""
    if not sys.stdin.isatty():
        raise SettingsError(f"there is no terminal to ask on; {remedy}")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


_SILENCE = 5.0
"""Seconds of waiting that a pipe hears nothing of, and from a line to the next."""


class StatusLine:
    """One line on stderr that says what is waited for, as long as it is."""

    def __init__(self) -> None:
        self._shown = ""
        self._told = monotonic()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Write the text in place of the last one; into a pipe, below it, if that was long ago."""
        if not sys.stderr.isatty():
            if monotonic() - self._told >= _SILENCE:
                self._told = monotonic()
                print(f"mlxsrv: {text}", file=sys.stderr, flush=True)
        elif text != self._shown:
            self.clear()
            self._shown = text
            print(dim(text + " ...", sys.stderr), end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the text away."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = ""
