"""Measure how fast a server streams: `python -m benchmarks.serve --url URL` or `--compare`.

`--compare` serves one tiny random-weight model with mlxsrv and with `mlx_lm.server` in turn, never
both at a time, and prints the medians over several pairs. With so small a model the arithmetic
costs next to nothing, so what remains is the servers' own work per token; `--family qwen3-46m`
shows what of that is left when the model has real work to do, and wants fewer `--requests`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeAlias

import msgspec

from benchmarks import servers
from benchmarks.load import Load, Report, run_load
from benchmarks.report import (
    BIAS,
    Machine,
    describe_machine,
    format_machine,
    format_number,
    format_table,
    write_json,
)
from benchmarks.servers import Side
from tests.support.tiny import FAMILIES, write_model


class Result(msgspec.Struct, frozen=True):
    """All of a run, for `--json`."""

    machine: Machine
    model: str
    load: Load
    reports: dict[str, list[Report]]


Figure: TypeAlias = Callable[[Report], float | None]

FIGURES: dict[str, Figure] = {
    "tokens/s": lambda report: report.tokens_per_second,
    "TTFT p50 ms": lambda report: report.ttft_p50,
    "TTFT p99 ms": lambda report: report.ttft_p99,
    "gap p50 ms": lambda report: report.gap_p50,
    "gap p99 ms": lambda report: report.gap_p99,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where any request failed, since its figures then mean little."""
    arguments = _parse(argv)
    servers.exit_on_sigterm()
    try:
        result = compare(arguments) if arguments.compare else measure_url(arguments)
    except servers.StartError as error:
        raise SystemExit(str(error)) from None
    if arguments.json:
        write_json(arguments.json, result)
    return int(_tell_failures(result))


def measure_url(arguments: argparse.Namespace) -> Result:
    """Measure one running server at each concurrency."""
    load = _make_load(arguments, arguments.url)
    reports = measure(load, arguments.concurrency, arguments.requests)
    result = Result(describe_machine(), arguments.model or "(default)", load, {"url": reports})
    _print_header(result)
    print(format_reports(reports))
    return result


def compare(arguments: argparse.Namespace) -> Result:
    """Measure two servers by turns on the same model."""
    reports: dict[str, list[Report]] = {}
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        model = write_model(Path(folder) / "model", arguments.family, plain=True)
        sides = _choose_sides(arguments, model)
        for pair in range(arguments.pairs):
            # who goes first alternates, so that a machine that warms up favours neither
            for side in sides if pair % 2 == 0 else sides[::-1]:
                measured = _measure_side(side, arguments)
                reports.setdefault(side.name, []).extend(measured)
                _print_progress(pair, side, measured)
    load = _make_load(arguments, "")
    result = Result(describe_machine(), f"random {arguments.family}", load, reports)
    _print_header(result)
    print(format_comparison(reports[sides[0].name], reports[sides[1].name], sides))
    print(BIAS)
    return result


def measure(load: Load, concurrencies: Sequence[int], requests: int) -> list[Report]:
    """Warm the server up, then one report per concurrency."""
    streams = max(concurrencies)
    asyncio.run(run_load(_scale(load, streams, requests=streams, max_tokens=16)))
    return [asyncio.run(run_load(_scale(load, streams, requests))) for streams in concurrencies]


def format_reports(reports: Sequence[Report]) -> str:
    """One line per report."""
    rows = [["streams", "requests", *FIGURES, "tokens", "errors"]]
    for report in reports:
        figures = [format_number(figure(report)) for figure in FIGURES.values()]
        counts = [str(report.tokens), str(sum(report.errors.values()))]
        rows.append([str(report.concurrency), str(report.requests), *figures, *counts])
    return format_table(rows)


def format_comparison(
    ours: Sequence[Report], theirs: Sequence[Report], sides: Sequence[Side]
) -> str:
    """Medians over the pairs, their ratio, and the least and greatest ratio of any one pair."""
    rows = [["streams", "figure", *(side.name for side in sides), "ratio", "of the pairs"]]
    for streams in dict.fromkeys(report.concurrency for report in ours):
        for name, figure in FIGURES.items():
            first = _collect(ours, streams, figure)
            second = _collect(theirs, streams, figure)
            rows.append([str(streams), name, *_compare_figures(first, second)])
    return format_table(rows)


def _compare_figures(ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
    if not ours or not theirs:
        return ["-", "-", "-", "-"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=False) if b]
    return [
        format_number(median(ours)),
        format_number(median(theirs)),
        f"{median(ours) / median(theirs):.2f}" if median(theirs) else "-",
        f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-",
    ]


def _collect(reports: Sequence[Report], streams: int, figure: Figure) -> list[float]:
    values = (figure(report) for report in reports if report.concurrency == streams)
    return [value for value in values if value is not None]


def _choose_sides(arguments: argparse.Namespace, model: Path) -> tuple[Side, Side]:
    ours = Side("url", url=arguments.url) if arguments.url else servers.ours(model)
    peer = Side("peer", url=arguments.peer_url) if arguments.peer_url else servers.peer(model)
    return ours, peer


def _measure_side(side: Side, arguments: argparse.Namespace) -> list[Report]:
    with servers.serve(side) as running:
        load = _make_load(arguments, running.url)
        return measure(load, arguments.concurrency, arguments.requests)


def _make_load(arguments: argparse.Namespace, url: str) -> Load:
    return Load(
        url=url,
        model=arguments.model,
        max_tokens=arguments.max_tokens,
        prompt_words=arguments.prompt_words,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed_each=arguments.seed_each,
        chat=not arguments.completions,
        api_key=os.environ.get("OPENAI_API_KEY"),
        connect_each=arguments.connect_each,
        timeout=arguments.timeout,
    )


def _scale(load: Load, streams: int, requests: int = 0, max_tokens: int = 0) -> Load:
    return msgspec.structs.replace(
        load,
        concurrency=streams,
        requests=requests or max(20, 4 * streams),
        max_tokens=max_tokens or load.max_tokens,
    )


def _print_header(result: Result) -> None:
    machine, load = result.machine, result.load
    print(format_machine(machine))
    sampling = f"temperature {load.temperature:g}"
    sampling += f", top_p {load.top_p:g}" if load.top_p is not None else ""
    sampling += ", a seed each" if load.seed_each else ""
    sampling += ", a new connection each" if load.connect_each else ""
    print(f"model: {result.model}; {load.max_tokens} tokens a request, {sampling}\n")


def _print_progress(pair: int, side: Side, reports: Sequence[Report]) -> None:
    rates = ", ".join(f"{r.concurrency}: {r.tokens_per_second:.0f}" for r in reports)
    print(f"pair {pair + 1}, {side.name}: tokens/s at {rates}", file=sys.stderr, flush=True)


def _tell_failures(result: Result) -> bool:
    """Say which requests failed or ended early; whether any failed."""
    failed = False
    for name, reports in result.reports.items():
        for report in reports:
            where = f"{name} at {report.concurrency}"
            if report.short:
                print(f"{where}: {report.short} requests ended before max_tokens", file=sys.stderr)
            for error, count in report.errors.items():
                print(f"{where}: {count} x {error}", file=sys.stderr)
                failed = True
    return failed


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description="Measure how fast OpenAI-compatible servers stream.",
    )
    parser.add_argument("--url", help="a running server to measure (OPENAI_API_KEY is sent to it)")
    parser.add_argument("--compare", action="store_true", help="mlxsrv, or --url, against a peer")
    parser.add_argument("--peer-url", help="running server as peer (default: start mlx_lm.server)")
    parser.add_argument("--pairs", type=int, default=5, help="times to measure each of the two")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="model of --compare")
    parser.add_argument("--model", help="`model` to ask for (default: leave it out)")
    parser.add_argument(
        "--concurrency", type=_parse_counts, default=(1, 8, 32), help="default: 1,8,32"
    )
    parser.add_argument("--requests", type=int, default=0, help="default: 4 a stream, 20 at least")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--prompt-words", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed-each", action="store_true", help="a seed of its own per request")
    parser.add_argument("--completions", action="store_true", help="ask /v1/completions")
    parser.add_argument(
        "--connect-each", action="store_true", help="open each connection as part of its request"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one request")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all reports here")
    arguments = parser.parse_args(argv)
    if not (arguments.url or arguments.compare):
        parser.error("give --url or --compare")
    return arguments


def _parse_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(",") if part.isdecimal())
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"not a list of counts: {text!r}")
    return counts


if __name__ == "__main__":
    raise SystemExit(main())
