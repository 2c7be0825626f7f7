"""Parts of messages that are no text: refused where they are new, left out where they are old.

A client sends the whole conversation with each request, so a refusal of an old part would end the
conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mlxsrv.errors import UnsupportedParameter
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


def leave_out(kind: str, path: str, search: Search, *, new: bool = False) -> str:
    """Return the text in place of a part: a note if it is a medium, else nothing.

    Args:
        kind: its type, for messages.
        search: notes the part.
        new: it is in the newest message of the user's.

    Raises:
        UnsupportedParameter: it is new.
    """
    if new:
        raise UnsupportedParameter(
            f"{path}: this model takes text only, not {kind[:100]!r}; leave it out", param=path
        )
    search.note(_INDEX.sub("[]", path), path)
    medium = next((each for each in _MEDIA if each in kind), None)
    return f"[{medium} left out: this model reads text only]" if medium else ""
