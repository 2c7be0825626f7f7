"""A coding agent's session against mlxsrv and `mlx_lm.server`: `python -m benchmarks.agents`.

A session of 40 turns with 20 tools, sub-agents, hang-ups and retries (see `benchmarks.sessions`) is
played against each server by turns, each started anew, on the same tiny random-weight model, with
as many bytes for kept prompts. Each agent goes on from what the server answered. Printed are the
tokens of all prompts that were answered, and how many of them the server has read, by its own count
in `usage`; the time to the first token; and the largest memory that the process had. What is read
for a client that is gone is in no usage: it shows in the time to the first token when it comes
again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import httpx
import msgspec

from benchmarks import servers
from benchmarks.load import percentile_ms
from benchmarks.report import (
    BIAS,
    describe_machine,
    format_machine,
    format_number,
    format_table,
    write_json,
)
from benchmarks.sessions import TURNS, Message, Script, write_session
from tests.support.tiny import write_model

_CONTEXT = 65_536
_ANSWER = 24  # tokens
_CACHE_BYTES = 64 * 1024 * 1024
_TIMEOUT = 120.0
_PAUSE = 0.2  # seconds until a client that has hung up asks again


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = _Delta()


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class Answer(msgspec.Struct):
    """The outcome of one request that was answered.

    Attributes:
        kind: `turn` of the agent, `again` after a hang-up, `retry` of what had its answer, or of a
            `helper`.
        ttft: seconds.
        prompt, cached: tokens.
    """

    kind: str
    text: str
    ttft: float
    prompt: int
    cached: int


class Session(msgspec.Struct):
    """The outcome of a session on one server.

    Attributes:
        seconds: that it took.
        peak: bytes of the largest memory that the process had; None if not known.
    """

    answers: list[Answer]
    seconds: float
    peak: int | None

    def ttfts(self) -> list[float]:
        """Times to the first token of the agent's own turns, in seconds, also after a hang-up."""
        return [each.ttft for each in self.answers if each.kind in ("turn", "again")]

    def of(self, *kinds: str) -> list[Answer]:
        return [each for each in self.answers if each.kind in kinds]


class Agent:
    """One agent: what was said so far."""

    def __init__(self, client: httpx.AsyncClient, script: Script, kind: str) -> None:
        self.answers: list[Answer] = []
        self._client = client
        self._script = script
        self._kind = kind
        self._messages: list[Message] = []

    async def play(self) -> list[Answer]:
        """Ask all that the script has. Returns the answers, those of sub-agents included."""
        last: str | None = None
        for turn in self._script.turns:
            if turn.helpers:
                helpers = [Agent(self._client, script, "helper") for script in turn.helpers]
                for answers in await asyncio.gather(*(each.play() for each in helpers)):
                    self.answers += answers
            if last is not None:
                calls = {} if turn.call is None else {"tool_calls": [turn.call]}
                self._messages.append({"role": "assistant", "content": last, **calls})
            self._messages += turn.said
            kind = self._kind
            if turn.hangs_up is not None:
                await self._hang_up(turn.hangs_up)
                kind = "again"
            answer = await self._ask(kind)
            self.answers.append(answer)
            if turn.again:
                self.answers.append(await self._ask("retry"))
            last = answer.text
        return self.answers

    async def _hang_up(self, seconds: float) -> None:
        """Ask, and leave; an answer that comes before is dropped."""
        try:
            async with asyncio.timeout(seconds):
                await self._ask("left")
        except TimeoutError:
            await asyncio.sleep(_PAUSE)

    async def _ask(self, kind: str) -> Answer:
        body = {
            "messages": self._messages,
            "tools": self._script.tools,
            "max_tokens": _ANSWER,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent, first = time.perf_counter(), None
        text: list[str] = []
        usage: _Usage | None = None
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = msgspec.json.decode(line[6:], type=_Chunk)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    if choice.delta.content:
                        first = time.perf_counter() if first is None else first
                        text.append(choice.delta.content)
        if first is None or usage is None:
            raise RuntimeError("an answer without text, or without usage")
        details = usage.prompt_tokens_details or _Details()
        return Answer(kind, "".join(text), first - sent, usage.prompt_tokens, details.cached_tokens)


async def _play(url: str, script: Script) -> tuple[list[Answer], float]:
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT) as client:
        warm = Script(
            (), (msgspec.structs.replace(script.turns[0], said=_GREETING, hangs_up=None),)
        )
        await Agent(client, warm, "warm-up").play()
        started = time.perf_counter()
        answers = await Agent(client, script, "turn").play()
        return answers, time.perf_counter() - started


_GREETING: tuple[Message, ...] = ({"role": "user", "content": "hello"},)


def run(side: servers.Side, script: Script) -> Session:
    """Play the session against a server that is started for it."""
    with servers.serve(side) as running:
        answers, seconds = asyncio.run(_play(running.url, script))
        return Session(answers, seconds, _find_peak(running.pid))


def _find_peak(pid: int | None) -> int | None:
    status = Path(f"/proc/{pid}/status")
    if pid is None or not status.exists():
        return None
    [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


# Figures.


def _sum_prompts(session: Session) -> float:
    return sum(each.prompt for each in session.answers)


def _sum_read(session: Session) -> float:
    return sum(each.prompt - each.cached for each in session.answers)


def _again_ttft(session: Session) -> float:
    return 1000 * median(each.ttft for each in session.of("again"))


def _median_ttft(session: Session) -> float:
    return 1000 * median(session.ttfts())


def _p95_ttft(session: Session) -> float:
    return percentile_ms(session.ttfts(), 95) or 0.0


def _helpers_ttft(session: Session) -> float:
    return 1000 * median(each.ttft for each in session.of("helper"))


def _peak(session: Session) -> float:
    return (session.peak or 0) / 2**20


FIGURES: dict[str, Callable[[Session], float]] = {
    "tokens of prompts": _sum_prompts,
    "tokens read": _sum_read,
    "TTFT of a turn, median, ms": _median_ttft,
    "TTFT of a turn, p95, ms": _p95_ttft,
    "TTFT when asked again after a hang-up, median, ms": _again_ttft,
    "TTFT of a sub-agent's turn, median, ms": _helpers_ttft,
    "the whole session, s": lambda session: session.seconds,
    "largest memory of the process, MiB": _peak,
}


def compare(pairs: Sequence[tuple[Session, Session]]) -> list[list[str]]:
    """A table: the median of each figure, and of the pairs' ratios, with their range."""
    table = [["", "mlxsrv", "mlx_lm.server", "ratio"]]
    for name, take in FIGURES.items():
        figures = [(take(ours), take(theirs)) for ours, theirs in pairs]
        ratios = [ours / theirs for ours, theirs in figures if theirs]
        row = [name, *(format_number(median(column)) for column in zip(*figures, strict=True))]
        span = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"
        table.append([*row, span])
    return table


def main() -> int:
    """Run the benchmark."""
    options = _parse()
    servers.exit_on_sigterm()
    print(f"{format_machine(describe_machine())}\n{BIAS}\n", flush=True)
    script = write_session(turns=options.turns)
    pairs: list[tuple[Session, Session]] = []
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        model = write_model(
            Path(folder) / "m", options.family, plain=True, max_position_embeddings=_CONTEXT
        )
        cache = ("--prompt-cache-bytes", str(options.cache_bytes))
        sides = [servers.ours(model, *cache), _peer(model, *cache)]
        for pair in range(options.pairs):
            taken: dict[str, Session] = {}
            for side in sides if pair % 2 == 0 else sides[::-1]:
                taken[side.name] = run(side, script)
                print(f"pair {pair + 1}, {side.name}: {taken[side.name].seconds:.0f} s", flush=True)
            pairs.append((taken["mlxsrv"], taken["mlx_lm.server"]))
    print(f"\n{format_table(compare(pairs))}")
    if options.json:
        write_json(options.json, pairs)
    return 0


def _peer(model: Path, *options: str) -> servers.Side:
    side = servers.peer(model)
    *command, port = side.command
    return msgspec.structs.replace(side, command=(*command, *options, port))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents", description="Play a coding agent's session."
    )
    parser.add_argument("--family", default="qwen3", help="of the tests' tiny models")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--cache-bytes", type=int, default=_CACHE_BYTES)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all answers here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
