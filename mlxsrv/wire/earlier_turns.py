"""Earlier turns, as clients give them back: parts that are no text, and arguments of tool calls.

A client sends the whole conversation with each request, so a refusal of an old part would end the
conversation. What is no text is refused where it is new, and left out where it is old.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mlxsrv.errors import UnsupportedParameter
from mlxsrv.wire.decoding import mend_surrogates
from mlxsrv.wire.unknown import Search

_INDEX = re.compile(r"\[\d+\]")
_MEDIA = ("image", "audio", "video", "document", "file")


def newest_question(roles: Iterable[str]) -> int | None:
    """Return the place of the user's last message, if no answer follows it."""
    newest = None
    for place, role in enumerate(roles):
        if role in ("user", "assistant"):
            newest = place if role == "user" else None
    return newest


def leave_out(
    kind: str, path: str, search: Search, *, new: bool = False, text: str | None = None
) -> str:
    """Return the text in place of a part: a note if it is a medium, else nothing.

    Args:
        kind: its type, for messages.
        search: notes the part.
        new: it is in the newest message of the user's.
        text: the type of what is text, where a part has a type.

    Raises:
        UnsupportedParameter: it is new.
    """
    if new:
        told = f"{path}: this model takes text only, not {kind[:100]!r}; leave it out"
        if text is not None:
            told += f", or use the type {text!r}"
        raise UnsupportedParameter(told, param=path)
    search.note(_INDEX.sub("[]", path), path)
    medium = next((each for each in _MEDIA if each in kind), None)
    return f"[{medium} left out: this model reads text only]" if medium else ""


def past_arguments(given: Any) -> Mapping[str, Any] | str:
    """Return the arguments of an earlier call: an object or, if the model wrote none, its text.

    Args:
        given: an object, or JSON as a string.
    """
    if isinstance(given, dict):
        return given
    if given in (None, ""):
        return {}
    if not isinstance(given, str):
        return msgspec.json.encode(given).decode()
    try:
        return msgspec.json.decode(mend_surrogates(given.encode()), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return given
