"""Calls are told from content in the dialects of all of mlx-lm's parsers, however text is cut."""

import importlib
import json
import pkgutil
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import tool_parsers

from mlxsrv.text.tools import ContentOrCall, ToolArguments, ToolCalls, ToolDialect, ToolOpened
from tests.support.cuts import cut

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
PARIS = {"city": "Paris é", "days": 3}
CITY = "Paris é"

# What a model of each family writes to call `weather(**PARIS)`.
FAMILIES = {
    "function_gemma": (
        f"<start_function_call>call:weather{{city:<escape>{CITY}<escape>,days:3}}"
        "<end_function_call>"
    ),
    "gemma4": f'<|tool_call>call:weather{{city:<|"|>{CITY}<|"|>,days:3}}<tool_call|>',
    "glm47": (
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
    "json_tools": (
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{CITY}", "days": 3}}}}\n'
        "</tool_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f'<|tool_call_argument_begin|>{{"city": "{CITY}", "days": 3}}<|tool_call_end|>'
        "<|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        f'<|open|>argument key="city" type="string"<|sep|>{CITY}<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "laguna": (
        f"<tool_call>weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    ),
    "longcat": (
        "<longcat_tool_call>weather\n"
        f"<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>{CITY}</longcat_arg_value>\n"
        "<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n"
        "</longcat_tool_call>"
    ),
    "minicpm5": (
        f'<function name="weather"><param name="city"><![CDATA[{CITY}]]></param>'
        '<param name="days">3</param></function>'
    ),
    "minimax_m2": (
        f'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "mistral": f'[TOOL_CALLS]weather[ARGS]{{"city": "{CITY}", "days": 3}}',
    "muse_spark": (
        '<atem:function_calls>\n<atem:invoke name="weather">\n'
        f'<atem:parameter name="city" string="true">{CITY}</atem:parameter>\n'
        '<atem:parameter name="days" string="false">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    ),
    "pythonic": f'<|tool_call_start|>[weather(city="{CITY}", days=3)]<|tool_call_end|>',
    "qwen3_coder": (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n\n</tool_call>"
    ),
}

# Several calls between one pair of markers, or with no end marker.
SECTIONS = {
    "gemma4": "<|tool_call>call:a{}call:b{x:1}<tool_call|>",
    "kimi_k2": (
        "<|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        '<|tool_call_begin|>functions.b:1<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
        "<|tool_calls_section_end|>"
    ),
    "json_tools": '<tool_call>[{"name": "a"}, {"name": "b", "arguments": {"x": 1}}]</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]',
    "pythonic": "<|tool_call_start|>[a(), b(x=1)]<|tool_call_end|>",
}


def family(name: str) -> ToolDialect:
    parser: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return ToolDialect(
        start=parser.tool_call_start,
        end=parser.tool_call_end,
        parse=lambda text: parser.parse_tool_call(text, TOOLS),
        json=name == "json_tools",
        names=("weather",),
    )


CUT = "cut off by a limit"
UNCLOSED = "never closed"
NO_OBJECT = "its arguments are no JSON object"
UNREADABLE = "no call could be read, so it is content"
UNKNOWN = "the request has no tool of this name"

JSON = family("json_tools")
START, END = JSON.start, str(JSON.end)
WEATHER_OR_ANY = msgspec.structs.replace(JSON, names=())
XML = family("qwen3_coder")


class Heard(msgspec.Struct, frozen=True):
    """An answer put together: content and calls in order, as one text or (name, arguments)."""

    parts: list[str | tuple[str, str]]
    calls: int
    broken: list[int] = []
    fragment: str = ""
    faults: list[str] = []

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def tools(self) -> list[tuple[str, str]]:
        return [part for part in self.parts if not isinstance(part, str)]


def merge(parts: Iterable[ContentOrCall]) -> list[str | tuple[str, str]]:
    merged: list[str | tuple[str, str]] = []
    opened = 0
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, ToolOpened):
            assert part.index == opened
            opened += 1
            merged.append((part.name, ""))
        elif isinstance(part, ToolArguments):
            assert part.text
            assert part.index == opened - 1
            assert isinstance(last, tuple)
            merged[-1] = (last[0], last[1] + part.text)
        else:
            assert part
            if isinstance(last, str):
                merged[-1] = last + part
            else:
                merged.append(part)
    return merged


def run(
    feeds: Iterable[str], dialect: ToolDialect = JSON, *, end: bool = False, parallel: bool = True
) -> Heard:
    """The answer that `feeds` are, cut off by a limit at the `end`."""
    stage = ToolCalls(dialect, parallel=parallel)
    parts = [part for text in feeds for part in stage.feed(text)] + stage.flush(cut=end)
    assert not stage.opened
    assert stage.flush(cut=end) == []
    return Heard(merge(parts), stage.calls, stage.broken, stage.fragment, [*stage.faults])


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
        pytest.param('{"name":"f","arguments":{"a":True}}', "f", '{"a":True}', id="not JSON"),
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
    ("call", "dialect"),
    [
        pytest.param("", JSON, id="empty"),
        pytest.param("oops", JSON, id="not JSON"),
        pytest.param('"name"', JSON, id="a string"),
        pytest.param("[1]", JSON, id="an array of numbers"),
        pytest.param("[]", JSON, id="an empty array"),
        pytest.param('[{"name": "f"}, {"arguments": {}}]', JSON, id="one of two has no name"),
        pytest.param("{}", JSON, id="an empty object"),
        pytest.param('{"arguments": {}}', JSON, id="no name"),
        pytest.param('{"name": null, "arguments": {}}', JSON, id="a name that is null"),
        pytest.param('{"name": "", "arguments": {}}', JSON, id="an empty name"),
        pytest.param('{"name": "\\x"}', JSON, id="a wrong escape"),
        pytest.param('{"name": "f\n"}', JSON, id="a line end in the name"),
        pytest.param('{"name" "f"}', JSON, id="no colon"),
        pytest.param("{name: 'f'}", JSON, id="no quotes"),
        pytest.param('{"arguments": {"a": True}, "name": "f"}', JSON, id="arguments not JSON"),
        pytest.param('{"arguments": [1], "name": "f"}', JSON, id="arguments an array"),
        pytest.param('{"arguments": {"a": 1}, "name": "f', JSON, id="an unclosed name"),
        pytest.param('{"name": "', JSON, id="an unclosed name, just begun"),
        pytest.param("<parameter=a>1</parameter>", XML, id="no function"),
        pytest.param("\n<function=f>\n<parameter=a>\n", XML, id="an unclosed function"),
        pytest.param("\n<function=weather>\n<parameter=days>x</parameter></function>", XML, id="x"),
        pytest.param("oops", family("longcat"), id="a parser that trips"),
        pytest.param("f:0<|tool_call_argument_begin|>[1]", family("kimi_k2"), id="no object"),
        pytest.param("f:0<|tool_call_argument_begin|>Paris", family("kimi_k2"), id="no JSON"),
        pytest.param('{"name": "f", "arguments": {"a": 1}}', XML, id="another dialect"),
    ],
)
def test_what_is_no_call_is_content(call: str, dialect: ToolDialect) -> None:
    closed = f"{dialect.start}{call}{dialect.end}"
    for text in (closed, f"a \n{closed}\n b ", f" \n{dialect.start}{call}"):
        assert run([text], dialect) == Heard([text], 0, faults=[UNREADABLE])
        assert run(text, dialect) == Heard([text], 0, faults=[UNREADABLE])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param(" \n a \n", [" \n a \n"], id="no call"),
        pytest.param(" \n ", [" \n "], id="only whitespace"),
        pytest.param("\n CALL \n CALL \n", ["f", "f"], id="whitespace around calls"),
        pytest.param(" a\n\nCALL\n\nb\n", [" a", "f", "b\n"], id="whitespace within content"),
        pytest.param("aCALLbCALLc", ["a", "f", "b", "f", "c"], id="no whitespace"),
        pytest.param("a\nSTART\nCALL", ["a\nSTART\nSTARTJSONEND"], id="a marker that is none"),
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
        pytest.param('{"a":"x\nyEND\nb', [("f", '{"a":"x\ny'), "b"], id="line ends before it"),
        pytest.param('{"a":"xENDyEND\nb', [("f", '{"a":"x'), "yEND\nb"], id="two"),
        pytest.param('{"a":"xENDy","b":1END\nb', [("f", '{"a":"xENDy","b":1'), "b"], id="one did"),
        pytest.param(
            '{"a":"xENDy","b":"cEND\nd', [("f", '{"a":"xENDy","b":"c'), "d"], id="the first did"
        ),
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
        pytest.param("oo", [], False, id="for the parser"),
    ],
)
def test_a_call_that_is_cut_off(call: str, parts: list[tuple[str, str]], broken: bool) -> None:
    for text in ([f"a\n{START}{call}"], f"a\n{START}{call}"):
        heard = run(text, WEATHER_OR_ANY, end=True)
        fragment = START + call if broken or not parts else ""
        faults = [CUT] if fragment else []
        assert heard == Heard(["a", *parts], len(parts), [0] if broken else [], fragment, faults)
    complete = f'{START}{{"name":"g"}}{END}\n'
    numbers = [1] if broken else []
    expected = Heard([("g", "{}"), *parts], len(parts) + 1, numbers, fragment, faults)
    assert run([f"{complete}{START}{call}"], WEATHER_OR_ANY, end=True) == expected


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
        pytest.param('[{"name": "f"}, 5]', [], [], UNREADABLE, id="one of two"),
    ],
)
def test_a_call_that_is_nonsense(
    text: str, tools: list[tuple[str, str]], broken: list[int], fault: str | None
) -> None:
    dialect = msgspec.structs.replace(JSON, names=("f",))
    whole = START + text + END
    for feeds in ([whole], whole):
        heard = run(feeds, dialect)
        assert heard.tools == tools
        assert heard.content == ("" if tools else whole)
        assert (heard.broken, heard.fragment) == (broken, "")
        assert heard.faults == ([fault] if fault else [])
    # The other calls of the answer are whole.
    good = f'{START}{{"name": "f", "arguments": {{"b": 2}}}}{END}'
    heard = run([good, whole, good], dialect)
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
        heard = run(feeds, msgspec.structs.replace(JSON, names=("f",)))
        assert heard.tools == tools
        assert heard.content == ("" if tools else START + text)
        assert heard.faults == ([fault] if fault else [])
        assert heard.broken == ([0] if fault and tools else [])
        assert heard.fragment == (START + text if heard.broken else "")


def test_a_name_is_sent_when_it_is_complete_and_arguments_as_they_come() -> None:
    stage = ToolCalls(JSON)
    seen: list[tuple[list[str], bool, int]] = []
    feeds = ["a\n", "<tool", '_call>{"name', '": "f', '"', ', "arguments": {', '"a": "\\', 'n"']
    for text in [*feeds, "<", "/tool", "> ", "} ", "}", "\n</tool_call>"]:
        parts = [
            part if isinstance(part, str) else part.name if isinstance(part, ToolOpened) else part
            for part in stage.feed(text)
        ]
        texts = [part.text if isinstance(part, ToolArguments) else part for part in parts]
        seen.append((texts, stage.opened, stage.calls))
    assert seen == [
        (["a"], False, 0),
        ([], False, 0),
        ([], False, 0),
        ([], False, 0),
        (["f"], True, 1),
        (["{"], True, 1),
        (['"a": "\\'], True, 1),
        (['n"'], True, 1),
        ([], True, 1),
        ([], True, 1),
        (["</tool> "], True, 1),
        (["}"], True, 1),
        ([], False, 1),
        ([], False, 1),
    ]
    assert stage.flush(cut=False) == []


def test_content_waits_no_longer_than_it_must() -> None:
    stage = ToolCalls(JSON)
    assert stage.feed(" a b") == [" a b"]
    assert stage.feed("\n") == []
    assert stage.feed("c <") == ["\nc"]
    assert stage.feed("b> ") == [" <b>"]
    assert stage.flush(cut=True) == [" "]


def test_without_parallel_the_first_call_is_the_last_thing() -> None:
    text = f'a\n{START}{{"name":"f","arguments":{{}}}}{END}'
    stage = ToolCalls(JSON, parallel=False)
    for character in text.removesuffix("}" + END):
        stage.feed(character)
        assert not stage.done
    assert stage.opened
    stage.feed("}")
    assert stage.done
    assert stage.feed(END + "\nb " + text) == []
    assert stage.flush(cut=False) == []
    assert run([text + " b" + text], parallel=False).parts == ["a", ("f", "{}")]


def test_without_parallel_what_is_no_call_does_not_count() -> None:
    text = f'{START}oops{END} {START}{{"name":"f"}}{END}{START}{{"name":"g"}}{END}'
    assert run([text], parallel=False).parts == [f"{START}oops{END}", ("f", "{}")]


def test_ids_are_as_openai_has_them() -> None:
    stage = ToolCalls(JSON)
    parts = stage.feed(f'{START}{{"name":"f"}}{END}' * 20)
    ids = [part.id for part in parts if isinstance(part, ToolOpened)]
    assert len(set(ids)) == 20
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", id) for id in ids)


@pytest.mark.parametrize("end", [None, ""])
def test_json_without_an_end_marker(end: str | None) -> None:
    dialect = ToolDialect(start="[CALL]", end=end, parse=json.loads, json=True)
    text = 'a [CALL]{"name": "f", "arguments": {"a": 1}}\n[CALL]{"name": "g"} '
    assert run([text], dialect).parts == ["a", ("f", '{"a": 1}'), ("g", "{}")]
    assert run(text, dialect).parts == ["a", ("f", '{"a": 1}'), ("g", "{}")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"a": (1, 2), "b": {3: None}}, '{"a":[1,2],"b":{"3":null}}'),
        ({"a": 2**70}, '{"a":1180591620717411303424}'),
        ({"a": float("inf")}, '{"a":null}'),
        (' {"a": 1}\n', '{"a": 1}'),
        ("", "{}"),
        (None, "{}"),
        ({"a": "\ud83d"}, None),
        ({"a": 1j}, None),
        ("{", None),
        (5, None),
        ([], None),
    ],
)
def test_what_a_parser_may_give_for_arguments(arguments: Any, text: str | None) -> None:
    def parse(_: str) -> dict[str, Any]:
        return {"name": "f", "arguments": arguments, "id": "functions.f:0"}

    heard = run(["<c>x</c>"], ToolDialect(start="<c>", end="</c>", parse=parse))
    assert heard.parts == (["<c>x</c>"] if text is None else [("f", text)])


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
