"""What clients may ask: OpenAI's chat and text completions.

A request Struct holds the fields that this server honours, so most of what can be wrong with a
value is said by its type; what one field means for another is said by one check for each kind.
What else a body may carry falls in two classes: fields that would change the output but cannot be
honoured are refused unless their value asks for nothing (NEUTRAL); all others are named in
`ignored`, for `X-Ignored-Params`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.generation import SteeringMode
from mlxsrv.wire.constraints import (
    ChoiceForm,
    Choices,
    Form,
    GrammarForm,
    GrammarText,
    JSONForm,
    Regex,
    RegexForm,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    format_forms,
    read_schema,
    structured_forms,
)
from mlxsrv.wire.decoding import RequestDecoder

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveInt = Annotated[int, Meta(ge=1)]
# -1 is what many servers' clients send for none.
Count = Annotated[int, Meta(ge=-1, extra_json_schema={"not": {"const": 0}})]
NotEmpty = Annotated[str, Meta(min_length=1)]
# Where only the size of the body would be a bound, there is one that no honest request meets.
StopString = Annotated[str, Meta(min_length=1, max_length=1000)]
BadWord = Annotated[str, Meta(pattern=r"\S", max_length=1000)]
User = Annotated[str, Meta(max_length=1000)]
TokenId = Int32
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Likeliest = Annotated[int, Meta(ge=0, le=20)]
# Which indices there are is for the SAE to say; so many directions are some megabytes a request.
Features = Annotated[dict[int, Annotated[float, Meta(ge=-200, le=200)]], Meta(max_length=1000)]
Scale = Annotated[float, Meta(ge=-100, le=100)]
# `$` alone would let a newline follow.
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}(?!\n)$")]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What chat and text completion have in common. None: the default, whatever it is."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=4096)] | None = None
    seed: Int64 | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n_predict: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1000)] | None = None
    truncate_prompt_tokens: Count | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=1000)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_json: SchemaOrText | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: SchemaOrText | None = None
    profile: NotEmpty | None = None
    steering: Features | None = None
    steering_mode: SteeringMode | None = None
    control_vector: NotEmpty | Annotated[dict[NotEmpty, Scale], Meta(max_length=100)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Likeliest | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings_per_token: bool | None = None
    verbose: bool | None = None
    user: User | None = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def limit(self) -> int | None:
        """How many tokens an answer may have, if the request says."""
        limit: int | None = self._given("max_tokens", none=-1)
        return limit

    @property
    def repetition(self) -> float | None:
        penalty: float | None = self._given("repetition_penalty")
        return penalty

    def _given(self, name: str, none: object = None) -> Any:
        """The value of a field under whichever of its SPELLINGS; `none` is as good as null."""
        values = (getattr(self, each) for each in SPELLINGS[name])
        return next((value for value in values if value not in (None, none)), None)

    @property
    def timed(self) -> bool:
        """Whether the answer tells how long it took."""
        return bool(self.timings_per_token or self.verbose)

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def all_choices(self) -> int:
        """How many answers to all prompts together."""
        return self.choices

    @property
    def likeliest(self) -> int | None:
        """How many tokens to score beside each one generated; None: no scores at all."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether each answer begins with its prompt."""
        return False

    @property
    def forms(self) -> list[Form]:
        """What the request's fields ask an answer to be. A decoded request has at most one.

        Raises:
            InvalidRequest, UnsupportedParameter: a field is wrong; never of a decoded request.
        """
        forms: list[Form] = []
        if self.guided_regex is not None:
            forms.append(RegexForm("guided_regex", self.guided_regex))
        if self.guided_choice is not None:
            forms.append(ChoiceForm("guided_choice", self.guided_choice))
        for name in ("guided_grammar", "grammar"):
            if text := getattr(self, name):  # llama.cpp's clients send "" for none
                forms.append(GrammarForm(name, text))
        for name in ("guided_json", "json_schema"):
            if (schema := getattr(self, name)) is not None:
                forms.append(JSONForm(name, read_schema(schema, name)))
        if self.structured_outputs is not None:
            forms.extend(structured_forms(self.structured_outputs))
        return forms


SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "max_completion_tokens", "n_predict"),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
}
"""Fields of a request that are one thing; a decoded request says the same in all it has."""

FORM_FIELDS = (
    *("guided_regex", "guided_choice", "guided_grammar", "guided_json"),
    *("structured_outputs", "grammar", "json_schema"),
)
"""The fields, beside a chat's `response_format`, that ask for a form."""

# Chat.


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str = ""


class ToolCall(Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, frozen=True):
    """One turn. Thoughts come back under either of the two names they are sent by, and an old
    client's call is in `function_call`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=10_000)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=1000)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class Function(Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is the JSON Schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


# In the order of chat templates' own examples: `msgspec.to_builtins` makes of it what they take.
class Tool(Struct, frozen=True):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Annotated[list[Tool], Meta(max_length=1000)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=100)] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=2**20)] | None = None

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to think, if the request says."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        return None if self.think is None else bool(self.think)

    @property
    def effort(self) -> str | None:
        """How much the model is to think, if the request says."""
        return self.think if isinstance(self.think, str) else self.reasoning_effort

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forms(self) -> list[Form]:
        return [*super().forms, *format_forms(self.response_format)]


# Text.


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None
    logprobs: Likeliest | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: str | None = None

    @property
    def limit(self) -> int:
        """How many tokens an answer may have: 16 by default, as OpenAI has it."""
        given = super().limit
        return 16 if given is None else given

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def all_choices(self) -> int:
        return self.choices * len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, whichever of OpenAI's four forms they came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [cast(list[int], self.prompt)]
        return cast(list[str | list[int]], self.prompt)


# What one field means for another.


def _check_spellings(request: GenerationRequest) -> None:
    for names in SPELLINGS.values():
        given = {name: getattr(request, name) for name in names}
        _check_same({name: None if value == -1 else value for name, value in given.items()})


def _check_same(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequest unless all that is given by these names is the same."""
    told = [(name, value) for name, value in given.items() if value is not None]
    for name, value in told[1:]:
        first, other = told[0]
        if type(value) is not type(other) or value != other:
            raise InvalidRequest(
                f"{name}: {_shown(value)} is not the {_shown(other)} of {first}, which means the "
                "same; give one of them",
                param=name,
            )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)[:100] if isinstance(value, str | int | float) else "this"


def _check_thinking(request: ChatRequest) -> None:
    own = request.chat_template_kwargs or {}
    level = isinstance(request.think, str)
    _check_same(
        {
            "chat_template_kwargs.enable_thinking": own.get("enable_thinking"),
            "enable_thinking": request.enable_thinking,
            "think": None if request.think is None else bool(request.think),
        }
    )
    _check_same(
        {
            "chat_template_kwargs.reasoning_effort": own.get("reasoning_effort"),
            "reasoning_effort": request.reasoning_effort,
            "think": request.think if level else None,
        }
    )
    check_ending(request)


def check_ending(request: ChatRequest) -> None:
    """Raises InvalidRequest."""
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt: cannot be combined with continue_final_message; a message that "
            "goes on is followed by no other",
            param="add_generation_prompt",
        )


def _check_limits(request: GenerationRequest, *, echo: bool = False) -> None:
    for name in (*SPELLINGS["max_tokens"], "truncate_prompt_tokens"):
        if getattr(request, name) == 0 and not (echo and name == "max_tokens"):
            echoing = "; 0 needs echo, to score the prompt" if name == "max_tokens" else ""
            raise InvalidRequest(
                f"{name}: expected `int` >= 1, or -1 for none{echoing}", param=name
            )
    if request.min_tokens and request.limit is not None and request.min_tokens > request.limit:
        raise InvalidRequest(
            f"min_tokens: {request.min_tokens} is more than the answer may have; max_tokens is "
            f"{request.limit}",
            param="min_tokens",
        )


def _check_forms(request: GenerationRequest) -> None:
    match request.forms:
        case [one, another, *_]:
            raise InvalidRequest(
                f"{another.param}: cannot be combined with {one.param}; an answer follows one of "
                "them",
                param=another.param,
            )


def _check_stream(request: GenerationRequest) -> None:
    if not request.stream:
        return
    if request.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs: not in a stream; ask without stream", param="prompt_logprobs"
        )
    options = request.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        path = "stream_options.continuous_usage_stats"
        raise InvalidRequest(f"{path}: needs include_usage to be true", param=path)


def _check_suffix(request: CompletionRequest) -> None:
    if not request.suffix:
        return
    if request.echo:
        raise InvalidRequest("suffix: cannot be combined with echo", param="suffix")
    if not all(isinstance(prompt, str) for prompt in request.prompts):
        raise InvalidRequest("suffix: needs a prompt of text, not of token ids", param="suffix")


def _check_steering(request: GenerationRequest) -> None:
    if request.profile is not None and request.steering is not None:
        raise InvalidRequest(
            "steering: cannot be combined with profile, which says it all", param="steering"
        )
    if request.steering_mode is not None and request.steering is None:
        raise InvalidRequest(
            "steering_mode: there is no steering that it could be the mode of",
            param="steering_mode",
        )


def check_generation(request: GenerationRequest, *, echo: bool = False) -> None:
    """Raises InvalidRequest if the fields that all kinds have do not go together."""
    _check_limits(request, echo=echo)
    _check_spellings(request)
    _check_forms(request)
    _check_stream(request)
    _check_steering(request)


def _check_chat(request: ChatRequest) -> None:
    _check_thinking(request)
    check_generation(request)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not request.tools:
        raise InvalidRequest("tool_choice: there are no tools to choose", param="tool_choice")
    if isinstance(choice, NamedTool):
        names = [tool.function.name for tool in request.tools]
        if choice.function.name not in names:
            path = "tool_choice.function.name"
            raise InvalidRequest(
                f"{path}: no tool is called that; there are {', '.join(names)}", param=path
            )


def _check_completion(request: CompletionRequest) -> None:
    check_generation(request, echo=bool(request.echo))
    if request.best_of not in (None, request.choices):
        raise UnsupportedParameter(
            f"best_of: this server returns all that it generates, so it is {request.choices} "
            "(as n is) or left out",
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
    # Honoured by one kind of request and unknown to the other.
    "best_of": (None, 1),
    "echo": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
}
"""Values that ask for nothing, of fields that would change what is generated."""

_REASONS: Mapping[str, str] = {
    "suffix": "a chat has none; use /v1/completions",
}


def _idle_options(request: GenerationRequest) -> list[str]:
    """Options of a stream, where there is none."""
    return [] if request.stream_options is None or request.stream else ["stream_options"]


CHAT_REQUESTS = RequestDecoder(
    ChatRequest, check=_check_chat, neutral=NEUTRAL, reasons=_REASONS, idle=_idle_options
)
COMPLETION_REQUESTS = RequestDecoder(
    CompletionRequest,
    check=_check_completion,
    neutral=NEUTRAL,
    reasons=_REASONS,
    idle=_idle_options,
)
