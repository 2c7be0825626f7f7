"""Measure mlx-lm without a server: its generators, called in a process of their own.

`run_task` starts `python -m benchmarks.inprocess`, which reads a Task from its standard input and
writes Figures to its standard output.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

import msgspec
from mlx_lm.generate import BatchGenerator, stream_generate
from mlx_lm.utils import load

TASK_TIMEOUT = 300.0
_WARM_UP_TOKENS = 8

SampleTokens: TypeAlias = Callable[[Any], Any]
"""A sampler of mlx-lm's: log-probabilities to token ids."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and a number of tokens to generate, greedily."""

    folder: str
    chats: tuple[list[dict[str, str]], ...]
    """The messages of each prompt."""
    max_tokens: int
    rows: int = 0
    """Prompts decoded together by `BatchGenerator`; 0: one after another by `stream_generate`."""


class Figures(msgspec.Struct, frozen=True):
    tokens: int
    seconds: float
    step_p50: float | None = None
    """Milliseconds between one token and the next, of a single stream."""


def run_task(task: Task) -> Figures:
    """The task's figures, by a process that ends with it."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.inprocess"],
        input=msgspec.json.encode(task),
        capture_output=True,
        timeout=TASK_TIMEOUT,
    )
    if done.returncode != 0:
        tail = done.stderr[-2000:].decode(errors="replace")
        raise RuntimeError(f"in-process generation ended with status {done.returncode}:\n{tail}")
    return msgspec.json.decode(done.stdout, type=Figures)


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    rows: int,
    max_tokens: int,
    samplers: Sequence[SampleTokens] | None = None,
) -> Figures:
    """All prompts through one `BatchGenerator`, `rows` at a time; none ends early."""
    generator = BatchGenerator(model, max_tokens=max_tokens, completion_batch_size=rows)
    started = time.perf_counter()
    generator.insert([list(prompt) for prompt in prompts], samplers=samplers)
    tokens = 0
    while responses := generator.next_generated():
        tokens += len(responses)
    seconds = time.perf_counter() - started
    generator.close()
    return Figures(tokens, seconds)


def generate_streams(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> Figures:
    """Each prompt through `stream_generate`, one after another."""
    started = time.perf_counter()
    tokens = 0
    steps: list[float] = []
    for prompt in prompts:
        answer = stream_generate(model, tokenizer, list(prompt), max_tokens=max_tokens)
        arrivals = [time.perf_counter() for _ in answer]
        tokens += len(arrivals)
        steps.extend(after - before for before, after in pairwise(arrivals))
    return Figures(tokens, time.perf_counter() - started, 1000 * median(steps))


def _run(task: Task) -> Figures:
    model, tokenizer = load(task.folder)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in task.chats
    ]
    if not task.rows:
        generate_streams(model, tokenizer, prompts[:1], max_tokens=_WARM_UP_TOKENS)
        return generate_streams(model, tokenizer, prompts, max_tokens=task.max_tokens)
    generate_batch(model, prompts[: task.rows], rows=task.rows, max_tokens=_WARM_UP_TOKENS)
    return generate_batch(model, prompts, rows=task.rows, max_tokens=task.max_tokens)


def main() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    # mlx-lm may print while it loads
    output, sys.stdout = sys.stdout, sys.stderr
    output.buffer.write(msgspec.json.encode(_run(task)))


if __name__ == "__main__":
    main()
