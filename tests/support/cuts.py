"""Cutting an input into feeds, for the rule that no cut changes what comes out."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from mlxsrv.generation.outputs import Channel
from mlxsrv.text.frames import Piece

S = TypeVar("S", bound=Sequence[object])


def cut(data: st.DataObject, whole: S) -> Iterator[S]:
    """`whole` in parts of any size, empty ones too."""
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=6).map(sorted))
    for start, end in zip([0, *places], [*places, len(whole)], strict=True):
        yield whole[start:end]  # type: ignore[misc]  # a slice of S is an S


def joined(pieces: Sequence[Piece], channel: Channel) -> str:
    return "".join(text for name, text in pieces if name == channel)
