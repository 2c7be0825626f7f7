"""Running a model once for each shape of work, before it serves.

MLX compiles parts of a model on first use, on the CPU back end with a C++ compiler: seconds that
no request should pay for. A warm-up also finds out whether the weights compute at all.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import mlx.core as mx

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.embedding.embedding_models import EmbeddingEncoder
from mlxsrv.engine.execution.batch_check import check_batching
from mlxsrv.engine.execution.text_runner import TextRunner
from mlxsrv.engine.faults import NOT_A_NUMBER, describe_error
from mlxsrv.engine.orders import Job
from mlxsrv.engine.plans import Decode, FreedRow, RowGroup, Span
from mlxsrv.engine.ranks.rank_group import RankGroup
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Sampling

_STEPS = 3  # two tokens: a step gives the tokens of the step before
_COLUMNS = 256


def warm_up(
    model: Any, caches: KVCacheFactory, ranks: RankGroup | None = None
) -> Generator[None, None, None]:
    """Find out whether rows can share a pass. Then generate two tokens in two rows, one greedy and
    one sampled. Yields between passes.

    Raises ValueError if the model cannot compute.
    """
    yield from check_batching(model, caches, ranks)
    runner = TextRunner(
        model, caches=caches, steerer=Steerer(model), prompt_cache_bytes=0, ranks=ranks
    )
    jobs = [
        Job(i, "", (0, 1, 2), 2, frozenset(), Sampling(temperature=temperature, top_p=0.9))
        for i, temperature in enumerate((0.0, 1.0))
    ]
    for rows in [jobs] if caches.batched else [[job] for job in jobs]:
        yield from _generate(runner, rows)


def _generate(runner: TextRunner, jobs: list[Job]) -> Generator[None, None, None]:
    """Read the prompt that these jobs share, and decode them together."""
    rows = tuple(job.id for job in jobs)
    runner.admit(jobs)
    span = Span(rows=rows, begin=0, end=len(jobs[0].prompt) - 1, opens=True, joins=rows)
    try:
        runner.read([span])
    except Exception as error:
        raise ValueError(describe_error(error)) from error
    yield
    for step in range(_STEPS):
        groups = (RowGroup(rows, len(rows), _COLUMNS),) if step == 0 else None
        decoded, fault = runner.decode(Decode(model=0, groups=groups))
        if fault is not None:
            raise ValueError(fault.reason)
        if decoded.broken:
            raise ValueError(NOT_A_NUMBER)
        yield
    runner.release([FreedRow(row) for row in rows])


def warm_up_encoder(encoder: EmbeddingEncoder) -> Generator[None, None, None]:
    """Run a text alone, and one beside a longer one, yielding after each."""
    tokens = mx.array([[0, 1, 2], [0, 0, 0]])
    mask = mx.array([[True, True, True], [True, False, False]])
    for rows in (1, 2):
        hidden = encoder.run(tokens[:rows], mask[:rows], [1] * rows if encoder.labels else None)
        mx.eval(encoder.classify(hidden, mask[:rows]) if encoder.labels else hidden)
        yield
