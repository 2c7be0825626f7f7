"""The events of a streamed response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from mlxsrv.wire.openai.logprobs import TokenLogprob
from mlxsrv.wire.responses.answers import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
    SummaryText,
)
from mlxsrv.wire.sse import PLACEHOLDER, EventNumbers, named_frame, numbered_frames


class ResponsesEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class _OfResponse(ResponsesEvent, frozen=True, kw_only=True):
    response: ResponseObject


class ResponseCreated(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    pass


class _OfItem(ResponsesEvent, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    pass


class ItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    pass


class _InItem(ResponsesEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class _InContent(_InItem, frozen=True, kw_only=True):
    content_index: int = 0


class PartAdded(_InContent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_InContent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_InContent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob] = []


class OutputTextDone(_InContent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(_InContent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_InContent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class _InSummary(_InItem, frozen=True, kw_only=True):
    summary_index: int = 0


class SummaryPartAdded(
    _InSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_part.added"
):
    part: SummaryText


class SummaryPartDone(
    _InSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_part.done"
):
    part: SummaryText


class SummaryDelta(
    _InSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_text.delta"
):
    delta: str


class SummaryDone(
    _InSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_text.done"
):
    text: str


class ArgumentsDelta(
    _InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(
    _InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class InputDelta(_InItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(_InItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


StreamedEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
)


class EventWriter:
    """Writes the events of one stream, and numbers them."""

    def __init__(self) -> None:
        self._numbers = EventNumbers()

    def write(self, kind: type[ResponsesEvent], **fields: Any) -> bytes:
        """Return the frame of one event."""
        return named_frame(_name(kind), kind(sequence_number=self._numbers.next(), **fields))

    def deltas(
        self, kind: type[ResponsesEvent], texts: list[str], **fields: Any
    ) -> Callable[[str], bytes]:
        """Return an encoder of events that differ in `delta` and in their number. It appends each
        delta to `texts`."""
        event = kind(**{"sequence_number": -1, "delta": PLACEHOLDER, **fields})
        return numbered_frames(_name(kind), event, "sequence_number", self._numbers, texts)


def _name(kind: type[ResponsesEvent]) -> str:
    return str(kind.__struct_config__.tag)
