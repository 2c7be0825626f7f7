"""The fields that all requests for text have, and the checks of fields that depend on others.

A request Struct has the fields that this server honours, so its types say most of what can be wrong
with a value. The checks here are for fields that do not go together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.parameters import RepetitionLimit
from mlxsrv.generation.spec import (
    ChoiceForm,
    DryWishes,
    Form,
    GenerationSpec,
    GrammarForm,
    JSONForm,
    PromptSpec,
    RegexForm,
)
from mlxsrv.wire.dialect import TextRequest, sampling_wishes, stop_strings
from mlxsrv.wire.openai.forms import (
    Choices,
    GrammarText,
    Regex,
    SchemaOrText,
    StructuredOutputs,
    asking,
    read_schema,
    structured_forms,
)
from mlxsrv.wire.schema_rules import NUMBERS_AS_KEYS, Schema, at_most_one
from mlxsrv.wire.steering import check_steering
from mlxsrv.wire.unknown import Search

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveInt = Annotated[int, Meta(ge=1)]
# Clients of many servers send -1 for no limit.
Count = Annotated[int, Meta(ge=-1, extra_json_schema={"not": {"const": 0}})]
# Bounds that no honest request reaches: else only the size of the body would be one.
StopString = Annotated[str, Meta(max_length=1000)]  # "" is none
BadWord = Annotated[str, Meta(pattern=r"\S", max_length=1000)]
User = Annotated[str, Meta(max_length=1000)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Int32
Effort = Annotated[str, Meta(max_length=100)]  # levels that no template knows are left out, too
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Likeliest = Annotated[int, Meta(ge=0, le=20)]


class StreamOptions(Struct, frozen=True):
    schema_rules: ClassVar[Schema] = {
        "properties": {"continuous_usage_stats": {"description": "Only with `include_usage`."}}
    }

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


FORM_FIELDS = (
    *("guided_regex", "guided_choice", "guided_grammar", "guided_json"),
    *("structured_outputs", "grammar", "json_schema"),
)
"""The fields, beside a chat's `response_format`, that ask for a form."""


class RepetitionFields(Struct, frozen=True):
    """A repetition at which an answer ends, as vLLM has it; `max_pattern_size` 0: none."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=4096)]
    min_pattern_size: Annotated[int, Meta(ge=0)] = 1
    min_count: Annotated[int, Meta(ge=2, le=1000)] = 2

    @property
    def limit(self) -> RepetitionLimit:
        return RepetitionLimit(self.max_pattern_size, self.min_pattern_size, self.min_count)


class GenerationRequest(TextRequest, frozen=True, kw_only=True):
    """The fields of chats, text completions and infills. None: the default is used."""

    # With more rules, tools that generate bodies give up.
    schema_rules: ClassVar[Schema] = {
        "properties": {
            "logit_bias": NUMBERS_AS_KEYS,
            "steering": {"description": "Not with `profile`."},
            "steering_mode": {"description": "Only with `steering`."},
            "prompt_logprobs": {"description": "Not with `stream`."},
        },
        "oneOf": at_most_one(asking(*FORM_FIELDS)),
    }

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Int32 | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    dry_sequence_breakers: Annotated[list[StopString], Meta(max_length=16)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Bias], Meta(max_length=4096)]
        | Annotated[list[tuple[TokenId, Bias | bool]], Meta(max_length=4096)]
        | None
    ) = None
    seed: Int64 | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n_predict: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1000)] | None = None
    truncate_prompt_tokens: Count | None = None
    repetition_detection: RepetitionFields | None = None
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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Likeliest | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings_per_token: bool | None = None
    verbose: bool | None = None
    user: User | None = None
    safety_identifier: User | None = None
    priority: Priority | None = None

    @property
    def limit(self) -> int | None:
        """The number of tokens that an answer may have, if the request says."""
        limit: int | None = self._given("max_tokens", none=-1)
        return limit

    @property
    def repetition(self) -> float | None:
        penalty: float | None = self._given("repetition_penalty")
        return penalty

    def _given(self, name: str, none: object = None) -> Any:
        """The value of a field under any of its SPELLINGS. `none` means the same as null."""
        values = (getattr(self, each) for each in SPELLINGS[name])
        return next((value for value in values if value not in (None, none)), None)

    @property
    def first_seed(self) -> int | None:
        """The seed of the first choice, if the request gives one."""
        return self.seed

    @property
    def biases(self) -> Mapping[int, float]:
        """The biases by token id. llama.cpp's clients list pairs, in which false means never."""
        if isinstance(self.logit_bias, list):
            return {id: -100.0 if bias is False else bias for id, bias in self.logit_bias}
        return self.logit_bias or {}

    @property
    def timed(self) -> bool:
        """Whether the answer says how long it took."""
        return bool(self.timings_per_token or self.verbose)

    @property
    def choices(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def all_choices(self) -> int:
        """The number of answers to all prompts together."""
        return self.choices

    @property
    def likeliest(self) -> int | None:
        """The number of tokens to score beside each one generated; None: no scores at all."""
        return None

    @property
    def forms(self) -> list[Form]:
        """The forms that the request asks for. A decoded request has at most one.

        Raises:
            InvalidRequest, UnsupportedParameter: a field is wrong. A decoded request raises none.
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

    @property
    def _repetition(self) -> RepetitionLimit | None:
        return None if self.repetition_detection is None else self.repetition_detection.limit

    @property
    def _dry(self) -> DryWishes | None:
        if not self.dry_multiplier or self.dry_penalty_last_n == 0:
            return None
        breakers = self.dry_sequence_breakers
        fields = {
            "base": self.dry_base,
            "allowed_length": self.dry_allowed_length,
            "last_n": self.dry_penalty_last_n,
            "breakers": None if breakers is None else tuple(breakers),
        }
        given: dict[str, Any] = {k: value for k, value in fields.items() if value is not None}
        return DryWishes(multiplier=self.dry_multiplier, **given)

    @property
    def paths(self) -> Mapping[str, str]:
        """Where the request has fields that its dialect names otherwise, as in the spec."""
        return {}

    def make_prompt(self, left_out: Search) -> PromptSpec:
        """Return the prompt, which each kind of request has in its own fields.

        Args:
            left_out: notes what is left out of it.

        Raises:
            InvalidRequest, MissingParameter, UnsupportedParameter: a message cannot be read.
        """
        raise NotImplementedError

    def spec(self) -> GenerationSpec:
        left_out = Search()
        return GenerationSpec(
            prompt=self.make_prompt(left_out),
            model=self.model,
            sampling=sampling_wishes(
                self,
                repetition_penalty=self.repetition,
                logit_bias=self.biases,
                dry=self._dry,
                seed=self.first_seed,
            ),
            steering=self.steering_wishes,
            form=next(iter(self.forms), None),
            stops=stop_strings(self.stop),
            limit=self.limit,
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=self.stop_token_ids or (),
            allowed_token_ids=self.allowed_token_ids or (),
            bad_words=self.bad_words or (),
            truncate=self.truncate_prompt_tokens,
            repetition=self._repetition,
            choices=self.choices,
            logprobs=self.likeliest,
            prompt_logprobs=self.prompt_logprobs,
            returns_ids=bool(self.return_token_ids),
            names_ids=bool(self.return_tokens_as_token_ids),
            timed=self.timed,
            streamed=bool(self.stream),
            user=self.user or self.safety_identifier,
            priority=self.priority,
            ignored=left_out.paths,
            paths=self.paths,
        )


SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "max_completion_tokens", "n_predict"),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
}
"""Names of fields that mean the same. A decoded request has the same value in all that it gives."""

# Checks.


def _check_spellings(request: GenerationRequest) -> None:
    for names in SPELLINGS.values():
        given = {name: getattr(request, name) for name in names}
        check_same({name: None if value == -1 else value for name, value in given.items()})


def check_same(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if two of these fields are given with different values."""
    values = [(name, value) for name, value in given.items() if value is not None]
    for name, value in values[1:]:
        first, other = values[0]
        if type(value) is not type(other) or value != other:
            raise InvalidRequest(
                f"{name}: {_shown(value)} is not {_shown(other)}, as in {first}, which means the "
                "same; give one of them",
                param=name,
            )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)[:100] if isinstance(value, str | int | float) else "this"


def _check_limits(request: GenerationRequest, *, echo: bool = False) -> None:
    for name in (*SPELLINGS["max_tokens"], "truncate_prompt_tokens"):
        if getattr(request, name) == 0 and not (echo and name == "max_tokens"):
            echoing = "; 0 needs echo, to score the prompt" if name == "max_tokens" else ""
            raise InvalidRequest(
                f"{name}: expected a whole number of at least 1, or -1 for none{echoing}",
                param=name,
            )
    if request.min_tokens and request.limit is not None and request.min_tokens > request.limit:
        raise InvalidRequest(
            f"min_tokens: {request.min_tokens} is more than max_tokens, which is {request.limit}",
            param="min_tokens",
        )


def _check_forms(request: GenerationRequest) -> None:
    match request.forms:
        case [one, another, *_]:
            raise InvalidRequest(
                f"{another.param}: cannot be combined with {one.param}; an answer follows only one "
                "of them",
                param=another.param,
            )


def _check_stream(request: GenerationRequest) -> None:
    if not request.stream:
        return
    if request.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs: not in a stream; leave out stream", param="prompt_logprobs"
        )
    options = request.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        path = "stream_options.continuous_usage_stats"
        raise InvalidRequest(f"{path}: needs include_usage to be true", param=path)


def check_generation(request: GenerationRequest, *, echo: bool = False) -> None:
    """Raises InvalidRequest if fields that all kinds have do not go together."""
    _check_limits(request, echo=echo)
    _check_spellings(request)
    _check_forms(request)
    _check_stream(request)
    check_steering(request)


def idle_options(request: GenerationRequest) -> list[str]:
    """The options of a stream, in a request that does not ask for one."""
    return [] if request.stream_options is None or request.stream else ["stream_options"]
