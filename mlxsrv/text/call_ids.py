"""Ids of calls in the form that a family writes."""

from __future__ import annotations

import re

from mlxsrv.text.calls import WrittenCall

_LAST_NUMBER = re.compile(r"\d+$")
_NO_ALPHANUMERIC = re.compile(r"[^A-Za-z0-9]")


def written_id(pattern: str, call: WrittenCall, number: int) -> str:
    """Return the id of a call, or one made from it, or from the call's number, that matches."""
    last = _LAST_NUMBER.search(call.id)
    plain = _NO_ALPHANUMERIC.sub("", call.id)
    for id in (call.id, last[0] if last else "", plain[-9:], str(number)):
        if re.fullmatch(pattern, id):
            return id
    return f"{number:09}"
