"""The choices and the matter that an input of the fuzzer holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

S = TypeVar("S", bound=Sequence[object])
LONGEST = 4096
"""Bytes of an input that are looked at: references are slow, and what is found should be short."""


class Source:
    """An input, read from its beginning: bytes that choose, then fields with 0xFF between them,
    which is in no UTF-8. Beyond the end there are zeros, and empty fields."""

    def __init__(self, data: bytes) -> None:
        self._data = data[:LONGEST]
        self._at = 0

    def number(self, limit: int) -> int:
        """One byte, as a number below `limit`."""
        taken = self._data[self._at : self._at + 1]
        self._at += 1
        return int.from_bytes(taken, "big") % limit

    def flag(self) -> bool:
        return self.number(2) == 1

    def sizes(self) -> list[int]:
        """Return sizes of pieces, to be used over and over; some of them are 0."""
        sizes = [self.number(9) for _ in range(3)]
        return sizes if any(sizes) else [1]

    def rest(self) -> bytes:
        return self._data[self._at :]

    def fields(self) -> list[bytes]:
        return self.rest().split(b"\xff")

    def texts(self) -> list[str]:
        return [field.decode(errors="replace") for field in self.fields()]


def cut(whole: S, sizes: Iterable[int]) -> Iterator[S]:
    sizes = list(sizes)
    at = turn = 0
    while at < len(whole):
        size = sizes[turn % len(sizes)]
        yield whole[at : at + size]  # type: ignore[misc]  # a slice of S is an S
        at, turn = at + size, turn + 1
