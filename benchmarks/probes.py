"""The figures that `benchmarks.ratios` compares, and how each is taken.

A probe takes some figures from a place: a server that runs, or none where the probe starts its
own. See `benchmarks.hosts` for the places and their prompts.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path

import msgspec

from benchmarks import servers
from benchmarks.burn import burning
from benchmarks.hosts import (
    Chat,
    LeftOut,
    Place,
    Reading,
    SamplingKind,
    Take,
    Unusable,
    say,
    write_bodies,
)
from benchmarks.inprocess import Task, run_task
from benchmarks.load import (
    Load,
    Report,
    Sample,
    Stream,
    percentile_ms,
    prepare,
    run_load,
    run_streams,
)

MAX_GAP = 0.05


MEMORY_CACHE_BYTES = 2 * 1024 * 1024


_MIXING: tuple[SamplingKind, ...] = ("greedy", "mixed", "mixed", "greedy")


_RETRY = 0.01  # seconds until a server that starts is asked again


_PHASE_TIMEOUT = 180.0


def take_throughput(kind: SamplingKind, streams: int) -> Take:
    """Tokens per second of `streams` at a time."""

    def take(place: Place) -> Reading:
        load = _make_throughput(place, kind, streams)
        warm_up(place, load)
        report = measure(load)
        if place.is_ours:
            place.bench.cpu_shares[streams] = report.cpu_share
        return Reading({"tokens/s": report.tokens_per_second}, (report,))

    return take


def take_mixing(place: Place) -> Reading:
    """Tokens per second of 32 streams, greedy and mixed; turns so short that a machine whose speed
    changes is as fast for both."""
    warm_up(place, _make_throughput(place, "mixed", 32))
    rates: dict[str, list[float]] = {}
    for turn, kind in enumerate(_MIXING * place.bench.choose(3, 1)):
        report = measure(_make_throughput(place, kind, 32, f"turn {turn}"))
        rates.setdefault(kind, []).append(report.tokens_per_second)
    return Reading({kind: statistics.median(taken) for kind, taken in rates.items()})


def _make_throughput(place: Place, kind: SamplingKind, streams: int, turn: str = "") -> Load:
    chats = place.write_chats(f"{kind}-{streams}{turn}", place.bench.choose(64, streams))
    return place.make_load(
        concurrency=streams,
        requests=len(chats),
        max_tokens=place.bench.choose(100, 30),
        bodies=write_bodies(chats, kind),
    )


def take_in_process(streams: int) -> Take:
    """Tokens per second of `BatchGenerator` with the prompts of the greedy load over HTTP.

    Beside it runs a consumer that takes as much of a processor as the load generator took when
    it last measured ours with as many streams.
    """

    def take(place: Place) -> Reading:
        if streams not in place.bench.cpu_shares:
            raise Unusable("the load generator's weight is not known: it did not measure ours")
        choose = place.bench.choose
        chats = place.write_chats(f"greedy-{streams}", choose(64, streams))
        with burning(place.bench.cpu_shares[streams]):
            figures = run_task(_make_task(place, chats, choose(100, 30), streams))
        return Reading({"tokens/s": figures.tokens / figures.seconds})

    return take


def take_single_gap(place: Place) -> Reading:
    """The median gap of one stream."""
    load = place.make_load(
        requests=place.bench.choose(4, 2),
        max_tokens=place.bench.choose(200, 100),
        bodies=write_bodies(_write_single(place)),
    )
    warm_up(place, load)
    report = measure(load)
    return Reading({"gap": _known(report.gap_p50)}, (report,))


def take_single_step(place: Place) -> Reading:
    """The median step of `stream_generate`."""
    figures = run_task(_make_task(place, _write_single(place), place.bench.choose(200, 100)))
    return Reading({"gap": _known(figures.step_p50)})


def take_ttft(*, connect_each: bool) -> Take:
    """TTFT p99 of 32 streams."""

    def take(place: Place) -> Reading:
        chats = place.write_chats(f"ttft-{connect_each}", place.bench.choose(128, 32))
        load = place.make_load(
            concurrency=32,
            requests=len(chats),
            max_tokens=place.bench.choose(100, 30),
            bodies=write_bodies(chats),
            connect_each=connect_each,
        )
        warm_up(place, load)
        report = measure(load)
        return Reading({"ttft": _known(report.ttft_p99)}, (report,))

    return take


def take_heavy(place: Place) -> Reading:
    """Tokens per second of 8 streams where the model has real work to do."""
    chats = _write_heavy(place)
    load = place.make_load(
        concurrency=8,
        requests=len(chats),
        max_tokens=place.bench.choose(16, 8),
        bodies=write_bodies(chats),
    )
    warm_up(place, load, requests=1, max_tokens=2)
    report = measure(load)
    return Reading({"tokens/s": report.tokens_per_second}, (report,))


def take_heavy_in_process(place: Place) -> Reading:
    figures = run_task(_make_task(place, _write_heavy(place), place.bench.choose(16, 8), 8))
    return Reading({"tokens/s": figures.tokens / figures.seconds})


def take_follow_up(place: Place) -> Reading:
    """TTFT of a chat's first turn of about 2,000 tokens, and of the turn that follows it."""
    count = place.bench.choose(3, 1)
    _ask(place, *place.write_chats("warm-up", 1, 2000))
    cold: list[float] = []
    warm: list[float] = []
    for chat in place.write_chats("follow-up", count, 2000):
        first = _ask(place, chat)
        answered = [*chat, say("assistant", first.text), say("user", "and after that?")]
        cold.append(1000 * _known(first.ttft))
        warm.append(1000 * _known(_ask(place, answered).ttft))
    return Reading({"cold": statistics.median(cold), "follow-up": statistics.median(warm)})


def take_prefill_gap(place: Place) -> Reading:
    """p99 of 8 streams' gaps: with nobody else there, and while 4,000 tokens are read."""
    times = place.bench.choose(3, 1)
    alone, prompts = asyncio.run(_watch_gaps(place, streams=8, tokens=4000, times=times))
    reading = [gap for gaps in prompts for gap in gaps]
    return Reading({"alone": _percentile(alone), "reading": _percentile(reading)})


def take_max_gap(place: Place) -> Reading:
    """The longest of 4 streams' gaps while 1,000 tokens are read, in milliseconds: the median of
    some prompts', for a machine that stops for a moment has nothing to do with them."""
    times = place.bench.choose(5, 1)
    _, prompts = asyncio.run(_watch_gaps(place, streams=4, tokens=1000, times=times))
    longest = statistics.median(max(gaps) for gaps in prompts)
    return Reading({"longest": 1000 * longest, "max-gap": 1000 * MAX_GAP})


def take_start(place: Place) -> Reading:
    """Seconds from the start of the process to the first token of one request."""
    if not place.side.command:
        raise LeftOut(f"{place.side.name} runs already")
    with servers.launch(place.side) as running:
        asked = msgspec.structs.replace(place, running=running)
        first = asyncio.run(_await_first_token(asked))
    return Reading({"seconds": first - running.started})


def take_memory(place: Place) -> Reading:
    """Resident megabytes after some requests, and after ten times as many.

    The prompt cache, where there is one, is so small that it is full before the first look.
    """
    before = place.bench.choose(200, 40)
    figures = {}
    reports = []
    with servers.serve(place.side) as running:
        assert running.pid is not None
        for name, requests in (("before", before), ("after", 9 * before)):
            load = msgspec.structs.replace(place, running=running).make_load(
                concurrency=32,
                requests=requests,
                max_tokens=8,
                bodies=write_bodies(place.write_chats(name, requests, 16)),
                connect_each=True,  # else thousands were open at a time
            )
            reports.append(measure(load))
            time.sleep(0.5)  # for the server to tidy up
            figures[name] = _read_resident(running.pid)
    return Reading(figures, tuple(reports))


def measure(load: Load) -> Report:
    """The load's report, if all its requests went as they should."""
    report = asyncio.run(run_load(load))
    if report.errors:
        raise Unusable("; ".join(f"{count} x {error}" for error, count in report.errors.items()))
    if report.short:
        raise Unusable(f"{report.short} of {report.requests} requests ended before max_tokens")
    return report


def warm_up(place: Place, load: Load, requests: int | None = None, max_tokens: int = 8) -> None:
    """Send the like of the load, so that what happens once per process has happened.

    The prompts are others than the load's: those must be new to the server.
    """
    chats = place.write_chats("warm-up", requests or load.concurrency, 8)
    bodies = tuple(
        body | {"messages": chat} for body, chat in zip(cycle(load.bodies), chats, strict=False)
    )
    measure(
        msgspec.structs.replace(
            load, requests=len(chats), max_tokens=max_tokens, bodies=bodies, connect_each=False
        )
    )


async def _watch_gaps(
    place: Place, *, streams: int, tokens: int, times: int
) -> tuple[list[float], list[list[float]]]:
    """Seconds between the tokens of some streams: undisturbed, and while each prompt is read."""
    rest = place.bench.choose(2, 1)
    await _follow(
        place.make_load(
            max_tokens=2, bodies=write_bodies(place.write_chats("warm-up", 1, tokens // 8))
        )
    )
    load = place.make_load(
        concurrency=streams,
        requests=streams,
        max_tokens=20_000,  # more than they get to: they are cut off
        bodies=write_bodies(place.write_chats("watched", streams, 16)),
        timeout=2 * _PHASE_TIMEOUT,
    )
    watched = prepare(load)
    samples = [stream.sample for stream in watched]
    running = asyncio.create_task(run_streams(watched, load))
    try:
        async with asyncio.timeout(_PHASE_TIMEOUT):
            await _await_all_begun(samples)
            await asyncio.sleep(0.2)
            quiet = (time.perf_counter(), time.perf_counter() + rest)
            await asyncio.sleep(rest)
            windows = []
            for chat in place.write_chats("long", times, tokens):
                long = await _follow(place.make_load(max_tokens=2, bodies=write_bodies([chat])))
                windows.append((long.sent, long.sent + _known(long.ttft)))
                await asyncio.sleep(0.5)
        _check(samples)
    finally:
        running.cancel()
        await asyncio.wait([running])
    return _find_gaps(samples, quiet), [_find_gaps(samples, window) for window in windows]


async def _await_all_begun(samples: Sequence[Sample]) -> None:
    while not all(sample.arrivals for sample in samples):
        _check(samples)
        await asyncio.sleep(0.01)


def _check(samples: Sequence[Sample]) -> None:
    for sample in samples:
        if sample.error is not None or sample.finish_reason is not None:
            raise Unusable(sample.error or "a stream ended while it was watched")


def _find_gaps(samples: Sequence[Sample], window: tuple[float, float]) -> list[float]:
    """All gaps that were open at some time in the window."""
    start, end = window
    gaps = [
        after - before
        for sample in samples
        for before, after in pairwise(sample.arrivals)
        if after > start and before < end
    ]
    if not gaps:
        raise Unusable("no token came while the streams were watched")
    return gaps


async def _await_first_token(place: Place) -> float:
    """When the first text came, by `time.perf_counter`."""
    body = write_bodies(place.write_chats("start", 1, 8))
    load = place.make_load(max_tokens=2, bodies=body, connect_each=True)
    async with asyncio.timeout(servers.START_TIMEOUT):
        while True:
            stream = _prepare_one(load)
            await stream.run(load.timeout)
            if stream.sample.arrivals:
                return stream.sample.arrivals[0]
            await asyncio.sleep(_RETRY)


def _ask(place: Place, chat: Chat) -> Sample:
    return asyncio.run(
        _follow(place.make_load(max_tokens=16, bodies=write_bodies([chat]), keep_text=True))
    )


async def _follow(load: Load) -> Sample:
    """One request to its end."""
    stream = _prepare_one(load)
    await stream.connect(load.timeout)
    await stream.run(load.timeout)
    if stream.sample.error is not None:
        raise Unusable(stream.sample.error)
    return stream.sample


def _prepare_one(load: Load) -> Stream:
    [stream] = prepare(msgspec.structs.replace(load, requests=1))
    return stream


def _write_single(place: Place) -> list[Chat]:
    return place.write_chats("single-gap", place.bench.choose(4, 2))


def _write_heavy(place: Place) -> list[Chat]:
    return place.write_chats("heavy", place.bench.choose(16, 8), 4)


def _make_task(place: Place, chats: Sequence[Chat], max_tokens: int, rows: int = 0) -> Task:
    return Task(
        folder=str(place.model.folder), chats=tuple(chats), max_tokens=max_tokens, rows=rows
    )


def _read_resident(pid: int) -> float:
    """Megabytes of the process that are in memory."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) / 1024
    shown = subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)], text=True, timeout=10)
    return int(shown) / 1024


def _percentile(seconds: Sequence[float]) -> float:
    return _known(percentile_ms(seconds, 99))


def _known(value: float | None) -> float:
    if value is None:
        raise Unusable("no token came")
    return value
