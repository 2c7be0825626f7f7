"""Ids of calls in the form that a family writes."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable

import msgspec

_ALPHANUMERICS = string.ascii_letters + string.digits
_NAMED = re.compile(r"functions\..+:(\d{1,9})\Z")  # a client may send any number of digits

_LAST_NUMBER = re.compile(r"\d+$")
_NO_ALPHANUMERIC = re.compile(r"[^A-Za-z0-9]")


class CallIds(msgspec.Struct, frozen=True):
    """The form of ids of calls. Templates of some families write ids, or refuse other ones.

    Attributes:
        form: an id, with {name}, {number} and {random} in their places.
        size: how many letters and digits stand for {random}.
        pattern: a regex for the part of an id that the model writes, if it writes one.
    """

    form: str = "call_{random}"
    size: int = 24
    pattern: str = ""

    def new(self, name: str, number: int) -> str:
        """Return an id for a call that a model makes.

        Args:
            name: that of the tool.
            number: how many calls came before it in the chat; see `count_calls`.
        """
        return self.form.format(name=name, number=number, random=_random(self.size))

    def written(self, id: str, number: int) -> str:
        """Return the part of a call's id that the model writes, or one made from it, or from the
        call's number."""
        last = _LAST_NUMBER.search(id)
        plain = _NO_ALPHANUMERIC.sub("", id)
        for part in (id, last[0] if last else "", plain[-9:], str(number)):
            if re.fullmatch(self.pattern, part):
                return part
        return f"{number:09}"


RANDOM = CallIds()
"""As OpenAI's."""
NUMBERED = CallIds("{number}", pattern="[0-9]+")
NAMED = CallIds("functions.{name}:{number}", pattern="[0-9]+")
SHORT = CallIds("{random}", 9, "[a-zA-Z0-9]{9}")


def _random(size: int) -> str:
    number = secrets.randbelow(len(_ALPHANUMERICS) ** size)  # once: the system is asked for it
    signs = []
    for _ in range(size):
        number, place = divmod(number, len(_ALPHANUMERICS))
        signs.append(_ALPHANUMERICS[place])
    return "".join(signs)


def count_calls(ids: Iterable[str | None]) -> int:
    """Return how many calls a chat has, by the ids of those that are left of it. Those before them
    are counted too if the ids have numbers, as Kimi's have."""
    numbers = [0]
    for count, id in enumerate(ids, 1):
        named = _NAMED.match(id or "")
        numbers += [count, int(named[1]) + 1] if named else [count]
    return max(numbers)
