"""Calls with JSON arguments, in every format that has them."""

from typing import Any

import pytest

from mlxsrv.text.call_formats.calls import (
    CallClosed,
    CallFormat,
    CallOpened,
    CallPart,
    Tools,
    WrittenCall,
)
from mlxsrv.text.call_formats.headed_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HARMONY,
    HEADED_FORMATS,
    KIMI_K2,
    MISTRAL_ARGS,
    MISTRAL_IDS,
)
from mlxsrv.text.call_formats.json_calls import (
    APERTUS,
    COMMAND,
    GRANITE,
    HERMES,
    JSON_FORMATS,
    LLAMA_JSON,
    MISTRAL_LIST,
    PHI4,
    PROMPTED,
)
from mlxsrv.text.marks import SPELLED
from tests.support.reading import (
    CallGrammar,
    caller,
    check_cuts,
    heard,
    merge,
    named,
    read,
    read_each_way,
    schemas,
    tokens,
)

FORMATS = [*JSON_FORMATS, *HEADED_FORMATS]
FRAMED = [HARMONY]
OPENED = [each for each in FORMATS if each not in FRAMED]
TOOLS = schemas("f", "g")
WRITTEN = [
    WrittenCall("f", {"a": 'x\n"y" {}]é </tool_call> [ARGS]'}, "abcdefgh1"),
    WrittenCall("g", {}),
    WrittenCall("f", {"b": [1, {"c": None}], "d": True}, "functions.f:2"),
]
HEARD = heard(*WRITTEN)

HEARD_F = ("f", "{}")


@pytest.mark.parametrize("format", OPENED, ids=named)
def test_calls_as_the_model_writes_them(format: CallFormat) -> None:
    assert read_each_way(format, format.spell(WRITTEN), TOOLS) == HEARD
    for count in (1, 2):
        assert read(format, [format.spell(WRITTEN[:count])], TOOLS) == HEARD[:count]
    text = f"a\n\n{format.spell(WRITTEN[1:2])}"
    if not format.leading:
        assert read_each_way(format, text, TOOLS) == ["a", HEARD[1]]


@pytest.mark.parametrize("format", OPENED, ids=named)
def test_a_call_that_is_cut_anywhere_gives_the_beginning_of_the_whole_one(
    format: CallFormat,
) -> None:
    check_cuts(format, WRITTEN[:2], TOOLS)


@pytest.mark.parametrize("format", FORMATS, ids=named)
def test_a_grammar_holds_what_the_model_writes(format: CallFormat) -> None:
    strict = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "x-guidance": {"whitespace_pattern": " ?"},
    }
    grammar = CallGrammar(format, [("f", strict), ("g", {"x-guidance": strict["x-guidance"]})])
    grammar.check(WRITTEN[:2], [("f", {}), ("h", {"a": "b"})], single=format is HARMONY)


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        # Several objects.
        (
            HERMES,
            '<tool_call>\n[{"name": "f"}, {"name": "g"}]\n</tool_call>',
            [("f", "{}"), ("g", "{}")],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>b',
            [("f", "{}"), ("g", "{}"), "b"],
        ),
        (HERMES, '<tool_call>[{"name": "f"}, 5]</tool_call>', [("f", "{}"), ", 5]"]),
        (HERMES, 'a<tool_call>[{"name": "f"}', ["a", ("f", "{}")]),
        # What is not quite JSON.
        (
            HERMES,
            "<tool_call>{'name': 'f', 'arguments': {'a': 'it\\'s \"x\"', 'b': [True, None,],}}",
            [("f", """{"a": "it's \\"x\\"", "b": [true, null]}""")],
        ),
        (HERMES, '<tool_call>{"name="f", "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "x\ty\n\\d\\\'"}}</tool_call>',
            [("f", '{"a": "x\\ty\\n\\\\d\'"}')],
        ),
        (
            HERMES,
            '<tool_call>\n```json\n{"name": "f", "arguments": {}}\n```\n</tool_call>',
            [("f", "{}")],
        ),
        (
            HERMES,
            '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}',
            [("f", "{}")],
        ),
        (HERMES, '<tool_call>{"function": "f", "parameters": {}}', [("f", "{}")]),
        (
            HERMES,
            '<tool_call>\n<function>f</function>\n{"a": 1}\n</tool_call>',
            [("f", '{"a": 1}')],
        ),
        (
            HERMES,
            "a\n<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>b",
            ["a", ("f", '{"a": "x"}'), "b"],
        ),
        (HERMES, "<tool_call> <function=", ["<tool_call> <function="]),
        (HERMES, '<tool_call>{"name": "functions.f"}', [HEARD_F]),
        (HERMES, '<tool_call>{"name": "f()"}', [HEARD_F]),
        (HERMES, '<tool_call>{"name": "api:f"}', [HEARD_F]),
        (
            HERMES,
            """<tool_call>{"name": "f", "arguments": "{'a': 1,}"}</tool_call>""",
            [("f", '{"a": 1}')],
        ),
        (HERMES, "<tool_call><function>f", ["<tool_call><function>f"]),
        (HERMES, '<tool_call>{"f": {}}', ['<tool_call>{"f": {}}']),
        (HERMES, "Write <tool_call> first, [ARGS] {", ["Write <tool_call> first, [ARGS] {"]),
        # The beginning of the content, or its end.
        (LLAMA_JSON, '\n{"name": "f", "parameters": {}}', [("f", "{}")]),
        (LLAMA_JSON, '{"type": "function", "function": {"name": "f", "arguments": {}}}', [HEARD_F]),
        (LLAMA_JSON, '<|python_tag|>{"name": "f", "parameters": {}}', [HEARD_F]),
        (LLAMA_JSON, '{"name": "h", "parameters": {}}', ['{"name": "h", "parameters": {}}']),
        (LLAMA_JSON, '{"name": "f", "parameters": {}} b', [HEARD_F, "b"]),
        (LLAMA_JSON, '{"name": "f", "parameters": {}}, b', [HEARD_F, ", b"]),
        (
            LLAMA_JSON,
            '{"name": "f", "parameters": {}};{"name": "h", "parameters": {}}',
            [HEARD_F, ';{"name": "h", "parameters": {}}'],
        ),
        (LLAMA_JSON, '{"city": {"name": "f"}} b', ['{"city": {"name": "f"}} b']),
        (LLAMA_JSON, 'Sure:\n{"name": "f", "parameters": {}}\n', ["Sure:", HEARD_F]),
        (
            LLAMA_JSON,
            'So:\n{"name": "f", "parameters": {}}\nis it.',
            ['So:\n{"name": "f", "parameters": {}}\nis it.'],
        ),
        (LLAMA_JSON, 'Sure! {"name": "f", "parameters": {}}', ["Sure!", HEARD_F]),
        (LLAMA_JSON, 'As {"name": "f"}.', ['As {"name": "f"}.']),
        (PROMPTED, '```json\n{"name": "f", "arguments": {}}\n```', [HEARD_F]),
        (PROMPTED, 'A:\n```json\n{"name": "f", "arguments": {}}\n```\n', ["A:", HEARD_F]),
        (PROMPTED, 'A:\n```json\n{"a": 5}\n``` b', ['A:\n```json\n{"a": 5}\n``` b']),
        (PROMPTED, '```json\n{"name": "h"}\n```', ['```json\n{"name": "h"}\n```']),
        (PROMPTED, "[1, 2]", ["[1, 2]"]),
        # Lists.
        (MISTRAL_LIST, '[TOOL_CALLS] [{"name": "f", "arguments": {}}] b', [HEARD_F, "b"]),
        (MISTRAL_LIST, '[TOOL_CALLS]{"name": "f", "arguments": {}}', [HEARD_F]),
        (GRANITE, '<tool_call>[{"name": "f", "arguments": {}}]', [HEARD_F]),
        (PHI4, 'functools[{"name": "f", "arguments": {}}]', [HEARD_F]),
        (PHI4, '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>', [HEARD_F]),
        (PHI4, "functools[x]", ["functools[x]"]),
        (APERTUS, '<|tools_prefix|>[{"f": {"a": 1}}', [("f", '{"a": 1}')]),
        (COMMAND, '<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>', [HEARD_F]),
        # Headers.
        (MISTRAL_ARGS, "[TOOL_CALLS]f{} b", [HEARD_F, "b"]),
        (MISTRAL_ARGS, '[TOOL_CALLS]f [ARGS] {"a": 1}', [("f", '{"a": 1}')]),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}", [HEARD_F]),
        (MISTRAL_ARGS, '[TOOL_CALLS][{"name": "f", "arguments": {}}]', [HEARD_F]),
        (MISTRAL_ARGS, "[TOOL_CALLS]f", [HEARD_F]),
        (MISTRAL_ARGS, "[TOOL_CALLS]h[ARGS]{}", [("h", "{}")]),
        (MISTRAL_ARGS, "a [TOOL_CALLS] marks a call", ["a [TOOL_CALLS] marks a call"]),
        (MISTRAL_IDS, "[TOOL_CALLS][TOOL_CALLS]f[CALL_ID]abcdefgh1{}", [HEARD_F]),
        (DEEPSEEK_V3, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}", [HEARD_F]),
        (
            DEEPSEEK_V3,
            "A.<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>b",
            ["A.", HEARD_F, "b"],
        ),
        (
            DEEPSEEK_V31,
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}",
            [HEARD_F, ("g", "{}")],
        ),
        (
            DEEPSEEK_V31,
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>oops<｜tool▁call▁end｜>",
            [("f", "oops")],
        ),
    ],
)
def test_what_models_write_in_place_of_their_format(
    format: CallFormat, text: str, expected: list[Any]
) -> None:
    assert read_each_way(format, text, TOOLS) == expected


def test_a_call_that_begins_an_answer_is_streamed_behind_whitespace_too() -> None:
    for space in ("", " ", "\n\n"):
        parts = caller(LLAMA_JSON, TOOLS).feed(space + '{"name": "f", "parameters": {"a": ')
        assert merge(parts) == [("f", '{"a": ')]


def test_names_as_models_dress_them_up() -> None:
    tools = schemas("f", "a.b")
    for written in ("f", " f ", "f()", " f () ", "functions.f", "api:f", "x/y.f()"):
        assert tools.meant(written) == "f", written
    assert tools.meant("functions.a.b") == "a.b"
    assert tools.meant("g") is None


def test_a_name_that_does_not_end_is_text_soon() -> None:
    text = "<tool_call><function>" + "f" * 300
    assert merge(caller(HERMES, TOOLS).feed(text)) == [text]


def test_text_without_a_marker_is_no_fault() -> None:
    """Not even if a limit cuts it off."""
    for text in ('So:\n```json\n{"a": 5}\n```', 'So:\n```json\n{"na', 'So:\n{"name": "h"}'):
        for cut in (False, True):
            stage = caller(PROMPTED, TOOLS)
            assert merge(stage.feed(text) + stage.flush(cut=cut)) == [text]
            assert (stage.faults, stage.fragment) == ([], "")


CITY = {"type": "object", "properties": {"city": {}, "days": {}}, "required": ["city"]}
OFFERED = Tools({"weather": CITY, "exec5": {"properties": {"code": {}}}, "now": {}})


@pytest.mark.parametrize(
    ("id", "arguments", "name"),
    [
        ("functions.weather:0", '{"city": "x"}', "weather"),
        ("functions.exec5:0", "{}", "exec5"),
        ("functionsexec5", "{}", "exec5"),
        ("exec5:12", "{}", "exec5"),
        ("weather3", "{}", "weather"),
        ("functions.other:3", '{"city": "x"}', "other"),
        ("5", '{"city": "x", "days": 3}', "weather"),
        ("call_abcdef", '{"code": "x"}', "exec5"),
        ("call_abcdef", '{"x": 1}', "call_abcdef"),
    ],
)
def test_names_in_ids_of_kimi(id: str, arguments: str, name: str) -> None:
    text = f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>b"
    assert read_each_way(KIMI_K2, text, OFFERED) == [(name, arguments), "b"]


@pytest.mark.parametrize(
    ("header", "text", "parts", "rest"),
    [
        ("functions.f", '{"a": 1}<|call|>', ["f", '{"a": 1}', None], "<|call|>"),
        ("functions.f", '{"a": 1}', ["f", '{"a": 1}', None], ""),
        ("functions.f", "", ["f", "{}", None], ""),
        ("functions.f", "<|call|>", ["f", "{}", None], "<|call|>"),
        ("f", '{"a": "<|end|>"}', ["f", '{"a": "<|end|>"}', None], ""),
        ("python", "print(1)\n<|call|>", ["python", "print(1)", None], "<|call|>"),
        ("functions.f", '{"a": "x', ["f", '{"a": "x', "never closed"], ""),
        ("functions.f", '{"a": "x<|call|>\n', ["f", '{"a": "x', None], "<|call|>\n"),
    ],
)
def test_calls_behind_a_header_of_harmony(
    header: str, text: str, parts: list[str | None], rest: str
) -> None:
    for marks in (SPELLED, tokens(HARMONY)):
        shown = marks.show(text)
        for feeds in ([shown], shown):
            calls = HARMONY.reader(header, TOOLS, marks)
            taken = [part for piece in feeds for part in calls.feed(piece)]
            taken += [] if calls.over else calls.end(cut=False)
            assert told(taken) == parts
            assert calls.over
            assert marks.spell(calls.rest) == rest


def told(parts: list[CallPart]) -> list[str | None]:
    """The name of one call, its arguments, and its fault."""
    opened, *arguments, closed = parts
    assert isinstance(opened, CallOpened)
    assert isinstance(closed, CallClosed)
    return [opened.name, "".join(map(str, arguments)), closed.fault]


@pytest.mark.parametrize("schema", [{"required": None, "properties": None}, {"required": [[]]}])
def test_an_unknown_id_beside_a_tool_with_an_odd_schema(schema: dict[str, Any]) -> None:
    tools = Tools({"odd": schema, "now": {"properties": {"zone": {}}}})
    reader = KIMI_K2.reader("<|tool_call_begin|>", tools, SPELLED)
    text = 'call_7<|tool_call_argument_begin|>{"zone": "UTC"}<|tool_call_end|>'
    assert list(reader.feed(text)) == [CallOpened("now"), '{"zone": "UTC"}', CallClosed()]
