"""One choice of a reply: a row of the batch, from its events to its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxsrv.engine.events import (
    Finished,
    JobEvent,
    Likelihood,
    PromptRead,
    PromptScored,
    Started,
    Token,
)
from mlxsrv.engine.orders import Job
from mlxsrv.generation.outputs import (
    Ended,
    FinishReason,
    Opened,
    Output,
    PromptDone,
    PromptInfo,
    SampledTokens,
    TextPiece,
    TokenScore,
    ToolInput,
    ToolStarted,
)
from mlxsrv.service.lifecycle import FOLLOWS, State
from mlxsrv.service.scores import Scores, cut_top, rank_prompt
from mlxsrv.states import follow
from mlxsrv.text.reader import ToolArguments, ToolOpened

if TYPE_CHECKING:
    from mlxsrv.text.pipeline import TextPipeline
    from mlxsrv.text.reader import OutputPart

# Looked up once: before Python 3.12 a member of an enum costs as much as the rest of a check.
_QUEUED, _CLOSED = State.QUEUED, State.CLOSED


class Choice:
    """Used on the event loop. `receive` only notes events; `collect` makes text of them when the
    reader wants it.

    Args:
        index: number of the choice in its reply.
        job: what the engine gets.
        pipeline: makes text of its tokens; no other choice uses it.
        scores: given if log-probabilities are wanted.
        echo: the prompt, if the answer begins with it.
        returns_ids: whether the outputs have the ids of the prompt and of generated tokens.
        spelling: returns a token's bytes; given if the scores of the prompt are wanted.
    """

    def __init__(
        self,
        index: int,
        job: Job,
        pipeline: TextPipeline,
        *,
        scores: Scores | None = None,
        echo: str = "",
        returns_ids: bool = False,
        spelling: Callable[[int], bytes] | None = None,
    ) -> None:
        self.index = index
        self.job = job
        self.pipeline = pipeline
        self.state = State.QUEUED
        self.finish: FinishReason | None = None  # set: the state is FINISHED or CLOSED
        self.cached_tokens = 0
        self._scores = scores
        self._echo = echo
        self._returns_ids = returns_ids
        self._spelling = spelling
        self._prompt_pending = returns_ids or spelling is not None

        # Arrived, and not read yet. A reader asks once more after each read, mostly for nothing.
        self._news = False
        self._opening: list[Output] = []
        self._tokens: list[int] = []
        self._likelihoods: list[Likelihood] = []
        self._prompt: tuple[Likelihood, ...] = ()
        self._end: Token | None = None
        self._end_tokens = 0

    @property
    def sampled(self) -> int:
        """The number of tokens sampled for the answer, with the end token."""
        return self.pipeline.tokens + self._end_tokens

    @property
    def waiting_tokens(self) -> int:
        """The number of tokens that have arrived and were not read yet."""
        return len(self._tokens)

    def enter(self, state: State) -> None:
        """Change to `state`. Raises RuntimeError if it may not follow the current state."""
        self.state = follow("a choice", self.state, state, FOLLOWS)

    def expire(self) -> None:
        """End the choice with what has arrived, because the time of its reply is over."""
        if self.finish is None:
            self._finish("timeout")

    def _finish(self, reason: FinishReason) -> None:
        self.finish = reason
        self._news = True
        self.enter(State.FINISHED)

    def receive(self, event: JobEvent) -> None:
        """Note an event of the job."""
        self._news = True
        match event:
            case Token():
                if event.finish == "stop":
                    self._end_tokens = 1  # it counts as sampled, but is not part of the text
                    self._end = event
                else:
                    self._tokens.append(event.id)
                    if event.likelihood is not None:
                        self._likelihoods.append(event.likelihood)
                if event.finish is not None:
                    self._finish(event.finish)
            case PromptRead():
                self.cached_tokens = event.cached
                if self.index == 0:
                    self._opening.append(PromptDone(len(self.job.prompt), event.cached))
            case PromptScored():
                self._prompt = event.scores
            case Started():
                self.enter(State.SUBMITTED)
                if self.index == 0:  # its turn is the first of the reply's
                    self._opening = [Opened()]
            case Finished():
                self._finish("length")

    def collect(self) -> list[Output]:
        """Return what has come since the last read. Ended comes last, if the choice is over."""
        if not self._news or self.state is _QUEUED or self.state is _CLOSED:
            return []
        self._news = False
        outputs, self._opening = self._opening, []
        outputs += self._read_prompt()
        outputs += self._read_echo()
        tokens, self._tokens = self._tokens, []
        before = self.pipeline.tokens
        if self._scores is None:
            outputs += self._outputs(self.pipeline.feed(tokens))
        else:
            outputs += self._read_scored(tokens, self._scores)
        if self.finish is not None:
            cut = self.finish in ("length", "timeout")
            outputs += self._outputs(self.pipeline.flush(cut=cut))  # may complete a stop string
            if self._scores is not None and not self.pipeline.stopped:
                outputs += self._extra(self._scores.rest(self._end))
        if self._returns_ids:
            outputs += self._drawn(tokens[: self.pipeline.tokens - before])
        if self.pipeline.stopped:
            self._end_tokens = 0
            if self.finish is None:
                self._finish("stop")
            self.finish = "stop"
            if self._scores is not None:
                outputs += self._extra(self._scores.discard_waiting())
        if self.finish is not None:
            self.enter(State.CLOSED)
            outputs.append(self._ended())
        return outputs

    def _ended(self) -> Ended:
        pipeline = self.pipeline
        return Ended(
            self.index,
            self.reason,
            stop=pipeline.stop,
            broken=tuple(pipeline.broken),
            fragment=pipeline.fragment,
            repeated=pipeline.repeated,
        )

    @property
    def reason(self) -> FinishReason:
        """Why the choice ended, as its client sees it."""
        finish = self.finish or "stop"
        called = self.pipeline.calls and not self.pipeline.repeated
        return "tool_calls" if finish == "stop" and called else finish

    def _read_prompt(self) -> list[Output]:
        """The prompt's ids and scores, once they are known."""
        if not self._prompt_pending or (self._spelling is not None and not self._prompt):
            return []
        self._prompt_pending = False
        scores = None
        if self._spelling is not None:
            scores = rank_prompt(self.job.prompt, self._prompt, self._spelling)
        return [PromptInfo(self.index, self.job.prompt if self._returns_ids else None, scores)]

    def _drawn(self, tokens: list[int]) -> list[Output]:
        """The ids that were read, and the end token, which is not part of the text."""
        end = [self._end.id] if self._end is not None and not self.pipeline.stopped else []
        ids = (*tokens, *end)
        return [SampledTokens(self.index, ids)] if ids else []

    def _read_echo(self) -> list[Output]:
        if not self._echo or (self.job.scores is not None and not self._prompt):
            return []
        echo, self._echo = self._echo, ""
        scores: tuple[TokenScore, ...] = ()
        if self._scores is not None:
            scores = self._scores.of_prompt(
                echo, self.job.prompt, cut_top(self._prompt, self.job.logprobs or 0)
            )
        return [TextPiece(self.index, "content", echo, scores)]

    def _read_scored(self, tokens: list[int], scores: Scores) -> list[Output]:
        """As `collect`, one token at a time: each is content, a thought, part of a tool call, or a
        marker with its header."""
        outputs: list[Output] = []
        likelihoods, self._likelihoods = self._likelihoods, []
        for token, likelihood in zip(tokens, likelihoods, strict=True):
            inside = self.pipeline.aside
            pieces = self.pipeline.feed([token])
            vanishes = token in scores.markers and not pieces
            if inside or vanishes or self.pipeline.aside:
                outputs += self._outputs(pieces)  # text that waited may be the end of the content
                outputs += self._extra(scores.leave())
            else:
                scores.take(token, likelihood)
                outputs += self._outputs(pieces)
        return outputs

    def _extra(self, scores: tuple[TokenScore, ...]) -> list[Output]:
        """Scores without text."""
        return [TextPiece(self.index, "content", "", scores)] if scores else []

    def _outputs(self, pieces: list[OutputPart]) -> list[Output]:
        return [self._output(piece) for piece in pieces]

    def _output(self, piece: OutputPart) -> Output:
        match piece:
            case ToolOpened(index, id, name):
                return ToolStarted(self.index, index, id, name)
            case ToolArguments(index, text):
                return ToolInput(self.index, index, text)
            case (channel, text):
                scored = self._scores is not None and channel == "content"
                scores = self._scores.release(text) if self._scores and scored else ()
                return TextPiece(self.index, channel, text, scores)
