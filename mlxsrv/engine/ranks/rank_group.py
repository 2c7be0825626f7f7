"""The ranks as MLX connects them, and the collectives that keep them in step.

All ranks do the same work items in the same order, so they take part in the same collectives. Only
rank 0 decides: its tokens are every rank's tokens.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import msgspec
import numpy as np

from mlxsrv.engine.events import KVCost, kv_bytes

_TOKENS = 4096  # of a row, to compare costs by


class Split(Enum):
    """The ways to divide a model among ranks."""

    TENSOR = "tensor"
    """Each rank has a part of every layer."""
    PIPELINE = "pipeline"
    """Each rank has some of the layers."""


class RankGroup:
    """All ranks, seen from one of them.

    Attributes:
        rank: the number of this one.
        size: how many there are.
        split: what each has of a model.
    """

    def __init__(self, group: mx.distributed.Group, split: Split) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()
        self.split = split

    @classmethod
    def join(cls, split: Split) -> RankGroup:
        """Connect with the other ranks, as the launcher's variables say, and wait for them.

        Raises:
            RuntimeError: a rank cannot be reached, or no launcher has started this process.
        """
        return cls(mx.distributed.init(strict=True), split)

    def share(self, tokens: mx.array) -> mx.array:
        """Rank 0's tokens, on every rank; not evaluated. `(rows,)` in and out.

        The tokens of the others are multiplied by 0 and not left out: what a rank computes for
        them has collectives in which it must take part.
        """
        own = tokens if self.rank == 0 else tokens * 0
        return mx.distributed.all_sum(own, group=self._group)

    def exchange(self, data: bytes) -> list[bytes]:
        """Each rank's bytes, on every rank, in their order. Waits for all ranks, and on no GPU: a
        GPU that waits for seconds is taken for hung."""
        lengths = self._gather(mx.array([len(data)], dtype=mx.int32))
        width = max(int(lengths.max()), 1)
        padded = np.frombuffer(data.ljust(width, b"\0"), dtype=np.uint8)
        rows = self._gather(mx.array(padded)).reshape(self.size, width)
        return [row.tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]

    def exchange_number(self, number: int) -> list[int]:
        """Each rank's number, on every rank, in their order."""
        return [int(each) for each in self.exchange(str(number).encode())]

    def _gather(self, array: mx.array) -> np.ndarray[Any, Any]:
        gathered = mx.distributed.all_gather(array, group=self._group, stream=mx.cpu)
        return np.array(gathered)

    def find_greatest(self, own: tuple[KVCost, ...]) -> tuple[KVCost, ...]:
        """The KV costs on the rank where a row takes the most. The scheduler counts with these, so
        that the budget is kept on every rank.

        Args:
            own: this rank's.
        """
        every = [
            msgspec.msgpack.decode(each, type=tuple[KVCost, ...])
            for each in self.exchange(msgspec.msgpack.encode(own))
        ]
        return max(every, key=lambda costs: kv_bytes(costs, _TOKENS))

    def require_alike(self, what: str, text: str) -> None:
        """Raise ValueError on all ranks, unless all have the same text.

        Args:
            what: the kind of things that the text names, and what may help; for the message.
            text: this rank's.
        """
        if len(set(self.exchange(text.encode()))) > 1:
            raise ValueError(f"its ranks would have different {what}")

    def divide(self, model: Any, config: dict[str, Any]) -> None:
        """Cut a model of mlx-lm's down to this rank's part, in place. Nothing is evaluated.

        Raises:
            ValueError: the model cannot be divided, or not among so many ranks.
        """
        if self.split is Split.TENSOR:
            self._require(hasattr(model, "shard"))
            _check_heads(config, self.size)
            model.shard(self._group)
            return
        inner: Any = getattr(model, "model", None)
        self._require(hasattr(inner, "pipeline"))
        layers = len(inner.layers)
        if layers < self.size:
            raise ValueError(f"its {layers} layers cannot be divided among {self.size} ranks")
        inner.pipeline(self._group)

    def _require(self, can: bool) -> None:
        if not can:
            raise ValueError(
                f"mlx-lm has no {self.split.value} parallelism for this kind of model; "
                f"it has for: {', '.join(families(self.split))}"
            )


def _check_heads(config: dict[str, Any], ranks: int) -> None:
    """Raises ValueError if ranks would have different numbers of heads."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = config.get("text_config", config).get(name)
        if isinstance(count, int) and count % ranks:
            raise ValueError(f"its {count} {name} cannot be divided among {ranks} ranks")


def families(split: Split) -> list[str]:
    """The kinds of models that mlx-lm can divide so, as config.json names them."""
    return sorted(_find_families("def shard(" if split is Split.TENSOR else ".pipeline_layers"))


def _find_families(mark: str) -> Iterator[str]:
    for folder in mlx_lm.models.__path__:
        for file in Path(folder).glob("*.py"):
            if file.stem != "pipeline" and mark in file.read_text(encoding="utf-8"):
                yield file.stem
