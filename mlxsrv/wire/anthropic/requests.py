"""Requests for a message, and for the count of its tokens.

Agents send what they would send to Anthropic, so little is refused: unknown fields, tools that run
on Anthropic's servers and marks of its cache are left out, and named in `X-Ignored-Params`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from mlxsrv.errors import InvalidRequest, ThreadNotFound
from mlxsrv.generation.spec import (
    ChatMessage,
    ChatPrompt,
    GenerationSpec,
    JSONForm,
    ToolChoice,
    ToolSpec,
)
from mlxsrv.wire.anthropic.blocks import BLOCKS, CacheControl, MessageParam, System, read_chat
from mlxsrv.wire.decoding import RequestDecoder, missing
from mlxsrv.wire.dialect import TextRequest, sampling_wishes
from mlxsrv.wire.openai.generation_request import Effort, Priority
from mlxsrv.wire.openai.requests import no_such_tool
from mlxsrv.wire.schema_rules import STRING, Schema, having, needs
from mlxsrv.wire.steering import check_steering
from mlxsrv.wire.unknown import Search


class AnthropicTool(Struct, frozen=True):
    """A tool of the client's has a name and a schema. One of another type than "custom" is known
    to Anthropic's models alone."""

    schema_rules: ClassVar[Schema] = {
        "allOf": [
            needs(
                {"properties": {"type": {"enum": [None, "custom"]}}},
                {
                    "properties": {"name": STRING, "input_schema": {"type": "object"}},
                    "required": ["name", "input_schema"],
                },
            )
        ]
    }

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def custom(self) -> bool:
        return self.type in (None, "custom")


class AnthropicToolChoice(Struct, frozen=True):
    schema_rules: ClassVar[Schema] = {
        "allOf": [needs(having("type", {"const": "tool"}), having("name", STRING))]
    }

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None


class JSONOutputFormat(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True):
    effort: Effort | None = None
    format: JSONOutputFormat | None = None


class MessageMetadata(Struct, frozen=True):
    user_id: Annotated[str, Meta(max_length=1000)] | None = None


class ThreadParam(Struct, frozen=True):
    """A conversation that Anthropic's server would keep."""

    type: str
    previous_message_id: str | None = None


_PATHS = {"reasoning_effort": "output_config.effort", "enable_thinking": "thinking"}


class MessagesRequest(TextRequest, frozen=True, kw_only=True, dict=True):
    """None: the default is used."""

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=10_000)]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    system: System | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=1000)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JSONOutputFormat | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=1000)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    metadata: MessageMetadata | None = None
    thread: ThreadParam | None = None
    priority: Priority | None = None
    cache_control: CacheControl | None = None

    def spec(self) -> GenerationSpec:
        return GenerationSpec(
            prompt=self._prompt(),
            model=self.model,
            sampling=sampling_wishes(self),
            steering=self.steering_wishes,
            form=self._form,
            stops=self.stop_sequences or (),
            limit=self.max_tokens,
            streamed=bool(self.stream),
            user=None if self.metadata is None else self.metadata.user_id,
            priority=self.priority,
            paths=_PATHS,
        )

    @cached_property
    def left_out(self) -> Search:
        """Finds what is left out of the messages."""
        return Search()

    @cached_property
    def chat(self) -> list[ChatMessage]:
        """The messages in no dialect. Decoding a request reads them, so they raise nothing later.

        Raises:
            InvalidRequest, MissingParameter, UnsupportedParameter: a message cannot be read.
        """
        return read_chat(self.system, self.messages, self.left_out)

    def _prompt(self) -> ChatPrompt:
        messages = self.chat
        choice = self.tool_choice
        return ChatPrompt(
            messages=messages,
            tools=[_tool_spec(tool) for tool in self.tools or () if tool.custom],
            tool_choice=_choice(choice),
            parallel=choice is None or not choice.disable_parallel_tool_use,
            thinking=_thinks(self.thinking),
            effort=None if self.output_config is None else self.output_config.effort,
            thinking_budget=None if self.thinking is None else self.thinking.budget_tokens,
            continues=messages[-1].is_unfinished,
        )

    @property
    def _form(self) -> JSONForm | None:
        """The form of the answer, under its name of today or its older one."""
        config = self.output_config
        if config is not None and config.format is not None:
            return JSONForm("output_config.format", config.format.schema)
        if self.output_format is not None:
            return JSONForm("output_format", self.output_format.schema)
        return None


def _tool_spec(tool: AnthropicTool) -> ToolSpec:
    assert tool.name is not None  # it was checked
    return ToolSpec(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )


def _choice(given: AnthropicToolChoice | None) -> ToolChoice:
    match given:
        case AnthropicToolChoice(type="any"):
            return ToolChoice("required")
        case AnthropicToolChoice(type="tool", name=str(name)):
            return ToolChoice("required", (name,))
        case AnthropicToolChoice(type="none"):
            return ToolChoice("none")
    return ToolChoice()


def _thinks(given: ThinkingConfig | None) -> bool | None:
    """Whether the model shall think; None: as it does by itself."""
    kind = "disabled" if given is None else given.type
    return {"enabled": True, "disabled": False}.get(kind)


# Checks.


def _check(request: MessagesRequest) -> None:
    check_steering(request)
    _check_tools(request)
    thread = request.thread
    if thread is not None and (thread.type != "create" or thread.previous_message_id is not None):
        raise ThreadNotFound(
            "thread: this server keeps no conversations; send all messages", param="thread"
        )
    _ = request.chat


def _check_tools(request: MessagesRequest) -> None:
    for i, tool in enumerate(request.tools or ()):
        for name in ("name", "input_schema"):
            if tool.custom and getattr(tool, name) is None:
                raise missing(f"tools[{i}].{name}")
    choice = request.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return
    names = [tool.name or "" for tool in request.tools or () if tool.custom]
    if not names:
        raise InvalidRequest("tool_choice: needs tools of the client's own", param="tool_choice")
    if choice.type == "tool" and choice.name is None:
        raise missing("tool_choice.name")
    if choice.type == "tool" and choice.name not in names:
        raise no_such_tool("tool_choice.name", names)


def _left_out(request: MessagesRequest) -> list[str]:
    """The fields that nothing here can honour, by their paths."""
    tools = [f"tools[{i}]" for i, tool in enumerate(request.tools or ()) if not tool.custom]
    thread = [] if request.thread is None else ["thread"]
    return [*tools, *thread, *request.left_out.paths]


MESSAGES_REQUESTS = RequestDecoder(
    MessagesRequest, check=_check, idle=_left_out, parts=BLOCKS.kinds
)
