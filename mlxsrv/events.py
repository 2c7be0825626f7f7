"""What crosses between the event loop and the device thread, and what a request gives.

Commands go down, events come up. All are frozen, and a Job is token ids and numbers only, so that
either side may be another process or machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "timeout"]
Channel = Literal["content", "reasoning"]
"""What a piece of an answer is: what the model says, or what it thinks before."""


class Sampling(msgspec.Struct, frozen=True):
    """How one row's next token is drawn from its logits. `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


class Job(msgspec.Struct, frozen=True):
    """One sequence to generate: a prompt of at least one token, and when to end."""

    id: int
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    end_tokens: frozenset[int]
    sampling: Sampling
    checkpoint: int = 0
    """Tokens at the beginning of the prompt, a system message say, that others will share."""


# Commands: the event loop to the device thread.


class Load(msgspec.Struct, frozen=True):
    """Read the model in `path` and keep it as `model`."""

    model: str
    path: str
    max_rows: int
    prefill_chunk: int
    max_gap: float
    prompt_cache_bytes: int | None


class Submit(msgspec.Struct, frozen=True):
    job: Job


class Cancel(msgspec.Struct, frozen=True):
    """Free the row of `job`, wherever it is; unknown or ended jobs are ignored."""

    job: int


class Unload(msgspec.Struct, frozen=True):
    """Forget `model` and what it holds; its rows, if any, fail."""

    model: str


Command = Load | Submit | Cancel | Unload


# Events: the device thread to the event loop.


class Loaded(msgspec.Struct, frozen=True):
    """`batched` is false where the model's caches cannot be merged and rows run one by one; `cuts`
    where a cache cannot be cut back to where two prompts part, so that jobs should say it."""

    model: str
    batched: bool
    cuts: bool
    bytes: int


class LoadFailed(msgspec.Struct, frozen=True):
    model: str
    reason: str


class Started(msgspec.Struct, frozen=True):
    """The engine has taken the job: from here on it ends with Finished or Failed."""

    job: int


class PromptRead(msgspec.Struct, frozen=True):
    """The prompt is read; `cached` of its tokens were found in the prompt cache."""

    job: int
    cached: int


class Token(msgspec.Struct, frozen=True):
    """One sampled token. With `finish` set it is the row's last; an end token ("stop") is not
    part of the text but counts as sampled."""

    job: int
    id: int
    finish: FinishReason | None = None


class Failed(msgspec.Struct, frozen=True):
    """The job ended because the engine could not go on with it."""

    job: int
    reason: str


class EngineStopped(msgspec.Struct, frozen=True):
    """The device thread is gone; nothing will follow."""

    reason: str


Event = Loaded | LoadFailed | Started | PromptRead | Token | Failed | EngineStopped


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None
    cached_tokens: int = 0
