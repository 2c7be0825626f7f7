"""A client's mailbox: all that the device thread knows of the client behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mlxsrv.engine.events import Event


class Mailbox:
    """Delivers events on a client's event loop. Two mailboxes are never equal.

    Args:
        loop: the client's.
        deliver: called on the loop with the events of a model's decode step, of its slice, or of an
            order.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Event]], None]
    ) -> None:
        self._loop = loop
        self.deliver = deliver

    def post(self, events: Sequence[Event]) -> bool:
        """Send events to the loop; false if it is closed. Called on the device thread.

        One wake-up of the loop for all of them: it costs as much as the rest of a small step.
        """
        try:
            self._loop.call_soon_threadsafe(self.deliver, events)
        except RuntimeError:
            return False
        return True
