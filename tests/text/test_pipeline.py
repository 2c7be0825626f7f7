from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.text.call_formats.json_calls import HERMES
from mlxsrv.text.detokenize import DecodingDetokenizer, Detokenizer, TokenBytes, token_bytes
from mlxsrv.text.frames import Piece
from mlxsrv.text.pipeline import TextPipeline
from mlxsrv.text.reader import OutputPart, ToolArguments, ToolOpened
from mlxsrv.text.stage import Stage
from mlxsrv.text.stops import StopStrings
from tests.support.cuts import cut, joined
from tests.support.reading import caller, thoughts
from tests.support.tool_calls import TOOLS

START, END = "<think>", "</think>"
# The last of the markers are spelled by several tokens.
FRAGMENTS = [START, END, "hello", "\n\n", " User:", "你好", "🙂", "<th", "[a]", "[b]", " "]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)


@pytest.fixture(scope="module")
def table(byte_level: Any) -> TokenBytes:
    return token_bytes(byte_level, "byte_level", keep=(START, END))


def pipeline(
    table: TokenBytes,
    stops: Sequence[str] = (),
    *,
    markers: tuple[str, str] | None = (START, END),
    thinking: bool = False,
) -> TextPipeline:
    reader = thoughts(*markers, thinking=thinking) if markers else None
    return TextPipeline(Detokenizer(table), reader, StopStrings(stops) if stops else None)


def run(stage: TextPipeline, feeds: Sequence[Sequence[int]]) -> list[Piece]:
    """The pieces of a pipeline without tools."""
    pieces: list[Piece] = []
    for ids in feeds:
        out = texts(stage.feed(ids))
        assert all(text for _, text in out)
        assert all(a != b for (a, _), (b, _) in pairwise(out))
        pieces += out
    return pieces + texts(stage.flush())


def texts(parts: Sequence[OutputPart]) -> list[Piece]:
    pieces = [part for part in parts if isinstance(part, tuple)]
    assert len(pieces) == len(parts)
    return pieces


def counts(stage: TextPipeline) -> tuple[int, int, bool]:
    return stage.tokens, stage.reasoning_tokens, stage.stopped


def test_each_token_gives_its_piece(byte_level: Any, table: TokenBytes) -> None:
    ids = byte_level.encode("<think>\nwhy\n</think>\n\n你🙂")
    stage = pipeline(table)
    pieces = run(stage, [[token_id] for token_id in ids])
    assert joined(pieces, "reasoning") == "why"
    assert joined(pieces, "content") == "你🙂"
    inside = ids.index(byte_level.convert_tokens_to_ids(END)) + 1
    assert counts(stage) == (len(ids), inside, False)


def test_ready_tokens_become_one_piece_per_channel(byte_level: Any, table: TokenBytes) -> None:
    ids = byte_level.encode("<think>\nwhy not\n</think>\n\nso it is")
    assert pipeline(table).feed(ids) == [("reasoning", "why not"), ("content", "so it is")]
    plain = pipeline(table, markers=None)
    assert plain.feed(byte_level.encode("so it is")) == [("content", "so it is")]
    assert plain.feed([]) == []


def test_it_stops_at_the_token_that_completes_a_stop_string(
    byte_level: Any, table: TokenBytes
) -> None:
    ids = byte_level.encode("hello User: again User:")
    stage = pipeline(table, ["ser:"])
    assert run(stage, [[token_id] for token_id in ids])[-1][1] != ""
    written = next(n for n in range(len(ids)) if "ser:" in byte_level.decode(ids[:n]))
    assert counts(stage) == (written, 0, True)
    assert stage.feed(ids) == []
    assert stage.flush() == []
    assert counts(stage) == (written, 0, True)


def test_text_behind_a_stop_string_in_one_token_is_dropped(table: TokenBytes) -> None:
    what = table.data.index(b"what")
    stage = pipeline(table, ["ha"])
    assert run(stage, [[what, what]]) == [("content", "w")]
    assert counts(stage) == (1, 0, True)


def test_reasoning_behind_a_stop_string_is_dropped(byte_level: Any, table: TokenBytes) -> None:
    tool = byte_level.convert_tokens_to_ids("<tool é>")
    stage = pipeline(table, ["t"], markers=("oo", "zz"))
    assert run(stage, [[tool]]) == [("content", "<")]
    assert counts(stage) == (1, 1, True)


def test_stop_strings_leave_reasoning_alone(byte_level: Any, table: TokenBytes) -> None:
    ids = byte_level.encode("<think>a\n\nb</think>c\n\nd")
    stage = pipeline(table, ["\n\n"])
    assert stage.feed(ids) == [("reasoning", "a\n\nb"), ("content", "c")]
    assert stage.stopped


def test_a_stop_string_may_be_complete_only_at_the_end(byte_level: Any, table: TokenBytes) -> None:
    stage = pipeline(table, ["<th"])
    assert run(stage, [byte_level.encode("a<th")]) == [("content", "a")]
    assert stage.stopped


def test_what_waits_comes_with_the_flush(byte_level: Any, table: TokenBytes) -> None:
    stage = pipeline(table, ["User:"])
    assert stage.feed(byte_level.encode("hello User<th")) == [("content", "hello ")]
    assert stage.flush() == [("content", "User<th")]
    assert stage.flush() == []
    empty = pipeline(table, markers=None)
    assert empty.flush() == []


def test_a_marker_of_several_tokens_counts_whole(byte_level: Any, table: TokenBytes) -> None:
    before, block, after = (byte_level.encode(text) for text in ("[ x ", "[a]hello[b]", "y[a"))
    stage = pipeline(table, markers=("[a]", "[b]"))
    pieces = run(stage, [before, block, after])
    assert pieces == [
        ("content", "[ x "),
        ("reasoning", "hello"),
        ("content", "y"),
        ("content", "[a"),
    ]
    assert counts(stage) == (len(before) + len(block) + len(after), len(block), False)


def test_the_other_detokenizer_fits_too(byte_level: Any) -> None:
    start, end = byte_level.convert_tokens_to_ids([START, END])
    detokenizer = DecodingDetokenizer(byte_level, keep={start: START, end: END})
    stage = TextPipeline(detokenizer, thoughts(START, END, thinking=True), StopStrings(["!"]))
    ids = byte_level.encode("why 你\n</think>\n\n🙂 so! no")
    pieces = run(stage, [[token_id] for token_id in ids])
    assert joined(pieces, "reasoning") == "why 你"
    assert joined(pieces, "content") == "🙂 so"
    assert stage.stopped


@given(TEXTS, st.lists(st.sampled_from(["\n\n", "User", "o你", "🙂", "l"]), max_size=2), st.data())
@pytest.mark.parametrize("markers", [(START, END), ("[a]", "[b]"), None])
def test_any_cut_gives_the_same_text_and_counts(
    byte_level: Any,
    table: TokenBytes,
    markers: tuple[str, str] | None,
    text: str,
    stops: list[str],
    data: st.DataObject,
) -> None:
    ids: list[int] = byte_level.encode(text)
    thinking = data.draw(st.booleans())
    whole = pipeline(table, stops, markers=markers, thinking=thinking)
    parts = pipeline(table, stops, markers=markers, thinking=thinking)
    expected = run(whole, [ids])
    pieces = run(parts, list(cut(data, ids)))
    for channel in ("reasoning", "content"):
        assert joined(pieces, channel) == joined(expected, channel)
    assert counts(parts) == counts(whole)
    assert not any(stop in joined(pieces, "content") for stop in stops)


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def calling(table: TokenBytes, *stops: str, parallel: bool = True) -> TextPipeline:
    reader = caller(HERMES, TOOLS, parallel=parallel, markers=(START, END))
    return TextPipeline(Detokenizer(table), reader, StopStrings(stops) if stops else None)


def test_calls_stand_between_thoughts_and_content(byte_level: Any, table: TokenBytes) -> None:
    stage = calling(table)
    parts = [*stage.feed(byte_level.encode(f"<think>why</think>\n\nso\n{CALL}")), *stage.flush()]
    assert parts[:2] == [("reasoning", "why"), ("content", "so")]
    opened, arguments = parts[2:]
    assert isinstance(opened, ToolOpened)
    assert (opened.index, opened.name) == (0, "f")
    assert arguments == ToolArguments(0, '{"a": 1}')
    assert (stage.calls, stage.stopped) == (1, False)


def test_a_stop_string_inside_a_call_stops_nothing(byte_level: Any, table: TokenBytes) -> None:
    stage = calling(table, "arguments", "STOP")
    parts = stage.feed(byte_level.encode(f"{CALL} then STOP it"))
    assert isinstance(parts[0], ToolOpened)
    assert parts[-1] == ("content", "then ")
    assert stage.stopped


def test_a_call_behind_a_stop_string_is_none() -> None:
    class AtOnce(Stage[int, str]):
        def feed(self, token_id: int) -> str:
            return f"STOP{CALL}"

        def flush(self, *, cut: bool = False) -> str:
            return ""

    stage = TextPipeline(AtOnce(), caller(HERMES, TOOLS), StopStrings(["STOP"]))
    assert stage.feed([0]) == []
    assert (stage.calls, stage.stopped) == (0, True)


def test_one_call_is_enough_where_no_more_may_be_made(byte_level: Any, table: TokenBytes) -> None:
    stage = calling(table, parallel=False)
    parts = [part for token in byte_level.encode(CALL * 2) for part in stage.feed([token])]
    assert sum(isinstance(part, ToolOpened) for part in parts) == 1
    assert stage.stopped
    assert stage.flush() == []


def test_aside_tells_thoughts_and_calls_from_content(byte_level: Any, table: TokenBytes) -> None:
    stage = calling(table)
    aside = []
    for text in ("so", "<think>why", "</think>so", CALL[:20]):
        stage.feed(byte_level.encode(text))
        aside.append(stage.aside)
    assert aside == [False, True, False, True]
