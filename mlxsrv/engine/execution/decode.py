"""Decode: rows that draw their tokens together, a step at a time.

- Decode-ahead: a step is launched before the tokens of the last one are read, so the device works
  while Python looks at tokens. A row that ends has therefore drawn one token too many, which is
  dropped with the row.
- Rows of very different lengths are decoded in sub-batches of their own, see `sub_batches`.
- A row that is alone may be decoded several tokens at a time, in speculative rounds: see
  `speculation`.

Between any two of a decoder's methods, after a plain step and after a speculative round:

- Each row's KV cache holds the row's text, `row.seen`. The KV cache of a fresh row does not hold
  its last token yet.
- Each row's input is the next token. It was drawn with the key of its position, and is neither fed
  to the model nor delivered.
- The draft's KV cache holds a beginning of some row's text, of any length.

So plain steps may follow speculative rounds, rows join and leave, and a row's cache is kept for
later prompts, as if there were no speculative rounds.

`row.drawn` is always the list of delivered tokens, also after an exception. The row's constraint
has accepted `row.accepted_tokens` of them. So the row can be decoded from there, see `recovery`.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any, cast

import mlx.core as mx

from mlxsrv.engine.cache.prompt_cache import Cache, PromptCache
from mlxsrv.engine.events import Event, Failed, Token
from mlxsrv.engine.execution.launch import Launched, launch
from mlxsrv.engine.execution.speculation import Round, Speculation
from mlxsrv.engine.execution.sub_batches import SubBatch, find_close
from mlxsrv.engine.faults import NOT_A_NUMBER, describe, survivable
from mlxsrv.engine.row import Place, Row, RowState
from mlxsrv.engine.sampling.bans import Banning
from mlxsrv.engine.sampling.blocks import Blocks
from mlxsrv.engine.sampling.processors import LogprobReader, Masks, Penalties, Proof, StepLogprobs
from mlxsrv.engine.sampling.sampler import Sampler
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.plan import PassActivations
from mlxsrv.engine.steering.steerer import Steerer

_CLEAR_EVERY = 256  # steps; buffers of outgrown caches go back to the system


class Step:
    """Draws the tokens of certain rows from their logits; made anew when rows change.

    Args:
        ahead: how many tokens a row that is not fresh has drawn and not delivered.
    """

    def __init__(self, rows: Sequence[Row], vocabulary: int, *, ahead: int = 1) -> None:
        self._rows = tuple(rows)
        # The input of a row that is not fresh is a token drawn and not delivered: it counts.
        drawn = [len(row.drawn) + ahead * (not row.fresh) for row in rows]
        settings = [row.job.sampling for row in rows]
        self._sampler = Sampler(settings, drawn)
        penalised = any(map(Penalties.wanted, settings))
        self._penalties = Penalties(rows, vocabulary) if penalised else None
        scored = any(row.job.logprobs is not None for row in rows)
        self._likelihoods = LogprobReader(rows) if scored else None
        constraints = [row.constraint for row in rows]
        self.masks = Masks(constraints, vocabulary) if any(constraints) else None
        banned = any(map(Banning.wanted, rows))
        self._banning = Banning(rows, drawn, vocabulary) if banned else None

    def draw(
        self, logits: mx.array, inputs: mx.array
    ) -> tuple[mx.array, tuple[Proof], tuple[StepLogprobs, ...]]:
        """Launch the drawing of the tokens that follow `inputs`.

        Args:
            logits: `(rows, vocabulary)`.
            inputs: `(rows,)`, the tokens behind which the logits are.

        Returns:
            The tokens `(rows,)`; the proof that the logits are not NaN; and how likely the tokens
            are, if a row asks. Log-probabilities are those before temperature, filters and masks.
        """
        if self._penalties is not None:
            logits = self._penalties(logits, inputs)
        allowed = logits if self.masks is None else self.masks(logits)
        if self._banning is not None:
            allowed = self._banning(allowed, inputs)
        blocks = Blocks(allowed)
        tokens, highest = self._sampler.draw_from(blocks)
        proof = Proof(self._rows, highest)
        if self._likelihoods is None:
            launch(tokens, highest)
            return tokens, (proof,), ()
        drawn = self._likelihoods(blocks if allowed is logits else Blocks(logits), tokens)
        launch(tokens, highest, *drawn[1:])
        return tokens, (proof,), (drawn,)


class Decoder:
    """Rows that decode together.

    Args:
        model: a model of mlx-lm's.
        cached: where rows that end leave their KV caches.
        batched: whether KV caches can be merged; if not, there is one row.
        padding: rows share a pass only if that needs at most this many bytes of padding.
        steerer: what rows are steered with.
        pace: learns how long steps take.
        speculation: a draft model that proposes tokens.
    """

    def __init__(
        self,
        model: Any,
        *,
        cached: PromptCache,
        batched: bool,
        padding: int,
        steerer: Steerer,
        pace: Pace | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.sub_batches: list[SubBatch] = []
        self.speculation = speculation
        self.rounding = False  # a speculative round is under way, or failed
        self._model = model
        self._cached = cached
        self._batched = batched
        self._padding = padding
        self._steerer = steerer
        self._pace = pace
        # (rows,), the token that each row is fed next, sub-batch by sub-batch
        self._inputs: mx.array | None = None
        self._launched = Launched()  # with the inputs
        self._step: Step | None = None  # None: rows have changed
        self._steps = 0
        self._stepped: float | None = None  # when the last step's tokens came, if rows are the same
        self._round: Round | None = None  # what came of the last step, if it was one

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order of the inputs."""
        return [row for sub_batch in self.sub_batches for row in sub_batch.rows]

    def replan(self) -> None:
        """Make the step anew: what is watched has changed."""
        self._step = None

    def skip(self) -> None:
        """Do not time the next step: something else happens before it."""
        self._stepped = None

    def decode(self, events: list[Event], *, waited: bool) -> None:
        """Launch a step for all rows, and append the tokens of the step before to `events`.

        Or run a speculative round, which gives several tokens of the only row; but not while
        somebody is `waited` for.
        """
        if proposals := self._count_proposals(waited):
            self._run_round(proposals, events)
            return
        assert self._inputs is not None
        inputs, last, rows = self._inputs, self._launched, self.rows
        logits = self._forward(inputs)
        step = self._step or self._prepare(rows, logits.shape[-1])
        if step.masks is None:
            self._inputs, proofs, scores = step.draw(logits, inputs)
            self._launched = Launched(proofs, scores, self._look())
            keep = self._deliver(rows, inputs, last, events)
        else:
            # A constraint must see the token before it can tell what may follow. So the model runs
            # while the constraints look at the tokens.
            launch(logits)
            activations = self._look()
            keep = self._accept(rows, self._deliver(rows, inputs, last, events), events)
            self._inputs, proofs, scores = step.draw(logits, inputs)
            self._launched = Launched(proofs, scores, activations)
            keep = self._permit(rows, keep, step.masks, events)
        self._count_step()
        self._time_step(waited)
        self._keep(keep)

    def _prepare(self, rows: Sequence[Row], vocabulary: int) -> Step:
        self._step = Step(rows, vocabulary)
        return self._step

    def _forward(self, inputs: mx.array) -> mx.array:
        """The next logits of all rows."""
        self._plan_steering()
        if len(self.sub_batches) == 1:
            return self.sub_batches[0].decode(self._model, inputs)
        ends = list(accumulate(len(sub_batch.rows) for sub_batch in self.sub_batches))
        parts = mx.split(inputs, ends[:-1])
        return mx.concatenate(
            [
                sub_batch.decode(self._model, part)
                for sub_batch, part in zip(self.sub_batches, parts, strict=True)
            ]
        )

    def _plan_steering(self) -> None:
        if self._step is None:  # rows have changed
            for sub_batch in self.sub_batches:
                sub_batch.plan = self._steerer.plan([row.steering for row in sub_batch.rows])

    def _look(self) -> tuple[tuple[PassActivations, list[Place]], ...]:
        """The activations that are watched in the step that was just launched."""
        if not self._steerer.watches:
            return ()
        activations = tuple(
            (sub_batch.plan.activations, [row.place for row in sub_batch.rows])
            for sub_batch in self.sub_batches
            if sub_batch.plan is not None and sub_batch.plan.activations is not None
        )
        for seen, _ in activations:
            launch(seen.arrays)
        return activations

    def _deliver(
        self, rows: Sequence[Row], inputs: mx.array, last: Launched, events: list[Event]
    ) -> list[int]:
        """Append the tokens that the rows are being fed. Returns the indices of rows that go on."""
        ids = cast(list[int], inputs.tolist())  # waits for the step that draws them
        broken = last.broken()
        likelihoods = last.likelihoods()
        # The activations of the step before, like its tokens.
        for seen, places in last.activations:
            events += seen.read(places)
        keep: list[int] = []
        for i, (row, token) in enumerate(zip(rows, ids, strict=True)):
            if row.state is RowState.FRESH:
                row.enter(RowState.DECODING)
                keep.append(i)
                continue
            if broken and row in broken:
                events.append(_break(row))
                continue
            row.drawn.append(token)
            finish = row.finish_reason(token)
            events.append(Token(row.job.id, token, finish, likelihoods.get(row)))
            if finish is None:
                keep.append(i)
            else:
                row.enter(RowState.ENDED)
        return keep

    def _accept(self, rows: Sequence[Row], keep: list[int], events: list[Event]) -> list[int]:
        """Tell the constraints which tokens came. Returns the indices of rows that go on, of those
        to keep."""
        for row in rows:
            if row.constraint is None or row.accepted_tokens == len(row.drawn):
                continue
            try:
                row.constraint.accept(row.drawn[-1])
                row.accepted_tokens += 1
            except BaseException as error:
                if not survivable(error):
                    raise
                if not row.ended:
                    events.append(_fail(row, describe(error)))
        return [i for i in keep if not rows[i].ended]

    def _permit(
        self, rows: Sequence[Row], keep: list[int], masks: Masks, events: list[Event]
    ) -> list[int]:
        """Returns the indices of rows whose constraint can go on, of those to keep."""
        kept: list[int] = []
        for i in keep:
            row = rows[i]
            failure = row.constraint.failure if row.constraint is not None else None
            if i in masks.faults:
                events.append(_fail(row, masks.faults[i]))
            elif failure is not None:
                row.enter(RowState.ENDED)
                clear = f"the grammar cannot go on: {failure}"
                events.append(Failed(row.job.id, failure, clear=clear))
            else:
                kept.append(i)
        return kept

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()

    def _time_step(self, waited: bool) -> None:
        now = perf_counter()
        seconds = None if self._stepped is None else now - self._stepped
        if self._pace is not None:
            self._pace.saw_step(seconds)
        if seconds is not None and (sub_batch := self._lone_sub_batch(waited)) is not None:
            assert self.speculation is not None
            self.speculation.saw_step(sub_batch, seconds)
        self._stepped = now
        self._round = None

    # Speculative rounds.

    def _count_proposals(self, waited: bool) -> int:
        """How many tokens to propose now; 0 for a plain step."""
        sub_batch = self._lone_sub_batch(waited)
        if sub_batch is None:
            return 0
        assert self.speculation is not None
        if self._round is not None and self._round.following in sub_batch.rows[0].job.end_tokens:
            return 0
        return self.speculation.choose(sub_batch)

    def _lone_sub_batch(self, waited: bool) -> SubBatch | None:
        """The sub-batch of the only row, if a draft may be used: nobody waits for the row to
        leave, or watches the activations of each token."""
        if self.speculation is None or waited or self._steerer.watches:
            return None
        if len(self.sub_batches) != 1 or len(self.sub_batches[0].rows) != 1:
            return None
        return self.sub_batches[0]

    def _run_round(self, proposals: int, events: list[Event]) -> None:
        """Deliver several tokens of the only row: its input, and the proposals that hold."""
        assert self.speculation is not None
        assert self._inputs is not None
        self.rounding = True
        self._plan_steering()
        [sub_batch] = self.sub_batches
        [row] = sub_batch.rows
        last, self._launched = self._launched, Launched()
        outcome = self.speculation.run(self._model, sub_batch, self._inputs, proposals, self._round)
        self._inputs, self._round = outcome.inputs, outcome
        # The sampler and the timing of the last plain step are out of date.
        self._step, self._stepped = None, None
        self._count_step()
        if outcome.broken or last.broken():
            events.append(_break(row))
            self._keep([])
            self.rounding = False
            return
        accepted = 0
        for token in outcome.seen:
            accepted += 1
            row.drawn.append(token)
            finish = row.finish_reason(token)
            events.append(Token(row.job.id, token, finish))
            if finish is not None:
                row.enter(RowState.ENDED)
                break
            self._accept([row], [], events)
            if row.ended or (row.constraint is not None and not row.constraint.dormant):
                break
        self.speculation.settle(sub_batch, proposals + 1 - accepted)
        self._keep([] if row.ended else [0])
        if not row.ended and row.constraint is not None and not row.constraint.dormant:
            self._redraw(row, outcome.logits[accepted - 1 : accepted], events)
        self.rounding = False

    def _redraw(self, row: Row, logits: mx.array, events: list[Event]) -> None:
        """Draw the next input of the only row anew, from the same logits `(1, vocabulary)`: its
        constraint, which was dormant in the round, binds that token."""
        step = Step([row], logits.shape[-1], ahead=0)
        assert step.masks is not None
        assert self._inputs is not None
        self._inputs, proofs, scores = step.draw(logits, self._inputs)
        self._launched, self._round = Launched(proofs, scores), None
        self._keep(self._permit([row], [0], step.masks, events))

    def prepare_draft(self, limit: int) -> None:
        """Have the draft read at most `limit` tokens of the only row's text, if it lacks many."""
        sub_batch = self._lone_sub_batch(waited=False)
        if sub_batch is None:
            return
        assert self.speculation is not None
        self.rounding = True
        # The next step waits for the draft and for the step under way: its time tells nothing.
        if self.speculation.read(sub_batch, limit, self._inputs):
            self._stepped, self._round = None, None
        self.rounding = False

    # Rows come and go.

    def join(self, group: list[Row], cache: Cache) -> None:
        """Take fresh rows, whose texts are in `cache`."""
        inputs = mx.array([row.last for row in group], dtype=mx.uint32)
        self._take(SubBatch(group, cache), inputs)

    def absorb(self, other: Decoder) -> None:
        """Take the rows of another decoder, which has them in one sub-batch, as they are. It keeps
        them, too, and is to be abandoned."""
        assert other._inputs is not None
        launched = self._launched.beside(other._launched)
        [sub_batch] = other.sub_batches
        self._take(sub_batch, other._inputs)
        self._launched = launched

    def _take(self, sub_batch: SubBatch, inputs: mx.array) -> None:
        self._step = None
        self._stepped = None
        if self._inputs is not None:
            inputs = mx.concatenate([self._inputs, inputs])
        self.sub_batches.append(sub_batch)
        self._inputs = inputs
        self._unite()

    def cancel(self, job_ids: set[int]) -> None:
        """End the rows of these jobs."""
        cancelled = [row for row in self.rows if row.job.id in job_ids]
        try:
            self._keep([i for i, row in enumerate(self.rows) if row.job.id not in job_ids])
        finally:  # even if caches could not be copied: recovery passes over rows that have ended
            for row in cancelled:
                row.enter(RowState.ENDED)

    def abandon(self) -> None:
        """Forget all rows, after an error: their KV caches may be half of a step on."""
        self.sub_batches, self._inputs, self._launched = [], None, Launched()
        self._step, self._stepped, self._round = None, None, None
        self.rounding = False
        if self.speculation is not None:
            self.speculation.forget()

    def _keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but those at `indices`, leaving their KV caches to the prompt cache."""
        if len(indices) == len(self.rows):
            return
        self._step = None
        self._stepped = None
        kept = set(indices)
        sub_batches: list[SubBatch] = []
        first = 0
        for sub_batch in self.sub_batches:
            keep = [i for i in range(len(sub_batch.rows)) if first + i in kept]
            first += len(sub_batch.rows)
            for i in set(range(len(sub_batch.rows))).difference(keep):
                self._file(sub_batch, i)
            if len(keep) == len(sub_batch.rows):
                sub_batches.append(sub_batch)
            elif keep:
                sub_batch.keep(keep)
                sub_batches.append(sub_batch)
        self.sub_batches = sub_batches
        if not sub_batches:
            self._inputs, self._launched = None, Launched()
            return
        assert self._inputs is not None
        self._inputs = self._inputs[mx.array(list(indices))]
        self._unite()

    def _unite(self) -> None:
        """Merge sub-batches that need not be apart."""
        while (pair := find_close(self.sub_batches, self._padding)) is not None:
            one, other = pair
            before = self.rows
            one.absorb(other)
            self.sub_batches.remove(other)
            after = self.rows
            if after != before:
                assert self._inputs is not None
                self._inputs = self._inputs[mx.array([before.index(row) for row in after])]

    def _file(self, sub_batch: SubBatch, index: int) -> None:
        """Leave a row's KV cache to the prompt cache, for prompts that go on from there."""
        row = sub_batch.rows[index]
        if row.state is RowState.BROKEN:
            self._cached.forget(row.seen, row.job.steering)
            return
        held = row.length - (row.state is RowState.FRESH)
        if not self._cached.wants(held):
            return
        cache = sub_batch.extract(index) if self._batched else sub_batch.cache
        # It is computed after the running step. Then it no longer refers to the batch's arrays.
        launch([layer.state for layer in cache])
        self._cached.put(row.seen[:held], cache, row.job.steering)


def _break(row: Row) -> Failed:
    """End a row for which the model computed NaN."""
    row.enter(RowState.BROKEN)
    return Failed(row.job.id, NOT_A_NUMBER, clear=NOT_A_NUMBER)


def _fail(row: Row, reason: str) -> Failed:
    row.enter(RowState.ENDED)
    return Failed(row.job.id, reason)
