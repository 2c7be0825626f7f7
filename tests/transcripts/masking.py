"""Answers without what chance and the clock decide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_TIMES = re.compile(
    r"since|created|created_at|completed_at|modified_at|expires_at|updated_at|time|timestamp|uptime"
    r"|.*_duration|.*_ms|.*_seconds|.*_per_second|idle_seconds|active|cached|peak|reading"
)
"""Keys of JSON whose numbers and dates differ from run to run."""
_OPAQUE = {"timings", "ttft", "memory", "engine", "sequence_number", "modified", "digest", "size"}
"""Keys whose values are masked whole."""
_ID = re.compile(
    r"\b(?:chatcmpl-|cmpl-|msg_|resp_|rs_|fc_|ctc_|call_|toolu_|req_|prof_|rerank-|score-|embd-|request_)"
    r"[0-9A-Za-z]{8,}|\b[0-9a-f]{32}\b|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}\b"
)
_PIECES = {
    "content",
    "reasoning_content",
    "reasoning",
    "text",
    "thinking",
    "partial_json",
    "arguments",
    "delta",
    "response",
    "token_ids",
    "logprobs",
    "tokens",
}
"""Keys of stream events whose values may be cut anywhere; those of successive events are joined."""


class Mask:
    """Replaces each id by its kind and the number of its first use."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def text(self, text: str) -> str:
        return _ID.sub(self._name, text)

    def _name(self, match: re.Match[str]) -> str:
        kind = re.split(r"[-_]", match[0])[0] if re.search(r"[-_]", match[0]) else "hex"
        return self._seen.setdefault(match[0], f"<{kind} {len(self._seen)}>")

    def value(self, value: Any, key: str = "") -> Any:
        """The value with its ids, times and durations masked."""
        if key in _OPAQUE and value is not None:
            return "<opaque>"
        if isinstance(value, dict):
            return {name: self.value(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self.value(each, key) for each in value]
        if _TIMES.fullmatch(key) and isinstance(value, int | float | str):
            return "<time>"
        return self.text(value) if isinstance(value, str) else value

    def body(self, text: str) -> Any:
        """A whole answer: JSON, or its text."""
        try:
            return self.value(json.loads(text))
        except ValueError:
            return self.text(text)

    def stream(self, text: str) -> list[Any]:
        """The events or lines of a stream; pieces that follow each other are one."""
        joined: list[Any] = []
        pieces: dict[str, int] = {}  # where a piece of each shape stands among the last events
        for event in _events(text):
            masked = self.value(event)
            shape = json.dumps(_shape(masked))
            if "<piece" not in shape:
                if '"finish_reason": "' not in shape:  # the end of one choice ends no other
                    pieces.clear()
            elif shape in pieces:
                joined[pieces[shape]] = _join(joined[pieces[shape]], masked)
                continue
            else:
                pieces[shape] = len(joined)
            joined.append(masked)
        return joined


def _events(text: str) -> Iterator[Any]:
    """The events of a stream, or its lines, without the comments that are signs of life."""
    for block in re.split(r"\n\n" if "data:" in text else r"\n", text):
        if not block or block.startswith(":"):
            continue
        event: dict[str, Any] = {}
        for line in block.split("\n"):
            name, _, data = line.partition(": ") if "data:" in text else ("line", "", line)
            try:
                event[name] = json.loads(data)
            except ValueError:
                event[name] = data
        yield event


def _shape(value: Any, key: str = "") -> Any:
    """The form of an event without its texts: two of one form are pieces of one text."""
    if key in _PIECES and isinstance(value, str) and value:
        return "<piece>"
    if key in _PIECES and isinstance(value, list):
        return "<pieces>"
    if key == "usage" and value:
        return "<usage>"  # so far
    if isinstance(value, dict):
        return {name: _shape(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_shape(each, key) for each in value]
    return value


def _join(first: Any, second: Any, key: str = "") -> Any:
    if key in _PIECES and isinstance(first, str | list):
        return first + second
    if key == "usage":
        return second
    if isinstance(first, dict):
        return {name: _join(each, second[name], name) for name, each in first.items()}
    if isinstance(first, list):
        return [_join(one, other, key) for one, other in zip(first, second, strict=True)]
    return first
