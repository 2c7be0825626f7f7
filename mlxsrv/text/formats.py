"""The table of formats: all that the server knows, by name."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mlxsrv.text.calls import CallFormat
from mlxsrv.text.frames import FrameFormat, MarkedThoughts, NoThoughts
from mlxsrv.text.json_calls import HERMES


class Formats(msgspec.Struct, frozen=True):
    """The formats of one model.

    Attributes:
        thoughts: tells its thoughts from its content.
        calls: that of its tool calls; None if it is not known.
    """

    thoughts: FrameFormat
    calls: CallFormat | None = None


THOUGHTS: Mapping[str, FrameFormat] = {
    each.name: each for each in (NoThoughts(), MarkedThoughts("think", "<think>", "</think>"))
}
"""The formats of thoughts by name."""

CALLS: Mapping[str, CallFormat] = {each.name: each for each in (HERMES,)}
"""The formats of calls by name."""


def formats_of(names: tuple[str, str]) -> Formats:
    """Return the formats of these names: of calls, and of thoughts."""
    calls, thoughts = names
    return Formats(THOUGHTS.get(thoughts, THOUGHTS["none"]), CALLS.get(calls))
