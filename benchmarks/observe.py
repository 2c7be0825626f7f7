"""Measure the cost of metrics, by token and by step of 32 rows, and that of the totals, which are
always kept, by request: `python -m benchmarks.observe`.

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
from mlxsrv.generation.outputs import Usage
from mlxsrv.service.observing import Generated, Observer, RequestEnded, Timing
from mlxsrv.web.observability.metrics import Metrics
from mlxsrv.web.observability.totals import Totals

ROWS = 32
STEPS = 2_000
REQUESTS = 20_000
STEP_SECONDS = 32 / 4_502
"""A decode step of 32 rows of a model 64 wide, where a server gave 4,502 tokens a second: about the
shortest that there is."""


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
        receivers.append(Timing(observers, "m", wanted=False).watch(receiver))
    events = [Token(row, 17) for row in range(ROWS)]
    gc.collect()
    begun = time.process_time()
    for _ in range(STEPS):
        for receiver, event in zip(receivers, events, strict=True):
            receiver(event)
    return (time.process_time() - begun) / STEPS


def run_totals() -> float:
    """Seconds of CPU time that the totals take for a request, on average."""
    totals = Totals()
    gc.collect()
    begun = time.process_time()
    for _ in range(REQUESTS):
        Timing((totals,), "m", wanted=False)
        totals.ended(_ended())
    return (time.process_time() - begun) / REQUESTS


def _ended() -> RequestEnded:
    generated = Generated(
        id="chatcmpl-1",
        model="m",
        usage=Usage(prompt_tokens=100, completion_tokens=50),
        reasons=("stop",),
        begun=1.0,
        ttft=0.1,
        started=1.01,
        first_token=None,
        last_token=None,
        error=None,
    )
    return RequestEnded(
        method="POST",
        route="/v1/chat/completions",
        status=200,
        headers={},
        id="1",
        time=1,
        begun=1.0,
        ended=2.0,
        operation="chat",
        model="m",
        generated=generated,
    )


def main() -> None:
    metrics: tuple[Observer, ...] = (Metrics(),)
    pairs = [(run(()), run(metrics)) for _ in range(9)]
    off, on = (statistics.median(times) for times in zip(*pairs, strict=True))
    more = statistics.median(b - a for a, b in pairs)
    print(f"{ROWS} tokens, metrics off / on: {off * 1e6:.1f} / {on * 1e6:.1f} µs")
    print(f"a token more: {more / ROWS * 1e9:.0f} ns")
    print(f"a request's totals: {min(run_totals() for _ in range(9)) * 1e6:.1f} µs")
    print(f"of a step of {STEP_SECONDS * 1e3:.1f} ms: {more / STEP_SECONDS:.2%}")


if __name__ == "__main__":
    main()
