"""Formats of calls whose arguments stand between tags, each value as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from mlxsrv.text.calls import (
    CallFormat,
    CallReader,
    CallRules,
    Tools,
    ToolSchema,
    WrittenCall,
)
from mlxsrv.text.json_reader import EitherReader
from mlxsrv.text.lark import Lark
from mlxsrv.text.marks import Marks
from mlxsrv.text.tagged_layout import TagLayout, plain
from mlxsrv.text.tagged_reader import TagReader
from mlxsrv.text.tagged_rules import gapped


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
