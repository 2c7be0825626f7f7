"""Calls are told in the dialects of all of mlx-lm's parsers, however text is cut or mutated."""

import json
import pkgutil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import tool_parsers

from mlxsrv.text.tools import ToolCalls, ToolDialect
from tests.support.cuts import cut
from tests.support.tool_calls import (
    CUT,
    END,
    FAMILIES,
    JSON,
    PARIS,
    SECTIONS,
    START,
    XML,
    Heard,
    family,
    run,
)


def test_every_parser_of_mlx_lm_is_tried() -> None:
    assert {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_of_each_family(name: str) -> None:
    dialect, call = family(name), FAMILIES[name]
    answers = [(call, [""]), (f"Let me see.\n\n{call}", ["Let me see."])]
    if dialect.end:
        answers.append((f" {call}\n{call}\n Done. ", ["", "", "Done. "]))
    for text, content in answers:
        heard = run([text], dialect)
        assert heard == run(text, dialect)
        assert [part for part in heard.parts if isinstance(part, str)] == list(
            filter(None, content)
        )
        assert [name for name, _ in heard.tools] == ["weather"] * max(1, len(content) - 1)
        for _, arguments in heard.tools:
            assert json.loads(arguments) == PARIS
            assert dialect.json or arguments == '{"city":"Paris é","days":3}'


@pytest.mark.parametrize("name", FAMILIES)
@given(st.data())
def test_any_cut_of_each_family_gives_the_same(name: str, data: st.DataObject) -> None:
    text = f"Let me see.\n\n{FAMILIES[name]}"
    assert run(cut(data, text), family(name)) == run([text], family(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_each_family_cut_off_anywhere(name: str) -> None:
    dialect, before = family(name), "Let me see.\n\n"
    text = before + FAMILIES[name]
    for length in range(len(text)):
        heard = run([text[:length]], dialect, end=True)
        assert heard == run(text[:length], dialect, end=True)
        if length < len(before) + len(dialect.start):  # no more than what may be content
            # One character may be anything; more of a marker are taken for one.
            shown = text[:length] if length <= len(before) + 1 else before
            assert heard == Heard([shown] if length else [], 0)
            continue
        assert heard.content == "Let me see."
        assert (not heard.fragment) == (not heard.faults)
        if heard.fragment:
            assert heard.fragment == FAMILIES[name][: length - len(before)]
            assert heard.faults == [CUT]
        if heard.broken:
            assert heard.broken == [0]
            [(called, arguments)] = heard.tools
            assert called == "weather"
            assert json.dumps(PARIS, ensure_ascii=False).startswith(arguments)
        else:
            assert [_loaded(arguments) for _, arguments in heard.tools] in ([], [PARIS])
    # The whole call is one even so: an answer may be cut off right after it.
    assert [_loaded(arguments) for _, arguments in run([text], dialect, end=True).tools] == [PARIS]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut_in_its_arguments_is_told_by_its_name(name: str) -> None:
    text = FAMILIES[name][: FAMILIES[name].index("Paris") + 3]
    heard = run([text], family(name), end=True)
    assert heard.broken
    assert heard.content == ""
    arguments = '{"city": "Par' if name in ("json_tools", "kimi_k2", "mistral") else ""
    assert heard.tools == [("weather", arguments)]


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_whose_model_ends_without_the_end_marker(name: str) -> None:
    dialect = family(name)
    text = FAMILIES[name].removesuffix(dialect.end or "")
    for rest in ["", *([dialect.end[:2]] if dialect.end else [])]:
        for feeds in ([text + rest], text + rest):
            heard = run(feeds, dialect)
            assert [(name, json.loads(text)) for name, text in heard.tools] == [("weather", PARIS)]
            assert heard.content == ""


@pytest.mark.parametrize("name", SECTIONS)
def test_several_calls_in_one(name: str) -> None:
    dialect, text = family(name), SECTIONS[name]
    assert run([text], dialect).parts == [("a", "{}"), ("b", '{"x":1}')]
    assert run(text, dialect).parts == [("a", "{}"), ("b", '{"x":1}')]
    assert run(text, dialect, parallel=False).parts == [("a", "{}")]


# Any text, and any well-formed answer.

FRAGMENTS = [START, END, "<tool_", "call>", "</", "<", *'{}[]":,\\ \n1aé']
PHRASES = [
    '{"name": "f"',
    '"arguments": {',
    '"name":',
    '"f"',
    '\\"',
    "true",
    "]}",
    '"}}',
    '{"x": "',
]
SOUP = st.lists(st.sampled_from([*FRAGMENTS, *PHRASES]), max_size=24).map("".join)

KEYS = st.sampled_from(["a", "name", "arguments", 'q"', "é"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from([START, END]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
WORDS = st.lists(st.sampled_from(["a", " ", "\n", "<tool", "</", "é", "{"]), max_size=4)


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[str, str, str]:
    """A call as a model writes it, with its name and its arguments' text."""
    name = draw(st.text(min_size=1, max_size=5))
    value = draw(st.dictionaries(KEYS, VALUES, max_size=3))
    style: dict[str, Any] = {
        "ensure_ascii": draw(st.booleans()),
        "indent": draw(st.none() | st.just(1)),
    }
    arguments = json.dumps(value, **style)
    written = json.dumps(arguments) if draw(st.booleans()) else arguments
    keys = [f'"name": {json.dumps(name)}', f'"arguments": {written}']
    body = ", ".join(draw(st.permutations([*keys, '"id": [0, "}"]'])))
    return f"{START}\n{{{body}}}\n{END}", name, arguments


@given(st.lists(st.tuples(WORDS.map("".join), written_calls())), WORDS.map("".join), st.data())
def test_content_and_calls_come_out_as_they_went_in(
    turns: list[tuple[str, tuple[str, str, str]]], last: str, data: st.DataObject
) -> None:
    text, expected = "", list[str | tuple[str, str]]()
    for number, (words, (written, name, arguments)) in enumerate(turns):
        text += words + written
        said = words.strip() if number else words.rstrip()
        expected += [said, (name, arguments)] if said else [(name, arguments)]
    rest = last.lstrip() if turns else last
    if turns and END.startswith(rest):  # begun right after a call, it was the call's
        rest = ""
    heard = run(cut(data, text + last))
    assert heard.parts == [*expected, *([rest] if rest else [])]
    assert not heard.broken


@pytest.mark.parametrize("dialect", [JSON, XML, family("mistral")], ids=["json", "xml", "mistral"])
@given(SOUP, st.booleans(), st.booleans(), st.data())
def test_any_cut_of_any_text_gives_the_same(
    dialect: ToolDialect, text: str, end: bool, parallel: bool, data: st.DataObject
) -> None:
    whole = run([text], dialect, end=end, parallel=parallel)
    assert run(cut(data, text), dialect, end=end, parallel=parallel) == whole
    assert run(text, dialect, end=end, parallel=parallel) == whole


@st.composite
def mutated_calls(draw: st.DrawFn, name: str) -> str:
    """Tool calls as a model of a family writes them, with pieces lost, doubled or put in."""
    text = FAMILIES[name]
    for _ in range(draw(st.integers(1, 4))):
        first, last = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        put = draw(st.sampled_from(["", text[first:last] * 2, *FRAGMENTS]) | st.text(max_size=5))
        text = text[:first] + put + text[last:]
    return text


@pytest.mark.parametrize("name", FAMILIES)
@given(st.data())
def test_no_parser_raises_whatever_a_model_writes(name: str, data: st.DataObject) -> None:
    dialect = family(name)
    noise = st.text(max_size=40) | SOUP | mutated_calls(name)
    said = data.draw(noise)
    text = said if data.draw(st.booleans()) else dialect.start + said + (dialect.end or "")
    end = data.draw(st.booleans())
    heard = run([text], dialect, end=end)
    assert heard == run(cut(data, text), dialect, end=end)
    for number, (called, arguments) in enumerate(heard.tools):
        assert called
        assert number in heard.broken or isinstance(_loaded(arguments), dict)
    assert text.endswith(heard.fragment)


@given(SOUP)
def test_a_marker_comes_out_only_with_what_was_no_call(text: str) -> None:
    """Content with a marker in it is the text of a call that could not be read."""
    stage = ToolCalls(JSON)
    for part in [*stage.feed(text), *stage.flush(cut=False)]:
        if isinstance(part, str) and (START in part or END in part):
            call = part.lstrip()  # it may be the space before a dropped end marker
            assert call.startswith(START)
            assert call in text
