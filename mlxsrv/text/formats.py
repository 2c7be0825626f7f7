"""The table of formats: all that the server knows, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from mlxsrv.text.call_formats.calls import CallFormat
from mlxsrv.text.call_formats.headed_calls import HEADED_FORMATS
from mlxsrv.text.call_formats.json_calls import JSON_FORMATS
from mlxsrv.text.call_formats.literal_calls import LITERAL_FORMATS
from mlxsrv.text.call_formats.nested_calls import MINIMAX_M3
from mlxsrv.text.call_formats.tagged_calls import TAGGED_FORMATS
from mlxsrv.text.frames import FrameFormat
from mlxsrv.text.thoughts import FRAME_FORMATS


class Formats(msgspec.Struct, frozen=True):
    """The formats of one model.

    Attributes:
        thoughts: tells its thoughts from its content.
        calls: that of its tool calls; None if it is not known.
    """

    thoughts: FrameFormat
    calls: CallFormat | None = None


_CALLS: Sequence[CallFormat] = (
    *(*JSON_FORMATS, *HEADED_FORMATS, *LITERAL_FORMATS, *TAGGED_FORMATS),
    MINIMAX_M3,
)

THOUGHTS: Mapping[str, FrameFormat] = {each.name: each for each in FRAME_FORMATS}
"""The formats of thoughts by name."""

CALLS: Mapping[str, CallFormat] = {each.name: each for each in _CALLS}
"""The formats of calls by name."""


def formats_of(names: tuple[str, str]) -> Formats:
    """Return the formats of these names: of calls, and of thoughts."""
    calls, thoughts = names
    return Formats(THOUGHTS[thoughts], CALLS.get(calls))
