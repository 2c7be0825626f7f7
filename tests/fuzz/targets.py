"""Properties that hold for any bytes at all: one function for each, which raises if it is broken.

`tests/test_fuzz.py` gives them seeds, inputs that were once found and random ones; `make fuzz` lets
atheris look for more. An input is a few bytes that choose, then the matter itself, so that a
mutation of one stays an input of the other.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from urllib.parse import parse_qsl

import msgspec

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.text.call_formats.json_calls import HERMES
from mlxsrv.text.detokenize import DecodingDetokenizer, Detokenizer, TokenBytes, token_bytes
from mlxsrv.text.frames import Piece
from mlxsrv.text.pipeline import TextPipeline
from mlxsrv.text.reader import OutputPart, ToolArguments, ToolOpened
from mlxsrv.text.stops import StopStrings
from mlxsrv.wire import management
from mlxsrv.wire.anthropic import requests as messages
from mlxsrv.wire.decoding import RequestDecoder, read_query
from mlxsrv.wire.ollama import requests as ollama
from mlxsrv.wire.openai import embeddings, requests
from mlxsrv.wire.responses import requests as responses
from mlxsrv.wire.sse import DONE, KEEPALIVE, PLACEHOLDER, frame, text_frames
from tests.fuzz import file_targets
from tests.fuzz.grammars import check_grammars
from tests.fuzz.source import LONGEST, Source, cut
from tests.support.reading import caller, merge, pieces, thoughts
from tests.support.tool_calls import FORMATS, TOOLS

# Requests.

_DECODERS: tuple[RequestDecoder[Any], ...] = tuple(
    decoder
    for module in (requests, messages, embeddings, management, responses, ollama)
    for _, decoder in sorted(vars(module).items())
    if isinstance(decoder, RequestDecoder)
)
_QUERIES: tuple[type[msgspec.Struct], ...] = tuple(
    kind
    for name, kind in sorted(vars(management).items())
    if name.endswith("Query") and isinstance(kind, type)
)


def check_requests(data: bytes) -> None:
    """A body is a request or an InvalidRequest that can be told. A request has all that it is asked
    for, and written as JSON it is read as the same."""
    for decoder in _DECODERS:
        try:
            request, ignored = decoder.decode(data)
        except InvalidRequest as error:
            msgspec.json.encode([error.message, error.param])
            continue
        msgspec.json.encode(ignored)
        _ask(request)
        again, _ = decoder.decode(msgspec.json.encode(request))
        assert again == request


@runtime_checkable
class Asking(Protocol):
    """A request for text."""

    def spec(self) -> GenerationSpec: ...


def check_queries(data: bytes) -> None:
    """A URL's query is what a route may ask, or an InvalidRequest that can be told."""
    values = dict(parse_qsl(data[:LONGEST].decode("latin-1"), keep_blank_values=True))
    for kind in _QUERIES:
        try:
            query = read_query(kind, values)
        except InvalidRequest as error:
            msgspec.json.encode([error.message, error.param])
            continue
        _ask(query)
        assert msgspec.json.decode(msgspec.json.encode(query), type=kind) == query


def _ask(request: msgspec.Struct) -> None:
    """Whatever else it tells, and what it asks of a model, or an InvalidRequest."""
    # A request may ask for no text, and what it refers to is looked up first.
    apart = getattr(request, "is_empty", False) or getattr(request, "references", ())
    if isinstance(request, Asking) and not apart:
        with contextlib.suppress(InvalidRequest):
            request.spec()
    for name in dir(type(request)):
        if isinstance(getattr(type(request), name), property):
            getattr(request, name)


# Text.


def check_stops(data: bytes) -> None:
    """However a text is cut, what comes out is what stands before the stop string that is complete
    first. Before that, nothing waits but what a stop string begins with."""
    source = Source(data)
    sizes = source.sizes()
    *stops, text = source.texts()
    stops = [stop for stop in stops if stop][:6]
    before, matched = _first_match(text, stops)
    stage = StopStrings(stops)
    sent, fed = "", ""
    for piece in cut(text, sizes):
        sent += stage.feed(piece)
        fed += piece
        if stage.matched is None:
            assert sent == fed[: len(fed) - _may_match(fed, stops)]
    sent += stage.flush()
    assert (sent, stage.matched) == (before, matched)
    assert stage.flush() == ""


def _first_match(text: str, stops: list[str]) -> tuple[str, str | None]:
    """As the rule is worded, one character at a time."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text.endswith(stop, 0, end)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def _may_match(text: str, stops: list[str]) -> int:
    longest = max(map(len, stops), default=1)
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((n for n in sizes if any(s.startswith(text[-n:]) for s in stops)), 0)


def check_detokenize(data: bytes) -> None:
    """However bytes are cut into tokens, their text is that of all of them, without a character
    that is not whole at the end. U+FFFD stands for what is no UTF-8, never for what was cut."""
    source = Source(data)
    strip = source.flag()
    sizes, payload = source.sizes(), source.rest()
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(payload)
    ids, table = tokenized(payload, sizes)
    stage = Detokenizer(table, strip_first_space=strip)
    written = "".join([*map(stage.feed, ids), stage.flush()])
    assert written == (text.removeprefix(" ") if strip else text)
    fallback = DecodingDetokenizer(_Bytes(table))
    written = "".join([*map(fallback.feed, ids), fallback.flush()])
    if "\ufffd" not in text:
        assert written == text


def tokenized(payload: bytes, sizes: Iterable[int]) -> tuple[list[int], TokenBytes]:
    """The bytes as ids, and the table of a byte-level tokenizer that has these tokens."""
    pieces = list(cut(payload, sizes))
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    table = token_bytes(_Vocabulary([*ids]), "byte_level")
    assert table.data == tuple(ids)
    return [ids[piece] for piece in pieces], table


class _Vocabulary:
    """A tokenizer of GPT-2's spelling, as far as one is asked here."""

    added_tokens_decoder: Mapping[int, Any] = {}

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = ["".join(map(_SPELLED.__getitem__, token)) for token in tokens]

    def convert_ids_to_tokens(self, ids: list[int], /) -> Sequence[str | None]:
        return [self._tokens[token_id] for token_id in ids]

    def __len__(self) -> int:
        return len(self._tokens)


def _spell_bytes() -> dict[int, str]:
    """`bytes_to_unicode` of GPT-2's own encoder."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    spelled = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in spelled]
    return spelled | {byte: chr(256 + n) for n, byte in enumerate(others)}


_SPELLED = _spell_bytes()


class _Bytes:
    """A tokenizer's `decode`."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        assert len(ids) <= 16  # the window is bounded
        return b"".join(self._table.data[token_id] for token_id in ids).decode(errors="replace")


def check_channels(data: bytes) -> None:
    """However a text is cut, the channels say the same: the text without the markers, but for
    whitespace around them. Of a text that comes whole no piece has a marker in it."""
    source = Source(data)
    thinking, bound, end = source.flag(), source.flag(), source.flag()
    sizes = source.sizes()
    start, stop, text = ([*source.texts(), "", ""])[:3]
    markers = (start, stop) if start and stop else (None, None)

    def run(feeds: Iterable[str]) -> list[Piece]:
        stage = thoughts(*markers, thinking=thinking, bound=bound)
        parts = [part for feed in feeds for part in stage.feed(feed)] + stage.flush(cut=end)
        assert stage.flush(cut=end) == []
        assert all(said for _, said in pieces(parts))
        return pieces(parts)

    whole = run([text])
    assert _joined(run(cut(text, sizes))) == _joined(run(text)) == _joined(whole)
    if not bound:
        known = [marker for marker in markers if marker]
        assert not any(marker in said for _, said in whole for marker in known)
        if not end:
            assert "".join("".join(said for _, said in whole).split()) == _unmarked(text, known)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for channel, text in pieces:
        if joined and joined[-1][0] == channel:
            text = joined.pop()[1] + text
        joined.append((channel, text))
    return joined


def _unmarked(text: str, markers: list[str]) -> str:
    """A text without markers, nor any whitespace."""
    kept = ""
    while text:
        before, marker = _first_match(text, markers)
        kept += before
        text = text[len(before) + len(marker or "") :]
    return "".join(kept.split())


# Tools.

DIALECTS = tuple(FORMATS)
_DIALECTS = tuple(FORMATS.values())
Heard = tuple[list[str | tuple[str, str]], int, list[int], str, list[str]]


def check_tools(data: bytes) -> None:
    """However a text is cut, the content and the calls are the same. The arguments of a call that
    is not broken are a JSON object; a call in JSON that is one comes out as it was written. What is
    left out of a broken call, the fragment, is the end of the text."""
    source = Source(data)
    dialect = _DIALECTS[source.number(len(_DIALECTS))]
    end, parallel, bound = source.flag(), source.flag(), source.flag()
    sizes, text = source.sizes(), source.texts()[0]

    def run(feeds: Iterable[str]) -> Heard:
        stage = caller(dialect, TOOLS, parallel=parallel, bound=bound)
        parts = [part for feed in feeds for part in stage.feed(feed)] + stage.flush(cut=end)
        assert stage.flush(cut=end) == []
        faults: list[str] = [*stage.faults]
        return merge(parts), stage.calls, stage.broken, stage.fragment, faults

    whole = run([text])
    assert run(cut(text, sizes)) == run(text) == whole
    calls = [part for part in whole[0] if isinstance(part, tuple)]
    assert len(calls) == whole[1]
    assert parallel or len(calls) < 2
    assert all(name for name, _ in calls)
    _, _, broken, fragment, faults = whole
    assert len(faults) >= len(broken)
    assert text.endswith(fragment)
    assert not fragment or faults
    for number, (_, arguments) in enumerate(calls):
        if number not in broken:
            assert isinstance(msgspec.json.decode(arguments), dict)
    if dialect is HERMES and (written := _written_call(text)) is not None:
        [name_and_arguments] = calls
        assert name_and_arguments == written


def _written_call(text: str) -> tuple[str, str] | None:
    """The call that a text is, if it is one as it should be and nothing else."""
    start, end = "<tool_call>", "</tool_call>"
    if not (text.startswith(start) and text.endswith(end)):
        return None
    body = text[len(start) : len(text) - len(end)]
    try:
        call = msgspec.json.decode(body, type=_Call)
        arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None
    # Of two equal keys, however they are spelled, the first holds.
    once = body.count('"name"') == body.count('"arguments"') == 1
    if not (call.name and once) or '"parameters"' in body or "\\" in body:
        return None
    assert isinstance(arguments, dict)
    return call.name, bytes(call.arguments).decode()


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw


# All of it.

_SIZE = 100_000  # characters
_LIMIT = 1.0  # seconds of this thread's own work; what grows with the square takes a minute


def check_growth(data: bytes) -> None:
    """Whatever is said over and over, 100 kB of it pass all stages within a second: a long answer
    must not stop the others."""
    source = Source(data)
    dialect = _DIALECTS[source.number(len(_DIALECTS))]
    end, size = source.flag(), (32, 256, 2000, _SIZE)[source.number(4)]
    before, again, after = ([*source.texts(), "", ""])[:3]
    text = before + (again or "a") * (_SIZE // max(1, len(again))) + after
    started = time.thread_time()
    reader = caller(dialect, TOOLS, markers=("<think>", "</think>"))
    stops = StopStrings(["\n\n\n\n\n\n\n\n", "</answer>"])
    parts = [part for feed in cut(text, [size]) for part in reader.feed(feed)]
    parts += reader.flush(cut=end)
    for part in parts:
        if isinstance(part, tuple):
            stops.feed(part[1])
    assert time.thread_time() - started < _LIMIT


def check_pipeline(data: bytes) -> None:
    """However bytes are cut into tokens and tokens into feeds, the parts are the same; and the
    counts, however the tokens are fed."""
    source = Source(data)
    dialect = _DIALECTS[source.number(len(_DIALECTS))] if source.flag() else None
    thinking, end, parallel = source.flag(), source.flag(), source.flag()
    sizes, feeds = source.sizes(), source.sizes()
    stop, payload = ([*source.fields(), b""])[:2]
    stops = [text] if (text := stop.decode(errors="replace")) else []

    def run(tokens: Iterable[int], sizes: Iterable[int]) -> tuple[list[Any], int, int, bool]:
        ids, table = tokenized(payload, tokens)
        pipeline = TextPipeline(
            Detokenizer(table),
            thoughts("<think>", "</think>", thinking=thinking)
            if dialect is None
            else caller(dialect, TOOLS, parallel=parallel, markers=("<think>", "</think>")),
            StopStrings(stops),
        )
        parts = [part for feed in cut(ids, sizes) for part in pipeline.feed(feed)]
        parts += pipeline.flush(cut=end)
        assert pipeline.tokens <= len(ids)
        assert 0 <= pipeline.reasoning_tokens <= pipeline.tokens
        assert all(_length(part) for part in parts)
        counts = pipeline.tokens, pipeline.reasoning_tokens, pipeline.stopped
        return _spoken(parts), *counts

    first = run(sizes, feeds)
    assert run(sizes, [1]) == first
    assert run(sizes, [len(payload) + 1]) == first
    assert run([1], [1])[0] == first[0]
    content = "".join(said for what, said in first[0] if what == "content")
    assert not any(text in content for text in stops)


def _length(part: OutputPart) -> int:
    match part:
        case ToolOpened():
            return len(part.name)
        case ToolArguments():
            return len(part.text)
        case _:
            return len(part[1])


def _spoken(parts: Iterable[OutputPart]) -> list[tuple[str, str]]:
    """The answer in order, as one text of each kind at a time; calls without their ids."""
    spoken: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case ToolOpened():
                spoken.append((f"call {part.index}", part.name))
                continue
            case ToolArguments():
                what, text = f"arguments {part.index}", part.text
            case _:
                what, text = part
        if spoken and spoken[-1][0] == what:
            text = spoken.pop()[1] + text
        spoken.append((what, text))
    return spoken


# Server-sent events.


def check_sse(data: bytes) -> None:
    """Any texts are one event each, to a reader as HTML has it and to one that cuts lines where
    Python does."""
    texts = Source(data).texts()
    encode = text_frames({"a": [PLACEHOLDER, 1], "again": PLACEHOLDER})
    frames = [encode(text) for text in texts]
    chunks = [{"a": [text, 1], "again": text} for text in texts]
    frames += [frame({text: text}) for text in texts]
    chunks += [{text: text} for text in texts]
    stream = KEEPALIVE + b"".join(frames) + KEEPALIVE + DONE
    expected = [*chunks, None]
    for lines in (_html_lines(stream.decode()), stream.decode().splitlines()):
        events = [None if said == "[DONE]" else json.loads(said) for said in _events(lines)]
        assert events == expected


def _html_lines(stream: str) -> list[str]:
    return stream.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _events(lines: Iterable[str]) -> Iterator[str]:
    """https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation"""
    held: list[str] = []
    for line in lines:
        if not line and held:
            yield "\n".join(held)
            held = []
        field, _, value = line.partition(":")
        if field == "data":
            held.append(value.removeprefix(" "))


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "requests": check_requests,
    "queries": check_queries,
    "stops": check_stops,
    "detokenize": check_detokenize,
    "channels": check_channels,
    "tools": check_tools,
    "pipeline": check_pipeline,
    "growth": check_growth,
    "sse": check_sse,
    "saes": file_targets.check_saes,
    "vectors": file_targets.check_vectors,
    "folders": file_targets.check_folders,
    "grammars": check_grammars,
}
