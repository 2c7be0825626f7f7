"""The outputs of a reply, in no wire dialect.

They come in this order: Opened; for each choice PromptInfo, then any number of texts, token ids and
tool calls, then Ended. The last Ended has the usage. Failures are raised.
"""

from __future__ import annotations

import msgspec

from mlxsrv.generation import Answer, Channel, FinishReason, PromptScore, TokenScore, ToolUse, Usage


class Opened(msgspec.Struct, frozen=True):
    """The engine has the first job of the reply."""


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
    """The end of a choice. `stop` is the stop string that ended it, if one did."""

    choice: int
    reason: FinishReason
    usage: Usage | None = None
    stop: str | None = None


Output = Opened | PromptInfo | TextPiece | SampledTokens | ToolStarted | ToolInput | Ended


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
            case Ended(choice, reason, usage, stop):
                self._drafts[choice].reason = reason
                self._drafts[choice].stop = stop
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
