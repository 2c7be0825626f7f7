"""Measure the cost of encoding one streamed token: `python -m benchmarks.sse`.

Four ways to turn a token's text into its frame: the server's own (`text_frames`), the whole chunk
as a Struct by msgspec, the whole chunk as a dict by `json.dumps`, and that inside sse-starlette's
`ServerSentEvent`, as servers on that library send it. Then the whole way through the stream of each
dialect, whose bound is 1.5 times chat completions. Hot loop, no socket; the best of several
rounds, since anything slower was the machine doing something else.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import timeit
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec

from mlxsrv.generation.outputs import Identity
from mlxsrv.wire.anthropic.answers import MessageBuilder
from mlxsrv.wire.dialect import Builder
from mlxsrv.wire.ollama.answers import CHATS
from mlxsrv.wire.ollama.requests import OllamaChatRequest
from mlxsrv.wire.openai.answers import ChatChunk, ChunkChoice, Delta
from mlxsrv.wire.openai.builders import ChatBuilder
from mlxsrv.wire.responses.builder import ResponseBuilder
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS
from mlxsrv.wire.sse import PLACEHOLDER, frame, text_frames

TOKENS = [" the", "stream", "ing", " é", "\n\n", " 😀", '"', " server", "你好", " first"]
ROUNDS = 7
LOOPS = 20_000


def chunk(text: str) -> ChatChunk:
    return ChatChunk(
        id="chatcmpl-0123456789abcdef0123456789abcdef",
        created=1_790_000_000,
        model="demo",
        system_fingerprint="mlxsrv-0.1.0-mlx-0.32.4-mlx-lm-0.32.2",
        choices=[ChunkChoice(delta=Delta(content=text), finish_reason=None)],
    )


def plain(text: str) -> dict[str, object]:
    builtin = msgspec.to_builtins(chunk(text))
    assert isinstance(builtin, dict)
    return builtin


def encoders() -> dict[str, Callable[[str], object]]:
    """Each way, and only those whose library is installed."""
    frames = text_frames(chunk(PLACEHOLDER))
    # A dict-building server fills a template per token too; building it from a Struct each time
    # would charge json.dumps for msgspec.
    template = plain("")
    choice: dict[str, dict[str, object]] = template["choices"][0]  # type: ignore[index]

    def dumps(text: str) -> str:
        choice["delta"]["content"] = text
        return json.dumps(template)

    ways: dict[str, Callable[[str], object]] = {
        "mlxsrv text_frames": frames,
        "msgspec, whole Struct": lambda text: frame(chunk(text)),
        "json.dumps, whole dict": lambda text: f"data: {dumps(text)}\n\n".encode(),
    }
    try:
        from sse_starlette.event import ServerSentEvent
    except ImportError:
        print("sse-starlette is not installed: left out", file=sys.stderr)
    else:
        ways["sse-starlette + json.dumps"] = lambda text: ServerSentEvent(dumps(text)).encode()
    return ways


def dialects() -> dict[str, Callable[[str], object]]:
    """The stream of each dialect, in the middle of an answer."""
    identity = Identity("some-id", 1_790_000_000, "demo", "mlxsrv")
    asked, _ = RESPONSES_REQUESTS.decode(b'{"input": "hi"}')
    streams: dict[str, Builder] = {
        "chat completions": ChatBuilder(identity, "unasked"),
        "messages": MessageBuilder(identity),
        "ollama": CHATS.builder(OllamaChatRequest(model="demo"), identity),
        "responses": ResponseBuilder(asked, identity, keep=lambda response: None),
    }
    return {f"{name}, stream": partial(each.text, 0, "content") for name, each in streams.items()}


def measure(encode: Callable[[str], object]) -> float:
    """Nanoseconds per token."""

    def all_tokens() -> None:
        for text in TOKENS:
            encode(text)

    best = min(timeit.repeat(all_tokens, repeat=ROUNDS, number=LOOPS // len(TOKENS)))
    return best / LOOPS * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    args = parser.parse_args()
    ways = encoders() | dialects()
    figures = {name: measure(encode) for name, encode in ways.items()}
    base = figures["mlxsrv text_frames"]
    print(f"Python {platform.python_version()}, msgspec {metadata.version('msgspec')}")
    for name, nanoseconds in figures.items():
        print(f"{name:28} {nanoseconds:8.0f} ns/token   x {nanoseconds / base:.1f}")
    if args.json:
        args.json.write_bytes(msgspec.json.encode(figures))


if __name__ == "__main__":
    main()
