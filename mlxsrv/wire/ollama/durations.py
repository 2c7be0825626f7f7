"""Ollama's `keep_alive`: a number of seconds, or a duration as Go writes it."""

from __future__ import annotations

import re
from math import inf

from mlxsrv.errors import InvalidRequest

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"([+-]?)((?:{_PART.pattern})+)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)


def read_keep_alive(given: float | str | None) -> float | None:
    """Return seconds; infinity for a negative number; None if none is given.

    Raises:
        InvalidRequest: it is no duration.
    """
    if given is None or given == "":
        return None
    seconds = given if isinstance(given, float) else _read(given)
    return inf if seconds < 0 else seconds


def _read(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text)
    found = _DURATION.fullmatch(text)
    if found is None:
        raise InvalidRequest(
            'keep_alive: expected seconds, or a duration such as "5m" or "1h30m"; 0 unloads the '
            "model, -1 keeps it",
            param="keep_alive",
        )
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(found[2]))
    return -seconds if found[1] == "-" else seconds
