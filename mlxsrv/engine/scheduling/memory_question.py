"""The question to a client for more memory.

    ENOUGH -> ASKED -> ANSWERED -> ASKED, or ENOUGH

The client may have models that nobody uses. It answers with another budget, or with the same. It is
asked once, and again if more is needed than it was asked for, or if a text comes that does not fit
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from mlxsrv.engine.events import MemoryShort
from mlxsrv.states import follow


class QuestionState(Enum):
    """The states of the question."""

    ENOUGH = "not to be asked"
    """Nobody was short of memory since the last answer."""
    ASKED = "asked"
    """The client got the event MemoryShort. It gets no other until it answers."""
    ANSWERED = "answered"
    """The client has said how much there is, and somebody may be short of memory still."""


_NEXT = {
    QuestionState.ENOUGH: {QuestionState.ASKED},
    QuestionState.ASKED: {QuestionState.ANSWERED},
    QuestionState.ANSWERED: {QuestionState.ASKED, QuestionState.ENOUGH},
}


class MemoryQuestion:
    """The question to one app: whether it was asked, for how many bytes, and for which rows.

    Rows have numbers, in the order of their turns.

    Args:
        send: takes the event MemoryShort.

    Attributes:
        state: changed by `enter` only.
    """

    def __init__(self, send: Callable[[MemoryShort], None]) -> None:
        self.state = QuestionState.ENOUGH
        self._send_event = send
        self._needed = 0  # bytes in all that it was asked for; 0: there was enough since
        self._numbers: set[int] = set()  # of those that do not fit alone, for whom it was asked

    def _enter(self, state: QuestionState) -> None:
        """Go on to `state`.

        Raises:
            RuntimeError: it may not follow the question's state.
        """
        self.state = follow("the question", self.state, state, _NEXT)

    def ask(self, needed: int, most: int) -> None:
        """Ask for so many bytes in all, where there are `most`, unless that was asked."""
        if needed > max(most, self._needed):
            self._send(needed, most)

    def ask_for(self, number: int, needed: int, most: int) -> bool:
        """Ask for a row whose text does not fit alone.

        Args:
            number: the row's.
            needed: bytes that it takes.
            most: bytes that there are.

        Returns:
            Whether that was asked, and answered.
        """
        if self.state is QuestionState.ANSWERED and number in self._numbers:
            self._numbers.remove(number)
            return True
        self._send(needed, most)
        if needed <= self._needed:
            self._numbers.add(number)
        return False

    def _send(self, needed: int, most: int) -> None:
        if self.state is not QuestionState.ASKED:
            self._enter(QuestionState.ASKED)
            self._needed = needed
            self._send_event(MemoryShort(needed - most))

    def note_answer(self) -> None:
        """Note that the client has said how much there is, asked or not."""
        if self.state is QuestionState.ASKED:
            self._enter(QuestionState.ANSWERED)

    def note_enough(self) -> None:
        """Note that nobody is short of memory. What is asked next is a new question."""
        self._needed = 0
        self._numbers.clear()
        if self.state is QuestionState.ANSWERED:
            self._enter(QuestionState.ENOUGH)
