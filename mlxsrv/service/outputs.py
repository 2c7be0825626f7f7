"""What a reply gives to whoever answers the client, in order: Opened; for each choice any number
of texts and tool calls, then Ended; the last of these has the usage. Failures are raised."""

from __future__ import annotations

import msgspec

from mlxsrv.generation import Answer, Channel, FinishReason, PromptScore, TokenScore, ToolUse, Usage


class Opened(msgspec.Struct, frozen=True):
    """The engine has the first of the jobs."""


class TextPiece(msgspec.Struct, frozen=True):
    choice: int
    channel: Channel
    text: str
    scores: tuple[TokenScore, ...] = ()


class ToolStarted(msgspec.Struct, frozen=True):
    """The choice's call number `index` begins; its arguments follow."""

    choice: int
    index: int
    id: str
    name: str


class ToolInput(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments."""

    choice: int
    index: int
    text: str


class PromptInfo(msgspec.Struct, frozen=True):
    """The choice's prompt, before anything else of it: its ids, its scores, whichever were asked
    for."""

    choice: int
    tokens: tuple[int, ...] | None
    scores: tuple[PromptScore, ...] | None


class SampledTokens(msgspec.Struct, frozen=True):
    """The ids of the tokens that were drawn since the last time; their text comes when it may."""

    choice: int
    tokens: tuple[int, ...]


class Ended(msgspec.Struct, frozen=True):
    """`stop` is the stop string that was found, if that is why."""

    choice: int
    reason: FinishReason
    usage: Usage | None = None
    stop: str | None = None


Output = Opened | PromptInfo | TextPiece | SampledTokens | ToolStarted | ToolInput | Ended


class AnswerBuilder:
    """The outputs of one reply, gathered into whole answers.

    Args:
        choices: how many there will be.
        scored: whether log-probabilities were asked for.
    """

    def __init__(self, choices: int, *, scored: bool) -> None:
        self._drafts = [_Draft() for _ in range(choices)]
        self._scored = scored
        self.usage: Usage | None = None  # set: all choices have ended

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
            case Ended(choice, reason, usage, stop):
                self._drafts[choice].reason = reason
                self._drafts[choice].stop = stop
                self.usage = usage

    def make(self) -> list[Answer]:
        return [draft.answer(self._scored) for draft in self._drafts]


class _Draft:
    """One answer as far as it has come."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.tools: list[tuple[str, str, list[str]]] = []
        self.scores: list[TokenScore] = []
        self.tokens: list[int] = []
        self.prompt: tuple[int, ...] | None = None
        self.prompt_scores: tuple[PromptScore, ...] | None = None
        self.reason: FinishReason = "stop"
        self.stop: str | None = None

    def answer(self, scored: bool) -> Answer:
        return Answer(
            reason=self.reason,
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tools=tuple(ToolUse(id, name, "".join(pieces)) for id, name, pieces in self.tools),
            scores=tuple(self.scores) if scored else None,
            tokens=tuple(self.tokens) if self.prompt is not None else None,
            prompt=self.prompt,
            prompt_scores=self.prompt_scores,
            stop=self.stop,
        )
