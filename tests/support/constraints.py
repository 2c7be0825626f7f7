"""Constraints that let all tokens pass, or wake up late."""

from __future__ import annotations

from mlxsrv.generation.parameters import Mask


class Anything:
    """A constraint that allows every token."""

    dormant = False
    failure = None

    def fill(self, mask: Mask) -> None:
        """All bits are set already."""

    def accept(self, token: int) -> None:
        """The state is always the same."""


class WakesUp:
    """A constraint that is dormant, but for the three tokens behind each multiple of five, which
    are odd."""

    failure = None

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.bound: list[int] = []
        self._left = 0

    @property
    def dormant(self) -> bool:
        return self._left == 0

    def fill(self, mask: Mask) -> None:
        mask[:] = 0x55555555 * 2 - 2**32

    def accept(self, token: int) -> None:
        if self._left:
            self.bound.append(token)
            self._left -= 1
        elif token % 5 == 0:
            self._left = 3
        self.accepted.append(token)
