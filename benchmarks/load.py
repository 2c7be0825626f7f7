"""A load generator for OpenAI-compatible servers that leaves the processor to the server.

It shares the machine with what it measures, so it does as little as it can: one asyncio protocol
per request, HTTP/1.1 written by hand, and a few searches in the bytes of each frame where a client
would parse JSON. What it takes from a stream is when text arrived, and how much.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice, pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec

_TEXT = re.compile(rb'"(?:content|text)": ?"(?!")')
"""Opens a text that is not empty. In a text itself the quotes would be escaped."""
_FINISH = re.compile(rb'"finish_reason": ?"(\w+)"')
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_FRAME_END = re.compile(rb"\r?\n\r?\n")

_ERROR = re.compile(rb'data: ?(?=\{ ?"error")')
_DONE = re.compile(rb"data: ?\[DONE\]")

_FILLER = ("one", "token", "after", "another", "while", "the", "reader", "waits", "for", "more")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The request to send, and how often."""

    url: str
    """Root of the server, with or without `/v1`."""
    model: str | None = None
    concurrency: int = 1
    requests: int = 32
    max_tokens: int = 100
    prompt_words: int = 16
    temperature: float = 0.0
    top_p: float | None = None
    seed_each: bool = False
    """Give each request a seed of its own."""
    bodies: tuple[dict[str, Any], ...] = ()
    """Fields of each request's own, by turns: the prompt and anything above may be among them."""
    chat: bool = True
    keep_text: bool = False
    """Keep what was said, at the price of parsing each frame after all."""
    api_key: str | None = None
    connect_each: bool = False
    """Open each connection as part of its request. Otherwise all are open before the clock starts,
    for a burst of new ones measures the length of the listening queue: where that is Python's
    default of 5, the kernel drops the rest, and a client tries again after one second."""
    timeout: float = 120.0
    """Seconds that one request may take."""


class Sample(msgspec.Struct):
    """One request's times and text. Times are seconds, those of events by `time.perf_counter`."""

    sent: float = 0.0
    """With `connect_each`: before the connection."""
    arrivals: list[float] = []
    """The time of each frame with text."""
    text: str = ""
    usage: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Between one frame with text and the next."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def tokens(self) -> int:
        """Tokens made: as the server counts them, for it may merge several into one frame."""
        return len(self.arrivals) if self.usage is None else self.usage


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one load. Times are milliseconds, None where nothing came."""

    concurrency: int
    requests: int
    seconds: float
    tokens: int
    frames: int
    tokens_per_second: float
    ttft_p50: float | None
    ttft_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    cpu_share: float
    """Processor time that this generator itself took, per second."""
    short: int
    """Requests that ended without error before their `max_tokens`: such runs compare badly."""
    finish_reasons: dict[str, int]
    errors: dict[str, int]


async def run_load(load: Load) -> Report:
    """Send `requests` requests, `concurrency` at a time, and sum up what they saw."""
    streams = prepare(load)
    if not load.connect_each:
        await _connect_all(streams, load.timeout)
    started, busy = time.perf_counter(), time.process_time()
    await run_streams(streams, load)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    return summarise(load, [stream.sample for stream in streams], seconds, busy)


def prepare(load: Load) -> list[Stream]:
    """The load's requests, written: nothing but sending is left to do while the server works."""
    target = _parse_url(load)
    return [
        Stream(_write_request(load, target, number), target, keep_text=load.keep_text)
        for number in range(load.requests)
    ]


async def run_streams(streams: Iterable[Stream], load: Load) -> None:
    """Run all, `concurrency` at a time. Cancelled, it cuts them off; their samples remain."""
    pending = iter(streams)
    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(_run_in_turn(pending, load.timeout))


def summarise(load: Load, samples: list[Sample], seconds: float, busy: float) -> Report:
    """The figures of one run that took `seconds`, `busy` of them the generator's own."""
    tokens = sum(sample.tokens for sample in samples)
    ttfts = [sample.ttft for sample in samples if sample.ttft is not None]
    gaps = [gap for sample in samples for gap in sample.gaps]
    return Report(
        concurrency=load.concurrency,
        requests=len(samples),
        seconds=seconds,
        tokens=tokens,
        frames=sum(len(sample.arrivals) for sample in samples),
        tokens_per_second=tokens / seconds,
        ttft_p50=percentile_ms(ttfts, 50),
        ttft_p99=percentile_ms(ttfts, 99),
        gap_p50=percentile_ms(gaps, 50),
        gap_p99=percentile_ms(gaps, 99),
        cpu_share=busy / seconds,
        short=sum(not sample.error and sample.tokens < load.max_tokens for sample in samples),
        finish_reasons=_count(sample.finish_reason for sample in samples),
        errors=_count(sample.error for sample in samples),
    )


def _count(labels: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(label for label in labels if label is not None))


class _Target(msgspec.Struct, frozen=True):
    host: str
    port: int
    path: str
    tls: bool


def _parse_url(load: Load) -> _Target:
    parts = urlsplit(load.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {load.url}")
    tls = parts.scheme == "https"
    root = parts.path.rstrip("/").removesuffix("/v1")
    endpoint = "chat/completions" if load.chat else "completions"
    port = parts.port or (443 if tls else 80)
    return _Target(parts.hostname, port, f"{root}/v1/{endpoint}", tls)


def _write_request(load: Load, target: _Target, number: int) -> bytes:
    body = msgspec.json.encode(_make_body(load, number))
    head = [
        f"POST {target.path} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if load.api_key:
        head.append(f"Authorization: Bearer {load.api_key}")
    return "\r\n".join([*head, "", ""]).encode() + body


def _make_body(load: Load, number: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.model is not None:
        body["model"] = load.model
    if load.top_p is not None:
        body["top_p"] = load.top_p
    if load.seed_each:
        body["seed"] = number
    prompt = _make_prompt(load.prompt_words)
    body |= {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
    return body | (load.bodies[number % len(load.bodies)] if load.bodies else {})


def _make_prompt(words: int) -> str:
    """A prompt no server has seen: its first word is random, so no cached prefix helps."""
    return " ".join([secrets.token_hex(4), *islice(cycle(_FILLER), words)])


async def _connect_all(streams: Sequence[Stream], timeout: float) -> None:
    for stream in streams:
        await stream.connect(timeout)
        await asyncio.sleep(0.003)  # for the server to take it off its listening queue


async def _run_in_turn(pending: Iterator[Stream], timeout: float) -> None:
    for stream in pending:
        await stream.run(timeout)


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    text: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


def _read_text(frame: bytes) -> str:
    chunk = msgspec.json.decode(frame.removeprefix(b"data:").strip(), type=_Chunk)
    return "".join(choice.delta.content or choice.text or "" for choice in chunk.choices)


class Stream(asyncio.Protocol):
    """One request and its streamed response."""

    def __init__(self, request: bytes, target: _Target, *, keep_text: bool) -> None:
        self.sample = Sample()
        self._request = request
        self._target = target
        self._keep_text = keep_text
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decoder = _BodyDecoder()
        self._rest = b""
        self._done = False

    async def connect(self, timeout: float) -> None:
        """Open the connection; where that fails, the sample says so."""
        target = self._target
        tls = ssl.create_default_context() if target.tls else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                self._transport, _ = await loop.create_connection(
                    lambda: self, target.host, target.port, ssl=tls
                )
        except TimeoutError:
            self.fail("timed out while connecting")
        except OSError as error:
            self.fail(f"connection: {error.strerror or error}")

    async def run(self, timeout: float) -> None:
        """Send the request and follow its stream to the end."""
        self.sample.sent = time.perf_counter()
        if self._transport is None and not self._done:
            await self.connect(timeout)
        if self._transport is None:
            return
        self._transport.write(self._request)
        try:
            async with asyncio.timeout(timeout):
                await self._closed
        except TimeoutError:
            self.fail("timed out")
        finally:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            text = self._decoder.feed(data)
        except ValueError as error:
            self.fail(str(error))
            return
        *frames, self._rest = _FRAME_END.split(self._rest + text)
        for frame in frames:
            self._take(frame, now)
        if self._done:
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done:
            self.fail(self._explain_loss())
        self._close()

    def fail(self, reason: str) -> None:
        """Note why the request failed: the first reason is the one that counts."""
        if self.sample.error is None:
            self.sample.error = reason
        self._done = True
        self._close()

    def _take(self, frame: bytes, now: float) -> None:
        if _TEXT.search(frame):
            self.sample.arrivals.append(now)
            if self._keep_text:
                self.sample.text += _read_text(frame)
        if finish := _FINISH.search(frame):
            self.sample.finish_reason = finish[1].decode()
        if tokens := _TOKENS.search(frame):
            self.sample.usage = int(tokens[1])
        if error := _ERROR.match(frame):
            self.fail(frame[error.end() :][:200].decode(errors="replace"))
        elif _DONE.match(frame):
            self._done = True

    def _explain_loss(self) -> str:
        if self._decoder.status in (0, 200):
            return "the stream was cut off"
        return f"HTTP {self._decoder.status}: {self._rest[:200].decode(errors='replace')}"

    def _close(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)


class _BodyDecoder:
    """Takes the bytes of an HTTP/1.x response and gives those of its body.

    Undoes chunked transfer; any other body runs to the end of the connection.
    """

    def __init__(self) -> None:
        self.status = 0
        self._buffer = b""
        self._chunked = False
        self._missing = 0
        """Bytes of the open chunk still to come, its line end included."""
        self._ended = False

    def feed(self, data: bytes) -> bytes:
        if self.status == 0:
            head, found, data = (self._buffer + data).partition(b"\r\n\r\n")
            if not found:
                self._buffer = head
                return b""
            self._buffer = b""
            self._read_head(head)
        return self._unchunk(data) if self._chunked else data

    def _read_head(self, head: bytes) -> None:
        status, *headers = head.lower().split(b"\r\n")
        if not (match := re.match(rb"http/1\.[01] (\d{3})", status)):
            raise ValueError("the answer is not HTTP/1.x")
        self.status = int(match[1])
        self._chunked = any(
            header.startswith(b"transfer-encoding:") and b"chunked" in header for header in headers
        )

    def _unchunk(self, data: bytes) -> bytes:
        data = self._buffer + data
        parts = []
        at = 0
        while at < len(data) and not self._ended:
            if self._missing == 0:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    break
                size = int(data[at:line_end].partition(b";")[0], 16)
                self._ended = size == 0
                self._missing = size + 2
                at = line_end + 2
            piece = data[at : at + self._missing]
            at += len(piece)
            self._missing -= len(piece)
            # the last two of a chunk are its line end, which may come in two reads
            parts.append(piece[: max(0, len(piece) - max(0, 2 - self._missing))])
        self._buffer = data[at:]
        return b"".join(parts)


def percentile_ms(seconds: Sequence[float], percent: int) -> float | None:
    """The smallest value that `percent` of all do not exceed, in milliseconds."""
    if not seconds:
        return None
    rank = -(-len(seconds) * percent // 100)
    return 1000 * sorted(seconds)[rank - 1]
