"""Measure the cost of metrics, by token and by step of 32 rows: `python -m benchmarks.observe`.

The way of a token through the event loop without observers, against the same with the metrics on.
In process, without an engine: what is measured is Python alone, and the step that it is compared
with is one that the engine took on the same kind of machine.
"""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial

from mlxsrv.engine.events import JobEvent, Receiver, Token
from mlxsrv.service.observing import Observer, Timing
from mlxsrv.web.observability.metrics import Metrics

ROWS = 32
STEPS = 2_000
STEP_SECONDS = 32 / 4_502
"""A decode step of 32 rows of a model 64 wide, by the README: about the shortest that there is."""


class Reader:
    """Takes tokens as a reply does, as far as the way there is concerned."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def receive(self, choice: int, event: JobEvent) -> None:
        if isinstance(event, Token):
            self.tokens.append(event.id)


def run(observers: tuple[Observer, ...]) -> float:
    """Seconds of CPU time for a step's tokens, on average."""
    receivers: list[Receiver] = []
    for row in range(ROWS):
        receiver: Receiver = partial(Reader().receive, row)
        receivers.append(Timing(observers, "m").watch(receiver) if observers else receiver)
    events = [Token(row, 17) for row in range(ROWS)]
    gc.collect()
    begun = time.process_time()
    for _ in range(STEPS):
        for receiver, event in zip(receivers, events, strict=True):
            receiver(event)
    return (time.process_time() - begun) / STEPS


def main() -> None:
    metrics: tuple[Observer, ...] = (Metrics(),)
    pairs = [(run(()), run(metrics)) for _ in range(9)]
    off, on = (statistics.median(times) for times in zip(*pairs, strict=True))
    more = statistics.median(b - a for a, b in pairs)
    print(f"{ROWS} tokens, metrics off / on: {off * 1e6:.1f} / {on * 1e6:.1f} µs")
    print(f"a token more: {more / ROWS * 1e9:.0f} ns")
    print(f"of a step of {STEP_SECONDS * 1e3:.1f} ms: {more / STEP_SECONDS:.2%}")


if __name__ == "__main__":
    main()
