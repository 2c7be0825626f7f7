"""Streams of the Responses API, whose events must come in their order."""

from __future__ import annotations

from mlxsrv.generation.outputs import Identity
from tests.support.schemas import Body
from tests.wire.responses.asking import short

WHO = Identity("resp_" + "0" * 32, 1_790_000_000, "org/name", "mlxsrv-1")


# The order, as a machine.


class Item:
    """One item, put together from its events."""

    def __init__(self, added: Body) -> None:
        self.item = added["item"]
        self.index = added["output_index"]
        self.text = ""
        self.done: Body | None = None
        self.expects = "part" if self.item["type"] in ("message", "reasoning") else "delta"
        assert self.item["status"] == "in_progress"

    @property
    def over(self) -> bool:
        """Whether another item may follow; a text that cannot be read is never done."""
        return self.expects == "nothing" or self.item["type"] == "custom_tool_call"

    def take(self, event: Body) -> None:
        type = short(event["type"])
        assert event["output_index"] == self.index
        assert event.get("item_id", self.item["id"]) == self.item["id"]
        if type.endswith("part.added"):
            assert self.expects == "part"
            assert event["part"]["text"] == ""
            self.expects = "delta"
        elif type.endswith(".delta"):
            assert self.expects == "delta"
            self.text += event["delta"]
        elif type.endswith("part.done"):
            assert self.expects == "part.done"
            assert event["part"]["text"] == self.text
            self.expects = "item.done"
        elif type == "output_item.done":
            assert self.expects == "item.done"
            assert event["item"]["id"] == self.item["id"]
            assert content_of(event["item"]) == self.text
            self.done, self.expects = event["item"], "nothing"
        else:
            assert type.endswith(".done")
            assert self.expects == "delta"
            whole = next(event[name] for name in ("text", "arguments", "input") if name in event)
            assert whole == self.text
            texts = self.item["type"] in ("message", "reasoning")
            self.expects = "part.done" if texts else "item.done"


def content_of(item: Body) -> str:
    match item["type"]:
        case "message":
            [part] = item["content"]
            return str(part["text"])
        case "reasoning":
            [part] = item["content"] or item["summary"]
            return str(part["text"])
        case "function_call":
            return str(item["arguments"])
    return str(item["input"])


def check_order(events: list[Body]) -> None:
    """Fails unless the events come as clients expect them, and agree with each other."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    types = [short(event["type"]) for event in events]
    assert types[0] == "created"
    items: list[Item] = []
    for event, type in zip(events[1:], types[1:], strict=True):
        if type in ("in_progress", "completed", "incomplete", "failed"):
            assert event["response"]["id"] == WHO.id
            assert event["response"]["status"] == type
        elif type == "output_item.added":
            assert not items or items[-1].over, "items do not overlap"
            assert event["output_index"] == len(items)
            items.append(Item(event))
        else:
            items[-1].take(event)
    assert types.count("created") == 1
    last = events[-1]["response"]
    if types[-1] not in ("completed", "incomplete", "failed"):
        return
    assert [item["id"] for item in last["output"]] == [item.item["id"] for item in items]
    for item, final in zip(items, last["output"], strict=True):
        assert item.done in (None, final)
        assert content_of(final) == item.text
        if item.done is None:
            assert final["status"] == "incomplete"
            assert item is items[-1] or item.over
