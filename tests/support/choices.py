"""Chunks of a stream by the choice that they belong to."""

from __future__ import annotations

from collections import defaultdict

from tests.support.client import Body, Streamed


def by_choice(streamed: Streamed) -> list[list[Body]]:
    """The chunks of each choice, in order of their index."""
    found: defaultdict[int, list[Body]] = defaultdict(list)
    for chunk in streamed.chunks:
        for choice in chunk["choices"]:
            found[choice["index"]].append(chunk | {"choices": [choice]})
    assert set(found) == set(range(len(found)))
    return [found[index] for index in range(len(found))]
