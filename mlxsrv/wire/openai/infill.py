"""Texts, and texts between two others, as llama.cpp's server and Mistral's API have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from mlxsrv.errors import InvalidRequest, ServeError, UnsupportedParameter
from mlxsrv.generation.outputs import Answer, Channel, Ended, TokenScore, Usage
from mlxsrv.generation.spec import InfillPrompt, ProjectFile, TextPrompts
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.dialect import Dialect
from mlxsrv.wire.openai.answers import ErrorBody, TimingsBody, error_response
from mlxsrv.wire.openai.builders import ChatBuilder, OpenAIBuilder
from mlxsrv.wire.openai.generation_request import (
    GenerationRequest,
    Int64,
    TokenId,
    check_generation,
    idle_options,
)
from mlxsrv.wire.schema_rules import Schema, unsupported
from mlxsrv.wire.sse import frame
from mlxsrv.wire.unknown import Search

# Requests.


class InfillFile(Struct, frozen=True):
    """Another file of the project."""

    text: str
    filename: str = "tmp"


NOT_HERE = {"prompt_logprobs": (None,), "return_tokens_as_token_ids": (None, False)}
"""Fields that ask for log-probabilities, which llama.cpp's answer has no place for, with the values
that ask for none."""


class LlamaRequest(GenerationRequest, frozen=True, kw_only=True):
    """The fields that all texts of llama.cpp's server have."""

    schema_rules: ClassVar[Schema] = {
        "properties": {
            "n": {"enum": [None, 1], "description": "There is one answer."},
            **dict(unsupported(NOT_HERE)),
        }
    }

    @property
    def timed(self) -> bool:
        return True

    @property
    def first_seed(self) -> int | None:
        """The seed; -1 is llama.cpp's word for any."""
        return None if self.seed == -1 else self.seed


class InfillRequest(LlamaRequest, frozen=True, kw_only=True):
    """`prompt` is what has been written already, right behind the prefix."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillFile], Meta(max_length=1000)] | None = None
    prompt: str | None = None

    def make_prompt(self, left_out: Search) -> InfillPrompt:
        files = [ProjectFile(each.filename, each.text) for each in self.input_extra or ()]
        return InfillPrompt(self.input_prefix + (self.prompt or ""), self.input_suffix, files)


class LlamaCompletionRequest(LlamaRequest, frozen=True, kw_only=True):
    """A text, or its token ids, to go on with."""

    prompt: str | Annotated[list[TokenId], Meta(min_length=1)]

    def make_prompt(self, left_out: Search) -> TextPrompts:
        return TextPrompts(prompts=[self.prompt], places=["prompt"])


class FIMRequest(GenerationRequest, frozen=True, kw_only=True):
    """Mistral's request for the text between `prompt` and `suffix`; without a suffix, for the text
    after the prompt."""

    prompt: str
    suffix: str | None = None
    random_seed: Int64 | None = None

    @property
    def first_seed(self) -> int | None:
        return self.seed if self.random_seed is None else self.random_seed

    def make_prompt(self, left_out: Search) -> TextPrompts:
        return TextPrompts(prompts=[self.prompt], places=["prompt"], suffix=self.suffix or "")


NEUTRAL = {"n_probs": (None, 0)}
"""The same as NOT_HERE, of llama.cpp's own fields."""

_REASONS = {"n_probs": "use logprobs of /v1/completions"}


def _check_llama(request: LlamaRequest) -> None:
    check_generation(request)
    for name, neutral in NOT_HERE.items():
        if getattr(request, name) not in neutral:
            raise UnsupportedParameter(
                f"{name}: llama.cpp's answers tell no log-probabilities; use /v1/completions",
                param=name,
            )
    if request.choices > 1:
        raise InvalidRequest("n: this route gives one answer; use /v1/completions", param="n")


def _idle_options(request: LlamaRequest) -> list[str]:
    return [] if request.stream_options is None else ["stream_options"]


INFILL_REQUESTS = RequestDecoder(
    InfillRequest, check=_check_llama, neutral=NEUTRAL, reasons=_REASONS, idle=_idle_options
)
LLAMA_REQUESTS = RequestDecoder(
    LlamaCompletionRequest,
    check=_check_llama,
    neutral=NEUTRAL,
    reasons=_REASONS,
    idle=_idle_options,
)
FIM_REQUESTS = RequestDecoder(FIMRequest, check=check_generation, idle=idle_options)

# Answers.

StopType = Literal["eos", "word", "limit"]


class LlamaCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer; with `stop` false, a piece of a streamed one, whose last has the rest."""

    index: Literal[0] = 0
    content: str
    tokens: list[int] | UnsetType = UNSET
    stop: bool = True
    model: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: StopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET


class LlamaBuilder(OpenAIBuilder):
    """Pieces of a text. The last event is the last piece: llama.cpp sends no `[DONE]`."""

    def tokens(self, choice: int, tokens: Sequence[int]) -> bytes:
        return frame(LlamaCompletion(content="", tokens=[*tokens], stop=False))

    def end(self, ended: Ended) -> bytes:
        assert ended.usage is not None  # there is one choice
        return frame(self._last(ended, ended.usage))

    def error(self, error: ServeError) -> bytes:
        return frame(LlamaCompletion(content="", error=error_response(error).error))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> LlamaCompletion:
        [answer] = answers
        tokens = UNSET if answer.tokens is None else [*answer.tokens]
        return self._last(answer, usage, content=answer.content, tokens=tokens)

    def _last(
        self,
        ended: Ended | Answer,
        usage: Usage,
        *,
        content: str = "",
        tokens: list[int] | UnsetType = UNSET,
    ) -> LlamaCompletion:
        """The end of a stream or, with content, a whole answer."""
        ends: StopType = "word" if ended.stop is not None else "eos"
        return LlamaCompletion(
            content=content,
            tokens=tokens,
            model=self._identity["model"],
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            tokens_cached=usage.cached_tokens,
            truncated=False,
            stop_type=ends if ended.reason == "stop" else "limit",
            stopping_word=ended.stop or "",
            timings=TimingsBody.of(usage),
        )

    def _piece(
        self, choice: int, channel: Channel, text: str, scores: Sequence[TokenScore] | None
    ) -> LlamaCompletion:
        return LlamaCompletion(content=text, stop=False, timings=self._timings)


INFILLS = Dialect(INFILL_REQUESTS, "cmpl-", LlamaBuilder.for_request)
LLAMA_COMPLETIONS = Dialect(LLAMA_REQUESTS, "cmpl-", LlamaBuilder.for_request)
FIMS = Dialect(FIM_REQUESTS, "chatcmpl-", ChatBuilder.for_request)
"""Mistral's, which is answered with a chat's messages and chunks."""
