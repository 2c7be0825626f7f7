import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cuts import cut, joined
from tests.support.reading import pieces, thoughts

START, END = "<think>", "</think>"
FRAGMENTS = [START, END, "<th", "ink>", "</", "<", "\n", " ", "\r\n", "a", "é", "🙂 b"]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def run(*feeds: str, thinking: bool = False) -> tuple[str, str]:
    """The reasoning and the content of a stream."""
    stage = thoughts(START, END, thinking=thinking)
    said = pieces([*(part for text in feeds for part in stage.feed(text)), *stage.flush()])
    assert all(text for _, text in said)
    return joined(said, "reasoning"), joined(said, "content")


def separate(text: str, *, thinking: bool) -> tuple[str, str]:
    """The rules applied to a whole text, one stretch between markers after the other."""
    reasoning, content, space = "", "", ""
    inside, fresh = thinking, thinking
    first, *marked = re.split(f"({START}|{END})", text)
    if marked and not thinking and not first.strip():  # an answer that begins with its thoughts
        text = text[len(first) :]
    for part in re.split(f"({START}|{END})", text):
        if part == END:
            inside, fresh, space = False, True, ""
        elif part == START:
            inside, fresh = True, True
        else:
            stretch = part.lstrip("\r\n") if fresh else part
            fresh = fresh and not stretch
            if inside and stretch.strip():
                reasoning += space + stretch.rstrip()
                space = stretch[len(stretch.rstrip()) :]
            elif inside:
                space += stretch
            else:
                content += stretch
    return reasoning + space, content


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        pytest.param("hello", False, "", "hello", id="never thought"),
        pytest.param("\n\n hello \n", False, "", "\n\n hello \n", id="never thought, as it is"),
        pytest.param("<think>\nwhy\n</think>\n\nso", False, "why", "so", id="a block"),
        pytest.param("\n<think>why</think>\nso", False, "why", "so", id="as GLM writes it"),
        pytest.param(" \n", False, "", " \n", id="nothing else"),
        pytest.param("why\n</think>\n\nso\n", True, "why", "so\n", id="opened by the prompt"),
        pytest.param("\n<think>\nwhy</think>so", True, "why", "so", id="opened twice"),
        pytest.param("why\nnot \n", True, "why\nnot \n", "", id="never closed"),
        pytest.param("<think>\n\n</think>\n\nso", False, "", "so", id="empty"),
        pytest.param("<think> \n \n</think>so", False, "", "so", id="only whitespace"),
        pytest.param("\n\n</think>\n\nso", True, "", "so", id="empty, opened by the prompt"),
        pytest.param("a\n<think>b</think>\nc", False, "b", "a\nc", id="a later block"),
        pytest.param("<think>a</think>b<think>c</think>d", False, "ac", "bd", id="two blocks"),
        pytest.param("a</think>\nb", False, "", "ab", id="an end marker without a start"),
        pytest.param("<think>a<think>b</think>c", False, "ab", "c", id="a start marker inside"),
        pytest.param("<think>  a  b  </think>  c", False, "  a  b", "  c", id="spaces"),
        pytest.param("a <thin", False, "", "a <thin", id="an unfinished start marker"),
        pytest.param("a </thin", True, "a </thin", "", id="an unfinished end marker"),
        pytest.param("<thi<think>a", False, "a", "<thi", id="a start marker that starts again"),
        pytest.param("<<b></b>>", False, "", "<<b></b>>", id="other tags"),
    ],
)
def test_channels(text: str, thinking: bool, reasoning: str, content: str) -> None:
    assert run(text, thinking=thinking) == (reasoning, content)
    assert run(*text, thinking=thinking) == (reasoning, content)
    for place in range(len(text)):
        assert run(text[:place], text[place:], thinking=thinking) == (reasoning, content)


@given(TEXTS, st.booleans(), st.data())
def test_any_cut_gives_the_same_channels(text: str, thinking: bool, data: st.DataObject) -> None:
    assert run(*cut(data, text), thinking=thinking) == separate(text, thinking=thinking)


@given(TEXTS, st.booleans())
def test_no_marker_ever_comes_out(text: str, thinking: bool) -> None:
    stage = thoughts(START, END, thinking=thinking)
    for character in text:
        for _, piece in pieces(stage.feed(character)):
            assert START not in piece
            assert END not in piece


def test_text_waits_no_longer_than_it_must() -> None:
    stage = thoughts(START, END, thinking=True)
    assert stage.feed("\n") == []
    assert stage.feed("a b") == [("reasoning", "a b")]
    assert stage.feed(" ") == []
    assert stage.feed("c\n</") == [("reasoning", " c")]
    assert stage.feed("b>") == [("reasoning", "\n</b>")]
    assert stage.feed(" </think>\n") == []
    assert stage.feed("\nd \n") == [("content", "d \n")]
    assert stage.feed("<") == []
    assert stage.flush() == [("content", "<")]
    assert stage.flush() == []


def test_it_tells_where_it_is() -> None:
    stage = thoughts(START, END, thinking=False)
    states = []
    for text in ["a<thi", "nk>", "b</think", ">", "c"]:
        stage.feed(text)
        states.append((stage.reasoning, stage.holding))
    assert states == [(False, True), (True, False), (True, True), (False, False), (False, False)]


@pytest.mark.parametrize("thinking", [False, True])
def test_without_markers_all_is_content(thinking: bool) -> None:
    stage = thoughts(None, None, thinking=thinking)
    text = "\n<think>a</think>\n"
    assert stage.feed(text) == [("content", text)]
    assert stage.flush() == []
    assert not stage.reasoning
