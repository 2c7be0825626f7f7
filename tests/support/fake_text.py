"""The rows of one model that generates text, without the model: where each of them is, what its KV
cache holds, and whether a work may be done at all.

A work that could not be done, or that would give a wrong text, raises IllegalWork. So this is a
strict description of what plans may ask for: see `mlxsrv.engine.plans`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mlxsrv.engine.events import Activations, Likelihood, PromptScored
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
    RowGroup,
    Span,
)
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.engine.scheduling.prompt_index import LEAST, Tokens, common_prefix
from mlxsrv.engine.scheduling.speculation_controller import MOST_UNREAD
from mlxsrv.generation.parameters import Steering
from tests.support.fake_device import FakeDevice, Pass
from tests.support.fake_rows import FakeEntry, FakePartialText, FakeRow, IllegalWork, require

PREFILLED = -1  # the place of the prompt, before the first token of the answer


_Group = list[FakeRow]


class FakeText:
    """Does the works of one model's rows.

    Args:
        facts: of the model.
        device: what comes of works.
        max_rows: rows that are read and decoded together, at most.
        prefill_chunk: tokens of a slice, at most.
    """

    def __init__(
        self, facts: TextFacts, device: FakeDevice, *, max_rows: int, prefill_chunk: int
    ) -> None:
        self.watched = False
        self._facts = facts
        self._device = device
        self._max_rows = max_rows if facts.batched else 1
        self._chunk = prefill_chunk
        self._rows: dict[int, FakeRow] = {}
        self._texts: dict[int, FakePartialText] = {}  # by each of its rows
        self._ready: list[_Group] = []
        self._decoders: dict[bool, list[_Group]] = {False: [], True: []}  # True: the trial's
        self._rooms: dict[bool, Sequence[RowGroup]] = {False: (), True: ()}  # of each group
        self._peak = 0
        self._changed = {False: False, True: False}  # rows have come or gone since the last step
        self._looked: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        self._kept: dict[int, FakeEntry] = {}
        self._unkept: set[int] = set()  # entries that could not be kept
        self._moved: set[int] = set()  # entries that a row has taken
        self._last_entry = 0
        self._draft: tuple[int, Tokens] | None = None  # the row that it follows, and what it read
        self._round = 0
        self._abandoned: set[bool] = set()  # decoders that a release of this round has broken

    @property
    def empty(self) -> bool:
        """Whether no row is left."""
        places = (self._rows, self._texts, self._ready, *self._decoders.values())
        return not any(places)

    @property
    def kept_bytes(self) -> int:
        return sum(entry.bytes for entry in self._kept.values())

    @property
    def bytes(self) -> int:
        """Bytes that all KV caches take."""
        texts = {id(text): text for text in self._texts.values()}
        reading = sum(self._measure(text.done) for text in texts.values())
        return self._array_bytes() + self._ready_bytes() + reading + self.kept_bytes

    def take_peak(self) -> int:
        """Bytes that were taken while the last work was done."""
        peak, self._peak = max(self._peak, self.bytes), 0
        return peak

    def _array_bytes(self) -> int:
        """Bytes of the arrays that have rows."""
        found = 0
        for trial, groups in self._decoders.items():
            there = {row.id for group in groups for row in group}
            rooms = [room for room in self._rooms[trial] if not there.isdisjoint(room.rows)]
            found += sum(map(self._measure_room, rooms))
        return found

    def _ready_bytes(self) -> int:
        """Bytes of texts that are read and not in arrays yet; several rows may have one text."""
        texts = {row.text.tobytes(): row.length - 1 for group in self._ready for row in group}
        return sum(map(self._measure, texts.values()))

    def _measure(self, tokens: int) -> int:
        return self._facts.kv_bytes(-(-tokens // STEP) * STEP)

    def _measure_room(self, room: RowGroup) -> int:
        return room.slots * self._facts.kv_bytes(room.columns)

    def end_round(self) -> None:
        """Check what must hold between rounds."""
        old = [entry.bytes for entry in self._kept.values() if entry.round < self._round]
        require(sum(old) <= self._facts.prompt_cache_bytes, "kept prompts take", sum(old), "bytes")
        self._round += 1
        self._abandoned.clear()

    def lacks_rows(self, work: Decode) -> bool:
        """Whether the rows of the step were lost in the round's release, so that it fails."""
        return work.trial in self._abandoned

    # Rows come and go.

    def admit(self, work: Admit) -> Admitted:
        failures: list[RowFailure] = []
        for job in work.jobs:
            require(job.id not in self._rows, "row", job.id, "is there already")
            self._rows[job.id] = row = FakeRow(job)
            if (failure := self._device.refuse(job)) is not None:
                row.over = True  # works of the same plan may name it
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
        elif any(row in group for group in self._groups()):
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
        self._ready = _without(self._ready, gone)
        for trial, groups in self._decoders.items():
            self._decoders[trial] = _without(groups, gone)
            if sum(map(len, groups)) != sum(map(len, self._decoders[trial])):
                self._changed[trial] = True

    def _lose_beside(self, ids: Sequence[int]) -> None:
        """A release has failed: drop the KV caches of the decoders that its rows were in."""
        gone = {*ids}
        for trial, groups in self._decoders.items():
            if any(row.id in gone for group in groups for row in group):
                self._abandon(trial)
                self._abandoned.add(trial)

    def _groups(self) -> Iterator[_Group]:
        yield from self._ready
        for groups in self._decoders.values():
            yield from groups

    # Kept prompts.

    def forget(self, work: Forget) -> None:
        require(work.entries or work.spare, "there is nothing to forget")
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
            span.source in self._unkept or (span.lender is not None and self._has_lost(span.lender))
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
        ready: _Group = []
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
            self._ready.append(ready)
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
        require(span.begin < span.end or span.joins is not None, "a span without tokens")
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
            require(not any(row in group for group in self._groups()), row.id, "was read already")
            require(row.job.steering == head.job.steering, "two steerings for one text")
            require(row is head or np.array_equal(row.text, head.text), "two texts in one span")
            require(row is head or row.job.scores is None, "row", row.id, "is not scored")
        again = bool(head.drawn) or head.lost
        require(span.scored == (head.job.scores is not None) or again, "row", head.id, "is scored")
        begins = span.source is not None or span.lender is not None
        if not begins:
            require(span.begin == 0, "a text begins at", span.begin)
        else:
            require(not span.scored, "a prompt that is scored begins with a kept one")
            require(again or not self.watched, "a prompt that is watched begins with a kept one")
        require(span.source is None or span.lender is None, "two sources")
        if span.source is not None:
            self._check_source(span, head)
        elif span.lender is not None:
            self._check_lender(span, head)
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

    def _check_lender(self, span: Span, row: FakeRow) -> None:
        """A row that runs, or whose text is half read, has what a text begins with."""
        require(self._facts.cuts, "a row lends what cannot be cut back")
        lender = None if span.lender is None else self._rows.get(span.lender)
        if lender is None or lender is row:
            raise IllegalWork(f"row {span.lender} cannot lend")
        held = self._count_held(lender)
        if held is None:
            raise IllegalWork(f"row {span.lender} has no KV cache to lend")
        require(LEAST <= span.begin <= held, span.begin, "tokens of", held, "are lent")
        require(lender.job.steering == row.job.steering, "the row is steered in another way")
        same = np.array_equal(lender.text[: span.begin], row.text[: span.begin])
        require(same, "the row has another text")

    def _count_held(self, row: FakeRow) -> int | None:
        """Return how many tokens of its text the row's KV cache holds; None if it has none."""
        if (text := self._texts.get(row.id)) is not None:
            return text.done
        groups = (*self._ready, *self._decoders[False])
        return row.held if any(row in group for group in groups) else None

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

    def decode(self, work: Decode, fault: Fault | None, *, told: bool) -> Decoded:
        """`told`: a step that fails has told the tokens of the step before."""
        if self.lacks_rows(work):
            return Decoded()
        if work.groups is None:
            require(not self._changed[work.trial], "rows have changed")
        else:
            self._arrange(work.trial, work.groups)
        self._check_room(work)
        rows = [row for group in self._decoders[work.trial] for row in group]
        require(rows, "a step without rows")
        require(len(rows) == 1 or not work.trial, "several rows on trial")
        for row in rows:
            require(not row.over, "row", row.id, "is over")
        self._check_rows()
        self._changed[work.trial] = False
        done = Decoded()
        if fault is None or told:
            if work.proposals:
                done = self._run_round(rows, work)
            elif work.guesses:
                done = self._run_guesses(rows, work)
            else:
                done = self._step(rows, trial=work.trial)
        if fault is not None:
            self._abandon(work.trial)
            if work.proposals:
                self._draft = None
        return done

    def decoded(self, work: Decode) -> list[FakeRow]:
        """The rows of a step, before it is done or behind it."""
        if work.groups is None:
            return [row for group in self._decoders[work.trial] for row in group]
        return [self._rows[row_id] for group in work.groups for row_id in group.rows]

    def passes_of_step(self, work: Decode) -> list[Pass]:
        """The passes of a step that was just done, or would be."""
        guessed = max(map(len, work.guesses), default=0)
        tokens = max(1 + sum(work.proposals), guessed)
        return [
            Pass(len(group), tokens, max(row.held for row in group))
            for group in self._decoders[work.trial]
        ]

    def _check_room(self, work: Decode) -> None:
        """Check that the groups have room for what the step writes."""
        tokens = max(1 + sum(work.proposals), *map(len, work.guesses), 1)
        groups, rooms = self._decoders[work.trial], self._rooms[work.trial]
        for group, room in zip(groups, rooms, strict=True):
            written = max(row.held for row in group) + tokens
            require(written <= room.columns, written, "tokens of a row in", room.columns)

    def _arrange(self, trial: bool, groups: Sequence[RowGroup]) -> None:
        """Have the rows of a decoder be these."""
        wanted = [row_id for group in groups for row_id in group.rows]
        for each in groups:
            require(len(each.rows) <= each.slots, len(each.rows), "rows in", each.slots, "slots")
        self._require_rows(wanted)
        self._note_peak(trial, groups)
        self._rooms[trial] = groups
        there = self._decoders[trial]
        other = self._decoders[not trial]
        coming = [g for g in [*self._ready, *other] if not {*wanted}.isdisjoint(_ids(g))]
        left = [*there, *coming]
        merged = [_merge(group.rows, left) for group in groups]
        require(not left, "rows are left out:", [*map(_ids, left)])
        self._ready = [group for group in self._ready if group not in coming]
        if any(group in coming for group in other):
            require(not trial, "rows that are decoded go on trial")
            require(len(other) == 1, "a part of a decoder joins another")
            self._decoders[not trial] = []
            self._looked[trial] += self._looked[not trial]
        self._decoders[trial] = merged

    def _note_peak(self, trial: bool, groups: Sequence[RowGroup]) -> None:
        """Note what is taken while arrays become these: the first of those whose rows come together
        grow or shrink, the others go when their rows are copied. The KV caches of rows that were
        read go layer by layer, as they are copied."""
        old = [*self._rooms[trial], *self._rooms[not trial]]
        there = {row.id for group in self._groups() for row in group}
        taken = 0
        for group in groups:
            live = {*group.rows} & there
            parts = [room for room in old if not live.isdisjoint(room.rows)]
            taken += self._measure_room(group) + sum(map(self._measure_room, parts[1:]))
        others = self.bytes - self._array_bytes() - self._ready_bytes()
        self._peak = max(self._peak, taken + others)

    def _step(self, rows: Sequence[FakeRow], *, trial: bool) -> Decoded:
        activations = tuple(Activations(*place, ()) for place in self._looked[trial])
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
        looked = [(row.id, row.held - 1) for row in rows] if self.watched else []
        self._looked[trial] = looked
        return Decoded(
            tokens=tuple(tokens),
            likelihoods=self._find_likelihoods(tokens),
            broken=tuple(broken),
            failures=tuple(failures),
            bound=self._find_bound(rows),
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

    def _find_likelihoods(self, tokens: Sequence[tuple[int, int]]) -> dict[int, Likelihood]:
        asking = (row_id for row_id, _ in tokens if self._rows[row_id].job.logprobs is not None)
        return dict.fromkeys(asking, Likelihood(-1.0))

    def _find_bound(self, rows: Iterable[FakeRow]) -> tuple[int, ...]:
        """Rows whose constraint binds their next token: not the one that is drawn already."""
        return tuple(row.id for row in rows if self._device.binds(row.job, len(row.drawn)))

    def _abandon(self, trial: bool) -> None:
        for group in self._decoders[trial]:
            for row in group:
                row.lose()
        self._decoders[trial] = []
        self._looked[trial] = []

    def _check_rows(self) -> None:
        rows = [*self._texts, *(row.id for group in self._groups() for row in group)]
        require(len({*rows}) == len(rows), "a row is in two places:", rows)
        live = [row_id for row_id in rows if not self._rows[row_id].over]
        require(len(live) <= self._max_rows, len(live), "rows at once")

    # A draft model.

    def _run_round(self, rows: Sequence[FakeRow], work: Decode) -> Decoded:
        [count], [row] = work.proposals, rows
        require(self._facts.drafts, "there is no draft model")
        self._require_proposable(row, count)
        require(count > 0, "no proposals")
        require(self._draft is not None and self._draft[0] == row.id, "the draft follows another")
        assert self._draft is not None
        read = self._draft[1]
        require(common_prefix(read, row.text) == read.size, "the draft has read another text")
        require(row.length - read.size <= MOST_UNREAD, "the draft lacks much of the text")
        length = row.length
        accepted = {row.id: self._device.accept(row.job, len(row.drawn), count)}
        done = self._check(rows, accepted)
        if row.id not in done.broken:
            self._draft = row.id, row.text[: min(length + count, row.length)]
        return done

    def _run_guesses(self, rows: Sequence[FakeRow], work: Decode) -> Decoded:
        require(self._facts.lookup, "nothing is looked up in this model")
        require(not work.trial, "proposals to a row on trial")
        require(len(self._decoders[False]) == 1, "proposals to rows in several passes")
        require(len(work.guesses) == len(rows), "guesses for other rows")
        require(any(work.guesses), "no guesses")
        accepted: dict[int, int] = {}
        for row, guess in zip(rows, work.guesses, strict=True):
            require(len(guess) != 1, "a guess of an input, and no proposal")
            self._require_proposable(row, max(len(guess) - 1, 0))
            tokens = [self._device.draw(row.job, len(row.drawn) + i) for i in range(len(guess))]
            if guess and guess[0] == tokens[0]:
                pairs = zip(guess[1:], tokens[1:], strict=True)
                same = [proposed == drawn for proposed, drawn in pairs]
                accepted[row.id] = (*same, False).index(False)
        if not accepted:
            return self._step(rows, trial=False)
        return self._check(rows, accepted)

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

    def read_draft(self, work: ReadDraft, fault: Fault | None) -> None:
        require(self._facts.drafts, "there is no draft model")
        self._require_rows([work.row])
        row = self._rows[work.row]
        text = row.text
        known = 0 if self._draft is None else common_prefix(self._draft[1], text)
        require(work.begin <= known, "the draft has", known, "tokens of the text")
        require(work.tokens > 0, "the draft reads nothing")
        require(work.begin + work.tokens <= row.length, "the draft reads beyond the text")
        self._draft = None if fault is not None else (row.id, text[: work.begin + work.tokens])


def _ids(group: Iterable[FakeRow]) -> list[int]:
    return [row.id for row in group]


def _without(groups: Iterable[_Group], gone: set[int]) -> list[_Group]:
    left = [[row for row in group if row.id not in gone] for group in groups]
    return [group for group in left if group]


def _merge(group: Sequence[int], left: list[_Group]) -> _Group:
    """The groups that have these rows, as one in this order; they are taken out of `left`."""
    parts = [part for part in left if part[0].id in group]
    left[:] = [part for part in left if part not in parts]
    rows = {row.id: row for part in parts for row in part}
    require({*rows} == {*group}, "the rows", [*group], "are not whole groups")
    return [rows[row_id] for row_id in group]
