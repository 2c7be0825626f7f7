"""Outcomes: the result of each work item of a plan. The scheduler learns from nothing else.

All are frozen, and hold no exception and no array of MLX's.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mlxsrv.engine.events import (
    Activations,
    Attached,
    KVCost,
    Likelihood,
    Loaded,
    PromptScored,
    kv_bytes,
)
from mlxsrv.generation.outputs import Vectors


class Fault(msgspec.Struct, frozen=True):
    """Why a work item failed: the error in one line. `memory`: there was too little memory, so
    fewer rows at once may succeed."""

    reason: str
    memory: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """Why a client's order is refused: the kind of error, and its message."""

    kind: Literal["model not loaded", "sae incompatible", "backend missing", "engine failed"]
    reason: str


# The results, by the kind of the work item.


class RowFailure(msgspec.Struct, frozen=True):
    """A row that cannot go on, for a cause of its own. `reason` is for the log; `clear` is what a
    client may read of it, if anything."""

    row: int
    reason: str
    clear: str | None = None


class StoredBeginning(msgspec.Struct, frozen=True):
    """The KV cache of at least the first `tokens` of a row's prompt is on disk."""

    row: int
    tokens: int


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """Rows that could not be admitted, which later work items of the same plan skip; and rows whose
    prompts have a prefix on disk."""

    failures: tuple[RowFailure, ...] = ()
    stored: tuple[StoredBeginning, ...] = ()


class KeptPrompt(msgspec.Struct, frozen=True):
    """A KV cache that was kept as `entry`. `cuts`: it can be cut back to any length."""

    entry: int
    bytes: int
    cuts: bool


class Kept(msgspec.Struct, frozen=True, tag=True):
    """The KV caches of freed rows that were kept. One that is missing here could not be kept."""

    prompts: tuple[KeptPrompt, ...] = ()


class PromptsRead(msgspec.Struct, frozen=True, tag=True):
    """A slice of prompts was read.

    Attributes:
        kept: KV caches that were kept after their spans.
        scores: of a prompt that is read to its end and scored.
        broken: rows for whose prompt the model computed NaN, as scores show it.
        activations: those that were watched, at the tokens of the slice.
    """

    kept: tuple[KeptPrompt, ...] = ()
    scores: PromptScored | None = None
    broken: tuple[int, ...] = ()
    activations: tuple[Activations, ...] = ()


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """The tokens of the step before, or several of each row where tokens were proposed; or the one
    that a suspect has drawn.

    These tokens count even if the step has failed.

    Attributes:
        tokens: (row, token) in the order of the rows; none of a row that is in its first step.
        likelihoods: of tokens whose row asks for them, by row.
        broken: rows whose token means nothing, for the model computed NaN.
        failures: rows whose constraint cannot go on.
        bound: rows whose constraint binds their next token.
        following: the input of the next step, by row, where it is known already: after proposals.
        accepted: how many proposals held, by row, of rows whose proposals were verified.
        activations: those that were watched in the step before.
        waited: when the step before was complete, by the clock of `Outcome.began`; of a step with
            proposals.
    """

    tokens: tuple[tuple[int, int], ...] = ()
    likelihoods: dict[int, Likelihood] = {}
    broken: tuple[int, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    bound: tuple[int, ...] = ()
    following: dict[int, int] = {}
    accepted: dict[int, int] = {}
    activations: tuple[Activations, ...] = ()
    waited: float = 0.0


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """Cached prompts that the storage thread now writes. An order Written follows for each."""

    entries: tuple[int, ...] = ()


class Restored(msgspec.Struct, frozen=True, tag=True):
    """A slice of a KV cache from disk is in the device's memory. `over`: it was the last; then
    `prompt` is the cached prompt, or None if it cannot be used."""

    over: bool = False
    prompt: KeptPrompt | None = None


class DraftRead(msgspec.Struct, frozen=True, tag=True):
    """The draft model has read; `waited` is when the step before was complete, by the clock of
    `Outcome.began`."""

    waited: float


class TextsRead(msgspec.Struct, frozen=True, tag=True):
    """The vectors of the jobs that are complete, by job. The pass had so many `tokens`, padding
    included."""

    tokens: int
    vectors: dict[int, Vectors] = {}


class StoreFacts(msgspec.Struct, frozen=True):
    """Cached prompts are written to disk; so many files are there already."""

    files: int = 0
    bytes: int = 0


class TextFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a model that generates text that the scheduler needs.

    Attributes:
        batched: rows can be decoded together.
        shares: groups of rows can share a pass of the model.
        cuts: KV caches can be cut back to any length.
        pads: a padded prompt is read as it would be alone.
        drafts: there is a draft model, and it can be used.
        draft_costs: of a text that it reads.
        lookup: tokens may be proposed to all rows, each looked up in the row's own text.
        padding: bytes of padding for which groups of rows are not kept apart.
        vocabulary: entries of the logits.
        prompt_cache_bytes: the most bytes of cached prompts.
        store: cached prompts are written to disk; None: they are not.
        kv_costs: of a row.
    """

    batched: bool
    shares: bool = False
    cuts: bool
    pads: bool
    drafts: bool = False
    draft_costs: tuple[KVCost, ...] = ()
    lookup: bool = False
    padding: int
    vocabulary: int
    prompt_cache_bytes: int
    store: StoreFacts | None = None
    kv_costs: tuple[KVCost, ...] = ()

    def cuts_at(self, tokens: int) -> bool:
        """Whether the KV cache of a row with so many tokens can be cut back to fewer: not where
        layers are recurrent, nor where a sliding window is full."""
        for cost in self.kv_costs:
            if cost.fixed or (cost.window and tokens >= cost.window):
                return False
        return True

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the KV cache of a row with so many tokens."""
        return kv_bytes(self.kv_costs, tokens)


class EmbedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a model that embeds texts that the scheduler needs.

    Attributes:
        slices: a text may be read in several slices.
        labels: logits for a pair of texts; 0: the model makes vectors and judges no pairs.
        longest: tokens that it has positions for; None: no bound of its own.
        token_bytes: that a pass needs for each token, without attention's scores.
        score_bytes: the same for each pair of tokens of a text: attention's scores.
        hidden_bytes: of the last hidden state of a token.
        kv_costs: of a text that is read in several slices.
    """

    slices: bool
    labels: int = 0
    longest: int | None = None
    token_bytes: int = 0
    score_bytes: int = 0
    hidden_bytes: int = 0
    kv_costs: tuple[KVCost, ...] = ()

    def pass_bytes(self, tokens: int, longest: int) -> int:
        """Estimate the bytes that a pass needs at most.

        Args:
            tokens: of the pass, padding included.
            longest: tokens of the longest of its texts.
        """
        return tokens * (self.token_bytes + longest * self.score_bytes)


class LoadStep(msgspec.Struct, frozen=True, tag=True):
    """A slice of a load. `bytes` were read."""

    bytes: int = 0
    loaded: Loaded | None = None
    text: TextFacts | None = None
    embed: EmbedFacts | None = None
    refusal: Refusal | None = None

    @property
    def over(self) -> bool:
        """Whether the load is."""
        return self.loaded is not None or self.refusal is not None


class AttachStep(msgspec.Struct, frozen=True, tag=True):
    """A slice of an attachment."""

    attached: Attached | None = None
    refusal: Refusal | None = None

    @property
    def over(self) -> bool:
        """Whether the attachment is."""
        return self.attached is not None or self.refusal is not None


class Watched(msgspec.Struct, frozen=True, tag=True):
    """Whether activations are looked at now: not where no SAE is attached."""

    active: bool


class DeviceAnswer(msgspec.Struct, frozen=True, tag=True):
    """The answer to a question, or why there is none."""

    value: Any = None
    refusal: Refusal | None = None


Done = (
    Admitted
    | Kept
    | PromptsRead
    | Decoded
    | DraftRead
    | HandedOver
    | Restored
    | TextsRead
    | LoadStep
    | AttachStep
    | Watched
    | DeviceAnswer
)


class Outcome(msgspec.Struct, frozen=True):
    """The result of one work item.

    Attributes:
        began, ended: seconds, by a clock that never goes back.
        done: the result, by the kind of the work item; of a failed one, as much as was done.
        fault: why it failed; None if it did not. The KV caches that it touched are dropped: those
            of all rows of the step, of all spans that were read, or of the draft model.
    """

    began: float
    ended: float
    done: Done | None = None
    fault: Fault | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def failure(self) -> str | None:
        """Why it failed or was refused; None if neither."""
        if self.fault is not None:
            return self.fault.reason
        refusal: Refusal | None = getattr(self.done, "refusal", None)
        return None if refusal is None else refusal.reason
