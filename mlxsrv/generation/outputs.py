"""The answer to one request, in pieces and whole, in no dialect.

The outputs of a reply come in this order: Opened; for each choice PromptInfo, then any number of
texts, token ids and tool calls, then Ended. PromptDone comes before the first text of the reply.
The last Ended has the usage. Failures are raised.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

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


def text_name(token: bytes) -> str:
    """The name of a token where a name is all that is shown of it: its bytes as a text."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class RankedToken(msgspec.Struct, frozen=True):
    """A token that stands, or could stand, at one place of a prompt."""

    id: int
    logprob: float
    rank: int
    text: str


PromptScore = tuple[RankedToken, ...] | None
"""Tokens at one place of a prompt: its own, then the likeliest. None at the first place."""


def is_object(arguments: str) -> bool:
    """Tell whether the arguments of a call, as the model wrote them, are a JSON object."""
    try:
        msgspec.json.decode(arguments, type=dict)
    except (ValueError, RecursionError):
        return False
    return True


class ToolUse(msgspec.Struct, frozen=True):
    """A tool that the model calls. `arguments` is a JSON object as text, as the model wrote it. If
    the call is not `complete`, it is the beginning of one, or no JSON object, and may be empty."""

    id: str
    name: str
    arguments: str
    complete: bool = True

    @property
    def text(self) -> str:
        """The call as text, for dialects that do not send one that is not complete."""
        name = msgspec.json.encode(self.name).decode()
        return f'{{"name": {name}, "arguments": {self.arguments}}}'


class Answer(msgspec.Struct, frozen=True):
    """One whole choice. `fragment` is what `Ended` has.

    None where it was not asked for: `scores`, `tokens` (the ids that were drawn), `prompt` (its
    ids) and `prompt_scores`. `stop` is the stop string that ended the answer;
    `repeated`: it ended because it repeated itself.
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
    fragment: str = ""
    repeated: bool = False


class Timings(msgspec.Struct, frozen=True):
    """Seconds that a request took: `prompt` from the first token that was read to the first that
    was drawn after the last prompt, `answer` from the first token that was drawn to the last;
    `load` while it waited for its model, `total` from its arrival until now."""

    prompt: float
    answer: float
    load: float = 0.0
    total: float = 0.0


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request took, so far or in all. `timings` where they were asked for."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None
    cached_tokens: int = 0
    timings: Timings | None = None


Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]
"""`(texts, width)`: a vector of each text; or `(pairs, labels)`: a cross-encoder's logits."""


# Outputs.


class Identity(msgspec.Struct, frozen=True):
    """The name of a response, and what made it. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Opened(msgspec.Struct, frozen=True):
    """It is the turn of the first job of the reply: it has a slot and memory."""


class PromptDone(msgspec.Struct, frozen=True):
    """The prompt of the first choice is read; `cached` of its tokens were in the prompt cache."""

    tokens: int
    cached: int


class TextPiece(msgspec.Struct, frozen=True):
    """The next text of a choice's content or reasoning, with the scores of its tokens."""

    choice: int
    channel: Channel
    text: str
    scores: tuple[TokenScore, ...] = ()


class ToolStarted(msgspec.Struct, frozen=True):
    """Tool call number `index` of the choice begins. Its arguments follow."""

    choice: int
    index: int
    id: str
    name: str


class ToolInput(msgspec.Struct, frozen=True):
    """The next piece of a tool call's arguments."""

    choice: int
    index: int
    text: str


class PromptInfo(msgspec.Struct, frozen=True):
    """The ids and the scores of the choice's prompt, if the request asks for them."""

    choice: int
    tokens: tuple[int, ...] | None
    scores: tuple[PromptScore, ...] | None


class SampledTokens(msgspec.Struct, frozen=True):
    """The ids of the next generated tokens. Their text may come later."""

    choice: int
    tokens: tuple[int, ...]


class Ended(msgspec.Struct, frozen=True):
    """The end of a choice.

    A client must not take a broken call for a whole one. Each dialect sees to that:

    - Chat completions: head and arguments were sent as they came, as OpenAI has it. The reason is
      "length" if a limit cut the call off, else "tool_calls".
    - Messages: `stop_reason` is not "tool_use" if a call is broken, but "max_tokens" or "end_turn".
      A whole message has no block of a broken call.
    - Responses: the item of a broken call has the status "incomplete", and so has the response if a
      limit cut it off.
    - Ollama: a broken call is not sent.

    Dialects that leave a call out give its `fragment` as text. So do Responses if the call has no
    item, because it was cut off before its name was complete.

    Attributes:
        usage: of the whole reply, with the last choice that ends.
        stop: the stop string that ended the choice, if one did.
        broken: the indices of tool calls that are not complete: cut off by a limit, never closed,
            or with arguments that are no JSON object.
        fragment: all that the model wrote of the call that the answer ended in, from the opening
            marker on, if that call is broken, or was cut off before its name was complete. No
            TextPiece has it.
        repeated: the choice ended because it repeated itself.
    """

    choice: int
    reason: FinishReason
    usage: Usage | None = None
    stop: str | None = None
    broken: tuple[int, ...] = ()
    fragment: str = ""
    repeated: bool = False


Output = (
    Opened | PromptDone | PromptInfo | TextPiece | SampledTokens | ToolStarted | ToolInput | Ended
)


class AnswerBuilder:
    """Collects the outputs of one reply into whole answers.

    Args:
        choices: how many the reply has.
        scored: whether the request asks for log-probabilities.
    """

    def __init__(self, choices: int, *, scored: bool) -> None:
        self._drafts = [_Draft() for _ in range(choices)]
        self._scored = scored
        self.usage: Usage | None = None  # set when all choices have ended

    def add(self, output: Output) -> None:
        match output:
            case TextPiece(choice, channel, text, scores):
                draft = self._drafts[choice]
                (draft.content if channel == "content" else draft.reasoning).append(text)
                draft.scores += scores
            case ToolStarted(choice, _, id, name):
                self._drafts[choice].tools.append((id, name, []))
            case ToolInput(choice, index, text):
                self._drafts[choice].tools[index][2].append(text)
            case PromptInfo(choice, ids, prompt_scores):
                draft = self._drafts[choice]
                draft.prompt, draft.prompt_scores = ids, prompt_scores
            case SampledTokens(choice, ids):
                self._drafts[choice].tokens += ids
            case Ended(choice, _, usage):
                self._drafts[choice].ended = output
                self.usage = usage

    def make(self) -> list[Answer]:
        return [draft.answer(self._scored) for draft in self._drafts]


class _Draft:
    """One answer, as far as it has come."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.tools: list[tuple[str, str, list[str]]] = []
        self.scores: list[TokenScore] = []
        self.tokens: list[int] = []
        self.prompt: tuple[int, ...] | None = None
        self.prompt_scores: tuple[PromptScore, ...] | None = None
        self.ended = Ended(0, "stop")

    def answer(self, scored: bool) -> Answer:
        return Answer(
            reason=self.ended.reason,
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tools=self._tool_uses(),
            scores=tuple(self.scores) if scored else None,
            tokens=tuple(self.tokens) if self.prompt is not None else None,
            prompt=self.prompt,
            prompt_scores=self.prompt_scores,
            stop=self.ended.stop,
            repeated=self.ended.repeated,
            fragment=self.ended.fragment,
        )

    def _tool_uses(self) -> tuple[ToolUse, ...]:
        return tuple(
            ToolUse(id, name, "".join(pieces), complete=i not in self.ended.broken)
            for i, (id, name, pieces) in enumerate(self.tools)
        )
