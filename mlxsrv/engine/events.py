"""Events: what the device thread sends up to the event loop. All are frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from mlxsrv.generation.outputs import FinishReason, Vectors

# Of jobs.


class Started(msgspec.Struct, frozen=True):
    """It is the job's turn: it has a slot, and there is memory to read its prompt. The job of texts
    to embed has a slot."""

    job: int


class Progress(msgspec.Struct, frozen=True):
    """A slice was read that the job waits for: of its own prompt, or of one before it in the queue.
    Sent once a slice, while the job waits."""

    job: int


class PromptRead(msgspec.Struct, frozen=True, eq=False):
    """The prompt is read; `cached` of its tokens were found in the prompt cache.

    `seconds` is how long the rest took, with other work in between but without the wait before. It
    is a measurement, so it does not count when two are compared.
    """

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
    """A token's log-probability, before temperature and filters.

    None for a prompt's first token, which nothing predicts. `top` are the likeliest tokens in its
    place with theirs, the likeliest first. `rank` is 1 for the likeliest token, where ranks were
    asked for.
    """

    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class PromptScored(msgspec.Struct, frozen=True):
    """One entry for each of the prompt's tokens. Comes before the first Token."""

    job: int
    scores: tuple[Likelihood, ...]


class Token(msgspec.Struct, frozen=True):
    """One sampled token. With `finish` set it is the row's last. An end token ("stop") is not part
    of the text but counts as sampled."""

    job: int
    id: int
    finish: FinishReason | None = None
    likelihood: Likelihood | None = None


class Activations(msgspec.Struct, frozen=True):
    """The activations of watched features at one token, before any steering: (feature,
    activation). `position` counts from the prompt's first token."""

    job: int
    position: int
    values: tuple[tuple[int, float], ...]


class Finished(msgspec.Struct, frozen=True):
    """The end of a job without a last token: it was only to score its prompt, or there is no memory
    to read its text again."""

    job: int


class Embedded(msgspec.Struct, frozen=True):
    """The vectors of a job's texts, or the logits of its pairs, in their order."""

    job: int
    vectors: Vectors


class Shortage(msgspec.Struct, frozen=True):
    """A job that does not fit into memory even if it is alone: the bytes that a text of so many
    `tokens` takes, and the bytes that there are for it."""

    needed: int
    available: int
    tokens: int

    @property
    def message(self) -> str:
        """The numbers, and what helps."""
        return (
            f"{self.tokens} tokens need {self.needed} bytes of memory, and beside the loaded "
            f"models there are {self.available}: send fewer, or raise --memory-limit"
        )


class Failed(msgspec.Struct, frozen=True):
    """The job ended because the engine could not go on with it.

    Attributes:
        reason: for the log.
        clear: what the client may read of the reason; None: nothing.
        shortage: the numbers, if the job can never fit into memory.
    """

    job: int
    reason: str
    clear: str | None = None
    shortage: Shortage | None = None


JobEvent = (
    Started
    | Progress
    | PromptRead
    | PromptScored
    | Token
    | Activations
    | Finished
    | Embedded
    | Failed
)
Receiver = Callable[[JobEvent], None]

# Answers to questions.


class KVCost(msgspec.Struct, frozen=True):
    """The bytes that one kind of layers adds to a row's KV cache: for each token, up to `window` of
    the last or `first` of the first ones (0: all), and whatever its length."""

    per_token: int
    window: int = 0
    fixed: int = 0
    first: int = 0

    def bytes(self, tokens: int, slice: int = 0) -> int:
        """The bytes for a row of so many tokens. While its text is read, layers with a window keep
        a `slice` more."""
        most = self.window + slice if self.window else self.first
        held = min(tokens, most) if most else tokens
        return self.fixed + self.per_token * held


def kv_bytes(costs: Iterable[KVCost], tokens: int, slice: int = 0) -> int:
    """The bytes of a KV cache of so many tokens, all layers together; see `KVCost.bytes`."""
    taken = 0
    for cost in costs:
        taken += cost.bytes(tokens, slice)
    return taken


class Loaded(msgspec.Struct, frozen=True):
    """The answer to a Load: the model is ready.

    Attributes:
        batched: rows share a pass; false where their KV caches cannot, or where they would be off.
        cuts: its KV caches can be cut back to any length. If not, jobs should give checkpoints.
        bytes: the size of its weights, adapter and draft model included; on several ranks, that of
            the largest share.
        shared: how many of these bytes are also another loaded model's.
        notes: options of the load that the model does not support, and why.
        vectors: names of the control vectors that fit.
        kv_costs: of a row; none for an encoder.
        draft_costs: of the text that a draft model follows; none where there is no draft.
    """

    model: str
    batched: bool
    cuts: bool
    bytes: int
    shared: int = 0
    notes: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    kv_costs: tuple[KVCost, ...] = ()
    draft_costs: tuple[KVCost, ...] = ()


class Attached(msgspec.Struct, frozen=True):
    """The SAE of this number is there; `bytes` is the size of its arrays."""

    number: int
    bytes: int


class Report(msgspec.Struct, frozen=True):
    """The use of the device's memory: bytes in use, free bytes kept for reuse, the most bytes ever
    used. `models`: each of the client's models, its rows, queue and prompt cache in numbers.
    `budget`: the bytes that its KV caches may take; None: no bound."""

    active_bytes: int
    cache_bytes: int
    peak_bytes: int
    models: dict[str, dict[str, int]]
    budget: int | None = None


class Answered(msgspec.Struct, frozen=True):
    """The answer to the question of this number: a value, or the ServeError to raise."""

    number: int
    value: Any


# Of memory.


class MemoryShort(msgspec.Struct, frozen=True):
    """The budget lacks so many bytes. The client must answer with a Budget: a larger one if it can
    unload idle models, else the same."""

    bytes: int


class WeightsRead(msgspec.Struct, frozen=True):
    """A slice of a load has read so many bytes of the model's weights."""

    model: str
    bytes: int


# Of the thread.


class EngineStopped(msgspec.Struct, frozen=True):
    """The device thread is gone; nothing will follow."""

    reason: str


Event = JobEvent | Answered | MemoryShort | WeightsRead | EngineStopped
