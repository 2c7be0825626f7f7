"""Reading of prompts, a span at a time, between the decode steps of other rows.

- A prompt is read without its last token, which becomes the row's first input. So reading needs no
  logits (MLX is lazy: the output head is never computed), and a fresh row draws its first token in
  the same step as all others.
- Several texts are read to their ends in one pass, right-padded. A longer one is read alone, in
  several spans.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isnan
from typing import Any, cast

import mlx.core as mx
import msgspec

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.row_cache import RowCache
from mlxsrv.engine.cache.row_caches import RowCaches
from mlxsrv.engine.events import Activations, Likelihood, PromptScored
from mlxsrv.engine.execution.sub_batches import KeptCache, ReadyRow, keep_cache
from mlxsrv.engine.live_row import LiveRow, Place
from mlxsrv.engine.orders import Job
from mlxsrv.engine.plans import Span
from mlxsrv.engine.sampling.blocks import Blocks
from mlxsrv.engine.sampling.processors import likelihoods, read_likelihoods
from mlxsrv.engine.steering.plan import SteeringPlan, forward


class PartialText:
    """One text that is being read, for one row or for several that have it in common.

    Args:
        rows: these rows.
        cache: the KV cache that the text is read into. It may hold a beginning of the text already.
        scored: the tokens of the first row's prompt are scored.
    """

    def __init__(self, rows: Sequence[LiveRow], cache: RowCache, *, scored: bool = False) -> None:
        self.rows = list(rows)
        self.cache = cache
        self.scorer = PromptScorer(rows[0].job) if scored else None
        self.steering = rows[0].steering
        self._text = rows[0].seen

    @property
    def done(self) -> int:
        """The number of tokens of the text that are read."""
        return self.cache.tokens

    def rows_among(self, row_ids: Sequence[int]) -> list[LiveRow]:
        """Return those of these rows that it has, in this order."""
        rows = {row.id: row for row in self.rows}
        return [rows[row_id] for row_id in row_ids if row_id in rows]

    def drop_rows(self, row_ids: Collection[int]) -> None:
        """Forget these rows, and the scores if they are for one of them."""
        self.rows = [row for row in self.rows if row.id not in row_ids]
        if self.scorer is not None and self.scorer.job_id in row_ids:
            self.scorer = None

    def part(self, end: int) -> tuple[int, ...]:
        """The tokens that are to be read, up to the `end`-th. A copy."""
        return self._text[self.done : end]

    def read_to(self, model: Any, end: int, plan: SteeringPlan | None) -> None:
        """Read up to the `end`-th token, and wait for it."""
        if part := self.part(end):
            logits = forward(model, plan, mx.array(part)[None], self.cache.layers)
            if self.scorer is not None:
                self.scorer.score(self.done, logits[0])
            self.cache.materialize()
        self.cache.tokens = end


class PromptScorer:
    """Gathers the likelihoods of one prompt's tokens, span by span.

    Attributes:
        broken: the model has computed NaN.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._top = job.scores or 0
        self._scores = [Likelihood(None)]
        self.broken = False

    def score(self, first: int, logits: mx.array) -> None:
        """Take the logits `(n, vocabulary)` at the prompt's tokens from `first` on."""
        tokens = mx.array(self._job.prompt[first + 1 : first + 1 + logits.shape[0]])
        found = read_likelihoods(likelihoods(Blocks(logits), tokens, self._top), self._top)
        self.broken |= any(each.logprob is not None and isnan(each.logprob) for each in found)
        self._scores += _ranked(found, logits, tokens) if self._job.ranks else found

    @property
    def job_id(self) -> int:
        return self._job.id

    @property
    def event(self) -> PromptScored:
        return PromptScored(self._job.id, tuple(self._scores))


def _ranked(scores: Sequence[Likelihood], logits: mx.array, tokens: mx.array) -> list[Likelihood]:
    """The scores of `tokens` `(n,)` with their ranks: 1 for the likeliest token."""
    own = mx.take_along_axis(logits, tokens[:, None], axis=-1)
    ranks = cast(list[int], ((logits > own).sum(axis=-1) + 1).tolist())
    return [
        msgspec.structs.replace(score, rank=rank) for score, rank in zip(scores, ranks, strict=True)
    ]


class SpansRead(msgspec.Struct):
    """The results of prefilling spans.

    Attributes:
        ready: the rows that may be decoded now.
        kept: KV caches to be kept.
        scores: those of a prompt that is read to its end.
        broken: rows for whose prompt the model computed NaN, as scores show it.
        activations: those that were watched.
    """

    ready: list[ReadyRow] = []
    kept: list[KeptCache] = []
    scores: PromptScored | None = None
    broken: tuple[int, ...] = ()
    activations: list[Activations] = []


def read_alone(model: Any, text: PartialText, span: Span, plan: SteeringPlan | None) -> SpansRead:
    """Read a part of one text.

    Args:
        model: a model of mlx-lm's.
        text: as far as it was read.
        span: the part.
        plan: the steering of its rows.
    """
    text.read_to(model, span.end, plan)
    done = SpansRead(activations=_look([span], plan))
    if text.scorer is not None and text.scorer.broken:
        done.broken = span.rows
        return done
    rows = text.rows_among(span.joins or ())
    # Each has layers of its own; arrays are shared until a row joins others.
    done.ready = [ReadyRow(row, text.cache.copy()) for row in rows]
    if span.keep is not None:
        kept = keep_cache(text.cache.copy(), span.keep)
        done.kept += [] if kept is None else [kept]
    if text.scorer is not None and span.joins is not None:
        done.scores = text.scorer.event
    return done


def read_whole(
    model: Any,
    caches: KVCacheFactory,
    texts: Sequence[PartialText],
    spans: Sequence[Span],
    plan: SteeringPlan | None,
) -> SpansRead:
    """Read several texts to their ends, in one pass. `caches` makes their KV caches, which can be
    shared."""
    parts = [text.part(span.end) for text, span in zip(texts, spans, strict=True)]
    together = read_together(model, caches, [text.cache for text in texts], parts, plan)
    done = SpansRead(activations=_look(spans, plan))
    for number, (text, span) in enumerate(zip(texts, spans, strict=True)):
        if span.keep is not None:
            kept = keep_cache(together.view_row(number), span.keep)
            done.kept += [] if kept is None else [kept]
        joining = text.rows_among(span.joins or ())
        done.ready += [ReadyRow(row, together.view_row(number)) for row in joining]
    return done


def read_together(
    model: Any,
    caches: KVCacheFactory,
    rows: Sequence[RowCache],
    parts: Sequence[tuple[int, ...]],
    plan: SteeringPlan | None = None,
) -> RowCaches:
    """Read one part into each row's KV cache, in one pass, right-padded, and wait. Returns what the
    rows have then; they lose what they had."""
    lengths = [len(part) for part in parts]
    together = caches.make_rows(reading=True)
    room = max(row.tokens for row in rows) + max(lengths)
    together.arrange(rows, len(rows), room)
    together.prepare(lengths)
    tokens = [part + (0,) * (max(lengths) - len(part)) for part in parts]
    forward(model, plan, mx.array(tokens), together.layers)
    together.finish(lengths)
    return together


def _look(spans: Sequence[Span], plan: SteeringPlan | None) -> list[Activations]:
    """The activations that were watched in a pass over these spans."""
    if plan is None or plan.activations is None:
        return []
    return plan.activations.to_events(
        [Place(span.rows, span.begin, span.end - span.begin) for span in spans]
    )
