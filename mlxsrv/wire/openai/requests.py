"""Requests of OpenAI's chat and text completions.

A body may have fields that its Struct does not have. Those that would change the output, but cannot
be honoured, are refused unless their value asks for nothing (NEUTRAL). All others are named in
`ignored`, for `X-Ignored-Params`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from msgspec import Meta, Struct

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.generation.spec import (
    ChatPrompt,
    Form,
    TextPrompts,
    ToolChoice,
    ToolSpec,
)
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.openai.forms import ResponseFormat, asking, format_forms
from mlxsrv.wire.openai.generation_request import (
    FORM_FIELDS,
    SPELLINGS,
    Effort,
    GenerationRequest,
    Likeliest,
    TokenId,
    check_generation,
    check_same,
    idle_options,
)
from mlxsrv.wire.openai.messages import Message, read_messages
from mlxsrv.wire.schema_rules import NO_LIMIT, TEXT, TOKEN_IDS, Schema, at_most_one, having, needs
from mlxsrv.wire.unknown import Search

# `$` alone would let a newline follow.
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}(?!\n)$")]

# Chat.


class Function(Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is the JSON Schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool_spec(self, name: str | None = None) -> ToolSpec:
        """Return the function in no dialect, by another name if one is given."""
        return ToolSpec(
            name=name or self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )


class Tool(Struct, frozen=True):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class ReasoningFields(Struct, frozen=True):
    """Whether and how much to think, as OpenRouter's clients say it."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall think, if the request says so: an effort asks for it too."""
        if self.enabled is None and self.effort is not None:
            return self.effort != "none"
        return self.enabled


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    schema_rules: ClassVar[Schema] = {
        "properties": {
            **dict.fromkeys(SPELLINGS["max_tokens"], NO_LIMIT),
            "chat_template": {"description": "Where the operator allows it."},
        },
        "oneOf": at_most_one(asking(*FORM_FIELDS, "response_format")),
        "allOf": [
            needs(
                having("top_logprobs", {"type": "integer", "minimum": 1}),
                having("logprobs", {"const": True}),
            ),
            needs(
                having("tool_choice", {"not": {"enum": [None, "none", "auto"]}}),
                having("tools", {"type": "array", "minItems": 1}),
            ),
        ],
    }

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Annotated[list[Tool], Meta(max_length=1000)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=100)] | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningFields | None = None
    enable_thinking: bool | None = None
    think: bool | Effort | None = None
    thinking_budget: Annotated[int, Meta(ge=-1)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    reasoning_budget_tokens: Annotated[int, Meta(ge=-1)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=2**20)] | None = None

    @property
    def thinking(self) -> bool | None:
        """Whether the model shall think, if the request says so."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.think is not None:
            return self.think not in (False, "none")
        return None if self.reasoning is None else self.reasoning.thinks

    @property
    def effort(self) -> str | None:
        """The effort to put into thinking, if the request says."""
        if isinstance(self.think, str):
            return self.think
        if self.reasoning_effort is not None or self.reasoning is None:
            return self.reasoning_effort
        return self.reasoning.effort

    @property
    def budgets(self) -> dict[str, int | None]:
        """The fields that bound the tokens of thoughts. Several mean the same."""
        return {
            "thinking_budget": self.thinking_budget,
            "thinking_token_budget": self.thinking_token_budget,
            "reasoning_budget_tokens": self.reasoning_budget_tokens,
            "reasoning.max_tokens": None if self.reasoning is None else self.reasoning.max_tokens,
        }

    @property
    def paths(self) -> Mapping[str, str]:
        """The fields in which this request says whether and how much to think: several mean the
        same, and an error names the one that was given."""
        thinks = "think" if self.think is not None else "reasoning.effort"
        level = "reasoning.effort" if self.reasoning_effort is None else "reasoning_effort"
        return {
            "enable_thinking": thinks if self.enable_thinking is None else "enable_thinking",
            "reasoning_effort": "think" if isinstance(self.think, str) else level,
        }

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forms(self) -> list[Form]:
        return [*super().forms, *format_forms(self.response_format)]

    @property
    def choice(self) -> ToolChoice:
        """Whether the model must call a tool."""
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice("required", (self.tool_choice.function.name,))
        # Mistral's clients, and Anthropic's, call it "any" that a tool must be called.
        return ToolChoice("required" if self.tool_choice == "any" else self.tool_choice or "auto")

    def make_prompt(self, left_out: Search) -> ChatPrompt:
        return ChatPrompt(
            messages=read_messages(self.messages, left_out),
            tools=[tool.function.tool_spec() for tool in self.tools or ()],
            tool_choice=self.choice,
            parallel=self.parallel_tool_calls is not False,
            variables=self.chat_template_kwargs or {},
            thinking=self.thinking,
            effort=self.effort,
            thinking_budget=next(
                (budget for budget in self.budgets.values() if budget is not None), None
            ),
            continues=bool(self.continue_final_message),
            answers=self.add_generation_prompt is not False,
            template=self.chat_template,
        )


# Text.


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    schema_rules: ClassVar[Schema] = {
        "properties": {
            "prompt": {
                "anyOf": [
                    TEXT,
                    {"type": "array", "items": TEXT, "minItems": 1},
                    TOKEN_IDS,
                    {"type": "array", "items": TOKEN_IDS, "minItems": 1},
                ]
            },
            "suffix": {"description": "Not with `echo`; prompts are texts then."},
        },
        "oneOf": at_most_one(asking(*FORM_FIELDS, "response_format")),
        "allOf": [needs(having("max_tokens", {"const": 0}), having("echo", {"const": True}))],
    }

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None
    logprobs: Likeliest | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: str | None = None

    @property
    def limit(self) -> int:
        """The number of tokens that an answer may have. OpenAI's default is 16."""
        given = super().limit
        return 16 if given is None else given

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def all_choices(self) -> int:
        return self.choices * len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, whichever of OpenAI's four forms they have in the request."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [cast(list[int], self.prompt)]
        return cast(list[str | list[int]], self.prompt)

    def make_prompt(self, left_out: Search) -> TextPrompts:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return TextPrompts(
            prompts=self.prompts,
            places=["prompt"] if one else [f"prompt[{i}]" for i in range(len(self.prompt))],
            suffix=self.suffix or "",
            echo=bool(self.echo),
        )


# Checks.


def _check_thinking(request: ChatRequest) -> None:
    own = request.chat_template_kwargs or {}
    level, asked = isinstance(request.think, str), request.reasoning
    check_same(
        {
            "chat_template_kwargs.enable_thinking": own.get("enable_thinking"),
            "enable_thinking": request.enable_thinking,
            "think": None if request.think is None else request.think not in (False, "none"),
            "reasoning.enabled": None if asked is None else asked.enabled,
        }
    )
    check_same(
        {
            "chat_template_kwargs.reasoning_effort": own.get("reasoning_effort"),
            "reasoning_effort": request.reasoning_effort,
            "think": request.think if level else None,
            "reasoning.effort": None if asked is None else asked.effort,
        }
    )
    check_same(request.budgets)
    check_ending(request)


def check_ending(request: ChatRequest) -> None:
    """Raises InvalidRequest."""
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt: cannot be combined with continue_final_message; the answer "
            "either continues the last message or begins a new one",
            param="add_generation_prompt",
        )


def no_such_tool(path: str, names: Iterable[str]) -> InvalidRequest:
    """Return the error about a choice that is none of the tools of these names."""
    return InvalidRequest(
        f"{path}: there is no tool of that name; there are {', '.join(names)}", param=path
    )


def _check_suffix(request: CompletionRequest) -> None:
    if not request.suffix:
        return
    if request.echo:
        raise InvalidRequest("suffix: cannot be combined with echo", param="suffix")
    if not all(isinstance(prompt, str) for prompt in request.prompts):
        raise InvalidRequest("suffix: needs a prompt of text, not of token ids", param="suffix")


def _check_chat(request: ChatRequest) -> None:
    _check_thinking(request)
    check_generation(request)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not request.tools:
        raise InvalidRequest("tool_choice: needs tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        names = [tool.function.name for tool in request.tools]
        if choice.function.name not in names:
            raise no_such_tool("tool_choice.function.name", names)


def _check_completion(request: CompletionRequest) -> None:
    check_generation(request, echo=bool(request.echo))
    if request.best_of not in (None, request.choices):
        raise UnsupportedParameter(
            f"best_of: this server returns all answers that it generates; give {request.choices}, "
            "as n is, or leave it out",
            param="best_of",
        )
    prompt = request.prompt
    if not isinstance(prompt, str) and len({*map(type, prompt)}) != 1:
        raise InvalidRequest(
            "prompt: expected a string, strings, token ids or lists of token ids",
            param="prompt",
        )
    _check_suffix(request)


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
    "suffix": (None, ""),
    # Fields of one kind of request that the other does not have.
    "best_of": (None, 1),
    "echo": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
}
"""Fields that would change the output but are not supported, and their values that ask for nothing.
"""

_REASONS: Mapping[str, str] = {
    "suffix": "chats have no suffix; use /v1/completions",
}


CHAT_REQUESTS = RequestDecoder(
    ChatRequest, check=_check_chat, neutral=NEUTRAL, reasons=_REASONS, idle=idle_options
)
COMPLETION_REQUESTS = RequestDecoder(
    CompletionRequest,
    check=_check_completion,
    neutral=NEUTRAL,
    reasons=_REASONS,
    idle=idle_options,
)
