"""Formats of calls with arguments between tags, each value as plain text, and their table."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mlxsrv.text.call_formats.calls import (
    CallFormat,
    CallReader,
    CallRules,
    Tools,
    ToolSchema,
    WrittenCall,
)
from mlxsrv.text.call_formats.json_reader import EitherReader
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.call_formats.tagged_layout import TagLayout, plain
from mlxsrv.text.call_formats.tagged_reader import TagReader
from mlxsrv.text.call_formats.tagged_rules import gapped
from mlxsrv.text.marks import Marks


class TaggedCalls(CallFormat):
    """Calls with tagged arguments. In their place, JSON objects that have the name among their keys
    are read too.

    Args:
        name: as the operator names it.
        layout: how the model writes its calls.
        marks: markers that are tokens of the family's vocabularies.
        openers: texts before a block. Another one may stand in the place of the first.
        bare: openers that are the beginning of a call and that other text has too, so a call behind
            them is one of the request's tools.
        dropped: other markers that vanish outside a block.
        header: what a frame has read before a block if it gives a header, as its format.
    """

    def __init__(
        self,
        name: str,
        layout: TagLayout,
        *,
        marks: Sequence[str],
        openers: Sequence[str] = (),
        bare: Sequence[str] = (),
        dropped: Sequence[str] = (),
        header: str = "",
    ) -> None:
        self.name = name
        self.marks = marks
        self.openers = (*openers, *bare)
        self.dropped = (*(end for end in layout.ends if " " not in end), *dropped)
        self._layout = layout
        self.bare = tuple(bare)
        self.untyped = not layout.typed
        self._header = header

    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        bare = opener in self.bare
        begun = opener if bare else ""
        if opener not in self.openers:
            begun = self._header.format(opener)
        tagged = TagReader(self._layout, self.openers, tools, marks, begun=begun, bare=bare)
        return tagged if begun else EitherReader(self.dropped, marks, tools, tagged, "")

    def spell(self, calls: Sequence[WrittenCall]) -> str:
        layout = self._layout
        texts = [layout.spell_call(call, number) for number, call in enumerate(calls)]
        if layout.between is not None:
            texts = [plain(layout.between).join(texts)]
        texts = [plain(layout.before) + text + plain(layout.after) for text in texts]
        return plain(layout.joint).join(texts)

    def rules(self, tools: Sequence[tuple[str, ToolSchema]], lark: Lark) -> CallRules:
        layout = self._layout

        def text(spelled: str) -> str:
            return gapped(lark, spelled)

        bodies = [layout.rule_call(name, schema, lark) for name, schema in tools]
        calls = call = lark.choice(f"{text(head)} {body}" for head, body in bodies)
        after = text(layout.after)
        one = lark.rule(f"{text(layout.before)} {call} {after}")
        if layout.between is None:
            many = lark.rule(f"{one} ({text(layout.joint)} {one})*")
        else:
            calls = lark.rule(f"{call} ({text(layout.between)} {call})*")
            many = lark.rule(f"{text(layout.before)} {calls} {after}")
        space = lark.rule(r"/[ \n]{0,2}/")
        behind = {}
        for opener in self.openers:
            begun = calls
            if all(opener in head for head, _ in bodies):
                rests = [(head.partition(opener)[2], body) for head, body in bodies]
                begun = lark.choice(f"{text(rest)} {body}" for rest, body in rests)
            behind[opener] = lark.rule(f"{space} {begun} {after}")
        return CallRules(one, many, behind)


def _glm_layout(start: str, end: str, key: str, value: str) -> TagLayout:
    """Return GLM's layout with tags of these names: around a call, a key and a value."""
    open_key, close_key, open_value = f"<{key}>", f"</{key}>", f"<{value}>"
    return TagLayout(
        before=start,
        head="{name}{gap}",
        argument=f"{open_key}{{key}}{close_key}{{gap}}{open_value}{{value}}</{value}>{{gap}}",
        after=end,
        joint="{gap}",
        heads=["{word}{end}"],
        keys=[
            f"{open_key}{{text}}{close_key} {open_value}",
            # As models slip: tags are doubled, missing, or another one stands in their place.
            f"{open_key}{{text}}{close_key} {close_key} {open_value}",
            f"{open_key}{{text}}{open_value}",
            f"{open_key}{{text}}{close_key} ",
            f"{start}{{text}}{close_key} {open_value}",
            f"{{word}}{close_key} {open_value}",
        ],
        closers=[f"</{value}>"],
        ends=[end],
        skipped=[open_key, f"</{value}>"],
        glued=close_key,
        loose=True,
    )


_QWEN = TagLayout(
    before="<tool_call>\n",
    head="<function={name}>\n",
    argument="<parameter={key}>\n{value}\n</parameter>\n",
    tail="</function>\n",
    after="</tool_call>",
    heads=["< function{text}>?"],
    keys=["< parameter{text}>?"],
    closers=["< / parameter >"],
    tails=["< / function >"],
    ends=["</tool_call>"],
    skipped=["< / parameter >"],
    named=["name"],
    lines=True,
)
QWEN_XML = TaggedCalls(
    "qwen_xml",
    _QWEN,
    marks=["<tool_call>", "</tool_call>"],
    openers=["<tool_call>"],
    bare=["<function="],
)
SEED_OSS = TaggedCalls(
    "seed_oss",
    msgspec.structs.replace(
        _QWEN,
        before="<seed:tool_call>\n",
        argument="<parameter={key}>{value}</parameter>\n",
        after="</seed:tool_call>",
        ends=["</seed:tool_call>"],
        lines=False,
    ),
    marks=["<seed:tool_call>", "</seed:tool_call>"],
    openers=["<seed:tool_call>"],
    bare=["<function="],
)

GLM = TaggedCalls(
    "glm",
    _glm_layout("<tool_call>", "</tool_call>", "arg_key", "arg_value"),
    marks=[
        *("<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ],
    openers=["<tool_call>"],
)
LONGCAT = TaggedCalls(
    "longcat",
    _glm_layout(
        "<longcat_tool_call>", "</longcat_tool_call>", "longcat_arg_key", "longcat_arg_value"
    ),
    marks=[
        *("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>"),
        *("</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
    ],
    openers=["<longcat_tool_call>"],
)

_HY_TAGS = ("tool_calls", "tool_call", "arg_key", "arg_value")


def _suffixed(patterns: Sequence[str]) -> Sequence[str]:
    """Return patterns with names of tags as they are, and as a checkpoint has them."""
    found = []
    for suffix in ("", ":opensource"):
        for pattern in patterns:
            for name in _HY_TAGS:
                pattern = pattern.replace(f"{name}>", f"{name}{suffix}>")
            found.append(pattern.replace("<tool_sep>", f"<tool_sep{suffix}>"))
    return found


HY_V3 = TaggedCalls(
    "hy_v3",
    TagLayout(
        before="<tool_calls>{gap}",
        head="<tool_call>{name}<tool_sep>{gap}",
        argument="<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>{gap}",
        tail="</tool_call>{gap}",
        after="</tool_calls>",
        between="",
        heads=_suffixed(["<tool_call> {word} <tool_sep>", "<tool_call> {word}{end}"]),
        keys=_suffixed(
            ["<arg_key>{text}</arg_key> <arg_value>", "<arg_key>{text}</arg_key> "],
        ),
        closers=_suffixed(["</arg_value>"]),
        tails=_suffixed(["</tool_call>"]),
        ends=_suffixed(["</tool_calls>"]),
        skipped=_suffixed(["<tool_sep>"]),
    ),
    marks=_suffixed(
        [
            *("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ]
    ),
    openers=_suffixed(["<tool_calls>"]),
    bare=_suffixed(["<tool_call>"]),
)

MINIMAX_M2 = TaggedCalls(
    "minimax_m2",
    TagLayout(
        before="<minimax:tool_call>\n",
        head='<invoke name="{name}">\n',
        argument='<parameter name="{key}">{value}</parameter>\n',
        tail="</invoke>\n",
        after="</minimax:tool_call>",
        between="",
        heads=["< invoke{text}>"],
        keys=["< parameter{text}>"],
        closers=["< / parameter >"],
        tails=["< / invoke >"],
        ends=["</minimax:tool_call>"],
        skipped=["< / parameter >"],
        named=["name"],
    ),
    marks=["<minimax:tool_call>", "</minimax:tool_call>"],
    openers=["<minimax:tool_call>"],
    bare=["<invoke name="],
)

MINICPM5 = TaggedCalls(
    "minicpm5",
    TagLayout(
        head='<function name="{name}">',
        argument='<param name="{key}">{value}</param>',
        tail="</function>",
        heads=["<function{text}>"],
        keys=["<param{text}>"],
        closers=["</param>"],
        tails=["</function>"],
        skipped=["</param>"],
        named=["name"],
        cdata=True,
        wrappers=["properties"],
    ),
    marks=["<function", "</function>", "<param", "</param>"],
    bare=["<function name=", "<functionname="],
)


def _dsml_format(name: str, block: str, space: str = "") -> CallFormat:
    """Return DeepSeek's format with blocks of this name, and a space in each tag."""
    sign = f"｜DSML｜{space}"
    blocks = ("function_calls", "tool_calls", "toolcalls", "tool", "calls")
    ends = [f"</｜DSML｜{gap}{each}>" for each in blocks for gap in ("", " ")]
    return TaggedCalls(
        name,
        TagLayout(
            before=f"<{sign}{block}>\n",
            head=f'<{sign}invoke name="{{name}}">\n',
            argument=f'<{sign}parameter name="{{key}}" string="{{type}}">{{value}}'
            f"</{sign}parameter>\n",
            tail=f"</{sign}invoke>\n",
            after=f"</{sign}{block}>",
            between="",
            heads=["< ｜DSML｜ invoke{text}>"],
            keys=["< ｜DSML｜ parameter{text}>"],
            closers=["</ ｜DSML｜ parameter >"],
            tails=["</ ｜DSML｜ inv{text}>"],
            ends=ends,
            named=["name"],
            typed="string",
            wrappers=["arguments"],
        ),
        marks=["｜DSML｜"],
        openers=[end.replace("</", "<") for end in ends],
        bare=["<｜DSML｜invoke", "<｜DSML｜ invoke"],
        dropped=ends,
    )


DEEPSEEK_V32 = _dsml_format("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml_format("deepseek_v4", "tool_calls")
DEEPSEEK_V41 = _dsml_format("deepseek_v41", "calls", " ")

MUSE = TaggedCalls(
    "muse",
    TagLayout(
        head=' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
        argument='<atem:parameter name="{key}">{value}</atem:parameter>\n',
        tail="</atem:invoke>\n</atem:function_calls>",
        between="<|eom|><|start|>assistant",
        heads=["< atem:invoke{text}>"],
        keys=["< atem:parameter{text}>"],
        closers=["< / atem:parameter >"],
        tails=["< / atem:invoke >"],
        ends=["</atem:function_calls>"],
        skipped=["< / atem:parameter >"],
        named=["name"],
    ),
    marks=["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"],
    openers=["<atem:function_calls>"],
    bare=["<atem:invoke name="],
)

KIMI_K3 = TaggedCalls(
    "kimi_k3",
    TagLayout(
        before="<|open|>tools<|sep|>",
        head='<|open|>call tool="{name}" index="{number}"<|sep|>',
        argument='<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
        tail="<|close|>call<|sep|>",
        after="<|close|>tools<|sep|>",
        between="",
        heads=["<|open|> call{text}<|sep|>"],
        keys=["<|open|> argument{text}<|sep|>"],
        closers=["<|close|> argument <|sep|>"],
        tails=["<|close|> call <|sep|>"],
        ends=["<|close|> tools <|sep|>"],
        skipped=["<|open|> json{text}<|sep|>", "<|close|> json <|sep|>"],
        named=["tool", "key"],
        typed="type",
        escaped=True,
    ),
    marks=["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    openers=["<|open|>tools<|sep|>"],
    header="<|open|>{}<|sep|>",
)

TAGGED_FORMATS: Sequence[CallFormat] = (
    *(QWEN_XML, SEED_OSS, GLM, LONGCAT, HY_V3, MINIMAX_M2, MINICPM5),
    *(DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V41, MUSE, KIMI_K3),
)
"""All of them."""
