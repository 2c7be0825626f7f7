"""Calls with tagged arguments, in every format that has them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.text.call_formats.calls import CallClosed, CallFormat, CallOpened, Tools, WrittenCall
from mlxsrv.text.call_formats.tagged_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM,
    HY_V3,
    KIMI_K3,
    MINICPM5,
    MINIMAX_M2,
    MUSE,
    QWEN_XML,
    TAGGED_FORMATS,
)
from mlxsrv.text.marks import SPELLED
from tests.support.cuts import cut
from tests.support.reading import (
    CallGrammar,
    Read,
    caller,
    check_cuts,
    heard,
    merge,
    named,
    read,
    read_each_way,
    tokens,
)

TEXT = {"type": "string"}
WRITE = {"properties": {"path": TEXT, "text": TEXT}, "required": ["path"]}
RUN = {
    "properties": {
        "opts": {"type": "object"},
        "n": {"type": "integer"},
        "on": {"type": ["boolean", "null"]},
        "any": {"type": ["string", "integer"]},
    }
}
SEARCH = {"properties": {"query": TEXT, "limit": {"type": "integer"}}}
TOOLS = Tools({"write": WRITE, "run": RUN, "now": {"properties": {}}, "search": SEARCH})
WRITTEN = [
    WrittenCall("write", {"path": "a b", "text": ' l1\n\t"l2" é {</b> '}),
    WrittenCall("now", {}),
    WrittenCall("run", {"opts": {"a": ["<x>", None]}, "n": 5, "on": True, "any": "x"}),
]
HEARD = heard(*WRITTEN)
NOW = ("now", "{}")
NOW_XML = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


# A frame reads the header before its blocks.
OPENED = [each for each in TAGGED_FORMATS if each is not MUSE]


@pytest.mark.slow
@pytest.mark.parametrize("format", OPENED, ids=named)
def test_calls_as_the_model_writes_them(format: CallFormat) -> None:
    assert read_each_way(format, format.spell(WRITTEN), TOOLS) == HEARD
    assert read(format, [format.spell(WRITTEN[:1])], TOOLS) == HEARD[:1]
    text = f"a\n\n{format.spell(WRITTEN[1:2])}"
    assert read_each_way(format, text, TOOLS) == ["a", HEARD[1]]


@pytest.mark.slow
@pytest.mark.parametrize("format", OPENED, ids=named)
def test_a_call_that_is_cut_anywhere_gives_the_beginning_of_the_whole_one(
    format: CallFormat,
) -> None:
    check_cuts(format, [WRITTEN[0], WRITTEN[2]], TOOLS)


@pytest.mark.parametrize("format", OPENED, ids=named)
def test_a_call_without_its_last_closers_is_whole(format: CallFormat) -> None:
    """An answer that ends early has lost markers only, or it is not whole."""
    text = format.spell(WRITTEN[2:])
    ends = [place for place in range(len(text)) if read(format, [text[:place]], TOOLS) == HEARD[2:]]
    assert ends == list(range(ends[0], len(text)))
    assert '"any": "x"' not in text[: ends[0]]


@pytest.mark.parametrize("format", TAGGED_FORMATS, ids=named)
def test_a_grammar_holds_what_the_model_writes(format: CallFormat) -> None:
    grammar = CallGrammar(format, [*TOOLS.schemas.items()])
    assert grammar.takes(WrittenCall("write", {"text": "x", "path": ""}))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("write", {}),
        ("write", {"text": "x"}),
        ("write", {"path": "x", "more": "y"}),
        ("run", {"n": "x"}),
        ("other", {"path": "x"}),
    ]
    grammar.check(WRITTEN, refused)


def searched(query: str, rest: str = "") -> tuple[str, str]:
    return "search", f'{{"query": {json.dumps(query, ensure_ascii=False)}{rest}}}'


SEARCHED = searched("q")
BLOCK = "<tool_call>\n<function=search>\n<parameter=query>\n"
TAIL = "\n</parameter>\n</function>\n</tool_call>"
DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">\n'
K3 = '<|open|>tools<|sep|><|open|>call tool="search" index="1"<|sep|>'

SLIPS = (
    "search\n<arg_key>query</arg_key>\n<arg_value>q</arg_value>\n",
    "search<arg_key>query</arg_key>q</arg_value>",
    "search<arg_key>query<arg_value>q</arg_value>",
    "searchquery</arg_key><arg_value>q</arg_value>",
    "search\nquery</arg_key>\n<arg_value>q</arg_value>",
    "search<arg_key><arg_key>query</arg_key></arg_key><arg_value>q</arg_value>",
    "search<tool_call>query</arg_key><arg_value>q</arg_value>",
    'search{"query": "q"}',
    '{"name": "search", "arguments": {"query": "q"}}',
)
"""Ways in which GLM writes a call."""

READ: list[tuple[CallFormat, str, Read]] = [
    # Qwen: what looks like markup in a value is data.
    (
        QWEN_XML,
        f"{BLOCK}x </parameter> y\n</tool_call>\n z </function> \ufffd{TAIL}\nafter",
        [searched("x </parameter> y\n</tool_call>\n z </function> \ufffd"), "after"],
    ),
    (QWEN_XML, f"{BLOCK}\n\nq\n\n{TAIL}", [searched("\n\nq\n\n")]),
    (QWEN_XML, f"{BLOCK}q\n<parameter=query>\n{TAIL}", [searched("q\n<parameter=query>\n")]),
    (QWEN_XML, f"{BLOCK}q\n<parameter=other>\n{TAIL}", [searched("q\n<parameter=other>\n")]),
    (QWEN_XML, BLOCK.replace("query>\n", "query>\n\n</parameter></function>"), [searched("")]),
    # Closers are missing, or on one line.
    (QWEN_XML, f"{BLOCK}q</parameter></function></tool_call>", [SEARCHED]),
    (QWEN_XML, f"{BLOCK}q\n</function>\n</tool_call>", [SEARCHED]),
    (QWEN_XML, f"{BLOCK}q\n</parameter>\n</tool_call>", [SEARCHED]),
    (QWEN_XML, f"{BLOCK}q\n</tool_call>\n{NOW_XML}", [SEARCHED, NOW]),
    (QWEN_XML, f"{BLOCK}q\n<parameter=limit>\n3{TAIL}", [searched("q", ', "limit": 3')]),
    (QWEN_XML, f"{BLOCK}q\n</parameter>\n</fu", [SEARCHED]),
    (QWEN_XML, "<tool_call>\n<function=now>", [NOW]),
    (QWEN_XML, "<tool_call><function=now</tool_call>", [NOW]),
    # The outer marker is missing.
    (QWEN_XML, f"a\n<function=now>\n</function>\n</tool_call>\n{NOW_XML}b", ["a", NOW, NOW, "b"]),
    (QWEN_XML, f"a\n{BLOCK.partition(chr(10))[2]}q{TAIL}", ["a", SEARCHED]),
    # Several in one block, another notation of tags, and a dressed-up name.
    (
        QWEN_XML,
        "<tool_call>< function = now >< / function ><function=functions.now>\n</function>"
        '<function name="now()">\n</function></tool_call>',
        [NOW, NOW, NOW],
    ),
    (QWEN_XML, BLOCK.replace(" ", "").replace("=", " = ") + f"q{TAIL}", [SEARCHED]),
    # JSON.
    (QWEN_XML, '<tool_call><function=search>{"query": "q"}</function></tool_call>', [SEARCHED]),
    (QWEN_XML, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>b', [NOW, "b"]),
    # The first of two values counts. One that does not fit is given as it is.
    (QWEN_XML, f"{BLOCK}q\n</parameter>\n<parameter=query>\nr{TAIL}", [SEARCHED]),
    (
        QWEN_XML,
        f"{BLOCK}q\n</parameter>\n<parameter=limit>\na <b>\n{TAIL}",
        [searched("q", ', "limit": "a <b>\\n"')],
    ),
    # Text about calls.
    (QWEN_XML, "<tool_call> is a marker", ["<tool_call> is a marker"]),
    (QWEN_XML, "with `<function=now>` x", ["with `<function=now>` x"]),
    (QWEN_XML, "<function=other>\n</function>", ["<function=other>\n</function>"]),
    # GLM.
    (GLM, "<tool_call>now\n</tool_call>\n<tool_call>now</tool_call>", [NOW, NOW]),
    (
        GLM,
        "<tool_call>search<arg_key>query</arg_key><arg_value>q"
        "<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>",
        [searched("q", ', "limit": 3')],
    ),
    (
        GLM,
        "<tool_call>search<arg_key>query</arg_key><arg_value>a </tool_call> b</arg_value>",
        [searched("a </tool_call> b")],
    ),
    (GLM, "<tool_call>search for it</tool_call>", ["<tool_call>search for it</tool_call>"]),
    (GLM, "<tool_call>", ["<tool_call>"]),
    (
        HY_V3,
        "<tool_calls:opensource>\n<tool_call:opensource>search<tool_sep:opensource>\n"
        "<arg_key:opensource>query</arg_key:opensource>\n"
        "<arg_value:opensource>q</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>",
        [SEARCHED],
    ),
    (HY_V3, "<tool_calls><tool_call>now</tool_call></tool_calls>", [NOW]),
    # MiniMax.
    (
        MINIMAX_M2,
        "<invoke name='search'>\n<parameter name=query>  </parameter> q\n </parameter>\n</invoke>",
        [searched("  </parameter> q\n ")],
    ),
    (
        MINIMAX_M2,
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">q\n'
        '<parameter name="limit">3\n</invoke>\n</minimax:tool_call>x',
        [searched("q", ', "limit": 3'), "x"],
    ),
    # MiniCPM.
    (MINICPM5, '<functionname="now"></function>', [NOW]),
    (
        MINICPM5,
        '<function name="search"><param name="query"><![CDATA[</function></param>]]></param>'
        "</function>",
        [searched("</function></param>")],
    ),
    (
        MINICPM5,
        '<function name="search"><param name="properties">{"query": "q"}</param></function>',
        [SEARCHED],
    ),
    (
        MINICPM5,
        '<function name="search"><param name="properties">{"query": "q"}</param>'
        '<param name="query">r</param></function>',
        [SEARCHED],
    ),
    (MINICPM5, '<function name="other"></function>', ['<function name="other"></function>']),
    # DeepSeek: the attribute tells the type, or the schema.
    (
        DEEPSEEK_V32,
        f'{DSML}<｜DSML｜parameter name="query">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="limit" string="true">5</｜DSML｜parameter>\n'
        "</｜DSML｜inv>\n</｜DSML｜function_calls>",
        [searched("5", ', "limit": "5"')],
    ),
    (
        DEEPSEEK_V32,
        f'{DSML}<｜DSML｜parameter name="arguments" string="false">{{"query": "q"}}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [SEARCHED],
    ),
    (
        DEEPSEEK_V4,
        'a\n\n<｜DSML｜toolcalls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
        "</｜DSML｜toolcalls>",
        ["a", NOW],
    ),
    (DEEPSEEK_V4, '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>', [NOW]),
    (DEEPSEEK_V4, "a ｜DSML｜ <b", ["a ｜DSML｜ <b"]),
    # Kimi K3.
    (
        KIMI_K3,
        f'{K3}<|open|>json type="object"<|sep|>{{"query": "q"}}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        [SEARCHED],
    ),
    # Muse.
    (
        MUSE,
        '<atem:function_calls>\n<atem:invoke name="search.search">\n'
        '<atem:parameter name="query">12</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>x",
        [searched("12"), "x"],
    ),
]


@pytest.mark.slow
def test_calls_as_models_slip() -> None:
    for format, text, expected in READ:
        assert read_each_way(format, text, TOOLS) == expected, text
    for slip in SLIPS:
        text = f"<tool_call>{slip}</tool_call>x"
        assert read_each_way(GLM, text, TOOLS) == [SEARCHED, "x"], text


def test_a_value_that_never_ends_is_given_as_far_as_it_goes() -> None:
    for text in (f"{BLOCK}a\n</par", BLOCK.replace("query", "limit") + "7"):
        stage = caller(QWEN_XML, TOOLS)
        said = merge([*stage.feed(text), *stage.flush()])
        assert said == [("search", '{"query": "a\\n</par' if "query" in text else '{"limit": 7')]
        assert stage.faults == ["never closed"]
        assert stage.fragment == text


def test_a_header_begins_a_call() -> None:
    """A frame takes the first tag of Kimi's, or the header of a message of Muse's."""
    whole = KIMI_K3.spell([WrittenCall("search", {"query": "q"})])
    for format, header, text in (
        (KIMI_K3, "tools", whole.partition("tools<|sep|>")[2]),
        (KIMI_K3, 'call tool="search" index="1"', whole.partition('"1"<|sep|>')[2]),
        (MUSE, "now", MUSE.spell([WrittenCall("now", {})]).partition("<|message|>")[2]),
    ):
        part = format.reader(header, TOOLS, SPELLED)
        parts = [*part.feed(text + "<|eom|>"), *part.end(cut=False)]
        assert isinstance(parts[0], CallOpened)
        assert parts[-1] == CallClosed()
        assert part.over
        assert part.rest == "<|eom|>"


KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
MARKUP = ["\n", "\n\n", "</", "<b>", " 007", "null", "{", "]]>", "</parameter> z", "é\n<parameter="]
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=12) | st.sampled_from(
    MARKUP
)
VALUES = st.one_of(
    TEXTS.map(lambda value: (TEXT, value)),
    st.integers(-(2**53), 2**53).map(lambda value: ({"type": ["integer", "null"]}, value)),
    st.booleans().map(lambda value: ({"type": "boolean"}, value)),
    st.lists(TEXTS | st.none()).map(lambda value: ({"type": "array"}, value)),
    st.dictionaries(KEYS, TEXTS).map(lambda value: ({"anyOf": [{"type": "object"}]}, value)),
)


@pytest.mark.slow
@pytest.mark.parametrize("format", OPENED, ids=named)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.data())
def test_what_is_written_is_read(
    format: CallFormat, members: dict[str, tuple[dict[str, Any], Any]], data: st.DataObject
) -> None:
    properties = {key: schema for key, (schema, _) in members.items()}
    call = WrittenCall("f-1.x", {key: value for key, (_, value) in members.items()})
    for marks in (SPELLED, tokens(format)):
        text = marks.show(format.spell([call, WrittenCall("now", {})]))
        tools = Tools({call.name: {"properties": properties}, "now": {}})
        found = read(format, [*cut(data, text)], tools, marks=marks)
        assert [(part[0], json.loads(part[1])) for part in found] == [
            (call.name, call.arguments),
            ("now", {}),
        ]
