"""Calls are told from content: in JSON, cut off, nonsense, without parallel calls."""

import re

import pytest

from mlxsrv.text.call_formats.calls import Tools
from mlxsrv.text.call_formats.json_calls import HERMES
from mlxsrv.text.reader import ToolArguments, ToolOpened
from tests.support.reading import caller
from tests.support.tool_calls import (
    CUT,
    END,
    NO_OBJECT,
    START,
    TOOLS,
    UNCLOSED,
    UNKNOWN,
    UNREADABLE,
    Heard,
    run,
)


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        pytest.param('{"name": "f", "arguments": {"a": 1} }', "f", '{"a": 1}', id="usual"),
        pytest.param('{"arguments":{"a":1},"name":"f"}', "f", '{"a":1}', id="the name last"),
        pytest.param('{"name":"f","parameters":{"a":1}}', "f", '{"a":1}', id="parameters"),
        pytest.param('{"name":"f"}', "f", "{}", id="no arguments"),
        pytest.param('{"name":"f","arguments":null}', "f", "{}", id="null"),
        pytest.param('{"arguments": null, "name":"f"}', "f", "{}", id="null first"),
        pytest.param('{"name":"f","arguments":""}', "f", "{}", id="an empty string"),
        pytest.param(
            '{"name":"f","arguments":"{\\"a\\": \\"\\\\u00e9\\ud83d\\ude42\\"}\\n"}',
            "f",
            '{"a": "\\u00e9🙂"}',
            id="arguments as a string",
        ),
        pytest.param(
            '{"arguments":" {\\"a\\": 1}","name":"f"}', "f", '{"a": 1}', id="a string, name last"
        ),
        pytest.param(
            '{"name":"f","arguments":{"a":{"b":["}","{"]},"c":"\\"}\\\\"}}',
            "f",
            '{"a":{"b":["}","{"]},"c":"\\"}\\\\"}',
            id="brackets and quotes in strings",
        ),
        pytest.param(
            '{"id": 3, "type": "function", "x": {"name": "no", "arguments": {}}, "name": "f",'
            ' "y": [], "arguments": {"name": "no"}, "z": true}',
            "f",
            '{"name": "no"}',
            id="other keys",
        ),
        pytest.param('{"name":"\\u00e9\\n","arguments":{}}', "é\n", "{}", id="escapes in the name"),
        pytest.param('{"n\\u0061me":"f","arguments":{}}', "f", "{}", id="escapes in a key"),
        pytest.param('{"name":"f","arguments":{},"arguments":{"a":1}}', "f", "{}", id="twice"),
        pytest.param('{"name":"f","name":"g","arguments":{}}', "f", "{}", id="two names"),
        pytest.param(
            f'{{"name":"f","arguments":{{"a":"{START}{END}"}}}}',
            "f",
            f'{{"a":"{START}{END}"}}',
            id="markers in a string",
        ),
        pytest.param(
            f'{{"x":"{END}\\"", "arguments":{{"{END}":1}},"name":"f{END}"}}',
            f"f{END}",
            f'{{"{END}":1}}',
            id="end markers everywhere",
        ),
        # Not quite JSON, but plain enough.
        pytest.param('{"name":"f","arguments":{}}}', "f", "{}", id="a brace too many"),
        pytest.param('{"name":"f","arguments":{"a":1}', "f", '{"a":1}', id="a brace too few"),
        pytest.param('{"name":"f"', "f", "{}", id="a brace too few, no arguments"),
        pytest.param('{"name":"f" "arguments":{},}', "f", "{}", id="commas"),
        pytest.param('{"name":"f","arguments":}', "f", "{}", id="nothing for arguments"),
        # No JSON object, but the name was sent.
        pytest.param('{"name":"f","arguments":{"a":yes}}', "f", '{"a":yes}', id="not JSON"),
        pytest.param('{"name":"f","arguments":{"a":}}', "f", '{"a":}', id="no value"),
        pytest.param('{"name":"f","arguments":[1, 2]}', "f", "[1, 2]", id="an array"),
        pytest.param('{"name":"f","arguments":12', "f", "12", id="a number, unfinished"),
        pytest.param('{"name":"f","arguments":"Paris"}', "f", '"Paris"', id="a string of no JSON"),
        pytest.param('{"name":"f","arguments":"[1]"}', "f", '"[1]"', id="a string of an array"),
    ],
)
def test_calls_in_json(call: str, name: str, arguments: str) -> None:
    answers = [f"{START}{call}{END}", f"a\n{START} \n{call}\n{END}\n b", f"{START}{call}"]
    for text, before, after in zip(answers, ["", "a", ""], ["", "b", ""], strict=True):
        expected = [*filter(None, [before]), (name, arguments), *filter(None, [after])]
        assert run([text]).parts == expected
        assert run(text).parts == expected
        for place in range(len(text)):
            assert run([text[:place], text[place:]]).parts == expected


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("", id="empty"),
        pytest.param("oops", id="not JSON"),
        pytest.param('"name"', id="a string"),
        pytest.param("[1]", id="an array of numbers"),
        pytest.param("[]", id="an empty array"),
        pytest.param("{}", id="an empty object"),
        pytest.param('{"arguments": {}}', id="no name"),
        pytest.param('{"name": null, "arguments": {}}', id="a name that is null"),
        pytest.param('{"name": "", "arguments": {}}', id="an empty name"),
        pytest.param('{"name": "\\x"}', id="a wrong escape"),
        pytest.param('{"name": "f\n"}', id="a line end in the name"),
        pytest.param('{"name" "f"}', id="no colon"),
        pytest.param("{name: 'f'}", id="no quotes"),
        pytest.param('{"arguments": {"a": yes}, "name": "f"}', id="arguments not JSON"),
        pytest.param('{"arguments": [1], "name": "f"}', id="arguments an array"),
        pytest.param('{"arguments": {"a": 1}, "name": "f', id="an unclosed name"),
        pytest.param('{"name": "', id="an unclosed name, just begun"),
    ],
)
def test_what_is_no_call_is_content(call: str) -> None:
    closed = f"{START}{call}{END}"
    for text in (closed, f"a \n{closed}\n b ", f" \n{START}{call}"):
        assert run([text]) == Heard([text], 0, faults=[UNREADABLE])
        assert run(text) == Heard([text], 0, faults=[UNREADABLE])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param(" \n a \n", [" \n a \n"], id="no call"),
        pytest.param(" \n ", [" \n "], id="only whitespace"),
        pytest.param("\n CALL \n CALL \n", ["f", "f"], id="whitespace around calls"),
        pytest.param(" a\n\nCALL\n\nb\n", [" a", "f", "b\n"], id="whitespace within content"),
        pytest.param("aCALLbCALLc", ["a", "f", "b", "f", "c"], id="no whitespace"),
        pytest.param("a\nSTART\nCALL", ["a\nSTART", "f"], id="a marker that is none"),
        pytest.param("CALL\nSTARToopsEND\nb", ["f", "STARToopsEND\nb"], id="no call after one"),
        pytest.param("a <tool_call", ["a <tool_call"], id="an unfinished start marker"),
        pytest.param("a </tool_call", ["a </tool_call"], id="an unfinished end marker"),
        pytest.param("CALL </tool_call", ["f"], id="an unfinished end marker after a call"),
        pytest.param("a END b", ["a  b"], id="an end marker outside a call"),
        pytest.param("STARTJSON\nb", ["f", "b"], id="no end marker"),
        pytest.param("STARTJSON\nSTARTJSONEND", ["f", "f"], id="no end marker between"),
        pytest.param("STARTJSON} ]\nEND } b", ["f", "} b"], id="brackets too many"),
    ],
)
def test_what_is_around_calls(text: str, parts: list[str]) -> None:
    body = '{"name":"f","arguments":{"a":1}}'
    names = {"CALL": "STARTJSONEND", "START": START, "END": END, "JSON": body}

    def spelled(text: str) -> str:
        for name, meaning in names.items():
            text = text.replace(name, meaning)
        return text

    expected = [("f", '{"a":1}') if part == "f" else spelled(part) for part in parts]
    assert run([spelled(text)]).parts == expected
    assert run(spelled(text)).parts == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param('{"a":"x}}END', [("f", '{"a":"x}}')], id="at the end"),
        pytest.param('{"a":"x}}END\nb', [("f", '{"a":"x}}'), "b"], id="before content"),
        pytest.param(
            '{"a":"xEND\nSTART{"name":"g"}END', [("f", '{"a":"x'), ("g", "{}")], id="call"
        ),
        pytest.param('{"a":"x\nyEND\nb', [("f", '{"a":"x\\ny'), "b"], id="line ends before it"),
        pytest.param('{"a":"xENDyEND\nb', [("f", '{"a":"x'), "yEND\nb"], id="two"),
        pytest.param('{"a":"xENDy","b":1END\nb', [("f", '{"a":"xENDy","b":1'), "b"], id="one did"),
        pytest.param(
            '{"a":"xENDy","b":"cEND\nd', [("f", '{"a":"xENDy","b":"c'), "d"], id="the first did"
        ),
        pytest.param('{"a":"xENDb', [("f", '{"a":"x'), "b"], id="with no line end behind it"),
        pytest.param('"xEND\nb', [("f", ""), "b"], id="arguments as a string"),
        pytest.param('"x', [("f", '"x')], id="no end marker, arguments as a string"),
        pytest.param('{"a":"x', [("f", '{"a":"x')], id="no end marker"),
    ],
)
def test_an_end_marker_in_a_string_that_does_not_close(
    text: str, parts: list[str | tuple[str, str]]
) -> None:
    text = f'{START}{{"name":"f","arguments":{text}'.replace("START", START).replace("END", END)
    # The second end marker, outside a call by then, is dropped.
    expected = [
        part.replace("END", "") if isinstance(part, str) else (part[0], part[1].replace("END", END))
        for part in parts
    ]
    assert run([text]).parts == expected
    assert run(text).parts == expected


def test_a_name_that_does_not_close_takes_no_other_call_with_it() -> None:
    unclosed = f'{START}{{"name": "f{END}'
    text = f'{unclosed}\n{START}{{"name": "g"}}{END}'
    assert run([text]).parts == [unclosed, ("g", "{}")]
    assert run(text).parts == [unclosed, ("g", "{}")]


@pytest.mark.parametrize(
    ("call", "parts", "broken"),
    [
        pytest.param("", [], False, id="nothing"),
        pytest.param('{"name": "f', [], False, id="in the name"),
        pytest.param('{"arguments": {"a": 1}, "nam', [], False, id="before the name"),
        pytest.param('{"name": "f"', [("f", "")], True, id="after the name"),
        pytest.param('{"name": "f", "arguments": {"a": "x', [("f", '{"a": "x')], True, id="within"),
        pytest.param('{"name": "f", "arguments": {"a": "x</to', [("f", '{"a": "x')], True, id="m"),
        pytest.param('{"name": "f", "arguments": "{', [("f", "")], True, id="in a string"),
        pytest.param('{"name": "f", "arguments": nul', [("f", "")], True, id="in null"),
        pytest.param('{"name": "f", "arguments": {"a": 1}', [("f", '{"a": 1}')], False, id="all"),
        pytest.param('{"name": "f"}', [("f", "{}")], False, id="all, without arguments"),
        pytest.param(
            f'{{"name": "f", "arguments": {{}}, "x": "a{END}b',
            [("f", "{}")],
            False,
            id="after the arguments",
        ),
        pytest.param('{"name": "f"}</to', [("f", "{}")], False, id="in the end marker"),
    ],
)
def test_a_call_that_is_cut_off(call: str, parts: list[tuple[str, str]], broken: bool) -> None:
    for text in ([f"a\n{START}{call}"], f"a\n{START}{call}"):
        heard = run(text, end=True)
        fragment = START + call if broken or not parts else ""
        faults = [CUT] if fragment else []
        assert heard == Heard(["a", *parts], len(parts), [0] if broken else [], fragment, faults)
    complete = f'{START}{{"name":"g"}}{END}\n'
    numbers = [1] if broken else []
    expected = Heard([("g", "{}"), *parts], len(parts) + 1, numbers, fragment, faults)
    assert run([f"{complete}{START}{call}"], end=True) == expected


@pytest.mark.parametrize(
    ("text", "tools", "broken", "fault"),
    [
        pytest.param('{"name": "f", "arguments": [1]}', [("f", "[1]")], [0], NO_OBJECT, id="list"),
        pytest.param('{"name": "f", "arguments": "x"}', [("f", '"x"')], [0], NO_OBJECT, id="text"),
        pytest.param('{"name": "f", "arguments": 5 ', [("f", "5")], [0], NO_OBJECT, id="number"),
        pytest.param(
            '{"name": "f", "arguments": {"a": 1 2}}', [("f", '{"a": 1 2}')], [0], NO_OBJECT, id="no"
        ),
        pytest.param(
            '{"name": "f", "arguments": {"a": {}', [("f", '{"a": {}')], [0], NO_OBJECT, id="open"
        ),
        pytest.param('{"name": "f", "arguments": "{}"}', [("f", "{}")], [], None, id="in a string"),
        pytest.param('{"name": "g"}', [("g", "{}")], [], UNKNOWN, id="another name"),
        pytest.param('{"name": 5}', [], [], UNREADABLE, id="no name"),
    ],
)
def test_a_call_that_is_nonsense(
    text: str, tools: list[tuple[str, str]], broken: list[int], fault: str | None
) -> None:
    only = Tools({"f": {}})
    whole = START + text + END
    for feeds in ([whole], whole):
        heard = run(feeds, only)
        assert heard.tools == tools
        assert heard.content == ("" if tools else whole)
        assert (heard.broken, heard.fragment) == (broken, "")
        assert heard.faults == ([fault] if fault else [])
    # The other calls of the answer are whole.
    good = f'{START}{{"name": "f", "arguments": {{"b": 2}}}}{END}'
    heard = run([good, whole, good], only)
    assert heard.tools == [("f", '{"b": 2}'), *tools, ("f", '{"b": 2}')]
    assert heard.broken == [number + 1 for number in broken]


@pytest.mark.parametrize(
    ("text", "tools", "fault"),
    [
        ('{"name": "f", "arguments": {"a": 1}', [("f", '{"a": 1}')], None),  # only its brace
        ('{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1')], UNCLOSED),
        ('{"name": "f", "argum', [("f", "{}")], UNCLOSED),
        ('{"name": "f"', [("f", "{}")], UNCLOSED),
        ('{"name": "f', [], UNREADABLE),
    ],
)
def test_a_call_that_the_model_itself_ends_too_early(
    text: str, tools: list[tuple[str, str]], fault: str | None
) -> None:
    for feeds in ([START + text], START + text):
        heard = run(feeds, Tools({"f": {}}))
        assert heard.tools == tools
        assert heard.content == ("" if tools else START + text)
        assert heard.faults == ([fault] if fault else [])
        assert heard.broken == ([0] if fault and tools else [])
        assert heard.fragment == (START + text if heard.broken else "")


def test_a_name_is_sent_when_it_is_complete_and_arguments_as_they_come() -> None:
    stage = caller(HERMES, TOOLS)
    seen: list[tuple[list[str], int]] = []
    feeds = ["a\n", "<tool", '_call>{"name', '": "f', '"', ', "arguments": {', '"a": "\\', 'n"']
    for text in [*feeds, "<", "/tool", "> ", "} ", "}", "\n</tool_call>"]:
        parts = [
            part.name
            if isinstance(part, ToolOpened)
            else part.text
            if isinstance(part, ToolArguments)
            else part[1]
            for part in stage.feed(text)
        ]
        seen.append((parts, stage.calls))
    assert seen == [
        (["a"], 0),
        ([], 0),
        ([], 0),
        ([], 0),
        (["f"], 1),
        (["{"], 1),
        (['"a": "'], 1),
        (['\\n"'], 1),
        ([], 1),
        ([], 1),
        (["</tool> "], 1),
        (["}"], 1),
        ([], 1),
        ([], 1),
    ]
    assert stage.flush(cut=False) == []


def test_content_waits_no_longer_than_it_must() -> None:
    stage = caller(HERMES, TOOLS)
    assert stage.feed(" a b") == [("content", " a b")]
    assert stage.feed("\n") == []
    assert stage.feed("c <") == [("content", "\nc")]
    assert stage.feed("b> ") == [("content", " <b>")]
    assert stage.flush(cut=True) == [("content", " ")]


def test_without_parallel_the_first_call_is_the_last_thing() -> None:
    text = f'a\n{START}{{"name":"f","arguments":{{}}}}{END}'
    stage = caller(HERMES, TOOLS, parallel=False)
    for character in text.removesuffix("}" + END):
        stage.feed(character)
        assert not stage.done
    assert stage.inside
    stage.feed("}")
    assert stage.done
    assert stage.feed(END + "\nb " + text) == []
    assert stage.flush(cut=False) == []
    assert run([text + " b" + text], parallel=False).parts == ["a", ("f", "{}")]


def test_without_parallel_what_is_no_call_does_not_count() -> None:
    text = f'{START}oops{END} {START}{{"name":"f"}}{END}{START}{{"name":"g"}}{END}'
    assert run([text], parallel=False).parts == [f"{START}oops{END}", ("f", "{}")]


def test_ids_are_as_openai_has_them() -> None:
    stage = caller(HERMES, TOOLS)
    parts = stage.feed(f'{START}{{"name":"f"}}{END}' * 20)
    ids = [part.id for part in parts if isinstance(part, ToolOpened)]
    assert len(set(ids)) == 20
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", id) for id in ids)


def written(*cities: str, name: str = "weather") -> str:
    """Calls for the weather of some cities, one a line."""
    calls = (f'{{"name": "{name}", "arguments": {{"city": "{city}"}}}}' for city in cities)
    return "\n".join(f"{START}\n{call}\n{END}" for call in calls)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("cities", "given"),
    [
        (["Oslo", "Oslo", "Oslo"], 1),
        (["Oslo", "Paris", "Oslo", "Rome"], 2),
        (["Os", "Oslo", "Os"], 2),
        (["Oslo", "Os", "Osl"], 3),
    ],
)
def test_a_call_that_is_made_again_ends_an_answer_that_follows_a_grammar(
    cities: list[str], given: int, size: int
) -> None:
    text = written(*cities)
    feeds = [text[at : at + size] for at in range(0, len(text), size)]
    heard = run(feeds, bound=True)
    assert heard.parts == [("weather", f'{{"city": "{city}"}}') for city in cities[:given]]
    assert (heard.calls, heard.broken, heard.faults) == (given, [], [])
    assert run(feeds).calls == len(cities), "where it may end by itself"


def test_another_call_is_given_as_soon_as_it_is_another() -> None:
    stage = caller(HERMES, TOOLS, bound=True)
    stage.feed(written("Oslo") + "\n")
    same, other = written("Oslo").split("slo")
    assert stage.feed(same) == []
    opened, *more = stage.feed("dense")
    assert isinstance(opened, ToolOpened)
    texts = [part.text for part in more if isinstance(part, ToolArguments)]
    assert "".join(texts) == '{"city": "Odense'
    assert stage.feed(other) == [ToolArguments(1, '"}')]
    assert not stage.done


def test_a_repeated_call_that_is_cut_off_is_told() -> None:
    """It may have become another one."""
    heard = run([written("Oslo") + "\n" + written("Oslo").partition("lo")[0]], bound=True, end=True)
    assert heard.tools == [("weather", '{"city": "Oslo"}'), ("weather", '{"city": "Os')]
    assert heard.broken == [1]


def test_calls_between_one_pair_of_markers_are_given_once() -> None:
    calls = ", ".join(['{"name": "weather", "arguments": {}}'] * 3)
    assert run([f"{START}[{calls}]{END}"], bound=True).calls == 1
