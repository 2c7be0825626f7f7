"""Responses: the object, its items and its usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.outputs import Identity, Usage
from mlxsrv.wire.openai.logprobs import TokenLogprob
from mlxsrv.wire.responses.conversation import seal
from mlxsrv.wire.responses.items import new_item_id
from mlxsrv.wire.responses.requests import PlainFormat, ResponsesRequest
from mlxsrv.wire.responses.tools import CallableTool

ItemStatus = Literal["in_progress", "completed", "incomplete"]

# Items.


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class SummaryText(Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    text: str = ""


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class OutputReasoning(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Thoughts, in `summary` if the request asks for one, else in `content`."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class OutputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""
    status: ItemStatus = "in_progress"


class OutputCustomCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


def make_call(tool: CallableTool, call_id: str) -> OutputCall | OutputCustomCall:
    """Return a call that begins, as the client knows the tool."""
    kind = OutputCustomCall if tool.custom else OutputCall
    id = new_item_id(str(kind.__struct_config__.tag))
    return kind(id=id, call_id=call_id, name=tool.name, namespace=tool.namespace)


def make_reasoning(
    request: ResponsesRequest, id: str, text: str, status: ItemStatus
) -> OutputReasoning:
    """Return the thoughts of an answer, in the form that the request asks for."""
    return OutputReasoning(
        id=id,
        status=status,
        summary=[SummaryText(text=text)] if request.summarized else [],
        content=[] if request.summarized else [ReasoningText(text=text)],
        encrypted_content=seal(text) if request.sealed else None,
    )


# The response.


class InputDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponsesUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponsesUsage:
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(usage.reasoning_tokens or 0),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


class ResponseProblem(Struct, frozen=True):
    """Why a response failed after it had begun."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens", "timeout"]


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response as it is at one time. Most fields repeat the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: bool = False
    error: ResponseProblem | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: Mapping[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage | None = None
    user: str | UnsetType = UNSET


def make_response(request: ResponsesRequest, identity: Identity) -> ResponseObject:
    """Return a response that has begun."""
    reasoning = request.reasoning
    form = None if request.text is None else request.text.format
    return ResponseObject(
        id=identity.id,
        created_at=identity.created,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=identity.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        store=request.stored,
        temperature=request.temperature,
        text={"format": form or PlainFormat()},
        tool_choice=request.tool_choice or "auto",
        tools=[*request.toolbox.shown],
        top_logprobs=request.top_logprobs,
        top_p=request.top_p,
        truncation=request.truncation or "disabled",
        user=UNSET if request.user is None else request.user,
    )


class InputTokens(Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


# Stored responses.


class DeletedResponse(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseQuery(Struct, frozen=True):
    stream: bool | None = None


class ItemQuery(Struct, frozen=True):
    """The page of a list that is wanted, the newest items first unless `order` says otherwise."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def page_of(ids: Sequence[str], query: ItemQuery) -> tuple[Sequence[int], bool]:
    """Return the places of the items that are asked for, and whether there are more.

    Args:
        ids: of all items, in their order.

    Raises:
        InvalidRequest: `after` is none of them.
    """
    places = range(len(ids)) if query.order == "asc" else range(len(ids))[::-1]
    if query.after is not None:
        if query.after not in ids:
            raise InvalidRequest("after: there is no item of that id", param="after")
        places = places[places.index(ids.index(query.after)) + 1 :]
    return places[: query.limit], len(places) > query.limit
