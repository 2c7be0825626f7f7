"""The text runner: does the work items of one model that generates text, and decides nothing.

A row is in one place at a time:

- admitted: nothing is read of its text, or its KV cache was dropped;
- in a text that is being read, perhaps with other rows; after a fault it draws tokens there, alone;
- ready: its text is read but for the last token, and it waits for the decoder;
- in the decoder.

If a work item fails, the KV caches that it touched are dropped, and their rows are back in the
first place. All else stays as it was, so other work items can go on.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.kv_costs import find_costs
from mlxsrv.engine.cache.row_cache import RowCache
from mlxsrv.engine.execution.decode import Decoder
from mlxsrv.engine.execution.facts import find_facts, shares_passes
from mlxsrv.engine.execution.read import PartialText, SpansRead, read_alone, read_whole
from mlxsrv.engine.execution.speculation import (
    Draft,
    check_draft,
    count_vocabulary,
    find_obstacle,
)
from mlxsrv.engine.execution.step_results import StepResults
from mlxsrv.engine.execution.stored import StoredPrompts
from mlxsrv.engine.execution.sub_batches import KeptCache, ReadyRow, keep_cache
from mlxsrv.engine.faults import describe_error, note, survivable
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import (
    Admitted,
    Decoded,
    DraftRead,
    Fault,
    HandedOver,
    Kept,
    KeptPrompt,
    PromptsRead,
    Restored,
    RowFailure,
    StoredBeginning,
)
from mlxsrv.engine.plans import Decode, FetchPrompt, FreedRow, Keep, RestorePrompt, RowGroup, Span
from mlxsrv.engine.ranks.rank_group import RankGroup
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Constraint


class TextRunner:
    """Reads and decodes the rows of one model.

    Args:
        model: a model of mlx-lm's.
        caches: makes the KV caches of rows.
        steerer: what rows are steered with.
        prompt_cache_bytes: the most bytes of cached prompts. The scheduler sees to it.
        draft: a small model that proposes tokens to a row that is alone. Unused where a KV cache
            cannot be cut back.
        lookup: tokens may be looked up for rows. They are not where KV caches cannot be cut back.
        padding: bytes of padding for which groups of rows are not kept apart; as many as the
            weights have, unless given.
        stored: its prompts on disk, if they are stored.
        ranks: those that each have their part of the model; None: this process is alone.

    Attributes:
        facts: what the scheduler knows of the model.

    Raises:
        ValueError: the vocabulary of the draft is another.
    """

    def __init__(
        self,
        model: Any,
        *,
        caches: KVCacheFactory,
        steerer: Steerer,
        prompt_cache_bytes: int,
        draft: Any | None = None,
        lookup: bool = False,
        padding: int | None = None,
        stored: StoredPrompts | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self._model = model
        self._caches = caches
        self._steerer = steerer
        self._draft = _make_draft(model, caches, draft)
        shares = shares_passes(model, caches)
        self.facts = find_facts(
            model,
            caches,
            prompt_cache_bytes=prompt_cache_bytes,
            shares=shares if ranks is None else all(ranks.exchange_number(int(shares))),
            drafts=self._draft is not None,
            draft_costs=() if draft is None or self._draft is None else find_costs(draft),
            lookup=lookup and find_obstacle(caches) is None,
            padding=padding,
            store=None if stored is None else stored.facts,
        )
        if ranks is not None:
            self.facts = msgspec.structs.replace(
                self.facts, kv_costs=ranks.find_greatest(self.facts.kv_costs)
            )
        self._stored = stored
        self._rows: dict[int, LiveRow] = {}
        self._texts: dict[int, PartialText] = {}  # partly read, by each of their rows
        self._ready: dict[int, ReadyRow] = {}  # by id
        self._decoder = Decoder(
            model,
            caches,
            steerer=steerer,
            shares=self.facts.shares,
            draft=self._draft,
            ranks=ranks,
        )
        self._kept: dict[int, KeptCache] = {}

    def replan(self) -> None:
        """Make the next steps anew, since other features are watched."""
        self._decoder.replan()

    # Rows are admitted and freed.

    def admit(
        self,
        jobs: Sequence[Job],
        make_constraint: Callable[[Job], Constraint | None] = lambda _: None,
    ) -> Admitted:
        """Take these jobs, with the constraint that is made for each. One for which it cannot be
        made, or that cannot be steered, is a failure."""
        failures: list[RowFailure] = []
        for job in jobs:
            try:
                steering = self._steerer.prepare(job.steering)
                constraint = make_constraint(job)
            except ValueError as error:
                failures.append(RowFailure(job.id, str(error)))
            except BaseException as error:
                if not survivable(error):
                    raise
                note(error, "a row's steering or grammar failed")
                failures.append(RowFailure(job.id, describe_error(error)))
            else:
                self._rows[job.id] = LiveRow(job, constraint, steering)
        return Admitted(tuple(failures), tuple(self._find_stored(jobs)))

    def _find_stored(self, jobs: Sequence[Job]) -> Iterator[StoredBeginning]:
        """Find the stored beginnings of these jobs' prompts. Choices of one request share a
        prompt."""
        last, tokens = None, 0
        for job in jobs if self._stored is not None else ():
            if job.prompt is not last and self._stored is not None:
                last, tokens = job.prompt, self._stored.count_stored(job)
            if tokens:
                yield StoredBeginning(job.id, tokens)

    def release(self, rows: Sequence[FreedRow]) -> Kept:
        """Free these rows, at whatever stage they are. KV caches with a `keep` become cached
        prompts.

        Raises:
            Exception: the KV caches of a sub-batch or of the decoder that one of the rows was in
                could not be copied. They are dropped, and nothing is kept. The rows are free.
        """
        keeps = {freed.row: freed.keep for freed in rows if freed.keep is not None}
        for row, keep in keeps.items():
            self._note_text(keep, row)
        try:
            return Kept(self._keep(self._take_out({freed.row for freed in rows}, keeps)))
        finally:
            for freed in rows:
                self._rows.pop(freed.row, None)

    def rewind(self, rows: Collection[int]) -> None:
        """Drop the KV caches of these rows, which stay. Raises what `release` does."""
        self._take_out(set(rows), {})

    def reset(self) -> None:
        """Forget all rows, and all KV caches."""
        self._decoder.abandon()
        if self._draft is not None:
            self._draft.forget()
        self._rows.clear()
        self._texts.clear()
        self._ready.clear()
        self._kept.clear()
        if self._stored is not None:
            self._stored.reset()

    def _take_out(self, row_ids: set[int], keeps: Mapping[int, Keep]) -> list[KeptCache]:
        """Take rows out of texts, of those ready, and of the decoder. Returns the KV caches that
        are to be kept. If one place fails, the others are done all the same."""
        kept = self._take_out_of_texts(row_ids, keeps)
        errors: list[Exception] = []
        for row_id in row_ids & self._ready.keys():
            cache = self._ready.pop(row_id).cache
            try:
                found = keep_cache(cache, keeps[row_id]) if row_id in keeps else None
                kept += [] if found is None else [found]
            except Exception as error:
                errors.append(error)
        rows = self._decoder.rows
        try:
            if not row_ids.isdisjoint(row.id for row in rows):
                for sub_batch in self._decoder.sub_batches:
                    kept += sub_batch.snapshot(keeps, row_ids)
                self._decoder.drop_rows(row_ids)
                _refresh(row for row in rows if row.id in row_ids)
        except Exception as error:
            errors.append(error)
            self._decoder.abandon()
            _refresh(rows)
        if errors:
            raise errors[0]
        return kept

    def _take_out_of_texts(
        self, row_ids: Collection[int], keeps: Mapping[int, Keep]
    ) -> list[KeptCache]:
        kept: list[KeptCache] = []
        by_text: dict[PartialText, list[int]] = {}
        for row_id in row_ids:
            if (text := self._texts.pop(row_id, None)) is not None:
                by_text.setdefault(text, []).append(row_id)
        for text, ids in by_text.items():
            text.drop_rows(ids)
            keep = next((keeps[row_id] for row_id in ids if row_id in keeps), None)
            if keep is not None:
                # Others may still read on in it.
                found = keep_cache(text.cache.copy() if text.rows else text.cache, keep)
                kept += [] if found is None else [found]
        return kept

    # Cached prompts.

    def _keep(self, caches: Iterable[KeptCache]) -> tuple[KeptPrompt, ...]:
        prompts: list[KeptPrompt] = []
        for kept in caches:
            self._kept[kept.entry] = kept
            prompts.append(kept.describe())
        return tuple(prompts)

    def forget(self, entries: Iterable[int], *, draft: bool = False, spare: bool = False) -> None:
        """Drop these cached prompts; with `draft` also the draft model's KV cache; with `spare`
        give MLX's free buffers back to the system."""
        for entry in entries:
            self._kept.pop(entry, None)
            if self._stored is not None:
                self._stored.drop_text(entry)
        if draft and self._draft is not None:
            self._draft.forget()
        if spare:
            mx.clear_cache()

    # Cached prompts on disk.

    def store(self, entries: Iterable[int]) -> HandedOver:
        """Hand those of these cached prompts to the storage thread that exist and can be stored."""
        handed: list[int] = []
        for entry in entries if self._stored is not None else ():
            kept = self._kept.get(entry)
            if kept is not None and self._stored is not None:
                handed += [entry] if self._stored.hand_over(entry, kept.cache) else []
        return HandedOver(tuple(handed))

    def fetch(self, work: FetchPrompt) -> None:
        """Have what is stored of a row's prompt read from disk."""
        if self._stored is not None:
            text = np.array(self._rows[work.row].job.prompt[:-1], dtype=np.uint32)
            self._stored.fetch(work.entry, text, work.seconds)

    def restore(self, work: RestorePrompt) -> Restored:
        """Copy a slice of what was read from disk into the device's memory. The last slice makes it
        a cached prompt."""
        if self._stored is None:
            return Restored(over=True)
        over, cache = self._stored.restore(work.entry, work.limit)
        if cache is None:
            return Restored(over=over)
        [prompt] = self._keep([KeptCache(work.entry, cache)])
        return Restored(over=over, prompt=prompt)

    def _note_text(self, keep: Keep | None, row: int) -> None:
        """Note the text of a KV cache that is to be kept."""
        if self._stored is not None and keep is not None:
            self._stored.note(keep.entry, self._rows.get(row), keep.tokens)

    # Reading.

    def read(self, spans: Sequence[Span]) -> PromptsRead:
        """Read a slice of prompts: one span, or several that are all read to their ends.

        Raises:
            Exception: the pass failed. The KV caches of all spans are dropped.
        """
        try:
            done = self._read_spans(spans)
        except Exception:
            self._drop_texts(spans)
            raise
        self._ready |= {each.row.id: each for each in done.ready}
        return PromptsRead(self._keep(done.kept), done.scores, done.broken, tuple(done.activations))

    def _read_spans(self, spans: Sequence[Span]) -> SpansRead:
        # The plan was made before it was known which rows cannot be admitted.
        spans = [span for span in spans if not self._rows.keys().isdisjoint(span.rows)]
        if not spans:
            return SpansRead()
        texts = [self._find_text(span) for span in spans]
        for text, span in zip(texts, spans, strict=True):
            self._note_text(span.keep, text.rows[0].id)
        plan = self._steerer.make_plan([text.steering for text in texts])
        if len(spans) == 1:
            [text], [span] = texts, spans
            done = read_alone(self._model, text, span, plan)
        else:
            done = read_whole(self._model, self._caches, texts, spans, plan)
        over = [span for span in spans if span.joins is not None or done.broken]
        self._drop_texts(over)
        return done

    def _find_text(self, span: Span) -> PartialText:
        """The text of a span, as far as it was read."""
        if not span.opens:
            text = self._texts[span.rows[0]]
            if text.done != span.begin:
                raise RuntimeError(f"{text.done} tokens of the text are read, not {span.begin}")
            return text
        cache = self._begin(span)
        rows = [self._rows[row_id] for row_id in span.rows if row_id in self._rows]
        scored = span.scored and rows[0].id == span.rows[0]
        text = PartialText(rows, cache, scored=scored)
        self._texts |= {row.id: text for row in rows}
        return text

    def _begin(self, span: Span) -> RowCache:
        """The KV cache that a span begins with."""
        if span.from_row is not None:
            return self._copy_row(span.from_row, span.begin)
        if span.source is None:
            return self._caches.make()
        if not span.moves:
            return self._kept[span.source].cache.copy(span.begin)
        cache = self._kept.pop(span.source).cache
        cache.cut(span.begin)
        return cache

    def _copy_row(self, row_id: int, tokens: int) -> RowCache:
        """Copy the KV cache of a row, cut to its first `tokens`.

        Raises:
            RuntimeError: the row has lost its KV cache since the round was planned.
        """
        if (text := self._texts.get(row_id)) is not None:
            return text.cache.copy(tokens)
        decoded = (each.view_rows({row_id}) for each in self._decoder.sub_batches)
        for rows in (self._ready, *decoded):
            if row_id in rows:
                cache = rows[row_id].cache.copy(tokens)
                cache.materialize()
                return cache
        raise RuntimeError(f"row {row_id} has lost its KV cache, which another text begins with")

    def _drop_texts(self, spans: Iterable[Span]) -> None:
        for span in spans:
            for row_id in span.rows:
                self._texts.pop(row_id, None)

    # Decoding.

    def decode(self, work: Decode) -> tuple[Decoded, Fault | None]:
        """Run one step for all rows of the decoder, or for a suspect.

        Returns:
            The tokens of the step before, of a speculative step, or of a suspect; and why it
            failed, if it did. Then the results up to the fault count, and the KV caches of all rows
            of the step are dropped.
        """
        decoder, results = self._decoder, StepResults()
        fault = None
        try:
            if work.groups is not None:
                self._arrange(work.groups)
            if work.suspect is not None:
                text = self._texts[work.suspect]
                decoder.run_alone(text.rows[0], text.cache, results)
            elif work.proposals:
                decoder.run_speculative_step(work.proposals, results)
            else:
                decoder.run_step(results)
        except Exception as error:
            fault = note(error, "a step failed")
        # Outside of `except`: the exception's traceback holds the arrays of the step.
        if fault is not None:
            self._give_up(work)
        return results.to_decoded(), fault

    def _arrange(self, groups: Sequence[RowGroup]) -> None:
        """Have the decoder's rows be these."""
        self._decoder.arrange(groups, self._ready)
        self._drop_ready(groups)

    def _drop_ready(self, groups: Sequence[RowGroup]) -> None:
        for group in groups:
            for row_id in group.rows:
                self._ready.pop(row_id, None)

    def _give_up(self, work: Decode) -> None:
        """Drop the KV caches of the rows of a step that failed, and of those that were to join."""
        if work.suspect is not None:
            self._texts.pop(work.suspect, None)
            return
        _refresh(self._decoder.rows)
        self._decoder.abandon()
        self._drop_ready(work.groups or ())
        if work.proposals and self._draft is not None:
            self._draft.forget()

    # The draft model.

    def read_draft(self, row: int, begin: int, tokens: int) -> DraftRead:
        """Have the draft model read `tokens` more of a row's text, behind the first `begin`.

        Raises:
            Exception: it failed. The draft's KV cache is dropped.
        """
        if self._draft is None:
            raise RuntimeError("there is no draft model")
        self._decoder.wait()  # so that a step under way is not timed as well
        waited = perf_counter()
        try:
            self._draft.follow(self._rows[row], begin)
            self._draft.read_on(tokens)
        except Exception:
            self._draft.forget()
            raise
        return DraftRead(waited)


def _make_draft(model: Any, caches: KVCacheFactory, draft: Any | None) -> Draft | None:
    """Make the Draft; None if there is no draft model, or it cannot be used. Raises ValueError if
    its vocabulary is another."""
    if draft is None or find_obstacle(caches, draft) is not None:
        return None
    check_draft(model, draft)
    return Draft(draft, count_vocabulary(model))


def _refresh(rows: Iterable[LiveRow]) -> None:
    """Note that these rows have lost their KV caches: next they are fed the last tokens of their
    texts."""
    for row in rows:
        row.fresh = True
