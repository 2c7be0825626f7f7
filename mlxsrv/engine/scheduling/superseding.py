"""Superseding: which cached prompts of a chat are dropped when a longer one is cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MOST_LASTING = 6
_MOST_ENDS = 2


class Link(NamedTuple):
    """A cached prompt of a chat.

    Attributes:
        tokens: how many it has.
        lasting: it ends at a checkpoint, and not where a prompt or an answer ended.
    """

    tokens: int
    lasting: bool


def find_superseded(chain: Sequence[Link]) -> set[int]:
    """Find the cached prompts of a chat that are of little use beside a longer one.

    The last two ends of prompts and answers stay, for one who edits the last message or asks
    again. So do six checkpoints: the shortest, which other chats share, the two longest, and
    those between them that are farthest apart.

    Args:
        chain: prompts that each begin with the one before it, and with which the new one begins.

    Returns:
        Their places in `chain`.
    """
    ends = [place for place, link in enumerate(chain) if not link.lasting]
    lasting = [place for place, link in enumerate(chain) if link.lasting]
    gone = set(ends[:-_MOST_ENDS])
    while len(lasting) > _MOST_LASTING:
        inner = range(1, len(lasting) - 2)
        least = min(
            inner, key=lambda i: chain[lasting[i + 1]].tokens - chain[lasting[i - 1]].tokens
        )
        gone.add(lasting.pop(least))
    return gone
