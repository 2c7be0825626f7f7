"""Reading a model's weights, in slices short enough to fall between decode steps."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx_lm.utils import load_model, maybe_set_recommended_wired_limit

from mlxsrv.engine.batch import Batch, weights
from mlxsrv.engine.prefill import Pace
from mlxsrv.engine.prompt_cache import PromptCache
from mlxsrv.events import Job, Load, Sampling

_SLICE_BYTES = 256 * 1024 * 1024


def read_model(path: str) -> Generator[None, None, tuple[Any, int]]:
    """Read the model in folder `path`, yielding between slices; returns `(model, bytes)`.

    Weights are mapped lazily, then brought into memory `_SLICE_BYTES` at a time, so that other
    models' streams go on beside the load. Raises what mlx-lm raises on files it cannot use.
    """
    # With nothing under way: the limit must not change during an asynchronous evaluation.
    mx.synchronize()
    maybe_set_recommended_wired_limit()
    model, _ = load_model(Path(path), lazy=True)
    yield
    lay_out(model)
    total = 0
    pending: list[mx.array] = []
    size = 0
    for array in weights(model):
        pending.append(array)
        size += array.nbytes
        if size >= _SLICE_BYTES:
            mx.eval(pending)
            total, pending, size = total + size, [], 0
            yield
    mx.eval(pending)
    yield
    return model, total + size


def lay_out(model: Any) -> None:
    """Keep float32 weights of linear layers by columns where the CPU is the device.

    Shapes and results stay as they are, to the bit. MLX multiplies by the transposed weight, and
    the reference BLAS of its Linux wheels does so 1.6 to 1.9 times as fast if that is contiguous:
    it can then add up columns, many at a time, instead of one dot product after the other.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.weight.dtype == mx.float32:
            layer.weight = mx.contiguous(layer.weight.T).T


def warm_up(model: Any) -> None:
    """Run the model once for each shape of work.

    MLX compiles parts of a model on first use, on the CPU back end with a C++ compiler: seconds
    that no request should pay for. It also finds out whether the weights compute at all.
    """
    batch = Batch(model, max_rows=2, pace=Pace(16, 1.0), cached=PromptCache(0))
    for i, temperature in enumerate((0.0, 1.0)):
        sampling = Sampling(temperature=temperature, top_p=0.9)
        batch.submit(Job(i, "", (0, 1, 2), 2, frozenset(), sampling))
    while not batch.idle:
        batch.decode()
        batch.prefill()


def make_batch(model: Any, command: Load) -> Batch:
    """The batch of a model that was just read."""
    return Batch(
        model,
        max_rows=command.max_rows,
        pace=Pace(command.prefill_chunk, command.max_gap),
        cached=PromptCache(_prompt_cache_bytes(command.prompt_cache_bytes)),
    )


def _prompt_cache_bytes(asked: int | None) -> int:
    """What was asked for, else an eighth of the memory that the device works in."""
    if asked is not None:
        return asked
    info = mx.device_info()
    memory = info.get("max_recommended_working_set_size") or info.get("memory_size")
    if not memory:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(memory) // 8
