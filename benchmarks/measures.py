"""The measures of `benchmarks.ratios`: two figures each, their ratio, and what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from benchmarks import filters, probes
from benchmarks.hosts import Host, Take


class Probe(msgspec.Struct, frozen=True):
    """One way to take figures, at one host."""

    name: str
    host: Host
    take: Take


class Figure(msgspec.Struct, frozen=True):
    """One of the figures that a probe takes."""

    probe: Probe
    key: str


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio of two figures, and what it should be."""

    name: str
    top: Figure
    bottom: Figure
    unit: str
    must: float | None = None
    goal: float | None = None
    at_most: bool = False
    """The ratio should be small; else it should be great."""
    own: bool = False
    """Both figures are ours."""
    peer: tuple[Figure, Figure] | None = None
    """The peer's own top and bottom, to show beside ours."""

    @property
    def figures(self) -> tuple[Figure, ...]:
        return (self.top, self.bottom, *(self.peer or ()))

    def judge(self, ratio: float) -> str:
        if self.goal is None:
            return "-"
        if self._holds(ratio, self.goal):
            return "goal"
        if self.must is None:
            return "-"
        return "must" if self._holds(ratio, self.must) else "MISSED"

    def _holds(self, ratio: float, target: float) -> bool:
        return ratio <= target if self.at_most else ratio >= target


OURS = Host("mlxsrv", "tiny")


PEER = Host("peer", "tiny")


LIBRARY = Host("mlx-lm", "tiny", running=False)


OURS_46M = Host("mlxsrv", "46m")


LIBRARY_46M = Host("mlx-lm", "46m", running=False)


OURS_GAP = Host("mlxsrv", "5m", ("--max-gap", str(probes.MAX_GAP)))


OURS_LARGE = Host("mlxsrv", filters.MODEL)


PEER_LARGE = Host("peer", filters.MODEL)


OURS_STARTING = Host("mlxsrv", "tiny", running=False)


PEER_STARTING = Host("peer", "tiny", running=False)


OURS_SMALL_CACHE = Host(
    "mlxsrv", "tiny", ("--prompt-cache-bytes", str(probes.MEMORY_CACHE_BYTES)), running=False
)


HOSTS = (
    PEER,
    OURS,  # between the two that it is compared with
    LIBRARY,
    OURS_46M,
    LIBRARY_46M,
    OURS_STARTING,
    PEER_STARTING,
    OURS_GAP,
    OURS_LARGE,
    PEER_LARGE,
    OURS_SMALL_CACHE,
)
"""In the order of the first pair. The next goes backwards: who is first favours neither."""


REQUIRED_OPTIONS = frozenset({"--max-gap"})
"""Without which a host makes no sense; others are left out of the command where not offered."""


_FILTERED_WELL = ("qwen", "top-k-1024")  # kinds that must cost little


Versus: TypeAlias = tuple[Probe, Probe]


def list_measures() -> list[Measure]:
    """All measures, in the order of the table."""
    rates = {
        f"{kind}-{streams}": _pair_up(f"{kind}-{streams}", probes.take_throughput(kind, streams))
        for kind in ("greedy", "mixed", "seeded")
        for streams in (8, 32)
    }
    targets = {
        "greedy-8": (1.6, 2.0),
        "greedy-32": (1.6, 2.0),
        "mixed-8": (1.8, 2.5),
        "mixed-32": (2.0, 2.7),
        "seeded-8": (3.5, 5.0),
        "seeded-32": (4.0, 5.5),
    }
    return [
        *(_compare_rates(name, rates[name], must, goal) for name, (must, goal) in targets.items()),
        _measure_mixing(),
        *(
            _compare_rates(f"over-http-{n}", (rates[f"greedy-{n}"][0], _in_process(n)), 0.8, 1.0)
            for n in (8, 32)
        ),
        _measure_single_gap(),
        *_measure_ttft(),
        _compare_rates(
            "http-46m-8",
            (
                Probe("heavy", OURS_46M, probes.take_heavy),
                Probe("heavy", LIBRARY_46M, probes.take_heavy_in_process),
            ),
            0.97,
            1.0,
        ),
        _measure_follow_up(),
        _measure_prefill_gap(),
        _measure_max_gap(),
        _measure_start(),
        _measure_memory(),
        *_measure_large(),
    ]


def _pair_up(name: str, take: Take) -> Versus:
    """The same probe at ours and at the peer."""
    return Probe(name, OURS, take), Probe(name, PEER, take)


def _in_process(streams: int) -> Probe:
    return Probe(f"batch-{streams}", LIBRARY, probes.take_in_process(streams))


def _compare_rates(name: str, sides: Versus, must: float, goal: float) -> Measure:
    top, bottom = (Figure(probe, "tokens/s") for probe in sides)
    return Measure(name=name, top=top, bottom=bottom, unit="tok/s", must=must, goal=goal)


def _measure_mixing() -> Measure:
    probe = Probe("mixing", OURS, probes.take_mixing)
    return Measure(
        name="mixed-over-greedy",
        top=Figure(probe, "mixed"),
        bottom=Figure(probe, "greedy"),
        unit="tok/s",
        must=0.85,
        goal=0.95,
        own=True,
    )


def _measure_single_gap() -> Measure:
    return Measure(
        name="single-gap",
        top=Figure(Probe("single-gap", OURS, probes.take_single_gap), "gap"),
        bottom=Figure(Probe("single-gap", LIBRARY, probes.take_single_step), "gap"),
        unit="ms",
        must=1.25,
        goal=1.1,
        at_most=True,
    )


def _measure_ttft() -> Iterator[Measure]:
    for name, connect_each in (("ttft-32", True), ("ttft-32-open", False)):
        ours, peer = _pair_up(name, probes.take_ttft(connect_each=connect_each))
        yield Measure(
            name=name,
            top=Figure(ours, "ttft"),
            bottom=Figure(peer, "ttft"),
            unit="ms",
            must=0.15 if connect_each else None,
            goal=0.08 if connect_each else None,
            at_most=True,
        )


def _measure_follow_up() -> Measure:
    ours, peer = _pair_up("follow-up", probes.take_follow_up)
    return Measure(
        name="follow-up",
        top=Figure(ours, "follow-up"),
        bottom=Figure(ours, "cold"),
        unit="ms",
        must=0.15,
        goal=0.05,
        at_most=True,
        own=True,
        peer=(Figure(peer, "follow-up"), Figure(peer, "cold")),
    )


def _measure_prefill_gap() -> Measure:
    ours, peer = _pair_up("prefill-gap", probes.take_prefill_gap)
    return Measure(
        name="prefill-gap",
        top=Figure(ours, "reading"),
        bottom=Figure(ours, "alone"),
        unit="ms",
        must=5.0,
        goal=2.0,
        at_most=True,
        own=True,
        peer=(Figure(peer, "reading"), Figure(peer, "alone")),
    )


def _measure_max_gap() -> Measure:
    probe = Probe("max-gap", OURS_GAP, probes.take_max_gap)
    return Measure(
        name="max-gap",
        top=Figure(probe, "longest"),
        bottom=Figure(probe, "max-gap"),
        unit="ms",
        must=2.0,
        goal=1.0,
        at_most=True,
        own=True,
    )


def _measure_start() -> Measure:
    return Measure(
        name="start",
        top=Figure(Probe("start", OURS_STARTING, probes.take_start), "seconds"),
        bottom=Figure(Probe("start", PEER_STARTING, probes.take_start), "seconds"),
        unit="s",
        must=1.0,
        goal=0.7,
        at_most=True,
    )


def _measure_memory() -> Measure:
    probe = Probe("memory", OURS_SMALL_CACHE, probes.take_memory)
    return Measure(
        name="memory",
        top=Figure(probe, "after"),
        bottom=Figure(probe, "before"),
        unit="MB",
        must=1.05,
        goal=1.01,
        at_most=True,
        own=True,
    )


def _measure_large() -> Iterator[Measure]:
    for streams in (8, 32):
        name, take = f"qwen-{streams}", filters.take_kind("qwen", streams)
        sides = Probe(name, OURS_LARGE, take), Probe(name, PEER_LARGE, take)
        yield _compare_rates(name, sides, 4.0, 8.0)
    for kind in filters.KINDS:
        for streams in (8, 32):
            yield _measure_filter(kind, streams, must=0.8 if kind in _FILTERED_WELL else None)


def _measure_filter(kind: str, streams: int, must: float | None) -> Measure:
    name = f"{kind}-over-greedy-{streams}"
    probe = Probe(name, OURS_LARGE, filters.take_over_greedy(kind, streams))
    return Measure(
        name=name,
        top=Figure(probe, kind),
        bottom=Figure(probe, "greedy"),
        unit="tok/s",
        must=must,
        goal=0.95 if must else 0.6,
        own=True,
    )
