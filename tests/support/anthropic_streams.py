"""Streams of messages, read event by event and held against Anthropic's types."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema

from tests.support.schemas import Body

_FILE = Path(__file__).with_name("anthropic_schemas.json")
_DEFS = json.loads(_FILE.read_text("utf-8"))["$defs"]


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": _DEFS})


def check_type(body: object, name: str) -> None:
    """Fails unless `body` is what the SDK's type `name` describes."""
    _validator(name).validate(body)


def read_events(data: bytes) -> list[Body]:
    """The events, to the letter of the format: a line with the name, and one with the data."""
    text = data.decode()
    assert not text or text.endswith("\n\n")
    events = []
    for event in text.split("\n\n")[:-1]:
        name, payload = event.splitlines()
        body = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        events.append(body)
    return events


class Heard:
    """The message that a client puts together of events. It fails at one out of place."""

    DELTAS = {"text": {"text_delta"}, "tool_use": {"input_json_delta"}} | {
        "thinking": {"thinking_delta", "signature_delta"}
    }

    def __init__(self) -> None:
        self.state = "new"
        self.message: Body = {}
        self.partial = ""
        self.error: Body | None = None

    def take(self, event: Body) -> None:
        kind = event["type"]
        assert self.state not in ("over", "failed"), f"{kind} after the end"
        if kind == "ping":
            return
        if kind == "error":
            check_type(event, "ErrorResponse")
            self.state, self.error = "failed", event["error"]
            return
        check_type(event, "RawMessageStreamEvent")
        {
            "message_start": self._start,
            "content_block_start": self._start_block,
            "content_block_delta": self._delta,
            "content_block_stop": self._stop_block,
            "message_delta": self._end,
            "message_stop": self._stop,
        }[kind](event)

    def _go(self, before: str, after: str) -> None:
        assert self.state == before, f"{after} while {self.state}"
        self.state = after

    def _start(self, event: Body) -> None:
        self._go("new", "between")
        self.message = event["message"]
        assert self.message["content"] == []
        assert self.message["stop_reason"] is None

    def _start_block(self, event: Body) -> None:
        self._go("between", "inside")
        assert event["index"] == len(self.message["content"])
        self.message["content"].append(dict(event["content_block"]))
        self.partial = ""

    def _delta(self, event: Body) -> None:
        self._go("inside", "inside")
        block, delta = self.message["content"][-1], event["delta"]
        assert event["index"] == len(self.message["content"]) - 1
        assert delta["type"] in self.DELTAS[block["type"]]
        assert not block.get("signature"), "a signature is the last of its block"
        for name in ("text", "thinking", "signature"):
            block[name] = block.get(name, "") + delta.get(name, "")
        self.partial += delta.get("partial_json", "")

    def _stop_block(self, event: Body) -> None:
        self._go("inside", "between")
        block = self.message["content"][-1]
        for name in {"text", "thinking", "signature"} - {*_FIELDS[block["type"]]}:
            assert not block.pop(name, "")
        if block["type"] == "tool_use":
            block["partial"] = self.partial

    def _end(self, event: Body) -> None:
        self._go("between", "ended")
        self.message |= event["delta"]
        usage = self.message["usage"]
        inputs = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert [usage[name] for name in inputs] == [event["usage"][name] for name in inputs]
        self.message["usage"] = event["usage"]

    def _stop(self, event: Body) -> None:
        self._go("ended", "over")


_FIELDS = {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": ()}


def hear(data: bytes) -> Heard:
    heard = Heard()
    for event in read_events(data):
        heard.take(event)
    return heard
