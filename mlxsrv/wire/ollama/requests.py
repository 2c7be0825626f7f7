"""Requests of Ollama's API.

Its own server ignores options that it does not know. So does this one, and names them in
`X-Ignored-Params`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.spec import (
    AS_MANY_AS_FIT,
    ChatMessage,
    ChatPrompt,
    GenerationSpec,
    JSONForm,
    PastCall,
    PromptSpec,
    SamplingWishes,
    TextPrompts,
    ToolSpec,
)
from mlxsrv.generation.texts import Cut, EmbeddingSpec
from mlxsrv.wire.decoding import RequestDecoder, missing
from mlxsrv.wire.dialect import TextRequest, sampling_wishes, stop_strings
from mlxsrv.wire.earlier_turns import leave_out, newest_question, past_arguments
from mlxsrv.wire.openai.generation_request import Effort, Priority
from mlxsrv.wire.schema_rules import TEXT, Schema, having
from mlxsrv.wire.steering import NotEmpty, check_steering
from mlxsrv.wire.unknown import Search

_CHAT_PATHS = {
    "context": "options.num_ctx",
    "reasoning_effort": "think",
    "enable_thinking": "think",
}

_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_KeepAlive = float | Annotated[str, Meta(max_length=100)]
_Images = Annotated[list[str], Meta(max_length=1000)]


class OllamaOptions(Struct, frozen=True, kw_only=True):
    """The options that have an effect here. None: the model's default."""

    num_predict: Annotated[int, Meta(ge=-2, le=AS_MANY_AS_FIT)] | None = None
    num_ctx: Annotated[int, Meta(ge=0)] | None = None
    stop: (
        str | Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=16)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=AS_MANY_AS_FIT)] | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None

    @property
    def limit(self) -> int | None:
        """The number of tokens that an answer may have; None: the server's default."""
        if self.num_predict is None or self.num_predict > 0:
            return self.num_predict
        return AS_MANY_AS_FIT

    @property
    def sampling(self) -> SamplingWishes:
        seed = None if self.seed == -1 else self.seed
        return sampling_wishes(self, repetition_penalty=self.repeat_penalty, seed=seed)


_NO_OPTIONS = OllamaOptions()


class OllamaRequest(TextRequest, frozen=True, kw_only=True):
    """The fields that chats and texts share. `stream` is true unless the request says otherwise."""

    model: NotEmpty
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: _KeepAlive | None = None
    priority: Priority | None = None
    think: bool | Effort | None = None
    thinking_budget: Annotated[int, Meta(ge=-1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def thinking(self) -> bool | None:
        return None if self.think is None else self.think not in (False, "none")

    @property
    def effort(self) -> str | None:
        """The effort to put into thinking."""
        return self.think if isinstance(self.think, str) else None

    @property
    def form(self) -> JSONForm | None:
        if not isinstance(self.format, dict):
            return JSONForm("format", {"type": "object"}) if self.format == "json" else None
        return JSONForm("format", self.format)

    _paths: ClassVar[Mapping[str, str]]
    """Where its fields are that this dialect names otherwise, as in the spec."""

    def make_prompt(self, left_out: Search) -> PromptSpec:
        """Return the prompt, which each kind of request has in its own fields.

        Args:
            left_out: notes what is left out of it.

        Raises:
            UnsupportedParameter: there are images in it.
        """
        raise NotImplementedError

    def spec(self) -> GenerationSpec:
        options, left_out = self.options or _NO_OPTIONS, Search()
        return GenerationSpec(
            prompt=self.make_prompt(left_out),
            model=self.model,
            sampling=options.sampling,
            steering=self.steering_wishes,
            form=self.form,
            stops=stop_strings(options.stop),
            limit=options.limit,
            context=options.num_ctx or None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            timed=True,
            streamed=self.stream is not False,
            priority=self.priority,
            keep_alive=read_keep_alive(self.keep_alive),
            ignored=left_out.paths,
            paths=self._paths,
        )


# Chat.


class OllamaPastFunction(Struct, frozen=True):
    name: str
    arguments: Any = None


class OllamaPastCall(Struct, frozen=True):
    function: OllamaPastFunction
    id: str | None = None


class OllamaMessage(Struct, frozen=True):
    """One turn. A tool's message names the tool, or the id of the call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: _Images | None = None
    tool_calls: Annotated[list[OllamaPastCall], Meta(max_length=1000)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def chat_message(self, where: str, search: Search, *, new: bool) -> ChatMessage:
        """Return the message in no dialect.

        Args:
            search: notes what is left out of it.
            new: it is the user's, and not answered yet.

        Raises:
            UnsupportedParameter: it is new and has images.
        """
        texts = [self.content or ""]
        if self.images:
            texts.append(leave_out("images", f"{where}.images", search, new=new))
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content="\n\n".join(text for text in texts if text),
            name=self.tool_name,
            reasoning=self.thinking,
            calls=[
                PastCall(call.function.name, past_arguments(call.function.arguments), call.id)
                for call in self.tool_calls or ()
            ],
            call_id=self.tool_call_id,
        )


class OllamaFunction(Struct, frozen=True):
    name: NotEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Struct, frozen=True):
    function: OllamaFunction
    type: Literal["function"] | None = None

    def tool_spec(self) -> ToolSpec:
        return ToolSpec(
            name=self.function.name,
            description=self.function.description,
            parameters=self.function.parameters,
        )


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """A chat. Without messages, the model is loaded or unloaded."""

    _paths: ClassVar = _CHAT_PATHS

    messages: Annotated[list[OllamaMessage], Meta(max_length=10_000)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=1000)] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def make_prompt(self, left_out: Search) -> ChatPrompt:
        given = self.messages or ()
        newest = newest_question(each.role for each in given)
        messages = [
            each.chat_message(f"messages[{i}]", left_out, new=i == newest)
            for i, each in enumerate(given)
        ]
        return ChatPrompt(
            messages=messages,
            tools=[tool.tool_spec() for tool in self.tools or ()],
            thinking=self.thinking,
            effort=self.effort,
            thinking_budget=self.thinking_budget,
            continues=messages[-1].is_unfinished,
        )


# Text.


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """A text. Without prompt and suffix, the model is loaded or unloaded."""

    _paths: ClassVar = {**_CHAT_PATHS, "messages": "prompt", "chat_template": "template"}

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: Annotated[str, Meta(max_length=2**20)] | None = None
    raw: bool | None = None
    images: _Images | None = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt and not self.suffix

    def make_prompt(self, left_out: Search) -> ChatPrompt | TextPrompts:
        text = self.prompt or ""
        if self.images:
            leave_out("images", "images", left_out, new=True)
        if self.raw or self.suffix:
            return TextPrompts(prompts=[text], places=["prompt"], suffix=self.suffix or "")
        messages = [ChatMessage(role="user", content=text)]
        if self.system:
            messages.insert(0, ChatMessage(role="system", content=self.system))
        return ChatPrompt(
            messages=messages,
            thinking=self.thinking,
            effort=self.effort,
            thinking_budget=self.thinking_budget,
            template=self.template or None,
            plain=text,
        )


# Embeddings.


class OllamaEmbedRequest(Struct, frozen=True, kw_only=True):
    """Texts to embed. `options` are ignored; without `input`, the model is loaded or unloaded."""

    model: NotEmpty
    input: str | Annotated[list[NotEmpty], Meta(max_length=2048)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0)] | None = None
    keep_alive: _KeepAlive | None = None
    options: dict[str, Any] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.input

    def to_spec(self) -> EmbeddingSpec:
        """Raises InvalidRequest. Texts are truncated by default."""
        given = self.input or ""
        if isinstance(given, str):
            texts = [(given, "input")]
        else:
            texts = [(text, f"input[{i}]") for i, text in enumerate(given)]
        return EmbeddingSpec(
            texts=texts,
            model=self.model,
            cut=None if self.truncate is False else Cut("right"),
            dimensions=self.dimensions or None,
            keep_alive=read_keep_alive(self.keep_alive),
        )


class OllamaEmbeddingsRequest(Struct, frozen=True, kw_only=True):
    """The older form: one text."""

    model: NotEmpty
    prompt: str | None = None
    keep_alive: _KeepAlive | None = None
    options: dict[str, Any] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def to_spec(self) -> EmbeddingSpec:
        """Raises InvalidRequest."""
        return EmbeddingSpec(
            texts=[(self.prompt or "", "prompt")],
            model=self.model,
            cut=Cut("right"),
            keep_alive=read_keep_alive(self.keep_alive),
        )


# Models.


class OllamaNamedRequest(Struct, frozen=True, kw_only=True):
    """A request about one model, in `model` or, as older clients have it, in `name`."""

    model: str | None = None
    name: str | None = None

    @property
    def named(self) -> str:
        """The name. A decoded request has one."""
        return self.model or self.name or ""


_NAMED: Schema = {"anyOf": [having(name, TEXT) for name in ("model", "name")]}


class OllamaShowRequest(OllamaNamedRequest, frozen=True, kw_only=True):
    schema_rules: ClassVar[Schema] = _NAMED

    verbose: bool | None = None


class OllamaPullRequest(OllamaNamedRequest, frozen=True, kw_only=True):
    """`insecure` has no effect: the operator's settings say where the hub is."""

    schema_rules: ClassVar[Schema] = _NAMED

    stream: bool | None = None
    insecure: bool | None = None


class OllamaCopyRequest(Struct, frozen=True, kw_only=True):
    source: str | None = None
    destination: str | None = None


class OllamaCreateRequest(OllamaNamedRequest, frozen=True, kw_only=True):
    stream: bool | None = None
    base: str | None = field(default=None, name="from")


# How long a model stays: seconds, or a duration as Go writes it.

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"([+-]?)((?:{_PART.pattern})+)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)


def read_keep_alive(given: float | str | None) -> float | None:
    """Return seconds; infinity for a negative number; None if none is given.

    Raises:
        InvalidRequest: it is no duration.
    """
    if given is None or given == "":
        return None
    seconds = given if isinstance(given, float) else _seconds(given)
    return inf if seconds < 0 else seconds


def _seconds(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text)
    found = _DURATION.fullmatch(text)
    if found is None:
        raise InvalidRequest(
            'keep_alive: expected seconds, or a duration such as "5m" or "1h30m"; 0 unloads the '
            "model, -1 keeps it",
            param="keep_alive",
        )
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(found[2]))
    return -seconds if found[1] == "-" else seconds


# Checks.


def _check_request(request: OllamaRequest) -> None:
    read_keep_alive(request.keep_alive)
    check_steering(request)


def _check_generate(request: OllamaGenerateRequest) -> None:
    _check_request(request)
    if request.raw and (request.template or request.system):
        name = "template" if request.template else "system"
        raise InvalidRequest(f"{name}: cannot be combined with raw; leave one out", param=name)


def _check_embedding(request: OllamaEmbedRequest | OllamaEmbeddingsRequest) -> None:
    read_keep_alive(request.keep_alive)


def _check_name(request: OllamaNamedRequest) -> None:
    if not request.named:
        raise missing("model")


def _idle_fields(request: OllamaRequest) -> list[str]:
    return [] if request.logprobs or request.top_logprobs is None else ["top_logprobs"]


def _idle_generate(request: OllamaGenerateRequest) -> list[str]:
    """A text around a gap has no system message and no template."""
    given = [name for name in ("system", "template") if request.suffix and getattr(request, name)]
    return [*given, *_idle_fields(request)]


def _idle_embedding(request: OllamaEmbedRequest | OllamaEmbeddingsRequest) -> list[str]:
    return ["options"] if request.options else []


OLLAMA_CHATS = RequestDecoder(OllamaChatRequest, check=_check_request, idle=_idle_fields)
OLLAMA_TEXTS = RequestDecoder(OllamaGenerateRequest, check=_check_generate, idle=_idle_generate)
OLLAMA_EMBEDS = RequestDecoder(OllamaEmbedRequest, check=_check_embedding, idle=_idle_embedding)
OLLAMA_OLD_EMBEDS = RequestDecoder(
    OllamaEmbeddingsRequest, check=_check_embedding, idle=_idle_embedding
)
OLLAMA_SHOWS = RequestDecoder(OllamaShowRequest, check=_check_name)
OLLAMA_PULLS = RequestDecoder(
    OllamaPullRequest,
    check=_check_name,
    idle=lambda request: ["insecure"] if request.insecure else [],
)
OLLAMA_NAMES = RequestDecoder(OllamaNamedRequest)
OLLAMA_COPIES = RequestDecoder(OllamaCopyRequest)
OLLAMA_CREATES = RequestDecoder(OllamaCreateRequest)
