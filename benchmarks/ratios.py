"""Compare mlxsrv with its peers, measure by measure: `python -m benchmarks.ratios`.

Most measures are ours over the same of a peer, taken by turns on the same tiny random-weight
model: `mlx_lm.server` over HTTP, or mlx-lm's generators in a process without a server. A few are
ours over ours. Each ratio is the median of the pairs' own ratios, for a machine that slows down
slows both sides of a pair. No two servers run at a time.

- `greedy`, `mixed`, `seeded` at 8 and 32 streams: tokens per second. Mixed requests each have a
  temperature and a top_p of their own, seeded ones a seed.
- `mixed-over-greedy`: what of ours at 32 streams is left when every row samples in its own way.
- `over-http`: the greedy rate over that of `BatchGenerator`. The load generator takes its share of
  the cores from the server, so a consumer that does nothing else takes as much from the generator:
  processor time per wall time, as the load generator had it (`time.process_time`, system calls
  included) when it last measured ours with as many streams, and about as finely spread.
- `single-gap`: one stream's median gap over the median step of `stream_generate`.
- `ttft-32`: TTFT p99 of 32 streams, each connection opened as part of its request, as most clients
  do. `ttft-32-open`: with all connections opened before. Both, because `mlx_lm.server` listens with
  a backlog of 5: of a burst of connections the kernel drops the rest, and tries again a second
  later. The first is what a client sees, the second what the server's own work amounts to.
- `http-46m-8`: as `over-http`, with a model that has real work to do and no consumer beside it:
  few and short requests, since such a model reads only some 40 tokens a second on two cores.
- `follow-up`: TTFT of a chat's second turn over that of its first, of 2,000 tokens and new to the
  server. On the tiny model, whose first turn takes some 300 ms: a clear signal, where the 46M one
  would take a minute.
- `prefill-gap`: 8 streams' p99 gap while a prompt of 4,000 tokens is read, over that without.
- `max-gap`: with `--max-gap 0.05`, the longest gap of 4 streams while a prompt of 1,000 tokens is
  read (the median of five prompts), in units of it; above 2 it was exceeded by more than another
  chunk of that size. With a model of 5M weights, for a step of the 46M one alone takes longer than
  that on a small machine.
- `start`: from the start of the process to the first token of one request, tried every 10 ms.
- `memory`: resident memory after 2,000 requests over that after 200, with a prompt cache of 2 MiB
  where there is one, full by then: what it holds is not growth.
- `qwen` at 8 and 32 streams, with a vocabulary of 151,936: tokens per second with Qwen's own
  sampling parameters. `qwen-over-greedy` and its like: what of ours is left there when each request
  asks for that (see `benchmarks.filters`).

A probe that fails spoils only the measures that need it; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import servers
from benchmarks.hosts import Bench, Host, LeftOut, Place, Reading, write_models
from benchmarks.measures import HOSTS, REQUIRED_OPTIONS, Figure, Measure, Probe, list_measures
from benchmarks.report import (
    BIAS,
    Machine,
    describe_machine,
    format_machine,
    format_number,
    format_table,
    write_json,
)

_DESCRIPTION = "Measure mlxsrv against mlx-lm, and print the ratios."


class Entry(msgspec.Struct, frozen=True):
    """The outcome of one probe in one pair."""

    pair: int
    host: str
    probe: str
    reading: Reading = Reading({})
    failure: str | None = None
    left_out: str | None = None


class Row(msgspec.Struct, frozen=True):
    """A line of the table."""

    name: str
    ours: str
    theirs: str
    ratios: list[float]
    must: float | None
    goal: float | None
    at_most: bool
    verdict: str
    failures: list[str]
    left_out: list[str]


class Result(msgspec.Struct, frozen=True):
    """All of a run, for `--json`."""

    machine: Machine
    pairs: int
    quick: bool
    rows: list[Row]
    entries: list[Entry]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where something could not be measured."""
    arguments = _parse(argv)
    servers.exit_on_sigterm()
    measures = [measure for measure in list_measures() if measure.name in arguments.only]
    machine = describe_machine()
    print(format_machine(machine))
    print(f"theirs: {arguments.peer or 'mlx_lm.server'}, and mlx-lm in process; ", end="")
    print(f"{arguments.pairs} by turns{', quick' if arguments.quick else ''}", end="")
    print("" if arguments.openblas else "; ours without OpenBLAS")
    print(f"{BIAS}\n", flush=True)
    entries = run_pairs(measures, arguments)
    rows = [summarise(measure, entries) for measure in measures]
    print(format_rows(rows))
    print(format_reasons(rows))
    if arguments.json:
        write_json(arguments.json, Result(machine, arguments.pairs, arguments.quick, rows, entries))
    return int(any(row.failures for row in rows))


def run_pairs(measures: Sequence[Measure], arguments: argparse.Namespace) -> list[Entry]:
    """Take all figures that the measures need, once per pair."""
    wanted = list(dict.fromkeys(figure.probe for m in measures for figure in m.figures))
    hosts = [host for host in HOSTS if any(probe.host == host for probe in wanted)]
    entries: list[Entry] = []
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        models = write_models(Path(folder), sorted({host.model for host in hosts}))
        peer = servers.Side("peer", url=arguments.peer) if arguments.peer else None
        bench = Bench(
            models,
            arguments.quick,
            peer=peer,
            peer_model=arguments.peer_model,
            openblas=arguments.openblas,
        )
        for bench.pair in range(arguments.pairs):
            for host in hosts if bench.pair % 2 == 0 else hosts[::-1]:
                at_host = [probe for probe in wanted if probe.host == host]
                for entry in run_host(bench, host, at_host):
                    entries.append(entry)
                    _print_progress(entry)
    return entries


def run_host(bench: Bench, host: Host, at_host: Sequence[Probe]) -> Iterator[Entry]:
    """Every probe of one host in turn."""
    try:
        with _open(bench, host) as place:
            for probe in at_host:
                yield _run_probe(probe, place)
    except LeftOut as reason:
        for probe in at_host:
            yield _note(probe, bench.pair, left_out=str(reason))
    except (servers.StartError, OSError) as error:
        for probe in at_host:
            yield _note(probe, bench.pair, failure=_describe(error))


@contextlib.contextmanager
def _open(bench: Bench, host: Host) -> Iterator[Place]:
    side = _offer_options(host).make_side(bench)
    with servers.serve(side) if host.running else contextlib.nullcontext() as running:
        yield Place(bench, host, side, running)


def _offer_options(host: Host) -> Host:
    """The host without options that this mlxsrv does not have."""
    missing = [name for name in host.options[::2] if not servers.offers(name)]
    for name in missing:
        if name in REQUIRED_OPTIONS:
            raise LeftOut(f"this mlxsrv has no {name}")
    return msgspec.structs.replace(host, options=()) if missing else host


def _run_probe(probe: Probe, place: Place) -> Entry:
    pair = place.bench.pair
    try:
        reading = probe.take(place)
    except LeftOut as reason:
        return _note(probe, pair, left_out=str(reason))
    except Exception as error:  # whatever it is, the others are still to be measured
        return _note(probe, pair, failure=_describe(error))
    return Entry(pair, probe.host.program, probe.name, reading)


def _note(
    probe: Probe, pair: int, *, failure: str | None = None, left_out: str | None = None
) -> Entry:
    return Entry(pair, probe.host.program, probe.name, failure=failure, left_out=left_out)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def summarise(measure: Measure, entries: Sequence[Entry]) -> Row:
    """The measure over all pairs that have both of its figures."""
    top, bottom = (_collect(figure, entries) for figure in (measure.top, measure.bottom))
    ratios = _divide(top, bottom)
    mine = [entry for entry in entries if _belongs(entry, measure.figures)]
    ours, theirs = _format_median(top, measure.unit), _format_median(bottom, measure.unit)
    if measure.own:
        ours, theirs = f"{ours} / {theirs}" if ratios else "-", _format_peer(measure, entries)
    return Row(
        name=measure.name,
        ours=ours,
        theirs=theirs,
        ratios=ratios,
        must=measure.must,
        goal=measure.goal,
        at_most=measure.at_most,
        verdict=measure.judge(median(ratios)) if ratios else "-",
        failures=_collect_notes((entry, entry.failure) for entry in mine),
        left_out=_collect_notes((entry, entry.left_out) for entry in mine),
    )


def _collect(figure: Figure, entries: Sequence[Entry]) -> dict[int, float]:
    """The figure's value in each pair that has one."""
    return {
        entry.pair: entry.reading.figures[figure.key]
        for entry in entries
        if _belongs(entry, [figure]) and figure.key in entry.reading.figures
    }


def _belongs(entry: Entry, figures: Iterable[Figure]) -> bool:
    taken = (entry.host, entry.probe)
    return any(taken == (figure.probe.host.program, figure.probe.name) for figure in figures)


def _divide(top: dict[int, float], bottom: dict[int, float]) -> list[float]:
    return [top[pair] / bottom[pair] for pair in sorted(top.keys() & bottom.keys())]


def _collect_notes(notes: Iterable[tuple[Entry, str | None]]) -> list[str]:
    """Return each note once, with the host that it comes from."""
    return list(dict.fromkeys(f"{entry.host}, {note}" for entry, note in notes if note))


def _format_median(values: dict[int, float], unit: str) -> str:
    return f"{format_number(median(values.values()))} {unit}" if values else "-"


def _format_peer(measure: Measure, entries: Sequence[Entry]) -> str:
    """The peer's own ratio, as it would stand in ours' place."""
    if measure.peer is None:
        return "-"
    ratios = _divide(*(_collect(figure, entries) for figure in measure.peer))
    return f"{median(ratios):.2f} by itself" if ratios else "-"


def format_rows(rows: Sequence[Row]) -> str:
    table = [["measure", "ours", "theirs", "ratio", "of the pairs", "must", "goal", "met"]]
    for row in rows:
        sign = "<=" if row.at_most else ">="
        targets = ["-" if it is None else f"{sign} {it:g}" for it in (row.must, row.goal)]
        table.append([row.name, row.ours, row.theirs, *_format_ratios(row), *targets, row.verdict])
    return format_table(table)


def _format_ratios(row: Row) -> tuple[str, str]:
    if row.ratios:
        least, greatest = min(row.ratios), max(row.ratios)
        return f"{median(row.ratios):.2f}", f"{least:.2f} to {greatest:.2f}"
    return "failed" if row.failures else "left out", "-"


def format_reasons(rows: Sequence[Row]) -> str:
    """Why something was not measured, or not in every pair."""
    lines = [f"{row.name} failed: {reason}" for row in rows for reason in row.failures]
    lines += [f"{row.name} left out: {reason}" for row in rows for reason in row.left_out]
    return "\n".join(lines)


def _print_progress(entry: Entry) -> None:
    figures = entry.reading.figures.items()
    numbers = ", ".join(f"{key} {format_number(value)}" for key, value in figures)
    said = numbers or (f"failed: {entry.failure}" if entry.failure else "left out")
    where = f"pair {entry.pair + 1}, {entry.host}, {entry.probe}"
    print(f"{where}: {said}", file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [measure.name for measure in list_measures()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ratios", description=_DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="one short pair, to see that it works")
    parser.add_argument("--pairs", type=int, help="times to measure each side (default: 5)")
    parser.add_argument(
        "--only",
        type=lambda text: _parse_names(text, names),
        default=names,
        metavar="NAME,...",
        help=", ".join(names),
    )
    parser.add_argument(
        "--peer", metavar="URL", help="a running server to measure instead of mlx_lm.server"
    )
    parser.add_argument("--peer-model", metavar="ID", help="`model` to ask it for")
    parser.add_argument(
        "--no-openblas",
        dest="openblas",
        action="store_false",
        help="run mlxsrv as if its extra blas were not installed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all readings here")
    arguments = parser.parse_args(argv)
    arguments.pairs = arguments.pairs or (1 if arguments.quick else 5)
    return arguments


def _parse_names(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no measure: {name!r}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
