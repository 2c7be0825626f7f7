"""What crosses between the event loop and the device thread, and what a request gives.

Commands go down, events come up. All are frozen, and a Job is token ids and numbers only, so that
either side may be another process or machine.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "tool_calls", "timeout"]
Channel = Literal["content", "reasoning"]
"""What a piece of an answer is: what the model says, or what it thinks before."""


class Sampling(msgspec.Struct, frozen=True):
    """How one row's next token is drawn from its logits. `temperature` 0 is greedy.

    `frequency_penalty` and `presence_penalty` count the row's own tokens, `repetition_penalty`
    (1: none) the prompt's as well. `logit_bias` is (token id, what to add) for some tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class Bans(msgspec.Struct, frozen=True):
    """What a row may not draw, unless nothing else is left.

    - `min_tokens`: no end token before it has drawn so many others.
    - `allowed`: none but these, if there are any.
    - `words`: never the last token of one of these right after its others.
    """

    min_tokens: int = 0
    allowed: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()


SteeringMode = Literal["additive", "clamp"]


class Steering(msgspec.Struct, frozen=True):
    """What is added to a row's hidden states, whatever its neighbours in the batch have.

    `values` are (feature, strength) of the SAE of that attachment, sorted: `additive` adds each
    feature's direction so many times, `clamp` as often as it takes to bring the feature's
    activation to that value. `vectors` are (control vector, scale), sorted.
    """

    attachment: int = 0
    mode: SteeringMode = "additive"
    values: tuple[tuple[int, float], ...] = ()
    vectors: tuple[tuple[str, float], ...] = ()


class Job(msgspec.Struct, frozen=True):
    """One sequence to generate: a prompt of at least one token, and when to end.

    Jobs that wait with the same prompt are read once. With `logprobs` each Token carries its
    log-probability and that many of the likeliest tokens'. With `scores` the prompt is scored
    first, as many likeliest tokens for each of its own, and `max_tokens` may be 0.
    """

    id: int
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    end_tokens: frozenset[int]
    sampling: Sampling
    checkpoint: int = 0
    """Tokens at the beginning of the prompt, a system message say, that others will share."""
    logprobs: int | None = None
    scores: int | None = None
    ranks: bool = False
    """Whether the prompt's tokens are ranked as well, where they are scored."""
    steering: Steering | None = None
    bans: Bans | None = None


class Constraint(Protocol):
    """What a row may say: a grammar in some state. Used by the device thread once submitted."""

    @property
    def failure(self) -> str | None:
        """Why it cannot go on; its row fails then."""

    def fill(self, mask: Mask) -> None:
        """Leave only the bits of the tokens that may come next: 32 a word, the lowest first. The
        mask comes with all bits set."""

    def accept(self, token: int) -> None:
        """Go on to the state after `token`."""


Mask = np.ndarray[tuple[int], np.dtype[np.int32]]


# Commands: the event loop to the device thread.


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Read the model in folder `path` and keep it as `model`.

    `adapter` is the folder of a LoRA adapter to put on it, `draft` that of a small model with the
    same vocabulary that proposes tokens. `prompt_cache_bytes` None: a share of the memory.
    `kv_bits` quantizes the KV cache, `max_kv_size` bounds it to so many tokens.
    """

    model: str
    path: str
    adapter: str | None = None
    draft: str | None = None
    max_rows: int
    prefill_chunk: int
    max_gap: float
    prompt_cache_bytes: int | None = None
    kv_bits: int | None = None
    max_kv_size: int | None = None
    trust_remote_code: bool = False
    vectors: tuple[tuple[str, str], ...] = ()
    """Control vectors, (name, file); those that do not fit are left out, with a note."""


class Submit(msgspec.Struct, frozen=True):
    job: Job
    constraint: Constraint | None = None


class Embed(msgspec.Struct, frozen=True):
    """Texts of at least one token each, to make vectors of; or pairs of texts to judge, where the
    model is a cross-encoder: `firsts` are then the numbers of tokens before each second text."""

    id: int
    model: str
    texts: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...] = ()


class Cancel(msgspec.Struct, frozen=True):
    """Forget `job` or free its row, wherever it is; unknown or ended jobs are ignored."""

    job: int


class Unload(msgspec.Struct, frozen=True):
    """Forget `model` and what it holds; its rows, if any, fail."""

    model: str


class Attach(msgspec.Struct, frozen=True):
    """Read the SAE at `path` and have it at one layer of `model`, at the layer's input if `before`.

    Jobs name it by `number`, which no other attachment of the process has.
    """

    model: str
    number: int
    path: str
    layer: int
    before: bool = False


class Detach(msgspec.Struct, frozen=True):
    """Forget the SAE of `model`, and stop watching. Rows that it steers go on as they are."""

    model: str


class Watch(msgspec.Struct, frozen=True):
    """Tell the activations of these features of the SAE of `model`, and the `top` highest, for each
    token of each row; with neither, no more."""

    model: str
    features: tuple[int, ...] = ()
    top: int = 0


Command = Load | Submit | Embed | Cancel | Unload | Detach | Watch


# Events: the device thread to the event loop.


class Loaded(msgspec.Struct, frozen=True):
    """A model is ready.

    `batched` is false where its caches cannot be merged and rows run one by one; `cuts` where a
    cache cannot be cut back to where two prompts part, so that jobs should say it. `bytes` are its
    weights', adapter and draft model included; `shared` of them are also another loaded model's.
    `notes` say which of the load's wishes could not be had, and why.
    """

    model: str
    batched: bool
    cuts: bool
    bytes: int
    shared: int = 0
    notes: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    """Names of the control vectors that fit."""


class Attached(msgspec.Struct, frozen=True):
    """The SAE of this number is there; `bytes` is what its arrays take."""

    number: int
    bytes: int


class LoadFailed(msgspec.Struct, frozen=True):
    model: str
    reason: str


class Started(msgspec.Struct, frozen=True):
    """The engine has taken the job: from here on it ends with Finished or Failed."""

    job: int


class Progress(msgspec.Struct, frozen=True):
    """A slice of what the job asks to be read has been read, or of what comes before it. Told once
    a slice, of jobs that take several."""

    job: int


class PromptRead(msgspec.Struct, frozen=True, eq=False):
    """The prompt is read; `cached` of its tokens were found in the prompt cache. `seconds` is how
    long the rest took, other work in between included, but no wait before: a measurement, which
    makes no difference between two that are else equal."""

    job: int
    cached: int
    seconds: float = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptRead):
            return NotImplemented
        return (self.job, self.cached) == (other.job, other.cached)

    def __hash__(self) -> int:
        return hash((self.job, self.cached))


class Likelihood(msgspec.Struct, frozen=True):
    """A token's log-probability, before temperature and filters, and the likeliest tokens there
    with theirs, the likeliest first. None for a prompt's first token, which nothing predicts.
    `rank` is 1 for the likeliest token, where ranks were asked for."""

    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class PromptScored(msgspec.Struct, frozen=True):
    """One entry for each of the prompt's tokens. Comes before the first Token."""

    job: int
    scores: tuple[Likelihood, ...]


class Token(msgspec.Struct, frozen=True):
    """One sampled token. With `finish` set it is the row's last; an end token ("stop") is not
    part of the text but counts as sampled."""

    job: int
    id: int
    finish: FinishReason | None = None
    likelihood: Likelihood | None = None


class Activations(msgspec.Struct, frozen=True):
    """What the features that are watched made of one token, before any steering: (feature,
    activation). `position` counts from the prompt's first token."""

    job: int
    position: int
    values: tuple[tuple[int, float], ...]


class Finished(msgspec.Struct, frozen=True):
    """A job that was to draw no tokens is over: its prompt is scored."""

    job: int


Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Embedded(msgspec.Struct, frozen=True):
    """What the texts of a job have become, in their order: `(texts, width)`; of pairs, the logits
    of the model's labels."""

    job: int
    vectors: Vectors


class Failed(msgspec.Struct, frozen=True):
    """The job ended because the engine could not go on with it. `clear` is what a client may be
    told of the reason, if anything."""

    job: int
    reason: str
    clear: str | None = None


class EngineStopped(msgspec.Struct, frozen=True):
    """The device thread is gone; nothing will follow."""

    reason: str


Event = (
    Loaded
    | LoadFailed
    | Started
    | Progress
    | PromptRead
    | PromptScored
    | Token
    | Activations
    | Finished
    | Embedded
    | Failed
    | EngineStopped
)


class Timings(msgspec.Struct, frozen=True):
    """Seconds that a request's prompts took, from the first that was read to the first token of
    the last; and its answers, from the first of their tokens to the last."""

    prompt: float
    answer: float


class Usage(msgspec.Struct, frozen=True):
    """What a request took, so far or in all. `timings` where they were asked for."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None
    cached_tokens: int = 0
    timings: Timings | None = None


class Report(msgspec.Struct, frozen=True):
    """What the device holds: bytes in use, free bytes kept for reuse, the most bytes ever used;
    and for each model of a port its rows, queue and prompt cache in numbers."""

    active_bytes: int
    cache_bytes: int
    peak_bytes: int
    models: dict[str, dict[str, int]]


# What an answer is made of, between the service and the wire.


class TokenScore(msgspec.Struct, frozen=True):
    """One token of a text: its bytes, its log-probability (None: nothing predicts it) and the
    likeliest tokens in its place. `names` are what to call it and these, where not by their bytes.
    """

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...] = ()
    names: tuple[str, ...] = ()


class RankedToken(msgspec.Struct, frozen=True):
    """A token that stands, or could stand, at one place of a prompt."""

    id: int
    logprob: float
    rank: int
    text: str


PromptScore = tuple[RankedToken, ...] | None
"""What could stand at one place: the prompt's own token, then the likeliest. None at the first."""


class ToolUse(msgspec.Struct, frozen=True):
    """A tool that the model calls. `arguments` is a JSON object as text, as the model wrote it: of
    a call that a limit cut, the beginning of one, perhaps empty."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True):
    """One whole choice. `scores` is None where they were not asked for, and so are `tokens`, the
    ids that were drawn, and what is told of the prompt. `stop` is the stop string that ended it."""

    reason: FinishReason
    content: str = ""
    reasoning: str = ""
    tools: tuple[ToolUse, ...] = ()
    scores: tuple[TokenScore, ...] | None = None
    tokens: tuple[int, ...] | None = None
    prompt: tuple[int, ...] | None = None
    prompt_scores: tuple[PromptScore, ...] | None = None
    stop: str | None = None
