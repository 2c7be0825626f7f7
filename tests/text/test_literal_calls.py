"""Calls whose arguments are literals, in every format that has them."""

import json
from itertools import starmap
from typing import Any

import pytest

from mlxsrv.text.call_formats.calls import CallClosed, CallFormat, CallOpened, Tools, WrittenCall
from mlxsrv.text.call_formats.literal_calls import (
    FUNCTIONGEMMA,
    GEMMA4,
    LFM2,
    LITERAL_FORMATS,
    LLAMA4_PYTHONIC,
    OLMO3,
    PYTHONIC,
)
from mlxsrv.text.marks import SPELLED, Marks
from tests.support.reading import (
    CallGrammar,
    check_cuts,
    heard,
    named,
    read,
    read_each_way,
    tokens,
)

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
RUN = {
    "properties": {
        "opts": {"type": "object"},
        "tags": {"type": "array"},
        "ratio": {"type": "number"},
        "either": {"type": ["integer", "string", "null"]},
    }
}
TOOLS = Tools({"weather": WEATHER, "run": RUN, "now": {}, "get-it": WEATHER})
WRITTEN = [
    WrittenCall("weather", {"city": "Paris, 'F' \"x\" \\ }) ]\n<b>é", "days": 305}),
    WrittenCall("now", {}),
    WrittenCall(
        "run",
        {"either": None, "opts": {"a": {"b": "x, {y}"}}, "ratio": -1.5, "tags": ["t", 2, True]},
    ),
]


@pytest.mark.parametrize("format", LITERAL_FORMATS, ids=named)
def test_calls_as_the_model_writes_them(format: CallFormat) -> None:
    expected = heard(*WRITTEN)
    assert read_each_way(format, format.spell(WRITTEN), TOOLS) == expected
    for count in (1, 2):
        assert read(format, [format.spell(WRITTEN[:count])], TOOLS) == expected[:count]


@pytest.mark.parametrize("format", LITERAL_FORMATS, ids=named)
def test_a_call_that_is_cut_anywhere_gives_the_beginning_of_the_whole_one(
    format: CallFormat,
) -> None:
    check_cuts(format, [WRITTEN[0], WRITTEN[2]], TOOLS)


@pytest.mark.parametrize("format", LITERAL_FORMATS, ids=named)
def test_a_grammar_holds_what_the_model_writes(format: CallFormat) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("weather", {}),
        ("weather", {"days": 3}),
        ("weather", {"city": 3}),
        ("weather", {"city": "x", "more": 1}),
        ("run", {"ratio": "x"}),
        ("other", {"city": "x"}),
    ]
    CallGrammar(format, [*TOOLS.schemas.items()]).check(WRITTEN, refused)


GEMMA_TEXTS: list[tuple[str, dict[str, Any]]] = [
    ('call:weather{city:<|"|>Paris<|"|>,days:3}', {"city": "Paris", "days": 3}),
    ('call:weather{city:Paris<|"|>,days:3}', {"city": "Paris", "days": 3}),
    (
        'call:weather{city:Paris, the one<|"|>,days:3}',
        {"city": "Paris, the one", "days": 3},
    ),
    ('call:weather{days:3,city:2 } of 3<|"|>}', {"days": 3, "city": "2 } of 3"}),
    ('call:weather{city:<|"|>Paris<|"|>days:3}', {"city": "Paris", "days": 3}),
    ('call:weather{"city":"Pa\\"r, is","days":3}', {"city": 'Pa"r, is', "days": 3}),
    ('call:weather{<|"|>city<|"|>:<|"|>x<|"|>}', {"city": "x"}),
    ('call:weather(city="Paris", days=3)', {"city": "Paris", "days": 3}),
    ("call:weather(city='Paris')", {"city": "Paris"}),
    ('call:weather({"city": "Paris"})', {"city": "Paris"}),
    ('call:weather(city:<|"|>x<|"|>)', {"city": "x"}),
    (':weather{city:<|"|>x<|"|>}', {"city": "x"}),
    ('weather{city:<|"|>x<|"|>}', {"city": "x"}),
    ('call:ns:weather{city:<|"|>x<|"|>}', {"city": "x"}),
    ('call:default_api.weather{city:<|"|>x<|"|>}', {"city": "x"}),
    ("call:weather{city:Paris,days:3}", {"city": "Paris", "days": 3}),
    ('call:weather{city:Paris,extra:<|"|>b<|"|>}', {"city": "Paris", "extra": "b"}),
    ("call:weather{city:007}", {"city": "007"}),
    ('call:weather{a-b:<|"|>x<|"|>,c.d:1}', {"a-b": "x", "c.d": 1}),
    ('call:weather{city:<|"|>x<|"|>,city:<|"|>y<|"|>,days:1}', {"city": "x", "days": 1}),
    ('call:weather{city:Paris, so:<|"|>,days:1}', {"city": "Paris, so:", "days": 1}),
]


@pytest.mark.parametrize(("body", "arguments"), GEMMA_TEXTS)
def test_gemma(body: str, arguments: dict[str, Any]) -> None:
    assert read_each_way(GEMMA4, f"a<|tool_call>{body}<tool_call|>", TOOLS) == [
        "a",
        *heard(WrittenCall("weather", arguments)),
    ]


def test_gemma_without_its_markers() -> None:
    assert read_each_way(GEMMA4, 'a\ncall:weather{city:<|"|>x<|"|>} b', TOOLS) == [
        "a",
        ("weather", '{"city": "x"}'),
        "b",
    ]
    text = 'call:weather{city:<|"|>x<|"|>}call:now{}<tool_call|>'
    assert read_each_way(GEMMA4, text, TOOLS) == [("weather", '{"city": "x"}'), ("now", "{}")]
    for prose in ("Please call: John{x}", "call:john{}", "the recall:now that", "call:now"):
        assert read_each_way(GEMMA4, prose, TOOLS) == [prose]


def test_gemma_without_its_end() -> None:
    start = "<|tool_call>call:weather{city:"
    assert read_each_way(GEMMA4, start + '<|"|>x<|"|>', TOOLS) == [("weather", '{"city": "x"}')]
    assert read_each_way(GEMMA4, start + '<|"|>x y', TOOLS) == [("weather", '{"city": "x y')]
    assert read_each_way(GEMMA4, "<|tool_call>call:now<tool_call|>", TOOLS) == [("now", "{}")]
    assert read_each_way(GEMMA4, "<|tool_call>what is it<tool_call|>", TOOLS) == [
        "<|tool_call>what is it<tool_call|>"
    ]
    two = 'call:weather{city:<|"|>x<|"|>}<|tool_call>call:now{}'
    assert read_each_way(GEMMA4, "<|tool_call>" + two, TOOLS) == [
        ("weather", '{"city": "x"}'),
        ("now", "{}"),
    ]


PYTHON_TEXTS: list[tuple[str, list[str | tuple[str, dict[str, Any]]]]] = [
    ("[weather(city='a\nb')]", [("weather", {"city": "a\nb"})]),
    ("[weather(city='a\\nb\\u00e9\\ud83d\\ude00\\'')]", [("weather", {"city": "a\nbé😀'"})]),
    ("[weather(city='sed -n '1,9p' f')]", [("weather", {"city": "sed -n '1,9p' f"})]),
    ("[weather(city='print('x')', days=3)]", [("weather", {"city": "print('x')", "days": 3})]),
    ('[weather(city="""a"b\n""")]', [("weather", {"city": 'a"b\n'})]),
    ("[weather(city='', days=07)]", [("weather", {"city": "", "days": 7})]),
    ("[weather(city=007)]", [("weather", {"city": "007"})]),
    ("[weather(from='x', class=2)]", [("weather", {"from": "x", "class": 2})]),
    ("[get-it(city='x')]", [("get-it", {"city": "x"})]),
    ("[api.weather(city='x')]", [("weather", {"city": "x"})]),
    ("[weather('x', 3)]", [("weather", {"city": "x", "days": 3})]),
    ("[weather('x', days=3,)]", [("weather", {"city": "x", "days": 3})]),
    (
        "[weather(city=x (y), days=3)]",
        [("weather", {"city": "x (y)", "days": 3})],
    ),
    ("weather(city='x')", [("weather", {"city": "x"})]),
    ("[now(), now( )]", [("now", {}), ("now", {})]),
    (
        "[run(opts={'a': [None, (1, 2)], \"b\": true}, tags=['x', 'it\\'s'], ratio=1_0)]",
        [
            (
                "run",
                {"opts": {"a": [None, [1, 2]], "b": True}, "tags": ["x", "it's"], "ratio": 10},
            )
        ],
    ),
    ("[run(tags=['x', 'y')]", [("run", {"tags": ["x", "y"]})]),
    (
        "[run(opts={'a': 1}, opts={'b': {'c': 1, 'c': 2}, 'd': 3}, ratio=2)]",
        [("run", {"opts": {"a": 1}, "ratio": 2})],
    ),
    ("[run(either=None, ratio=-1.5e3)]", [("run", {"either": None, "ratio": -1500.0})]),
]


@pytest.mark.parametrize(("body", "expected"), PYTHON_TEXTS)
def test_python(body: str, expected: list[tuple[str, dict[str, Any]]]) -> None:
    calls = [(name, json.loads(text)) for name, text in heard(*starmap(WrittenCall, expected))]
    marked = f"<|tool_call_start|>{body}<|tool_call_end|>"
    for text in (marked, marked + " Then.", marked[:-18]):
        read = read_each_way(LFM2, text, TOOLS)
        rest = ["Then."] if text.endswith("Then.") else []
        assert [(each[0], json.loads(each[1])) for each in read[: len(calls)]] == calls
        assert read[len(calls) :] == rest


def test_echoed_calls() -> None:
    call = "[weather(city='x')]<|tool_call_end|>"
    text = f"<|tool_call_start|>{call}{call}<|tool_call_end|>So."
    assert read_each_way(LFM2, text, TOOLS) == [("weather", '{"city": "x"}'), "So."]
    text = f"<|tool_call_start|>{call}weather(city) is it."
    assert read_each_way(LFM2, text, TOOLS) == [
        ("weather", '{"city": "x"}'),
        "weather(city) is it.",
    ]


def test_python_that_begins_an_answer() -> None:
    for format in (PYTHONIC, LLAMA4_PYTHONIC):
        text = '[weather(city="x"), now()]'
        assert read_each_way(format, text, TOOLS) == [("weather", '{"city": "x"}'), ("now", "{}")]
        for prose in ("[1] is", "[other(x=1)]", "[weather] is", "weather(x=1)", "See [now()]"):
            assert read_each_way(format, prose, TOOLS) == [prose]
    text = "<|python_start|>[now()]<|python_end|>"
    assert read_each_way(LLAMA4_PYTHONIC, text, TOOLS) == [("now", "{}")]


def test_a_call_a_line() -> None:
    text = "<function_calls>\nweather(city='a')\nrun(opts={\"a\": true}, ratio=null)\n"
    run = WrittenCall("run", {"opts": {"a": True}, "ratio": None})
    calls = heard(WrittenCall("weather", {"city": "a"}), run)
    assert read_each_way(OLMO3, text + "</function_calls> b", TOOLS) == [*calls, "b"]
    assert read_each_way(OLMO3, text, TOOLS) == calls


def test_functiongemma() -> None:
    text = "<start_function_call>call:weather{city:<escape>a}b<escape>,days:3}<end_function_call>"
    assert read_each_way(FUNCTIONGEMMA, text, TOOLS) == [("weather", '{"city": "a}b", "days": 3}')]


@pytest.mark.parametrize("format", [FUNCTIONGEMMA, GEMMA4, LFM2, OLMO3], ids=named)
def test_an_end_marker_in_a_string_that_is_closed(format: CallFormat) -> None:
    text = f"a {format.dropped[0]} 'b' \\n {format.dropped[0]}c"
    calls = [WrittenCall("weather", {"city": text}), WRITTEN[1]]
    assert read_each_way(format, format.spell(calls), TOOLS) == heard(*calls)


@pytest.mark.parametrize("format", [GEMMA4, LFM2], ids=named)
def test_an_end_marker_behind_a_string_that_is_not_closed(format: CallFormat) -> None:
    marks = tokens(format)
    text = format.spell([WrittenCall("weather", {"city": "x"})])
    quote = "'" if format is LFM2 else '<|"|>'
    broken = quote.join(text.split(quote)[:2]) + text.rpartition(quote)[2]
    for text in (broken, f"{broken}\nAnd then.", f"{broken}\n{format.spell(WRITTEN[1:2])}"):
        shown = marks.show(text)
        whole = read(format, [shown], TOOLS, marks=marks)
        first, *rest = whole
        assert first[0] == "weather"
        assert first[1].startswith('{"city": "x')
        assert rest == (
            [] if text == broken else ["And then."] if "And" in text else [("now", "{}")]
        )
        assert read(format, shown, TOOLS, marks=marks) == whole


@pytest.mark.parametrize("text", ["[run(tags=['a', <think>", "[run(tags=[<think>x])]"])
def test_a_strange_marker_in_a_list_ends_the_reading(text: str) -> None:
    marks = Marks(["<think>"], {"<think>": 0})
    reader = PYTHONIC.reader("", TOOLS, marks)
    parts = [*reader.feed(marks.show(text)), *reader.end(cut=False)]
    assert parts[0] == CallOpened("run")
    assert parts[-1] == CallClosed("its arguments are no JSON object")
    assert "<think>" in "".join(part for part in parts if isinstance(part, str))


def test_behind_a_list_of_calls_another_name_is_no_call() -> None:
    reader = PYTHONIC.reader("", TOOLS, SPELLED)
    parts = [*reader.feed("[now()]\nother(x=1)"), *reader.end(cut=False)]
    assert parts == [CallOpened("now"), "{}", CallClosed()]
    assert reader.over
    assert reader.rest.strip() == "other(x=1)"


def test_in_a_list_of_calls_another_name_ends_it() -> None:
    reader = PYTHONIC.reader("", TOOLS, SPELLED)
    parts = [*reader.feed("[now(), other(x=1)]"), *reader.end(cut=False)]
    assert parts == [CallOpened("now"), "{}", CallClosed()]
    assert reader.over
    assert reader.rest == "other(x=1)]"
