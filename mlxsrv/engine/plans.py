"""Plans: the work items of one round, chosen by the scheduler and done by the runner in their
order.

A work item is a frozen Struct of numbers and names: it can be recorded, replayed, and sent to
another process. It names a row by the id of its job, a model by the number that its load was given,
and a cached prompt by the number of its entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from mlxsrv.engine.orders import Attach, Job, Load, Question


class _Item(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One work item. The runner returns an Outcome for it; see `outcomes`.

    Attributes:
        title: what the watchdog calls it.
        model: the number of the model that it concerns; 0: none.
    """

    title: ClassVar[str]
    model: int = 0


# Rows of a model.


class Admit(_Item, frozen=True):
    """Take these jobs: the runner makes a live row of each. Done: Admitted.

    `client` is the number of the client that sent them.
    """

    title = "admitting rows"

    client: int
    jobs: tuple[Job, ...]


class Keep(msgspec.Struct, frozen=True):
    """Keep a row's KV cache, as far as it has seen the first `tokens` of the row's text, as
    `entry`. What it holds behind them is cut off."""

    entry: int
    tokens: int


class FreedRow(msgspec.Struct, frozen=True):
    """A row to free, at whatever stage it is. Its KV cache is dropped unless `keep` is given."""

    row: int
    keep: Keep | None = None


class Release(_Item, frozen=True):
    """Free these rows: those that ended, were cancelled or failed. Done: Kept."""

    title = "freeing rows"

    rows: tuple[FreedRow, ...]


class Rewind(_Item, frozen=True):
    """Drop the KV caches of these rows, which stay: their texts are read anew. Done: None."""

    title = "freeing rows"

    rows: tuple[int, ...]


class Forget(_Item, frozen=True):
    """Drop these cached prompts. `draft`: and what the draft model has read. `spare`: memory is
    short, so free buffers go back to the system. Done: None."""

    title = "freeing memory"

    entries: tuple[int, ...]
    draft: bool = False
    spare: bool = False


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one text that a slice reads.

    Attributes:
        rows: the rows whose text it is. Those after the first share the reading.
        begin, end: the first token to read, and the one behind the last.
        source: the number of the cached prompt with a copy of whose KV cache the reading begins,
            cut to `begin` tokens.
        from_row: the id of the row with a copy of whose KV cache it begins instead, cut alike. If
            neither is given, it begins with an empty KV cache.
        moves: the cached prompt is moved, not copied: it leaves the prompt cache.
        opens: this span is the first of the text.
        keep: a copy of the KV cache is kept after the span.
        joins: the text is read to its end but for the last token, so these rows may be decoded.
            None: there is more to read. Rows that draw no token are not among them.
        scored: the tokens of the first row's prompt are scored.
    """

    rows: tuple[int, ...]
    begin: int
    end: int
    source: int | None = None
    from_row: int | None = None
    moves: bool = False
    opens: bool = False
    keep: Keep | None = None
    joins: tuple[int, ...] | None = None
    scored: bool = False


class Read(_Item, frozen=True):
    """Read a slice of prompts: one span, or several that are all read to their ends in one padded
    pass. Done: PromptsRead. The next Decode has the rows that join."""

    title = "reading prompts"

    spans: tuple[Span, ...]


class RowGroup(msgspec.Struct, frozen=True):
    """Rows that share KV cache arrays.

    Attributes:
        rows: the ids of their jobs, in the order of their slots: the first row has slot 0, and no
            slot between them is free.
        slots: rows that the arrays have room for, those free behind the last included.
        columns: tokens of each row that the arrays have room for, those of the step included.
    """

    rows: tuple[int, ...]
    slots: int
    columns: int


Proposal = int | tuple[int, ...]
"""The tokens that are proposed to a row, behind its next input: so many that the draft model is to
propose; or a guess of the input, and the tokens themselves. 0 or no tokens: nothing."""


def count_proposed(proposal: Proposal) -> int:
    """Tokens that are proposed."""
    return proposal if isinstance(proposal, int) else max(len(proposal) - 1, 0)


def count_fed(proposals: Sequence[Proposal]) -> int:
    """Tokens that each row is fed at most: its input, and what is proposed."""
    return 1 + max(map(count_proposed, proposals), default=0)


class Decode(_Item, frozen=True):
    """One step for all rows that are decoded together, or for a suspect. Done: Decoded.

    Attributes:
        suspect: the step is for this row alone, whose text is read but for the last token, after a
            step that has failed. It is fed that token, and Decoded has the token that it draws. So
            its text is read but for the last token again, and it joins the others when it is read.
        groups: the rows by the KV cache that they share; None: as in the step before. A row may
            change from any group to any other.
        proposals: for each row, in their order, the tokens to verify; empty: the step is a plain
            one. Where the input is guessed wrongly, nothing is verified. If no row is left, the
            step is a plain one, too.
    """

    title = "decoding"

    suspect: int | None = None
    groups: tuple[RowGroup, ...] | None = None
    proposals: tuple[Proposal, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether each row only draws its next token, beside the same rows as before."""
        return not (self.suspect is not None or self.groups or self.proposals)


class ReadDraft(_Item, frozen=True):
    """Have the draft model read `tokens` more of a row's text, behind the first `begin`, which are
    those that it has in common with the text that it has read. Done: DraftRead."""

    title = "reading with the draft model"

    row: int
    begin: int
    tokens: int


# Cached prompts on disk.


class StorePrompts(_Item, frozen=True):
    """Hand these cached prompts to the storage thread, which writes them. Done: HandedOver."""

    title = "storing prompts"

    entries: tuple[int, ...]


class FetchPrompt(_Item, frozen=True):
    """Have the storage thread read what is stored of a row's prompt, to be the cached prompt
    `entry`. Done: None. The order Fetched says what was read, after so many `seconds` at the
    latest."""

    title = "fetching prompts"

    entry: int
    row: int
    seconds: float


class RestorePrompt(_Item, frozen=True):
    """Bring what was read of `entry` into the device's memory: about `limit` bytes of it. Done:
    Restored."""

    title = "restoring prompts"

    entry: int
    limit: int


# Texts to embed.


class TextSpan(msgspec.Struct, frozen=True):
    """Tokens of one text of a job."""

    job: int
    index: int
    begin: int
    end: int


class EmbedSlice(_Item, frozen=True):
    """Read texts, one pass for all: whole ones, or a part of one long text. Done: TextsRead.

    Attributes:
        completes: jobs whose last texts these are. Their vectors are wanted.
    """

    title = "embedding"

    texts: tuple[TextSpan, ...]
    completes: tuple[int, ...] = ()


# Models.


class LoadSlice(_Item, frozen=True):
    """Go on with the load of `model`, reading about so many bytes. Done: LoadStep.

    `order` is given with the first slice.
    """

    title = "loading"

    limit: int
    order: Load | None = None


class AttachSlice(_Item, frozen=True):
    """Go on with the attachment of this number, which is not that of the order: clients number
    theirs each by themselves. Done: AttachStep.

    `order` is given with the first slice.
    """

    title = "attaching an SAE"

    number: int
    order: Attach | None = None


class DetachSAE(_Item, frozen=True):
    """Take the SAE off the model, and stop watching. Rows that it steers stay steered.

    Done: None.
    """

    title = "detaching an SAE"


class WatchFeatures(_Item, frozen=True):
    """Report the activations of these features, and of the `top` highest, from now on. Done:
    Watched."""

    title = "watching features"

    features: tuple[int, ...]
    top: int


class Reset(_Item, frozen=True):
    """Forget all rows, texts and cached prompts of the model, which stays. Done: None."""

    title = "starting a model's rows anew"


class UnloadModel(_Item, frozen=True):
    """Forget the model and what it holds, or give up its load. Done: None."""

    title = "unloading"


class AnswerQuestion(_Item, frozen=True):
    """Answer a question of a client's about the device. Done: DeviceAnswer."""

    title = "answering"

    client: int
    number: int
    question: Question


PlainItem = (
    Admit
    | Release
    | Rewind
    | Forget
    | Read
    | ReadDraft
    | StorePrompts
    | FetchPrompt
    | RestorePrompt
    | EmbedSlice
    | LoadSlice
    | AttachSlice
    | DetachSAE
    | WatchFeatures
    | Reset
    | UnloadModel
    | AnswerQuestion
)
"""Work items that return nothing if they fail. A failed step may return the tokens of the step
before."""

WorkItem = Decode | PlainItem


class RoundPlan(msgspec.Struct, frozen=True):
    """The work items of one round, in order."""

    items: tuple[WorkItem, ...] = ()
