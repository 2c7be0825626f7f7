"""Ids of calls in the form that a family writes."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping

from mlxsrv.text.calls import WrittenCall

_ALPHANUMERICS = string.ascii_letters + string.digits
_NAMED = re.compile(r"functions\..+:(\d{1,9})\Z")  # a client may send any number of digits

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


def _random(size: int) -> str:
    number = secrets.randbelow(len(_ALPHANUMERICS) ** size)  # once: the system is asked for it
    signs = []
    for _ in range(size):
        number, place = divmod(number, len(_ALPHANUMERICS))
        signs.append(_ALPHANUMERICS[place])
    return "".join(signs)


# Templates of these families write ids, or refuse others.
_IDS: Mapping[str, Callable[[str, int], str]] = {
    "command": lambda name, number: str(number),
    "kimi_k2": lambda name, number: f"functions.{name}:{number}",
    **dict.fromkeys(
        ("mistral_args", "mistral_ids", "mistral_list"), lambda name, number: _random(9)
    ),
}


def make_call_id(format: str, name: str, number: int) -> str:
    """Return an id for a call that a model makes.

    Args:
        format: the name of the format of its calls.
        name: that of the tool.
        number: how many calls came before it in the chat; see `count_calls`.
    """
    make = _IDS.get(format)
    return f"call_{_random(24)}" if make is None else make(name, number)


def count_calls(ids: Iterable[str | None]) -> int:
    """Return how many calls a chat has, by the ids of those that are left of it. Those before them
    are counted too if the ids have numbers, as Kimi's have."""
    numbers = [0]
    for count, id in enumerate(ids, 1):
        named = _NAMED.match(id or "")
        numbers += [count, int(named[1]) + 1] if named else [count]
    return max(numbers)
