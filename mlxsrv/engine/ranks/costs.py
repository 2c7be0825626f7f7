"""The costs of a row where each rank has its own share of the KV cache.

Used on the device thread only.
"""

from __future__ import annotations

import msgspec

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.ranks.rank_group import RankGroup

_TOKENS = 4096  # of a row, to compare costs by


def find_greatest(own: tuple[KVCost, ...], ranks: RankGroup) -> tuple[KVCost, ...]:
    """The costs on the rank where a row takes the most. The scheduler counts with these, so the
    budget is kept on every rank."""
    every = [
        msgspec.msgpack.decode(each, type=tuple[KVCost, ...])
        for each in ranks.exchange(msgspec.msgpack.encode(own))
    ]
    return max(every, key=lambda costs: sum(cost.bytes(_TOKENS) for cost in costs))
