"""A response, as server-sent events in the order that clients rely on, or whole.

`response.created` and `response.in_progress` come first. Then each item has its events: it is
added, its text or its arguments come in deltas, and it is done. Items never overlap. The last event
has the whole response. There is no `[DONE]`.

A call that was cut off, or a free text that cannot be read, is never done, so that no client runs
it: it is in the last event only, and incomplete there. A function whose arguments are no JSON
object is done, but incomplete: clients tell the model what is wrong with it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxsrv.errors import ServeError
from mlxsrv.generation.outputs import (
    Answer,
    Channel,
    Ended,
    FinishReason,
    Identity,
    TokenScore,
    Usage,
    is_object,
)
from mlxsrv.wire.dialect import Builder, Dialect
from mlxsrv.wire.openai.logprobs import TokenLogprob, chat_logprobs
from mlxsrv.wire.responses.answers import (
    IncompleteDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseObject,
    ResponseProblem,
    ResponsesUsage,
    SummaryText,
    make_call,
    make_reasoning,
    make_response,
)
from mlxsrv.wire.responses.custom_input import CustomInput
from mlxsrv.wire.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    EventWriter,
    InputDelta,
    InputDone,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponsesEvent,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
)
from mlxsrv.wire.responses.items import new_item_id
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS, ResponsesRequest
from mlxsrv.wire.responses.tools import CallableTool

KeepResponse = Callable[[ResponseObject], None]

_CUTS: Mapping[FinishReason, IncompleteDetails] = {
    "length": IncompleteDetails("max_output_tokens"),
    "timeout": IncompleteDetails("timeout"),
}
"""Ends of answers that are not complete."""


class ResponseBuilder(Builder):
    """One response. A whole one is the last state of its stream.

    Args:
        keep: called with the response at its end, unless it failed.
    """

    def __init__(self, request: ResponsesRequest, identity: Identity, keep: KeepResponse) -> None:
        self._request = request
        self._response = make_response(request, identity)
        self._keep = keep
        self._events = EventWriter()
        self._created = False
        self._items: list[OutputItem] = []
        self._open: _OpenItem | None = None
        self._calls = 0  # that were begun
        self._deltas: dict[Channel, Callable[[str], bytes]] = {}  # of the text that is open

    def whole(self, answers: Sequence[Answer], usage: Usage) -> ResponseObject:
        [answer] = answers
        cut = answer.reason in _CUTS
        broken = [i for i, use in enumerate(answer.tools) if not use.complete]
        # What was written of a call that was cut off before it had a name belongs to the text.
        nameless = "" if len(answer.tools) - 1 in broken else answer.fragment
        content = answer.content + nameless
        self.text(0, "reasoning", answer.reasoning)
        if content or not (answer.tools or cut):
            text = self._new_text("content")
            self._begin(text)
            text.add_scored(content, answer.scores or ())
            if cut and nameless:
                self._close("incomplete")
        for i, use in enumerate(answer.tools):
            self.tool(0, i, use.id, use.name)
            self.arguments(0, i, use.arguments)
        fragment = "" if nameless else answer.fragment
        self.end(Ended(0, answer.reason, usage, answer.stop, tuple(broken), fragment))
        return self._response

    def keepalive(self) -> bytes:
        """An event, because clients do not count comments as a sign of life."""
        if not self._created:
            return self.opening()
        return self._events.write(ResponseInProgress, response=self._response)

    def opening(self) -> bytes:
        if self._created:
            return b""
        self._created = True
        created = self._events.write(ResponseCreated, response=self._response)
        return created + self._events.write(ResponseInProgress, response=self._response)

    def text(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] = ()
    ) -> bytes:
        deltas = self._deltas.get(channel)
        if deltas is None:
            if not text:  # the score of a token that is no text, such as a marker of a call
                return b""
            begun = self._begin(self._new_text(channel))
            return begun + self.text(choice, channel, text, scores)
        if scores:
            assert isinstance(self._open, _OpenText)
            return self._open.add_scored(text, scores)
        return deltas(text)

    def tool(self, choice: int, index: int, id: str, name: str) -> bytes:
        self._calls += 1
        tool = self._request.toolbox.tool(name)
        return self._begin(_OpenCall(self._events, self._next_index(), tool, id))

    def arguments(self, choice: int, index: int, text: str) -> bytes:
        assert isinstance(self._open, _OpenCall)
        return self._open.extend(text)

    def end(self, ended: Ended) -> bytes:
        assert ended.usage is not None  # there is one choice
        cut = _CUTS.get(ended.reason)
        data = b""
        if ended.fragment and self._calls - 1 not in ended.broken:
            data = self.text(0, "content", ended.fragment)  # of a call that has no item
        elif cut is not None and ended.fragment and isinstance(self._open, _OpenCall):
            self._abandon()
        data += self._close("completed" if cut is None else "incomplete")
        if cut is None and all(isinstance(item, OutputReasoning) for item in self._items):
            # Clients look for a message or a call.
            data += self._begin(self._new_text("content")) + self._close("completed")
        self._response = replace(
            self._response,
            status="completed" if cut is None else "incomplete",
            incomplete_details=cut,
            completed_at=int(time.time()) if cut is None else None,
            output=self._items,
            usage=ResponsesUsage.of(ended.usage),
        )
        self._keep(self._response)
        kind = ResponseCompleted if cut is None else ResponseIncomplete
        return data + self._events.write(kind, response=self._response)

    def error(self, error: ServeError) -> bytes:
        begun = self.opening()
        self._abandon()
        problem = ResponseProblem(_problem_code(error), error.message)
        response = replace(self._response, status="failed", error=problem, output=self._items)
        return begun + self._events.write(ResponseFailed, response=response)

    def _new_text(self, channel: Channel) -> _OpenText:
        return _OpenText(self._events, self._next_index(), channel, self._request)

    def _next_index(self) -> int:
        return len(self._items) + (self._open is not None)

    def _begin(self, item: _OpenItem) -> bytes:
        closed = self._close("completed")
        self._open = item
        if isinstance(item, _OpenText):
            self._deltas[item.channel] = item.frames
        return closed + item.begin()

    def _close(self, status: ItemStatus) -> bytes:
        """End the open item, if there is one. Texts get this status."""
        open, self._open = self._open, None
        self._deltas.clear()
        if open is None:
            return b""
        data, item = open.end(status)
        self._items.append(item)
        return data

    def _abandon(self) -> None:
        """Leave the open item, if there is one, as it is: it is never done."""
        if self._open is not None:
            self._items.append(self._open.item("incomplete"))
            self._open = None


def _problem_code(error: ServeError) -> str:
    """Return one of OpenAI's codes for responses; their number is limited."""
    if error.code in ("context_length_exceeded", "rate_limit_exceeded"):
        return error.code
    return "server_error" if error.status >= 500 else "invalid_prompt"


class _Kinds(Struct, frozen=True):
    """The events of a text."""

    added: type[ResponsesEvent]
    delta: type[ResponsesEvent]
    done: type[ResponsesEvent]
    part_done: type[ResponsesEvent]
    part: type[OutputText | ReasoningText | SummaryText]


_CONTENT = _Kinds(PartAdded, OutputTextDelta, OutputTextDone, PartDone, OutputText)
_REASONING = _Kinds(PartAdded, ReasoningDelta, ReasoningDone, PartDone, ReasoningText)
_SUMMARY = _Kinds(SummaryPartAdded, SummaryDelta, SummaryDone, SummaryPartDone, SummaryText)


class _OpenItem(ABC):
    """An item that is being written: what it has in all events, and its text so far.

    Args:
        item: as it begins.
    """

    def __init__(self, events: EventWriter, index: int, item: OutputItem) -> None:
        self._events = events
        self._index = index
        self._item = item
        self._texts: list[str] = []

    def begin(self) -> bytes:
        return self._events.write(ItemAdded, output_index=self._index, item=self._item)

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item as far as it has come."""

    @abstractmethod
    def end(self, status: ItemStatus) -> tuple[bytes, OutputItem]:
        """Return the events at the end, and the item. Texts get this status."""

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _deltas(self, kind: type[ResponsesEvent]) -> Callable[[str], bytes]:
        place = {"item_id": self._item.id, "output_index": self._index}
        return self._events.deltas(kind, self._texts, **place)

    def _write(self, kind: type[ResponsesEvent], **fields: object) -> bytes:
        return self._events.write(kind, item_id=self._item.id, output_index=self._index, **fields)

    def _done(self, item: OutputItem) -> bytes:
        return self._events.write(ItemDone, output_index=self._index, item=item)


class _OpenText(_OpenItem):
    """A message or reasoning that is being written."""

    def __init__(
        self, events: EventWriter, index: int, channel: Channel, request: ResponsesRequest
    ) -> None:
        item: OutputItem
        if channel == "content":
            self._kinds, item = _CONTENT, OutputMessage(id=new_item_id("message"))
        else:
            self._kinds = _SUMMARY if request.summarized else _REASONING
            item = OutputReasoning(id=new_item_id("reasoning"))
        super().__init__(events, index, item)
        self.channel = channel
        self._request = request
        self._logprobs: list[TokenLogprob] = []
        self.frames = self._deltas(self._kinds.delta)

    def begin(self) -> bytes:
        return super().begin() + self._write(self._kinds.added, part=self._kinds.part())

    def add_scored(self, text: str, scores: Sequence[TokenScore]) -> bytes:
        self._texts.append(text)
        logprobs = chat_logprobs(scores).content
        self._logprobs += logprobs
        return self._write(OutputTextDelta, delta=text, logprobs=logprobs)

    def item(self, status: ItemStatus) -> OutputItem:
        if self.channel == "content":
            content = [OutputText(text=self._text, logprobs=self._logprobs)]
            return OutputMessage(id=self._item.id, status=status, content=content)
        return make_reasoning(self._request, self._item.id, self._text, status)

    def end(self, status: ItemStatus) -> tuple[bytes, OutputItem]:
        item, kinds = self.item(status), self._kinds
        fields: dict[str, Any] = {"text": self._text}
        if self.channel == "content":
            fields["logprobs"] = self._logprobs
        done = self._write(kinds.done, **fields)
        done += self._write(kinds.part_done, part=kinds.part(**fields))
        return done + self._done(item), item


class _OpenCall(_OpenItem):
    """A call that is being written."""

    def __init__(self, events: EventWriter, index: int, tool: CallableTool, call_id: str) -> None:
        super().__init__(events, index, make_call(tool, call_id))
        self._input = CustomInput() if tool.custom else None
        self._frames = self._deltas(InputDelta if tool.custom else ArgumentsDelta)

    def extend(self, arguments: str) -> bytes:
        return self._write_text(arguments if self._input is None else self._input.feed(arguments))

    def _write_text(self, text: str) -> bytes:
        return self._frames(text) if text else b""

    def item(self, status: ItemStatus) -> OutputItem:
        field = "arguments" if self._input is None else "input"
        return replace(self._item, **{field: self._text, "status": status})

    def end(self, status: ItemStatus) -> tuple[bytes, OutputItem]:
        assert not isinstance(self._item, OutputMessage | OutputReasoning)
        if self._input is None:
            item = self.item("completed" if is_object(self._text) else "incomplete")
            done = self._write(ArgumentsDone, name=self._item.name, arguments=self._text)
            return done + self._done(item), item
        rest, whole = self._input.finish()
        data = self._write_text(rest)
        item = self.item("completed" if whole else "incomplete")
        if not whole:  # the beginning of a free text looks like a whole one
            return data, item
        return data + self._write(InputDone, input=self._text) + self._done(item), item


def responses_dialect(keep: KeepResponse) -> Dialect[ResponsesRequest]:
    """Return the dialect that hands each response to `keep` at its end, unless it failed."""
    return Dialect(
        RESPONSES_REQUESTS,
        "resp_",
        lambda request, identity: ResponseBuilder(request, identity, keep),
    )
