"""One soak from its first to its last count."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.soak.crowd import DEEDS, do, gather, learn, make_peace
from tests.soak.town import Book, Stock, Watched, read_book, watched
from tests.soak.world import Failure, World

MOST_GROWTH = 1.10
"""Resident memory at the end over that after the first third."""

_SPELL = 12.0  # seconds of crowd between two pauses
_PAUSE = 1.0  # seconds in which nobody is there; then nothing may be held
_SETTLED = 0.5  # seconds after the last answer in which its connection is gone
_PATIENCE = 15.0  # seconds until nothing of those who have gone is left
_MOST_SHOWN = 20
_COUNTER = "mlxsrv:http_requests_total{"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one soak. Bytes, seconds."""

    seconds: float
    seed: int
    requests: int
    generations: int
    loads: int
    table: dict[str, dict[str, int]]
    """The number of times that each deed had each outcome."""
    rss: dict[str, int]
    """At the beginning, after the first third, at the end."""
    growth: float
    held: dict[str, int]
    """At the end; the same as at the beginning, or there are failures."""
    failures: list[Failure]


def soak(folder: Path, *, seconds: float, seed: int = 0, members: int = 24) -> Run:
    """Serve a new town in `folder` and let a crowd at it."""
    started = time.monotonic()
    with watched(folder) as server:
        world = World(server.address, seed)
        begin, third, end = asyncio.run(_soak(server, world, seconds, members))
        counted = asyncio.run(_counted_requests(world))
        server.close()
        if server.process.returncode != 0:
            _fail(world, "exit", f"status {server.process.returncode}")
        book = read_book(server.lines())
    _audit(world, book)
    if counted != book.events["request"] - 1:  # itself, which was not over then
        logged = book.events["request"] - 1
        _fail(world, "metrics", f"they tell of {counted} requests, and the log of {logged}")
    growth = end.rss / third.rss
    if growth > MOST_GROWTH:
        _fail(world, "memory", f"grew by {growth:.3f} since the first third")
    table: dict[str, dict[str, int]] = {}
    for (name, outcome), times in sorted(world.table.items()):
        table.setdefault(name, {})[outcome] = times
    return Run(
        seconds=time.monotonic() - started,
        seed=seed,
        requests=len(book.status),
        generations=book.begun.total(),
        loads=book.events["model loaded"],
        table=table,
        rss={"begin": begin.rss, "third": third.rss, "end": end.rss},
        growth=growth,
        held=end.steady,
        failures=world.failures,
    )


async def _soak(
    server: Watched, world: World, seconds: float, members: int
) -> tuple[Stock, Stock, Stock]:
    """Return the stock at the beginning, after the first third, and at the end."""
    world.known = await learn(world)
    begin = await _warm(server, world)
    await _spells(server, world, members, seconds / 3)
    third = await _count(server, world, begin)
    await _spells(server, world, members, seconds * 2 / 3)
    return begin, third, await _count(server, world, begin)


async def _warm(server: Watched, world: World) -> Stock:
    """Once of everything that leaves threads or caches behind."""
    await do(world, "attaches")
    for name in DEEDS:
        await do(world, name)
    await make_peace(world)
    await _compare(world)
    await _until_empty(world)
    await asyncio.sleep(_SETTLED)  # or a connection that is closing would count as one that stays
    return server.take_stock()


async def _spells(server: Watched, world: World, members: int, seconds: float) -> None:
    """A crowd, a pause, a crowd; in other fashions."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not world.failures:
        await gather(world, members, min(left, _SPELL))
        await asyncio.sleep(min(left, _PAUSE))
        await make_peace(world)
        await _until_empty(world)
        world.change_fashion()


async def _count(server: Watched, world: World, begin: Stock) -> Stock:
    """Leave the server as it was in the beginning, and see whether it is."""
    await make_peace(world)
    await _compare(world)
    await _until_empty(world)
    await asyncio.sleep(_SETTLED)
    stock = server.take_stock()
    before, now = begin.steady, stock.steady
    for name in sorted(before.keys() | now.keys()):
        is_claim = name.startswith(("borrowed: ", "claims: "))
        wanted = 0 if is_claim else before.get(name, 0)
        # Fewer is no fault: a connection may still have been closing when the first were counted.
        if now.get(name, 0) > wanted:
            _fail(world, "left behind", f"{name}: {now.get(name, 0)}, and not {wanted}")
    return stock


async def _counted_requests(world: World) -> int:
    """As the server's metrics count them."""
    lines = (await world.ask("GET", "/metrics")).body.decode().splitlines()
    told = [line.rpartition(" ")[2] for line in lines if line.startswith(_COUNTER)]
    return int(sum(map(float, told)))


async def _compare(world: World) -> None:
    for key, said in (await learn(world)).items():
        if said != world.known[key]:
            _fail(world, "greedy", f"{key}: {said!r}, and {world.known[key]!r} at first")


async def _until_empty(world: World) -> None:
    """Wait until the server's own account of its models tells of no request."""
    deadline = time.monotonic() + _PATIENCE
    while busy := _busy((await world.ask("GET", "/health?verbose=1")).json):
        if time.monotonic() > deadline:
            _fail(world, "left behind", f"nobody is there, and the server is at {busy}")
            return
        await asyncio.sleep(0.1)


def _busy(health: Any) -> list[Any]:
    """The models of which something is wanted, and the work that the engine has."""
    return [
        model
        for model in health["models"]
        if model["requests"]
        or model["rows"]
        or model["state"] not in ("loaded", "unused")
        or any(model["engine"].get(name) for name in ("rows", "reading", "waiting", "texts"))
    ]


def _audit(world: World, book: Book) -> None:
    """Every request that was answered is in the log, once and with its status; every generation
    that began has ended, once; and no line tells of a bug."""
    for request, status in world.heard.items():
        if book.status.get(request) != [status]:
            told = book.status.get(request)
            _fail(world, "accounts", f"{request}: {status} was heard, and {told} logged")
    for request, times in book.ended.items():
        if times != 1 or book.begun[request] > 1:
            _fail(world, "accounts", f"{request}: began {book.begun[request]}, ended {times}")
    for request in book.begun.keys() - book.ended.keys():
        _fail(world, "accounts", f"{request}: began and never ended")
    for line in book.bad[:_MOST_SHOWN]:
        _fail(world, "log", f"{line}")


def _fail(world: World, deed: str, what: str) -> None:
    world.failures.append(Failure(deed, what))


def format_run(run: Run) -> str:
    lines = ["| deed | outcome | times |", "|---|---|---:|"]
    for name, outcomes in run.table.items():
        lines += [f"| {name} | {outcome} | {times} |" for outcome, times in outcomes.items()]
    rss = ", ".join(f"{size / 1e6:.0f} MB {when}" for when, size in run.rss.items())
    held = ", ".join(f"{name} {number}" for name, number in run.held.items() if number)
    lines += [
        "",
        f"{run.requests} requests, {run.generations} generations, {run.loads} loads in "
        f"{run.seconds:.0f} s; seed {run.seed}",
        f"resident memory: {rss}; {run.growth:.3f} of the first third's",
        f"held at the end as at the beginning: {held}",
        *(f"FAILED {failure.deed}: {failure.what}" for failure in run.failures[:_MOST_SHOWN]),
    ]
    return "\n".join(lines)
