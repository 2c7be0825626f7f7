"""The way in which a model writes calls with tagged arguments, to write and to enforce them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from mlxsrv.text.call_formats.calls import ToolSchema, WrittenCall
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.call_formats.tagged_rules import ArgumentRules, gapped, text_body
from mlxsrv.text.call_formats.values import Argument, ArgumentTypes

CDATA: Final = ("<![CDATA[", "]]>")
_NO_MARKUP = r"[^<&\n]"

_TYPES = ArgumentTypes({})
TEXT = _TYPES.typed({"type": "string"})
"""The type of a value that is a string."""
OTHER = _TYPES.typed({"type": ["object", "array", "number", "integer", "boolean", "null"]})
"""The type of a value that is none."""


class TagLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which a model writes calls with tagged arguments. All markers are spelled.

    The first attributes are texts as a model writes them, the others patterns of `Tag` for reading.

    Attributes:
        before: what stands before the calls of a block.
        head: the beginning of a call, with {name} and perhaps {number}.
        argument: one argument, with {key}, {value} and perhaps {type}. In all of these {gap} is a
            newline that some models write; it is not written for them.
        tail: the end of a call.
        after: the end of a block.
        between: text between two calls in a block; None if each call has its own block.
        joint: text between two blocks.
        heads: tags that begin a call, with the name in them.
        keys: tags before a value, with the key in them.
        closers: tags behind a value. One that is plain text ends a value only where another tag of
            the call, or none, follows it.
        tails: tags that end a call.
        ends: tags that end a block.
        skipped: tags that mean nothing inside a call.
        glued: the tag behind a key; the name and the first key may stand before it as one word.
        named: the attribute of a tag that has the name of the tool or the key.
        typed: the attribute that has the type of a value: "string" is true or false, "type" a type
            of JSON. The schema has it where there is none.
        escaped: attributes are escaped as in XML.
        lines: one newline on each side of a value is markup.
        cdata: a value may stand in a CDATA section.
        wrappers: keys that no tool has; the object behind one has the arguments.
        loose: heads match any word, so that only one call can stand in a block.
    """

    before: str = ""
    head: str
    argument: str
    tail: str = ""
    after: str = ""
    between: str | None = None
    joint: str = "\n"
    heads: Sequence[str]
    keys: Sequence[str]
    closers: Sequence[str]
    tails: Sequence[str] = ()
    ends: Sequence[str] = ()
    skipped: Sequence[str] = ()
    glued: str = ""
    named: Sequence[str] = ()
    typed: Literal["", "string", "type"] = ""
    escaped: bool = False
    lines: bool = False
    cdata: bool = False
    wrappers: Sequence[str] = ()
    loose: bool = False

    def spell_call(self, call: WrittenCall, number: int) -> str:
        """Return one call as the model writes it, without what is around a block."""
        arguments = [self._spell_argument(key, value) for key, value in call.arguments.items()]
        head = plain(self.head).replace("{name}", self._attribute(call.name))
        return "".join([head.replace("{number}", str(number + 1)), *arguments, plain(self.tail)])

    def rule_call(self, name: str, schema: ToolSchema, lark: Lark) -> tuple[str, str]:
        """Return the head of a call, spelled, and the body of what follows it."""

        def write(key: str, schema: Mapping[str, Any], argument: Argument) -> str:
            return self._rule_argument(key, schema, argument, lark)

        arguments = ArgumentRules(lark, schema, write).all()
        head = self.head.replace("{name}", self._attribute(name))
        return head, lark.rule(f"{arguments} {gapped(lark, self.tail)}")

    def _rule_argument(
        self, key: str, schema: Mapping[str, Any], argument: Argument, lark: Lark
    ) -> str:
        """Return the body of one argument.

        Args:
            key: the body of its key.
        """
        before, _, behind = self.argument.partition("{key}")
        between, _, closer = behind.partition("{value}")
        middle, _, end = between.partition("{type}")
        values = [
            f"{f'({words})' if words else ''} {gapped(lark, end)} "
            f"{self._rule_value(schema, typed, closer, lark)}"
            for words, typed in self._rule_types(argument)
        ]
        return f"{lark.text(before)} {key} {gapped(lark, middle)} ({' | '.join(values)})"

    def _rule_value(
        self, schema: Mapping[str, Any], argument: Argument, closer: str, lark: Lark
    ) -> str:
        if not self.cdata:
            return text_body(lark, schema, argument, closer)
        data = text_body(lark, schema, argument, CDATA[1] + closer)
        bodies = [f"{lark.text(CDATA[0])} {data}"]
        if argument.kind == "other" or "pattern" not in schema:
            bodies.append(text_body(lark, schema, argument, closer, _NO_MARKUP))
        return f"({' | '.join(bodies)})"

    def _rule_types(self, argument: Argument) -> Iterator[tuple[str, Argument]]:
        """Yield the bodies of the attribute for types, each with the type that it tells."""
        if not self.typed:
            yield "", argument
            return
        text, others = '"true"', ['"false"']
        if self.typed == "type":
            text = '"string"'
            names = {each.replace("integer", "number") for each in argument.types}
            others = [json.dumps(name) for name in sorted(names - {"string"})]
        if argument.kind != "other":
            yield text, TEXT if argument.kind == "mixed" else argument
        if argument.kind != "text":
            yield " | ".join(others), OTHER

    def _spell_argument(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self.cdata and re.search(r"[<&\n]", text):
            text = CDATA[0] + text + CDATA[1]
        before, _, after = plain(self.argument).partition("{value}")
        before = before.replace("{key}", self._attribute(key))
        return before.replace("{type}", self._type_of(value)) + text + after

    def _attribute(self, text: str) -> str:
        return text.replace("&", "&amp;").replace('"', "&quot;") if self.escaped else text

    def _type_of(self, value: Any) -> str:
        if self.typed == "string":
            return "true" if isinstance(value, str) else "false"
        match value:
            case None:
                return "null"
            case bool():
                return "boolean"
            case str():
                return "string"
            case int() | float():
                return "number"
        return "array" if isinstance(value, list) else "object"


def plain(text: str) -> str:
    """Return a text without its gaps."""
    return text.replace("{gap}", "")
