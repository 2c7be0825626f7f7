"""Formats of calls whose arguments stand between tags, each value as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from mlxsrv.text.calls import CallFormat, CallReader, CallRules, Tools, ToolSchema, WrittenCall
from mlxsrv.text.lark import Lark
from mlxsrv.text.marks import Marks
from mlxsrv.text.tagged_layout import TagLayout
from mlxsrv.text.tagged_reader import TagReader
from mlxsrv.text.tagged_rules import gapped


class TaggedCalls(CallFormat):
    """Calls with tagged arguments.

    Args:
        name: as the operator names it.
        layout: how the model writes its calls.
        marks: markers that are tokens of the family's vocabularies.
        openers: texts before a block. Another one may stand in the place of the first.
        bare: openers that are the beginning of a call and that other text has too, so a call behind
            them is one of the request's tools.
    """

    def __init__(
        self,
        name: str,
        layout: TagLayout,
        *,
        marks: Sequence[str],
        openers: Sequence[str] = (),
        bare: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.marks = marks
        self.openers = (*openers, *bare)
        self.dropped = tuple(end for end in layout.ends if " " not in end)
        self._layout = layout
        self._bare = frozenset(bare)

    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        bare = opener in self._bare
        return TagReader(self._layout, self.openers, tools, marks, bare=opener if bare else "")

    def spell(self, calls: Sequence[WrittenCall]) -> str:
        layout = self._layout
        texts = [layout.spell_call(call, number) for number, call in enumerate(calls)]
        if layout.between is not None:
            texts = [layout.between.join(texts)]
        return layout.joint.join(layout.before + text + layout.after for text in texts)

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
            if opener in self._bare:
                begun = lark.choice(f"{text(head.removeprefix(opener))} {b}" for head, b in bodies)
            behind[opener] = lark.rule(f"{space} {begun} {after}")
        return CallRules(one, many, behind)
