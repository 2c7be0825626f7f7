"""Requests of the Responses API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw, Struct

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.spec import (
    AS_MANY_AS_FIT,
    ChatMessage,
    ChatPrompt,
    Form,
    GenerationSpec,
    JSONForm,
    ToolChoice,
)
from mlxsrv.wire.decoding import RequestDecoder, missing
from mlxsrv.wire.dialect import TextRequest, sampling_wishes, stop_strings
from mlxsrv.wire.openai.generation_request import (
    Count,
    Effort,
    Int64,
    Likeliest,
    Penalty,
    Priority,
    Repetition,
    StopString,
    User,
)
from mlxsrv.wire.responses.conversation import chat_messages
from mlxsrv.wire.responses.items import (
    ITEM_KINDS,
    InputMessage,
    InputReference,
    PlacedItem,
    read_item,
    read_stored,
    stored_form,
)
from mlxsrv.wire.responses.tools import (
    MOST_TOOLS,
    NO_TOOLS,
    TOOL_KINDS,
    RawTool,
    Toolbox,
    ToolChoiceObject,
    read_choice,
    read_tools,
)
from mlxsrv.wire.schema_rules import NO_LIMIT, STRING, Schema, any_of, having
from mlxsrv.wire.steering import check_steering
from mlxsrv.wire.unknown import Search

# Fields.


class PlainFormat(Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class ObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaFormat(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="json_schema"
):
    """JSON that a schema describes."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True):
    format: PlainFormat | ObjectFormat | SchemaFormat | None = None


class ReasoningOptions(Struct, frozen=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None


class ResponsesRequest(TextRequest, frozen=True, kw_only=True, dict=True):
    """A request; null means the default. The last fields are not OpenAI's."""

    schema_rules: ClassVar[Schema] = {
        "properties": {
            "input": {
                "anyOf": [
                    STRING,
                    {"type": "array", "items": any_of(ITEM_KINDS), "maxItems": 10_000},
                    {"type": "null"},
                ],
                "description": "Items of other types are left out.",
            },
            "tools": {"description": "Tools of other types are left out."},
            "max_output_tokens": NO_LIMIT,
            "steering": {"description": "Not with `profile`."},
            "steering_mode": {"description": "Only with `steering`."},
        },
        "anyOf": [having("input"), having("previous_response_id")],
    }

    input: str | Annotated[list[Raw], Meta(max_length=10_000)] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    include: Annotated[list[str], Meta(max_length=100)] | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Likeliest | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[RawTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: User | None = None
    safety_identifier: User | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    seed: Int64 | None = None
    priority: Priority | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=100)] | None = None

    # What the fields say. Decoding a request reads all of these, so they raise nothing later.

    @cached_property
    def ignored(self) -> Search:
        """The paths of ignored fields inside items and tools, filled while these are read."""
        return Search()

    @cached_property
    def items(self) -> Sequence[PlacedItem]:
        """The items, if the input is no string. Raises InvalidRequest."""
        if self.input is None or isinstance(self.input, str):
            return []
        read = (read_item(raw, f"input[{i}]", self.ignored) for i, raw in enumerate(self.input))
        return [item for item in read if item is not None]

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools. Raises InvalidRequest."""
        return read_tools(self.tools, self.ignored) if self.tools else NO_TOOLS

    @cached_property
    def choice(self) -> ToolChoice:
        """Whether the model must call a tool. Raises InvalidRequest."""
        return read_choice(self.tool_choice, self.toolbox, self.ignored)

    @property
    def references(self) -> Sequence[tuple[str, str]]:
        """The ids of stored items that the input refers to, each with the path that does."""
        return [
            (placed.item.id, placed.path)
            for placed in self.items
            if isinstance(placed.item, InputReference)
        ]

    def stored_input(self) -> Iterator[tuple[str, bytes | None]]:
        """Yield the id of each item, and the item as it is stored; None for one that the request
        only refers to."""
        if isinstance(self.input, str):
            yield stored_form(InputMessage(role="user", content=self.input))
        for placed in self.items:
            if isinstance(placed.item, InputReference):
                yield placed.item.id, None
            else:
                yield stored_form(placed.item)

    @property
    def stored(self) -> bool:
        """Whether the response is kept for later requests."""
        return self.store is not False

    @property
    def sealed(self) -> bool:
        """Whether the client wants reasoning in a form that it can give back."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def summarized(self) -> bool:
        """Whether the client wants to read reasoning as a summary."""
        return self.reasoning is not None and self.reasoning.summary is not None

    @property
    def likeliest(self) -> int | None:
        """The number of tokens to score beside each one generated; None: no scores at all."""
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @property
    def form(self) -> Form | None:
        """The form that the answer must have."""
        match self.text:
            case TextOptions(format=ObjectFormat()):
                return JSONForm("text.format", {"type": "object"})
            case TextOptions(format=SchemaFormat(schema=schema)):
                return JSONForm("text.format.schema", schema)
        return None

    def spec(self, past: Past | None = None) -> GenerationSpec:
        """Return what the request asks for, after the `past` that it continues.

        Raises:
            InvalidRequest, UnsupportedParameter: an item cannot be read.
        """
        effort = None if self.reasoning is None else self.reasoning.effort
        left_out = Search()
        return GenerationSpec(
            prompt=ChatPrompt(
                messages=self._messages(past or Past(), left_out),
                tools=[tool.spec for tool in self.toolbox.tools.values()],
                tool_choice=self.choice,
                parallel=self.parallel_tool_calls is not False,
                variables=self.chat_template_kwargs or {},
                thinking=None if effort is None else effort != "none",
                effort=effort,
                thinking_budget=None if self.reasoning is None else self.reasoning.max_tokens,
            ),
            model=self.model,
            sampling=sampling_wishes(self),
            steering=self.steering_wishes,
            form=self.form,
            stops=stop_strings(self.stop),
            limit=self.limit,
            truncate=-1 if self.truncation == "auto" else None,
            logprobs=self.likeliest,
            streamed=bool(self.stream),
            user=self.user or self.safety_identifier,
            priority=self.priority,
            ignored=left_out.paths,
            paths=_PATHS,
        )

    @property
    def limit(self) -> int:
        """The number of tokens that an answer may have.

        Agents give no limit, and take an answer that a limit ends for a failure.
        """
        given = self.max_output_tokens
        return AS_MANY_AS_FIT if given is None or given == -1 else given

    def _messages(self, past: Past, left_out: Search) -> list[ChatMessage]:
        """Raises InvalidRequest, UnsupportedParameter."""
        items = read_stored(past.items, "previous_response_id")
        for placed in self.items:
            if isinstance(placed.item, InputReference):
                items += read_stored([past.references[placed.item.id]], placed.path)
            else:
                items.append(placed)
        if isinstance(self.input, str):
            items.append(PlacedItem("input", InputMessage(role="user", content=self.input)))
        messages = chat_messages(self.instructions, items, left_out)
        if not messages:
            raise InvalidRequest("input: there is no message in it; give one", param="input")
        return messages


_PATHS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "enable_thinking": "reasoning.effort",
}


class Past(Struct, frozen=True):
    """The stored items that a request continues or refers to.

    Attributes:
        items: of the responses that it follows, their input and their output.
        references: items by their ids, for those that the input refers to.
    """

    items: Sequence[bytes] = ()
    references: Mapping[str, bytes] = {}


# Checks.


def _check_request(request: ResponsesRequest) -> None:
    if request.input is None and request.previous_response_id is None:
        raise missing("input")
    if request.max_output_tokens == 0:
        told = "max_output_tokens: expected a whole number of at least 1, or -1 for none"
        raise InvalidRequest(told, param="max_output_tokens")
    check_steering(request)
    _ = request.items, request.toolbox, request.choice


def _ignored(request: ResponsesRequest) -> list[str]:
    return request.ignored.paths


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
}
"""Fields that would change the answer but are not supported, and their values that ask for nothing.
"""

_REASONS = {
    "background": "a response is generated while its client waits",
    "conversation": "use previous_response_id",
    "prompt": "this server stores no prompts",
}

RESPONSES_REQUESTS = RequestDecoder(
    ResponsesRequest,
    check=_check_request,
    neutral=NEUTRAL,
    reasons=_REASONS,
    idle=_ignored,
    parts=(*ITEM_KINDS, *TOOL_KINDS),
)
