"""A row: one job on its way through the engine, and the states that it goes through.

    QUEUED -> WAITING -> PREFILLING -> FRESH -> DECODING -> ENDED, or BROKEN

A row that has to give its memory to older rows, or whose step fails, is PREEMPTED, and goes through
the queue again. A row may end at any time. `_NEXT` has all that may follow.
"""

from __future__ import annotations

from enum import Enum
from zlib import crc32

import numpy as np

from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Fault
from mlxsrv.engine.scheduling.prompt_index import Source, Tokens, as_tokens, find_beginning
from mlxsrv.engine.scheduling.prompt_lookup import PromptLookup
from mlxsrv.generation.outputs import FinishReason
from mlxsrv.states import follow


class RowState(Enum):
    """The states of a row."""

    __hash__ = object.__hash__  # that of Enum is a function of Python, and takes ten times as long

    QUEUED = "queued"
    """It stands in the line of its model, for a slot and for memory."""
    WAITING = "waiting"
    """It has a slot, and its prompt is to be read."""
    FETCHING = "fetching"
    """It has a slot; what is on disk of its prompt is looked for, and fetched."""
    PREFILLING = "prefilling"
    """Its prompt is being read, or its texts are embedded. That of a suspect is read, and the row
    draws tokens alone."""
    FRESH = "fresh"
    """Its KV cache holds its text but for the last token, which is its next input."""
    DECODING = "decoding"
    """Its KV cache holds its text. Its next input is a token that is drawn and not delivered."""
    PREEMPTED = "preempted"
    """Its KV cache was dropped, since memory was short, or lost in a fault. It is in the queue
    again, and its text, with the tokens that are drawn, is to be read anew."""
    ENDED = "ended"
    """It has finished or failed, or was cancelled."""
    BROKEN = "broken"
    """It has failed because the model computed NaN, and its KV cache must not be kept."""


_NEXT = {
    RowState.QUEUED: {
        RowState.WAITING,
        RowState.FETCHING,
        RowState.PREFILLING,
        RowState.ENDED,
    },
    RowState.WAITING: {RowState.PREFILLING, RowState.ENDED},
    RowState.FETCHING: {RowState.WAITING, RowState.ENDED},
    # What failed sends its rows back to the queue, and so does want of memory.
    RowState.PREFILLING: {
        RowState.FRESH,
        RowState.WAITING,
        RowState.PREEMPTED,
        RowState.ENDED,
        RowState.BROKEN,
    },
    RowState.FRESH: {RowState.DECODING, RowState.PREEMPTED, RowState.ENDED},
    RowState.DECODING: {RowState.PREEMPTED, RowState.ENDED, RowState.BROKEN},
    RowState.PREEMPTED: {RowState.PREFILLING, RowState.ENDED},
    RowState.ENDED: set[RowState](),
    RowState.BROKEN: set[RowState](),
}

# Looked up once: before Python 3.12 a member of an enum takes 0.2 µs, ten times a check.
_WAITING, _PREEMPTED, _FRESH = RowState.WAITING, RowState.PREEMPTED, RowState.FRESH
_QUEUED, _ENDED, _BROKEN = RowState.QUEUED, RowState.ENDED, RowState.BROKEN


class Incident:
    """A work item that failed, shared by the rows that were in it.

    Attributes:
        explained: its cause is known, so it does not count against these rows. Where memory was
            short, there were just too many of them.
    """

    __slots__ = ("explained", "memory", "reason")

    def __init__(self, fault: Fault) -> None:
        self.reason = fault.reason
        self.memory = fault.memory
        self.explained = fault.memory


class Row:
    """One job, and what is decided of it. Its live objects are the runner's.

    Args:
        job: what is asked.
        prompt: the job's prompt as an array; choices of one request share it.

    Attributes:
        number: its place in the order in which turns come, from its turn on.
        admitted: the runner has admitted it already, though it is queued.
        tokens_read: of its prompt or its texts, those that were read for it and were not cached.
        drawn: tokens delivered; changed by `draw` only, as is `length`.
        length: tokens of its text: its prompt and the tokens delivered.
        most_length: the same when its job allows no more, or memory does not.
        beginning: of its prompt.
        checksum: of its prompt.
        incidents: work items that failed while the row was in them. If there are any, it shares no
            slice with other prompts.
        suspect_until: the row is a suspect until its text has so many tokens: a step has failed
            that it was in, and it is not past the place of the fault.
        read: its prompt was read, and the event PromptRead was sent.
        uses: of the cached prompt that was moved to it: how many tokens each use has saved. The
            row's own text inherits them when it is cached.
        reported: how many of its first tokens' activations were sent.
        lookup: finds proposals in its text; None until it was asked for some.
        source: of most use to it, when that was last looked up.
        source_version: what there was to go on from then.
    """

    __slots__ = (
        "admitted",
        "beginning",
        "checksum",
        "drawn",
        "id",
        "incidents",
        "job",
        "length",
        "lookup",
        "most_length",
        "number",
        "prompt",
        "read",
        "reported",
        "source",
        "source_version",
        "state",
        "suspect_until",
        "tokens_read",
        "uses",
    )

    def __init__(self, job: Job, prompt: Tokens) -> None:
        self.job = job
        self.id = job.id
        self.number = 0
        self.prompt = prompt
        self.state = RowState.QUEUED  # changed by `enter` only
        self.admitted = False
        self.tokens_read = 0
        self.drawn: list[int] = []
        self.length = prompt.size
        self.most_length = prompt.size + job.max_tokens
        self.beginning = find_beginning(prompt, job.steering)
        self.checksum = crc32(prompt.data)
        self.incidents: list[Incident] = []
        self.suspect_until = 0
        self.read = False
        self.reported = 0
        self.uses: tuple[int, ...] = ()
        self.lookup: PromptLookup | None = None
        self.source = Source()
        self.source_version: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"row {self.id}"

    def enter(self, state: RowState) -> None:
        """Go on to `state`.

        Raises:
            RuntimeError: it may not follow the row's state.
        """
        self.state = follow(self, self.state, state, _NEXT)

    @property
    def ended(self) -> bool:
        return self.state is _ENDED or self.state is _BROKEN

    @property
    def steered(self) -> bool:
        """Whether an SAE steers it. The runner admits it when it comes and not at its turn: the SAE
        may go meanwhile."""
        return self.job.steering is not None and self.job.steering.attachment > 0

    @property
    def embeds(self) -> bool:
        """Whether its job is texts to embed: it has no prompt, and draws nothing."""
        return bool(self.job.texts)

    @property
    def queued(self) -> bool:
        """Whether it stands in the line."""
        return self.state is _QUEUED

    @property
    def waits(self) -> bool:
        """Whether it has a slot, and its text waits to be read."""
        return self.state is _WAITING or self.state is _PREEMPTED

    @property
    def fresh(self) -> bool:
        """Whether its KV cache lacks the last token of its text, which is its next input."""
        return self.state is _FRESH

    @property
    def suspect(self) -> bool:
        """Whether it is to draw its next tokens alone, since it may have caused a fault."""
        return self.length < self.suspect_until

    @property
    def text(self) -> Tokens:
        """The row's text. A copy, once tokens were delivered."""
        return np.concatenate([self.prompt, as_tokens(self.drawn)]) if self.drawn else self.prompt

    @property
    def held(self) -> int:
        """The number of tokens of its text that the KV cache of a decoding row holds."""
        return self.length - self.fresh

    def draw(self, token: int) -> FinishReason | None:
        """Give the row its next token. Returns why it ends with this one; None if it goes on."""
        self.drawn.append(token)
        self.length += 1
        if token in self.job.end_tokens:
            return "stop"
        return "length" if self.length >= self.most_length else None

    def end_soon(self) -> None:
        """Have the row end with its next token: there is no memory for more of its text."""
        self.most_length = self.length + 1
