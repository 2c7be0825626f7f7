"""Decode: rows that draw their tokens together, a step at a time.

- Decode-ahead: a step is launched before the tokens of the last one are read, so the device works
  while Python looks at tokens. A row that ends has therefore drawn one token too many, which is
  dropped with the row.
- Rows that share a KV cache are a sub-batch, see `sub_batches`. All of them share a pass of the
  model where it can, else each takes its own.
- Rows may be decoded several tokens at a time, in speculative steps: see `speculation`.

Between any two of a decoder's methods, after a plain step and after a speculative one:

- Each row's KV cache holds the row's text, `row.seen`. The KV cache of a fresh row does not hold
  its last token yet.
- Each row's input is the next token. It was drawn with the key of its position, and is neither fed
  to the model nor delivered.
- The draft's KV cache holds a beginning of some row's text, of any length.

So plain steps may follow speculative ones, rows join and leave, and a row's cache is kept for later
prompts, as if there were no speculative steps.

`row.drawn` is always the list of delivered tokens, also after an exception. The row's constraint
has accepted `row.accepted_tokens` of them. So the row can be decoded from there, once its text is
read anew. Nobody ends a row here: it draws on until it is taken out.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any, cast

import mlx.core as mx

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.row_cache import RowCache
from mlxsrv.engine.execution.speculation import Draft, verify
from mlxsrv.engine.execution.step_results import (
    Launched,
    StepResults,
    accept,
    binds,
    deliver_tokens,
    launch,
    report_constraints,
)
from mlxsrv.engine.execution.sub_batches import Pass, ReadyRow, SubBatch, regroup
from mlxsrv.engine.live_row import LiveRow, Place
from mlxsrv.engine.plans import Proposal, RowGroup, count_proposed
from mlxsrv.engine.ranks.rank_group import RankGroup
from mlxsrv.engine.sampling.bans import Banning
from mlxsrv.engine.sampling.blocks import Blocks
from mlxsrv.engine.sampling.dry import Dry
from mlxsrv.engine.sampling.processors import LogprobReader, Masks, Penalties, Proof, StepLogprobs
from mlxsrv.engine.sampling.sampler import Sampler
from mlxsrv.engine.steering.plan import PassActivations, forward
from mlxsrv.engine.steering.steerer import Steerer

_CLEAR_EVERY = 256  # steps; buffers of outgrown caches go back to the system


class Step:
    """Draws the tokens of certain rows from their logits; made anew when rows change.

    Args:
        ahead: how many tokens a row that is not fresh has drawn and not delivered.
        ranks: all have the tokens that rank 0 draws.
    """

    def __init__(
        self,
        rows: Sequence[LiveRow],
        vocabulary: int,
        *,
        ahead: int = 1,
        ranks: RankGroup | None = None,
    ) -> None:
        self._ranks = ranks
        self._rows = tuple(rows)
        # The input of a row that is not fresh is a token drawn and not delivered: it counts.
        drawn = [len(row.drawn) + ahead * (not row.fresh) for row in rows]
        settings = [row.job.sampling for row in rows]
        self._sampler = Sampler(settings, drawn)
        penalised = any(map(Penalties.wanted, settings))
        self._penalties = Penalties(rows, vocabulary) if penalised else None
        self._dry = Dry(rows, vocabulary) if any(map(Dry.wanted, rows)) else None
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
        if self._dry is not None:
            logits = self._dry(logits, inputs)
        allowed = logits if self.masks is None else self.masks(logits)
        if self._banning is not None:
            allowed = self._banning(allowed, inputs)
        blocks = Blocks(allowed)
        tokens, highest = self._sampler.draw_from(blocks)
        if self._ranks is not None:
            tokens = self._ranks.share(tokens)
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
        caches: makes the KV caches of rows.
        steerer: what rows are steered with.
        shares: sub-batches can share a pass of the model.
        draft: proposes tokens to a row that is alone.
        ranks: those that decode the same rows with their parts of the model; None: this process is
            alone.
    """

    def __init__(
        self,
        model: Any,
        caches: KVCacheFactory,
        *,
        steerer: Steerer,
        shares: bool,
        draft: Draft | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self.sub_batches: list[SubBatch] = []
        self.rows: list[LiveRow] = []  # of all sub-batches, in the order of the inputs
        self._model = model
        self._caches = caches
        self._steerer = steerer
        self._shares = shares
        self._draft = draft
        self._passes: list[Pass] = []  # of a step
        self._ranks = ranks
        # (rows,), the token that each row is fed next, sub-batch by sub-batch
        self._inputs: mx.array | None = None
        self._launched = Launched()  # with the inputs
        self._step: Step | None = None  # None: rows have changed
        self._row_ids: list[int] = []
        self._fresh = False  # some row is
        self._steps = 0

    def replan(self) -> None:
        """Make the step anew: what is watched has changed."""
        self._step = None

    def wait(self) -> None:
        """Wait for the step under way."""
        if self._inputs is not None:
            mx.eval(self._inputs)

    # Plain steps.

    def run_step(self, results: StepResults) -> None:
        """Launch a step for all rows, and deliver the tokens of the step before."""
        assert self._inputs is not None
        inputs, last, rows = self._inputs, self._launched, self.rows
        logits = self._forward(inputs)
        step = self._step or self._prepare(rows, logits.shape[-1])
        if step.masks is None:
            self._inputs, proofs, scores = step.draw(logits, inputs)
            self._launched = Launched(proofs, scores, self._look())
            self._deliver(inputs, last, results)
        else:
            # A constraint must see the token before it knows what may follow. So the model runs
            # while the constraints look at the tokens.
            launch(logits)
            activations = self._look()
            self._deliver(inputs, last, results)
            for row in rows:
                accept(row, results)
            self._inputs, proofs, scores = step.draw(logits, inputs)
            self._launched = Launched(proofs, scores, activations)
            report_constraints(rows, step.masks, results)
        self._count_step()

    def _prepare(self, rows: Sequence[LiveRow], vocabulary: int) -> Step:
        self._step = Step(rows, vocabulary, ranks=self._ranks)
        return self._step

    def _forward(self, inputs: mx.array) -> mx.array:
        """The next logits of all rows."""
        self._plan_passes()
        if len(self._passes) == 1:
            return self._passes[0].next_logits(self._model, inputs)
        ends = list(accumulate(len(each.rows) for each in self._passes))
        parts = mx.split(inputs, ends[:-1])
        logits: list[mx.array] = []
        for each, part in zip(self._passes, parts, strict=True):
            logits.append(each.next_logits(self._model, part))
            if self._ranks is not None:
                # One pass after the other: collectives must have one order on all ranks.
                launch(logits[-1])
        return mx.concatenate(logits)

    def _plan_passes(self) -> None:
        if self._step is None:  # rows have changed
            together = [self.sub_batches] if self._shares else [[each] for each in self.sub_batches]
            self._passes = [
                Pass(
                    part,
                    self._steerer.make_plan([row.steering for each in part for row in each.rows]),
                )
                for part in together
            ]

    def _look(self) -> tuple[tuple[PassActivations, list[Place]], ...]:
        """The activations that are watched in the step that was just launched."""
        if not self._steerer.watches:
            return ()
        activations = tuple(
            (each.plan.activations, [row.place for row in each.rows])
            for each in self._passes
            if each.plan is not None and each.plan.activations is not None
        )
        for seen, _ in activations:
            launch(seen.arrays)
        return activations

    def _deliver(self, inputs: mx.array, last: Launched, results: StepResults) -> None:
        """Deliver the tokens that the rows are being fed, but for those of fresh rows."""
        tokens = cast(list[int], inputs.tolist())  # waits for the step that draws them
        broken = last.broken()
        likelihoods = last.likelihoods()
        # The activations of the step before, like its tokens.
        for seen, places in last.activations:
            results.activations += seen.to_events(places)
        if self._fresh or broken:
            self._deliver_some(tokens, broken, results)
        else:
            for row, token in zip(self.rows, tokens, strict=True):
                row.drawn.append(token)
            results.tokens = list(zip(self._row_ids, tokens, strict=True))
        if likelihoods:
            drawn = {row_id for row_id, _ in results.tokens}
            results.likelihoods = {
                row.id: found for row, found in likelihoods.items() if row.id in drawn
            }

    def _deliver_some(
        self, tokens: Sequence[int], broken: Collection[LiveRow], results: StepResults
    ) -> None:
        self._fresh = False
        for row, token in zip(self.rows, tokens, strict=True):
            if row.fresh:
                row.fresh = False
            elif row in broken:
                results.broken.append(row.id)
            else:
                row.drawn.append(token)
                results.tokens.append((row.id, token))

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()

    # Speculative steps.

    def run_speculative_step(self, proposals: Sequence[Proposal], results: StepResults) -> None:
        """Deliver each row's input, and the proposals behind it that are accepted.

        Args:
            proposals: to each row. If there are none behind inputs that were guessed rightly, this
                is a plain step.
            results: filled in.
        """
        self._plan_passes()
        if len(self._passes) != 1 or self._fresh or len(proposals) != len(self.rows):
            raise RuntimeError("tokens are proposed to rows of one pass, after their first step")
        assert self._inputs is not None
        inputs = cast(list[int], self._inputs.tolist())  # waits for the step under way
        results.waited = perf_counter()
        counts = [
            count_proposed(each) if isinstance(each, int) or each[:1] == (token,) else 0
            for each, token in zip(proposals, inputs, strict=True)
        ]
        if not any(counts):
            self.run_step(results)
        elif self._draft is not None and isinstance(proposals[0], int):
            proposed = self._draft.propose(self.rows, self._inputs, counts)
            self._verify(proposed, counts, results)
            self._draft.cut_to_text()
        else:
            most = max(counts)
            padded = [
                [*each[1 : 1 + count], *[0] * (most - count)]
                for each, count in zip(cast(Any, proposals), counts, strict=True)
            ]
            self._verify(mx.array(padded, dtype=mx.uint32), counts, results)

    def _verify(self, proposals: mx.array, counts: Sequence[int], results: StepResults) -> None:
        """Run the model over the inputs and the proposals `(rows, most)`, so many of each row. The
        inputs are known."""
        assert self._inputs is not None
        [whole], rows = self._passes, self.rows
        broken = self._launched.broken()
        self._launched = Launched()
        verified = verify(self._model, whole, self._inputs, proposals, counts)
        self._inputs = mx.array([each.following for each in verified], dtype=mx.uint32)
        self._step = None  # the sampler of the last plain step is out of date
        self._count_step()
        taken: list[int] = []
        for row, each, count in zip(rows, verified, counts, strict=True):
            if each.broken or row in broken:
                results.broken.append(row.id)
                taken.append(0)
                continue
            if count:
                results.accepted[row.id] = len(each.seen) - 1
            taken.append(deliver_tokens(row, each.seen, results))
        whole.cut([proposals.shape[1] + 1 - each for each in taken])
        woken = [i for i, row in enumerate(rows) if binds(row, results)]
        for i, row in enumerate(rows):
            if i not in woken and taken[i] == len(verified[i].seen):
                results.following[row.id] = verified[i].following
        if woken:
            last = [verified[i].logits[taken[i] - 1] for i in woken]
            self._redraw(woken, mx.stack(last), results)

    def _redraw(self, places: Sequence[int], logits: mx.array, results: StepResults) -> None:
        """Draw the next inputs of the rows at these places anew, from the same logits
        `(places, vocabulary)`: their constraints, which were dormant in the step, bind them."""
        rows = [self.rows[i] for i in places]
        step = Step(rows, logits.shape[-1], ahead=0)
        assert step.masks is not None
        assert self._inputs is not None
        at = mx.array(list(places))
        drawn, proofs, scores = step.draw(logits, self._inputs[at])
        self._inputs[at] = drawn
        self._launched = Launched(proofs, scores)
        report_constraints(rows, step.masks, results)

    # A suspect.

    def run_alone(self, row: LiveRow, cache: RowCache, results: StepResults) -> None:
        """Draw the next token of a row that is not among the others, and wait for it.

        Args:
            row: it is fresh, and stays so.
            cache: its own; it lacks the last token of the text, and then the one that is drawn.
            results: filled in.
        """
        place, plan = row.place, self._steerer.make_plan([row.steering])
        inputs = mx.array([row.last], dtype=mx.uint32)
        logits = forward(self._model, plan, inputs[:, None], cache.layers)[:, -1, :]
        step = Step([row], logits.shape[-1], ranks=self._ranks)
        drawn, proofs, scores = step.draw(logits, inputs)
        cache.materialize()
        cache.tokens += 1
        if plan is not None and plan.activations is not None:
            results.activations += plan.activations.to_events([place])
        launched = Launched(proofs, scores)
        if launched.broken():
            results.broken.append(row.id)
            return
        if step.masks is not None:
            report_constraints([row], step.masks, results)
        if row.id not in results.failures:
            results.likelihoods = {each.id: found for each, found in launched.likelihoods().items()}
            deliver_tokens(row, cast(list[int], drawn.tolist()), results)

    # Rows join and are freed.

    def arrange(self, groups: Sequence[RowGroup], ready: Mapping[int, ReadyRow]) -> None:
        """Set the groups: of the rows of this decoder, and of those that are ready to join, by id.

        Raises:
            RuntimeError: a row of a group is not there, or a row is in no group.
        """
        self.wait()  # so that slots are written in place, and nobody reads them meanwhile
        there = {row.id for row in self.rows}
        joining = {
            row_id: ready[row_id]
            for group in groups
            for row_id in group.rows
            if row_id not in there and row_id in ready
        }
        places = {row_id: place for place, row_id in enumerate([*self._row_ids, *joining])}
        wanted = [row_id for group in groups for row_id in group.rows]
        if sorted(wanted) != sorted(places):
            raise RuntimeError(f"the rows are {[*places]}, so they cannot be {wanted}")
        if joining:
            last = [each.row.last for each in joining.values()]
            self._feed(self.sub_batches, mx.array(last, dtype=mx.uint32))
        self._passes = []
        self._set(regroup(self.sub_batches, groups, joining, self._caches.make_rows))
        order = [places[row_id] for row_id in wanted]
        if order != [*range(len(order))]:
            assert self._inputs is not None
            self._inputs = self._inputs[mx.array(order)]

    def _feed(self, sub_batches: Sequence[SubBatch], inputs: mx.array) -> None:
        """Set the sub-batches, and append the inputs `(rows,)` of rows that come last in them."""
        self.sub_batches = [*sub_batches]
        self._inputs = inputs if self._inputs is None else mx.concatenate([self._inputs, inputs])
        self._row_ids = [row.id for each in self.sub_batches for row in each.rows]

    def drop_rows(self, row_ids: Collection[int]) -> None:
        """Drop these rows."""
        left = [i for i, row in enumerate(self.rows) if row.id not in row_ids]
        if len(left) == len(self.rows):
            return
        if not left:
            self.abandon()
            return
        assert self._inputs is not None
        self._inputs = self._inputs[mx.array(left)]
        self._set([each for each in self.sub_batches if each.drop_rows(row_ids)])

    def _set(self, sub_batches: list[SubBatch]) -> None:
        self._step = None
        self._passes = []
        self.sub_batches = sub_batches
        self.rows = [row for sub_batch in sub_batches for row in sub_batch.rows]
        self._row_ids = [row.id for row in self.rows]
        self._fresh = any(row.fresh for row in self.rows)

    def abandon(self) -> None:
        """Forget all rows."""
        self._set([])
        self._inputs, self._launched = None, Launched()
