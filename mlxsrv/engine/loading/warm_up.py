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
from mlxsrv.engine.cache.prompt_cache import PromptCache
from mlxsrv.engine.embedding.runners import EncoderRunner
from mlxsrv.engine.events import Failed
from mlxsrv.engine.execution.batch import Batch
from mlxsrv.engine.execution.prefill import try_padding
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Sampling


def warm_up(model: Any, caches: KVCacheFactory) -> Generator[None, None, None]:
    """Generate text with two rows, one greedy and one sampled, yielding between passes.

    Raises ValueError if the model cannot compute.
    """
    caches.pads = (yield from try_padding(model)) if caches.batched else False
    batch = Batch(model, max_rows=2, pace=Pace(16, 1.0), cached=PromptCache(0), caches=caches)
    for i, temperature in enumerate((0.0, 1.0)):
        sampling = Sampling(temperature=temperature, top_p=0.9)
        batch.submit(Job(i, "", (0, 1, 2), 2, frozenset(), sampling))
    while not batch.idle:
        batch.decode()
        yield
        for event in batch.prefill():
            if isinstance(event, Failed):
                raise ValueError(event.reason)
        yield


def warm_up_encoder(runner: EncoderRunner) -> Generator[None, None, None]:
    """Run a text alone, and one beside a longer one, yielding after each."""
    tokens = mx.array([[0, 1, 2], [0, 0, 0]])
    mask = mx.array([[True, True, True], [True, False, False]])
    for rows in (1, 2):
        hidden = runner.run(tokens[:rows], mask[:rows], [1] * rows if runner.labels else None)
        mx.eval(runner.classify(hidden, mask[:rows]) if runner.labels else hidden)
        yield
