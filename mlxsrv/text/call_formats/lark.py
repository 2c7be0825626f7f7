"""A grammar in llguidance's variant of Lark, written rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlxsrv.text.marks import Marks

_DEFINITIONS = ("$defs", "definitions")


class Lark:
    """The rules of one grammar. Markers that are tokens are named by number: no text matches them.

    Args:
        marks: those of the model's formats.
        prepare: turns a JSON schema into the one that llguidance is given, as JSON.
    """

    def __init__(self, marks: Marks, prepare: Callable[[Mapping[str, Any]], str]) -> None:
        self._marks = marks
        self._prepare = prepare
        self._rules: list[str] = []
        spelled = sorted(map(re.escape, marks.ids), key=len, reverse=True)
        self._markers = re.compile("(" + "|".join(spelled or ["(?!)"]) + ")")

    def text(self, text: str) -> str:
        """Return the body that matches this text, in which markers may be spelled."""
        parts = [part for part in self._markers.split(text) if part]
        ids = self._marks.ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts)

    def rule(self, body: str) -> str:
        """Add a rule with this body; return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def choice(self, bodies: Iterable[str]) -> str:
        """Add a rule for one of the bodies; return its name."""
        return self.rule(" | ".join(map(self.rule, bodies)))

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the body that matches JSON of a schema."""
        return f"%json {self._prepare(schema)}"

    def until(self, closer: str, pattern: str = "(?s:.*)") -> str:
        """Return the name of a rule for any text that matches a pattern, and the closer behind it.

        Args:
            closer: spelled. The text has no marker that is a token, if the closer has one; else
                the text ends with the first closer.
        """
        if marker := self._markers.search(closer):
            name = f"T{len(self._rules)}"
            before = re.sub(r"([].^$*+?()[{}|\\/])", r"\\\1", closer[: marker.start()])
            before = before.replace("\n", r"\n")
            self._rules.append(f"{name}: /{pattern}{before}/")
            return self.rule(f"{name} {self.text(closer[marker.start() :])}")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[suffix={json.dumps(closer)}]: /{pattern}/")
        return name

    def any_text(self, pattern: str = "(?s:.*)") -> str:
        """Return the name of a terminal for any text that matches a pattern."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: /{pattern}/")
        return name

    def any_order(
        self,
        members: Mapping[str, str],
        required: frozenset[str],
        comma: str = "",
        between: str = "",
    ) -> str:
        """Add the rule for members that stand in any order, each once; return its name. There is a
        rule for each set of members that may be left.

        Args:
            members: their rules, by keys.
            required: the keys that must be there.
            comma: the body of what stands between two members.
            between: the body of what may stand before each member and behind the last.
        """
        states: dict[frozenset[str], str] = {}

        def begin(left: frozenset[str], before: str) -> str:
            bodies = [
                f"{between} {before} {members[key]} {go_on(left - {key})}"
                for key in members
                if key in left
            ]
            return self.rule(" | ".join(bodies if left & required else [*bodies, between or '""']))

        def go_on(left: frozenset[str]) -> str:
            if left not in states:
                states[left] = begin(left, comma)
            return states[left]

        return begin(frozenset(members), "")

    def grammar(self, start: str) -> str:
        """Return the grammar that begins with this body."""
        return "\n".join([f"start: {start}", *self._rules])


def stand_alone(part: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema with the definitions of the whole, if it refers to any."""
    defined = {key: whole[key] for key in _DEFINITIONS if key in whole}
    return {**defined, **part} if "$ref" in json.dumps(part) else dict(part)


def listed_members(schema: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], Sequence[str]]:
    """Return the schemas of the members that an object's schema lists or requires, by key, and the
    keys of those that it requires."""
    properties, required = schema.get("properties"), schema.get("required")
    listed = properties if isinstance(properties, Mapping) else {}
    keys = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    found = {key: listed.get(key) for key in (*listed, *keys)}
    members = {key: each if isinstance(each, Mapping) else {} for key, each in found.items()}
    return members, list(dict.fromkeys(keys))


def text_bounds(schema: Mapping[str, Any]) -> str:
    """Return how often a sign may come in a string of a schema, in a regex."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    if not isinstance(least, int) and not isinstance(most, int):
        return "*"
    return f"{{{least or 0},{'' if most is None else most}}}"


def text_pattern(schema: Mapping[str, Any], sign: str = "(?s:.)") -> str:
    """Return the regex for a string of a schema.

    Args:
        sign: a regex for one sign of it.
    """
    pattern, bounds = schema.get("pattern"), text_bounds(schema)
    if not isinstance(pattern, str) or bounds != "*":
        return sign + bounds
    before = "" if pattern.startswith("^") else "(?s:.*)"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern.removeprefix("^")
    body = body[:-1] if ends else body
    return f"{before}(?:{body}){'' if ends else '(?s:.*)'}".replace("/", r"\/")
