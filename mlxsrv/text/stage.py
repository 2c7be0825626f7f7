"""The base of the stages of an answer's text, which no stage may import from another."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


class Stage(ABC, Generic[In, Out]):
    """Takes one answer in pieces. The output does not depend on how the input was split."""

    __slots__ = ()

    @abstractmethod
    def feed(self, part: In, /) -> Out:
        """Return what is certain now, in order."""

    @abstractmethod
    def flush(self, *, cut: bool = False) -> Out:
        """Return what waited when the answer ended, or was `cut` off by a limit."""
