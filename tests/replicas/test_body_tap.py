"""A body is passed on as it comes, and what is made of it is made once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mlxsrv.replicas.body_tap import BodyTap


class Chunk(bytes):
    """A part of a body, which nobody appends to what came before: that copies all of it anew."""

    def __radd__(self, other: bytes) -> bytes:
        raise AssertionError("it copies what came before")


def tapped(chunks: Sequence[bytes], *, whole: bool) -> tuple[BodyTap[bytes], list[bytes]]:
    """A tap through which these chunks went, and all that it has made."""
    messages = [{"type": "http.request", "body": Chunk(each), "more_body": True} for each in chunks]
    if whole:
        messages[-1]["more_body"] = False
        messages.append({"type": "http.disconnect"})
    coming = iter(messages)
    made: list[bytes] = []

    async def receive() -> dict[str, object]:
        return next(coming)

    def make(body: bytes) -> bytes:
        made.append(body)
        return body

    async def run() -> BodyTap[bytes]:
        tap = BodyTap(receive, make)
        assert [await tap.receive() for _ in messages] == messages
        return tap

    return asyncio.run(run()), made


@pytest.mark.parametrize("whole", [True, False])
def test_a_body_is_used_once_and_not_kept(whole: bool) -> None:
    tap, made = tapped([b"a", b"", b"bc"], whole=whole)
    assert made == ([b"abc"] if whole else []), "as soon as all of it has come"
    assert [tap.finish(), tap.finish()] == [b"abc", b"abc"]
    assert made == [b"abc"]
    assert tap._parts == []
