"""Tool calls in the dialects of all of mlx-lm's parsers, and what is heard of them."""

import importlib
from collections.abc import Iterable
from typing import Any

import msgspec

from mlxsrv.text.reader import ToolArguments, ToolOpened
from mlxsrv.text.tools import ContentOrCall, ToolCalls, ToolDialect

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
    feeds: Iterable[str],
    dialect: ToolDialect = JSON,
    *,
    end: bool = False,
    parallel: bool = True,
    bound: bool = False,
) -> Heard:
    """The answer that `feeds` are, cut off by a limit at the `end`."""
    stage = ToolCalls(dialect, parallel=parallel, bound=bound)
    parts = [part for text in feeds for part in stage.feed(text)] + stage.flush(cut=end)
    assert not stage.opened
    assert stage.flush(cut=end) == []
    return Heard(merge(parts), stage.calls, stage.broken, stage.fragment, [*stage.faults])
