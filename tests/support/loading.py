"""Models that are loaded slice by slice, by plans made by hand; and what they leave in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxsrv.engine.loading.load import ResidentModel
from mlxsrv.engine.loading.loader import Loader
from mlxsrv.engine.orders import Job, Load
from mlxsrv.engine.outcomes import LoadStep
from mlxsrv.engine.plans import Decode, FreedRow, Keep, LoadSlice, RowGroup, Span
from mlxsrv.generation.parameters import Sampling

MIB = 1024 * 1024
COLUMNS = 512


class Refused(Exception):
    """The load was refused: the reason."""


def make_load(path: Path | str, name: str = "m", **more: Any) -> Load:
    settings = {"max_rows": 4, "prefill_chunk": 64, "max_gap": 0.2, "prompt_cache_bytes": MIB}
    return Load(model=name, path=str(path), **(settings | more))


def run_load(loader: Loader, number: int, order: Load, limit: int = MIB) -> list[LoadStep]:
    """Load a model. Returns all steps; the last one says how it ended."""
    steps = [loader.load(LoadSlice(model=number, limit=limit, order=order))]
    while steps[-1].loaded is None and steps[-1].refusal is None:
        steps.append(loader.load(LoadSlice(model=number, limit=limit)))
    return steps


def load(path: Path, others: Sequence[ResidentModel] = (), **more: Any) -> ResidentModel:
    """Load a model beside others. Raises Refused."""
    models = dict(enumerate(others))
    # As after a load: an array that takes a free buffer may get a larger one.
    mx.clear_cache()
    step = run_load(Loader(models), len(others), make_load(path, **more))[-1]
    if step.refusal is not None:
        raise Refused(step.refusal.reason)
    return models[len(others)]


@contextmanager
def nothing_left(within: int = 4096) -> Iterator[None]:
    """MLX has as much memory in use afterwards as before. Without the cyclic collector: a server
    freezes it when its first model is there, so a model in a reference cycle would stay."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    gc.disable()
    try:
        yield
        mx.synchronize()
        mx.clear_cache()
        assert mx.get_active_memory() - before < within
    finally:
        gc.enable()


class HandRunner:
    """Has a model generate greedy text, by plans made by hand.

    Attributes:
        kept: the numbers of the entries that prompts were kept as, which all but their last tokens
            were read of.
    """

    def __init__(self, resident: ResidentModel) -> None:
        assert resident.text is not None
        self.text = resident.text
        self.kept: dict[tuple[int, ...], int] = {}
        self._numbers = count()

    def generate(self, *prompts: tuple[int, ...], max_tokens: int = 30) -> list[list[int]]:
        """Greedy text of these prompts, decoded together where rows can be."""
        if self.text.facts.batched:
            return self._decode(prompts, max_tokens)
        return [text for prompt in prompts for text in self._decode([prompt], max_tokens)]

    def _decode(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[int]]:
        rows = self.start(*prompts)
        texts = self.step(rows, max_tokens)
        self.release(rows)
        return texts

    def start(self, *prompts: tuple[int, ...]) -> list[int]:
        """Read these prompts, and keep each. Those that are kept already are not read again.
        Returns the ids of the rows."""
        rows = [next(self._numbers) for _ in prompts]
        greedy = Sampling(temperature=0)
        admitted = self.text.admit(
            [Job(i, "m", p, 10**6, frozenset(), greedy) for i, p in zip(rows, prompts, strict=True)]
        )
        assert not admitted.failures
        for row, prompt in zip(rows, prompts, strict=True):
            self._read(row, prompt)
        return rows

    def _read(self, row: int, prompt: tuple[int, ...]) -> None:
        last, source = len(prompt) - 1, self.kept.get(prompt)
        keep = Keep(next(self._numbers), last) if last and source is None else None
        span = Span(
            rows=(row,),
            begin=0 if source is None else last,
            end=last,
            source=source,
            opens=True,
            keep=keep,
            joins=(row,),
        )
        for kept in self.text.read([span]).kept:
            self.kept[prompt] = kept.entry

    def step(self, rows: Sequence[int], tokens: int, *, proposals: int = 0) -> list[list[int]]:
        """Have rows that were just read draw at least so many tokens each. `proposals` are asked of
        the draft model in each step but the first."""
        texts: Mapping[int, list[int]] = {row: [] for row in rows}
        groups: tuple[RowGroup, ...] | None = (RowGroup(tuple(rows), len(rows), COLUMNS),)
        asked: tuple[int, ...] = ()
        while any(len(text) < tokens for text in texts.values()):
            work = Decode(model=0, groups=groups, proposals=asked)
            decoded, fault = self.text.decode(work)
            assert fault is None, fault
            assert not decoded.broken
            for row, token in decoded.tokens:
                texts[row].append(token)
            groups, asked = None, (proposals,) * len(rows) if proposals else ()
        return [texts[row] for row in rows]

    def release(self, rows: Sequence[int]) -> None:
        self.text.release([FreedRow(row) for row in rows])


def generate(
    resident: ResidentModel, *prompts: tuple[int, ...], max_tokens: int = 30
) -> list[list[int]]:
    """Greedy text of these prompts, decoded together where rows can be."""
    return HandRunner(resident).generate(*prompts, max_tokens=max_tokens)
