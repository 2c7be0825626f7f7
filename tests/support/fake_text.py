"""The rows of one model that generates text, without the model: where each of them is, what its KV
cache holds, and whether a work may be done at all.

A work that could not be done, or that would give a wrong text, raises IllegalWork. So this is a
strict description of what plans may ask for: see `mlxsrv.engine.plans`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mlxsrv.engine.events import Activations, Likelihood, PromptScored, kv_bytes
from mlxsrv.engine.outcomes import (
    Admitted,
    Decoded,
    Fault,
    Kept,
    KeptPrompt,
    PromptsRead,
    RowFailure,
    TextFacts,
)
from mlxsrv.engine.plans import (
    Admit,
    Decode,
    Forget,
    Keep,
    Read,
    ReadDraft,
    Release,
    Rewind,
    Span,
    count_fed,
    count_proposed,
)
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.engine.scheduling.prompt_index import LEAST, Tokens, common_prefix
from mlxsrv.engine.scheduling.proposers import MOST_UNREAD
from mlxsrv.generation.parameters import Steering
from tests.support.fake_decoders import (
    FakeDecoder,
    FakeEntry,
    FakeGroup,
    FakePartialText,
    FakeRow,
    IllegalWork,
    require,
)
from tests.support.fake_device import FakeDevice, Pass

PREFILLED = -1  # the place of the prompt, before the first token of the answer


class FakeText:
    """Does the work items of one model's rows.

    Args:
        facts: of the model.
        device: what comes of work items.
        max_rows: rows that are read and decoded together, at most.
        prefill_chunk: tokens of a slice, at most.
    """

    def __init__(
        self, facts: TextFacts, device: FakeDevice, *, max_rows: int, prefill_chunk: int
    ) -> None:
        self._facts = facts
        self._device = device
        self._max_rows = max_rows if facts.batched else 1
        self._chunk = prefill_chunk
        self._rows: dict[int, FakeRow] = {}
        self._texts: dict[int, FakePartialText] = {}  # by each of its rows
        self._decoder = FakeDecoder(facts)
        self._steps = FakeSteps(facts, device)
        self._kept: dict[int, FakeEntry] = {}
        self._unkept: set[int] = set()  # entries that could not be kept
        self._moved: set[int] = set()  # entries that a row has taken
        self._last_entry = 0
        self._round = 0

    @property
    def watched(self) -> bool:
        return self._steps.watched

    @watched.setter
    def watched(self, active: bool) -> None:
        self._steps.watched = active

    @property
    def empty(self) -> bool:
        """Whether no row is left."""
        return not (self._rows or self._texts or self._decoder.all_rows)

    @property
    def kept_bytes(self) -> int:
        return sum(entry.bytes for entry in self._kept.values())

    @property
    def bytes(self) -> int:
        """Bytes that all KV caches take."""
        return self._decoder.bytes + self._reading_bytes + self.spare_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of kept prompts, and of what the draft has read."""
        return self.kept_bytes + self._steps.draft_bytes

    @property
    def _reading_bytes(self) -> int:
        texts = {id(text): text for text in self._texts.values()}
        return sum(self._decoder.measure(text.done) for text in texts.values())

    def end_round(self) -> None:
        """Check what must hold between rounds."""
        old = [entry.bytes for entry in self._kept.values() if entry.round < self._round]
        require(sum(old) <= self._facts.prompt_cache_bytes, "kept prompts take", sum(old), "bytes")
        self._round += 1
        self._decoder.lost = False

    def lacks_rows(self, work: Decode) -> bool:
        """Whether the rows of the step were lost in the round's release, so that it fails."""
        return work.suspect is None and self._decoder.lost

    # Rows come and go.

    def admit(self, work: Admit) -> Admitted:
        failures: list[RowFailure] = []
        for job in work.jobs:
            require(job.id not in self._rows, "row", job.id, "is there already")
            self._rows[job.id] = row = FakeRow(job)
            if (failure := self._device.refuse(job)) is not None:
                row.over = True  # work items of the same plan may name it
                failures.append(failure)
        return Admitted(tuple(failures))

    def release(self, work: Release, fault: Fault | None) -> Kept | None:
        ids = [leave.row for leave in work.rows]
        self._require_rows(ids)
        kept: list[KeptPrompt] = []
        for leave in work.rows:
            kept += self._snapshot(self._rows[leave.row], leave.keep)
        if fault is not None:
            self._lose_beside(ids)
            for entry in kept:
                del self._kept[entry.entry]
                self._unkept.add(entry.entry)
        self._take_out(ids)
        for row_id in ids:
            del self._rows[row_id]
        return None if fault is not None else Kept(tuple(kept))

    def rewind(self, work: Rewind) -> None:
        self._require_rows(work.rows)
        self._take_out(work.rows)
        for row_id in work.rows:
            self._rows[row_id].lose()

    def _require_rows(self, ids: Sequence[int]) -> None:
        require(len({*ids}) == len(ids), "a row twice:", ids)
        for row_id in ids:
            require(row_id in self._rows, "row", row_id, "is not there")

    def _snapshot(self, row: FakeRow, keep: Keep | None) -> list[KeptPrompt]:
        """Keep the KV cache of a row that leaves."""
        if keep is None:
            return []
        text = self._texts.get(row.id)
        if text is not None:
            held = text.done
        elif row in self._decoder.all_rows:
            held = row.held
        else:
            require(row.lost, "row", row.id, "is to be kept and was never read")
            return []
        return self._keep(keep, row.text, row.job.steering, held)

    def _take_out(self, ids: Iterable[int]) -> None:
        gone = {*ids}
        for row_id in gone:
            if (text := self._texts.pop(row_id, None)) is not None:
                text.rows = [row for row in text.rows if row.id != row_id]
        self._decoder.remove(gone)

    def _lose_beside(self, ids: Sequence[int]) -> None:
        """A release has failed: drop the KV caches of the decoder if its rows were in it."""
        if any(row.id in ids for row in self._decoder.rows):
            self._decoder.abandon()
            self._decoder.lost = True

    # Kept prompts.

    def forget(self, work: Forget) -> None:
        require(work.entries or work.draft or work.spare, "there is nothing to forget")
        if work.draft:
            self._steps.forget_draft()
        for entry in work.entries:
            require(entry in self._kept or entry in self._moved, "entry", entry, "is not there")
            self._kept.pop(entry, None)
            self._moved.discard(entry)

    def _keep(
        self, keep: Keep, text: Tokens, steering: Steering | None, held: int
    ) -> list[KeptPrompt]:
        require(keep.entry > self._last_entry, "entry", keep.entry, "was given before")
        require(LEAST <= keep.tokens <= held, keep.tokens, "tokens of", held, "are to be kept")
        self._last_entry = keep.entry
        cut = keep.tokens < held
        if not self._device.keeps(keep.entry) or (cut and not self._facts.cuts_at(held)):
            self._unkept.add(keep.entry)
            return []
        nbytes, cuts = self._facts.kv_bytes(keep.tokens), self._facts.cuts_at(keep.tokens)
        tokens = text[: keep.tokens]
        self._kept[keep.entry] = FakeEntry(tokens, steering, nbytes, cuts, self._round)
        return [KeptPrompt(keep.entry, nbytes, cuts)]

    # Reading.

    def lacks_sources(self, work: Read) -> bool:
        """Whether a span begins with a prompt that a work before it was to keep, and could not; or
        with what a row held that has lost it in this round."""
        return any(
            span.source in self._unkept
            or (span.from_row is not None and self._has_lost(span.from_row))
            for span in work.spans
        )

    def _has_lost(self, row_id: int) -> bool:
        row = self._rows.get(row_id)
        return row is not None and row.lost and self._count_held(row) is None

    def read(self, work: Read, fault: Fault | None) -> PromptsRead | None:
        self._check_slice(work.spans)
        rows = [row_id for span in work.spans for row_id in span.rows]
        self._require_rows(rows)
        if self.lacks_sources(work):
            self._drop_texts([self._texts[row_id] for row_id in rows if row_id in self._texts])
            return None
        texts = [self._find_text(span) for span in work.spans]
        if fault is not None:
            self._drop_texts(texts)
            return None
        kept: list[KeptPrompt] = []
        ready: list[FakeRow] = []
        broken: list[int] = []
        for text, span in zip(texts, work.spans, strict=True):
            text.done = span.end
            head = text.rows[0]
            if span.scored and self._device.breaks(head.job, PREFILLED):
                broken += span.rows
            elif span.keep is not None:
                require(span.keep.tokens == span.end, "a span keeps what it has read")
                kept += self._keep(span.keep, text.tokens, text.steering, span.end)
            ready += [row for row in text.rows if row.id in (span.joins or ())]
        over = [t for t, s in zip(texts, work.spans, strict=True) if s.joins is not None or broken]
        self._drop_texts(over, lost=bool(broken))
        for row_id in broken:
            self._rows[row_id].over = True
        if ready and not broken:
            self._decoder.ready.append(FakeGroup(ready))
        self._check_rows()
        return PromptsRead(
            tuple(kept),
            None if broken else self._score(work.spans[0]),
            tuple(broken),
            tuple(self._look_at(work.spans)),
        )

    def passes(self, spans: Sequence[Span]) -> list[Pass]:
        """The pass of a slice."""
        return [
            Pass(
                len(spans),
                max(span.end - span.begin for span in spans),
                max(span.begin for span in spans),
            )
        ]

    def _check_slice(self, spans: Sequence[Span]) -> None:
        require(spans, "a slice without spans")
        tokens = max(span.end - span.begin for span in spans) * len(spans)
        require(tokens <= self._chunk, tokens, "tokens of a slice, padding included")
        if len(spans) > 1:
            require(self._facts.batched, "prompts cannot be read together")
            for span in spans:
                require(span.joins is not None and span.end > span.begin, "a part beside others")
                require(not span.scored, "a prompt that is scored beside others")
            if not self._facts.pads:
                require(len({span.end - span.begin for span in spans}) == 1, "padding")

    def _find_text(self, span: Span) -> FakePartialText:
        rows = [self._rows[row_id] for row_id in span.rows]
        text = self._open(span, rows) if span.opens else self._texts.get(rows[0].id)
        if text is None:
            raise IllegalWork(f"row {rows[0].id} is not being read")
        require(text.rows == rows, "the text belongs to", [row.id for row in text.rows])
        require(text.done == span.begin, text.done, "tokens are read, not", span.begin)
        last = text.tokens.size - 1
        require(span.begin <= span.end <= last, "the span ends at", span.end, "of", last)
        tried = span.opens and rows[0].lost
        require(span.begin < span.end or span.joins is not None or tried, "a span without tokens")
        require(span.keep is None or span.keep.tokens == span.end, "what is read is kept")
        if span.joins is not None:
            decoded = tuple(row.id for row in rows if row.job.max_tokens > 0)
            require(span.end == last, "rows join before their text is read")
            require(span.joins == decoded, span.joins, "join, not", decoded)
        return text

    def _open(self, span: Span, rows: list[FakeRow]) -> FakePartialText:
        head = rows[0]
        for row in rows:
            require(row.id not in self._texts, "row", row.id, "is being read already")
            require(row not in self._decoder.all_rows, row.id, "was read already")
            require(row.job.steering == head.job.steering, "two steerings for one text")
            require(row is head or np.array_equal(row.text, head.text), "two texts in one span")
            require(row is head or row.job.scores is None, "row", row.id, "is not scored")
        again = bool(head.drawn) or head.lost
        require(span.scored == (head.job.scores is not None) or again, "row", head.id, "is scored")
        begins = span.source is not None or span.from_row is not None
        if not begins:
            require(span.begin == 0, "a text begins at", span.begin)
        else:
            require(not span.scored, "a prompt that is scored begins with a kept one")
            require(again or not self.watched, "a prompt that is watched begins with a kept one")
        require(span.source is None or span.from_row is None, "two sources")
        if span.source is not None:
            self._check_source(span, head)
        elif span.from_row is not None:
            self._check_from_row(span, head)
        text = FakePartialText(rows, span.begin)
        self._texts |= {row.id: text for row in rows}
        return text

    def _check_source(self, span: Span, row: FakeRow) -> None:
        assert span.source is not None
        require(span.source in self._kept, "entry", span.source, "is not there")
        entry = self._kept[span.source]
        require(entry.tokens.size >= span.begin, "entry", span.source, "is shorter")
        require(entry.cuts or entry.tokens.size == span.begin, span.source, "cannot be cut")
        require(entry.steering == row.job.steering, "the kept prompt is steered in another way")
        same = np.array_equal(entry.tokens[: span.begin], row.text[: span.begin])
        require(same, "the kept prompt is another text")
        if span.moves:
            del self._kept[span.source]
            self._moved.add(span.source)

    def _check_from_row(self, span: Span, row: FakeRow) -> None:
        """A row that runs, or whose text is half read, has what a text begins with."""
        require(self._facts.cuts, "a copy of a row is begun with that cannot be cut back")
        from_row = None if span.from_row is None else self._rows.get(span.from_row)
        if from_row is None or from_row is row:
            raise IllegalWork(f"row {span.from_row} cannot be copied")
        held = self._count_held(from_row)
        if held is None:
            raise IllegalWork(f"row {span.from_row} has no KV cache to copy")
        require(LEAST <= span.begin <= held, span.begin, "tokens of", held, "are copied")
        require(from_row.job.steering == row.job.steering, "the row is steered in another way")
        same = np.array_equal(from_row.text[: span.begin], row.text[: span.begin])
        require(same, "the row has another text")

    def _count_held(self, row: FakeRow) -> int | None:
        """Return how many tokens of its text the row's KV cache holds; None if it has none."""
        if (text := self._texts.get(row.id)) is not None:
            return text.done
        return row.held if row in self._decoder.all_rows else None

    def _drop_texts(self, texts: Iterable[FakePartialText], *, lost: bool = True) -> None:
        for text in texts:
            for row in text.rows:
                del self._texts[row.id]
                if lost:
                    row.lose()

    def _score(self, span: Span) -> PromptScored | None:
        if not span.scored or span.joins is None:
            return None
        job = self._rows[span.rows[0]].job
        return PromptScored(job.id, (Likelihood(None),) * len(job.prompt))

    def _look_at(self, spans: Sequence[Span]) -> Iterator[Activations]:
        for span in spans if self.watched else ():
            for row_id in span.rows:
                for position in range(span.begin, span.end):
                    yield Activations(row_id, position, ())

    # Decoding.

    def decode(self, work: Decode, fault: Fault | None, *, reported: bool) -> Decoded:
        """`told`: a step that fails has told the tokens of the step before."""
        if self.lacks_rows(work):
            return Decoded()
        if work.suspect is not None:
            return self._try(work.suspect, fault)
        decoder = self._decoder
        if work.groups is None:
            require(not decoder.changed, "rows have changed")
        else:
            self._require_rows([row_id for group in work.groups for row_id in group.rows])
            decoder.arrange(work.groups)
        decoder.check_room(work)
        rows = decoder.rows
        require(rows, "a step without rows")
        for row in rows:
            require(not row.over, "row", row.id, "is over")
        self._check_rows()
        decoder.changed = False
        done = Decoded() if fault is not None and not reported else self._steps.run(work, decoder)
        if fault is not None:
            decoder.abandon()
            if work.proposals:
                self._steps.forget_draft()
        return done

    def _try(self, row_id: int, fault: Fault | None) -> Decoded:
        """A step of a suspect, whose text is read."""
        text = self._texts.get(row_id)
        if text is None or len(text.rows) > 1:
            raise IllegalWork(f"the text of row {row_id} is not there for it alone")
        [row] = text.rows
        require(row.lost and not row.over, "row", row_id, "is no suspect, or is over")
        require(text.done == row.length - 1, text.done, "tokens are read of", row.length)
        if fault is not None:
            self._drop_texts([text])
            return Decoded()
        done = self._steps.draw_alone(row)
        text.done, text.tokens = text.done + 1, row.text
        return done

    def decoded(self, work: Decode) -> list[FakeRow]:
        """The rows of a step, before it is done or behind it."""
        if work.suspect is not None:
            return [self._rows[work.suspect]]
        if work.groups is None:
            return self._decoder.rows
        return [self._rows[row_id] for group in work.groups for row_id in group.rows]

    def passes_of_step(self, work: Decode) -> list[Pass]:
        """The passes of a step that was just done, or would be."""
        if work.suspect is not None:
            return [Pass(1, 1, self._rows[work.suspect].length)]
        tokens = count_fed(work.proposals)
        passes = [
            Pass(len(group.rows), tokens, max(row.held for row in group.rows))
            for group in self._decoder.groups
        ]
        if not self._facts.shares or len(passes) < 2:
            return passes
        rows = sum(each.rows for each in passes)
        return [Pass(rows, tokens, sum(each.rows * each.held for each in passes) // rows)]

    def read_draft(self, work: ReadDraft, fault: Fault | None) -> None:
        self._require_rows([work.row])
        self._steps.read_draft(work, self._rows[work.row], fault)

    def _check_rows(self) -> None:
        rows = [*self._texts, *(row.id for row in self._decoder.all_rows)]
        require(len({*rows}) == len(rows), "a row is in two places:", rows)
        live = [row_id for row_id in rows if not self._rows[row_id].over]
        require(len(live) <= self._max_rows, len(live), "rows at once")


class FakeSteps:
    """Draws the tokens of rows, and checks what is proposed to them.

    Args:
        facts: of the model.
        device: what comes of work items.

    Attributes:
        watched: the activations of each token are looked at.
    """

    def __init__(self, facts: TextFacts, device: FakeDevice) -> None:
        self.watched = False
        self._facts = facts
        self._device = device
        self._draft: tuple[int, Tokens] | None = None  # the row that it follows, and what it read
        self._draft_room = 0  # tokens that its KV cache has had at most

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft's KV cache."""
        room = -(-self._draft_room // STEP) * STEP
        return kv_bytes(self._facts.draft_costs, room)

    def run(self, work: Decode, decoder: FakeDecoder) -> Decoded:
        """One step of the decoder."""
        if not work.proposals:
            return self._step(decoder)
        rows = decoder.rows
        require(
            self._facts.shares or len(decoder.groups) == 1, "proposals to rows in several passes"
        )
        require(len(work.proposals) == len(rows), "proposals to other rows")
        require(count_fed(work.proposals) > 1, "no proposals")
        accepted: dict[int, int] = {}
        for row, proposal in zip(rows, work.proposals, strict=True):
            self._require_proposable(row, count_proposed(proposal))
            if isinstance(proposal, int):
                self._require_draft(row, alone=len(rows) == 1)
                held: int | None = self._device.accept(row.job, len(row.drawn), proposal)
            else:
                held = self._verify(row, proposal)
            accepted |= {} if held is None else {row.id: held}
        if not accepted:
            return self._step(decoder)
        lengths = {row.id: row.length for row in rows}
        done = self._check(rows, accepted)
        for row, proposal in zip(rows, work.proposals, strict=True):
            if isinstance(proposal, int) and row.id not in done.broken:
                end = lengths[row.id] + proposal
                self._draft = row.id, row.text[: min(end, row.length)]
                self._draft_room = max(self._draft_room, end)
        return done

    def forget_draft(self) -> None:
        self._draft, self._draft_room = None, 0

    def _step(self, decoder: FakeDecoder) -> Decoded:
        rows = decoder.rows
        activations = tuple(Activations(*place, ()) for place in decoder.looked)
        tokens: list[tuple[int, int]] = []
        broken: list[int] = []
        failures: list[RowFailure] = []
        for row in rows:
            if row.fresh:
                row.fresh = False
            elif self._device.breaks(row.job, len(row.drawn)):
                row.over = True
                broken.append(row.id)
            else:
                tokens.append((row.id, self._tell(row, failures)))
        decoder.looked = [(row.id, row.held - 1) for row in rows] if self.watched else []
        return Decoded(
            tokens=tuple(tokens),
            likelihoods=_find_likelihoods(rows, tokens),
            broken=tuple(broken),
            failures=tuple(failures),
            bound=self._find_bound(rows),
            activations=activations,
        )

    def draw_alone(self, row: FakeRow) -> Decoded:
        """One step of a suspect, which stays fresh."""
        if self._device.breaks(row.job, len(row.drawn)):
            row.over = True
            return Decoded(broken=(row.id,))
        failures: list[RowFailure] = []
        activations = (Activations(row.id, row.length - 1, ()),) if self.watched else ()
        tokens = ((row.id, self._tell(row, failures)),)
        return Decoded(
            tokens=tokens,
            likelihoods=_find_likelihoods([row], tokens),
            failures=tuple(failures),
            activations=activations,
        )

    def _tell(self, row: FakeRow, failures: list[RowFailure]) -> int:
        """Give the row its next token."""
        place = len(row.drawn)
        token = self._device.draw(row.job, place)
        row.drawn.append(token)
        row.over |= token in row.job.end_tokens or len(row.drawn) >= row.job.max_tokens
        if (failure := self._device.stop(row.job, place)) is not None:
            failures.append(failure)
            row.over = True
        return token

    def _find_bound(self, rows: Iterable[FakeRow]) -> tuple[int, ...]:
        """Rows whose constraint binds their next token: not the one that is drawn already."""
        return tuple(row.id for row in rows if self._device.binds(row.job, len(row.drawn)))

    # Proposals.

    def _require_draft(self, row: FakeRow, *, alone: bool) -> None:
        """Check that the draft model can propose to a row."""
        require(self._facts.drafts, "there is no draft model")
        require(alone, "a draft model proposes to several rows")
        require(self._draft is not None and self._draft[0] == row.id, "the draft follows another")
        assert self._draft is not None
        read = self._draft[1]
        require(common_prefix(read, row.text) == read.size, "the draft has read another text")
        require(row.length - read.size <= MOST_UNREAD, "the draft lacks much of the text")

    def _verify(self, row: FakeRow, proposal: tuple[int, ...]) -> int | None:
        """Return how many of the tokens hold; None if the row's input is guessed wrongly, or if
        there are none."""
        require(self._facts.lookup, "nothing is looked up in this model")
        require(len(proposal) != 1, "a guess of an input, and no proposal")
        tokens = [self._device.draw(row.job, len(row.drawn) + i) for i in range(len(proposal))]
        if proposal[:1] != tuple(tokens[:1]) or not proposal:
            return None
        pairs = zip(proposal[1:], tokens[1:], strict=True)
        return (*(proposed == drawn for proposed, drawn in pairs), False).index(False)

    def _require_proposable(self, row: FakeRow, count: int) -> None:
        """Check that so many tokens may be proposed to a row, or to others in the same pass."""
        require(not row.fresh, "proposals to a fresh row")
        require(not self.watched, "proposals while each token is watched")
        require(row.job.logprobs is None and not row.job.sampling.changes_logits, "each token asks")
        require(not self._device.binds(row.job, len(row.drawn)), "the constraint binds a token")
        require(not count or len(row.drawn) + 1 + count <= row.job.max_tokens, count, "proposals")

    def _check(self, rows: Sequence[FakeRow], accepted: dict[int, int]) -> Decoded:
        """A pass that checks proposals, so many of which hold."""
        tokens: list[tuple[int, int]] = []
        broken: list[int] = []
        failures: list[RowFailure] = []
        following: dict[int, int] = {}
        for row in rows:
            if self._device.breaks(row.job, len(row.drawn)):
                row.over = True
                broken.append(row.id)
                continue
            for left in range(accepted.get(row.id, 0), -1, -1):
                failed = len(failures)
                tokens.append((row.id, self._tell(row, failures)))
                if len(failures) > failed or self._find_bound([row]):
                    break
                if left == 0:
                    following[row.id] = self._device.draw(row.job, len(row.drawn))
        return Decoded(
            tokens=tuple(tokens),
            broken=tuple(broken),
            failures=tuple(failures),
            bound=self._find_bound(rows),
            following=following,
            accepted={row_id: n for row_id, n in accepted.items() if row_id not in broken},
        )

    def read_draft(self, work: ReadDraft, row: FakeRow, fault: Fault | None) -> None:
        require(self._facts.drafts, "there is no draft model")
        text = row.text
        known = 0 if self._draft is None else common_prefix(self._draft[1], text)
        require(work.begin <= known, "the draft has", known, "tokens of the text")
        require(work.tokens > 0, "the draft reads nothing")
        require(work.begin + work.tokens <= row.length, "the draft reads beyond the text")
        self._draft = None if fault is not None else (row.id, text[: work.begin + work.tokens])
        read = work.begin + work.tokens
        room = max(self._draft_room, read) if work.begin else read
        self._draft_room = room if fault is None else 0


def _find_likelihoods(
    rows: Iterable[FakeRow], tokens: Sequence[tuple[int, int]]
) -> dict[int, Likelihood]:
    reported = {row_id for row_id, _ in tokens}
    asking = (row.id for row in rows if row.id in reported and row.job.logprobs is not None)
    return dict.fromkeys(asking, Likelihood(-1.0))
