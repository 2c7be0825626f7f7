"""A request's body on its way to the app."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from starlette.types import Message, Receive

T = TypeVar("T")


class BodyTap(Generic[T]):
    """Passes a request's body on, and keeps what is made of it. The body itself is kept only until
    all of it has come: an app may hold a request long after.

    Args:
        make: called with the body, once.
    """

    def __init__(self, receive: Receive, make: Callable[[bytes], T]) -> None:
        self._receive = receive
        self._make = make
        self._parts: list[bytes] = []
        self._made: list[T] = []

    @property
    def whole(self) -> bool:
        """Whether all of the body has come."""
        return bool(self._made)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not self._made:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.finish()
        return message

    def finish(self) -> T:
        """Return what is made of the body, as far as it has come."""
        if not self._made:
            self._made.append(self._make(b"".join(self._parts)))
            self._parts.clear()
        return self._made[0]
