"""Requests and answers in no dialect: sampling and steering, and the pieces of an answer.

All floors share these types.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec
import numpy as np

# Requests.


class Sampling(msgspec.Struct, frozen=True):
    """How one row's next token is drawn from its logits. `temperature` 0 is greedy.

    `frequency_penalty` and `presence_penalty` count the row's own tokens, `repetition_penalty`
    (1: none) the prompt's as well. `logit_bias` holds (token id, what to add to its logit).
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
    """Tokens that a row may not draw, unless nothing else is left.

    - `min_tokens`: no end token before the row has drawn this many others.
    - `allowed`: no token but these; empty: no limit.
    - `words`: the last token of one of these never follows its other tokens.
    """

    min_tokens: int = 0
    allowed: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()


SteeringMode = Literal["additive", "clamp"]


class Steering(msgspec.Struct, frozen=True):
    """Changes to one row's hidden states; the batch's other rows are not touched.

    `values` are (feature, strength) of the SAE of that attachment, sorted. `additive` adds each
    feature's direction, multiplied by its strength. `clamp` adds as much of it as brings the
    feature's activation to that value. `vectors` are (control vector, scale), sorted.
    """

    attachment: int = 0
    mode: SteeringMode = "additive"
    values: tuple[tuple[int, float], ...] = ()
    vectors: tuple[tuple[str, float], ...] = ()


Mask = np.ndarray[tuple[int], np.dtype[np.int32]]


class Constraint(Protocol):
    """The tokens that a row may draw next: a grammar in some state.

    Once submitted with a job, it is used by the device thread only.
    """

    @property
    def failure(self) -> str | None:
        """Why it cannot go on; its row fails then."""

    def fill(self, mask: Mask) -> None:
        """Clear the bits of the tokens that may not come next.

        Args:
            mask: 32 tokens a word, the lowest bit first; all bits are set when it comes.
        """

    def accept(self, token: int) -> None:
        """Go on to the state after `token`."""


# Answers.

FinishReason = Literal["stop", "length", "tool_calls", "timeout"]
Channel = Literal["content", "reasoning"]
"""The kind of a piece of an answer: content, or the thoughts that come before it."""


class TokenScore(msgspec.Struct, frozen=True):
    """One token of a text: its bytes, its log-probability (None: nothing predicts it) and the
    likeliest tokens in its place. `names` replace the bytes as names of the token and of these.
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
"""Tokens at one place of a prompt: its own, then the likeliest. None at the first place."""


class ToolUse(msgspec.Struct, frozen=True):
    """A tool that the model calls. `arguments` is a JSON object as text, as the model wrote it. If
    a limit cut the call, it is the beginning of one, and may be empty."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True):
    """One whole choice.

    None where it was not asked for: `scores`, `tokens` (the ids that were drawn), `prompt` (its
    ids) and `prompt_scores`. `stop` is the stop string that ended the answer.
    """

    reason: FinishReason
    content: str = ""
    reasoning: str = ""
    tools: tuple[ToolUse, ...] = ()
    scores: tuple[TokenScore, ...] | None = None
    tokens: tuple[int, ...] | None = None
    prompt: tuple[int, ...] | None = None
    prompt_scores: tuple[PromptScore, ...] | None = None
    stop: str | None = None


class Timings(msgspec.Struct, frozen=True):
    """Seconds that a request took: `prompt` from the first token that was read to the first that
    was drawn after the last prompt, `answer` from the first token that was drawn to the last."""

    prompt: float
    answer: float


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request took, so far or in all. `timings` where they were asked for."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None
    cached_tokens: int = 0
    timings: Timings | None = None


Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]
"""`(texts, width)`: a vector of each text; or `(pairs, labels)`: a cross-encoder's logits."""
