"""The continuous batch of one model: rows that decode together, joining and leaving at any step.

- Greedy text is mlx-lm's token for token: its models, its cache classes, and prompts read as its
  own generators read them.
- Decode-ahead: a step is launched before the tokens of the last one are read, so the device
  works while Python looks at tokens. A row that ends has therefore drawn one token too many; it
  is dropped with the row.
- Rows of very different lengths are decoded in lanes of their own: see `lanes`.
- A row that is alone may be decoded in rounds of several tokens: see `speculative`.
- Models whose caches cannot be merged run one row at a time through the same code, unmerged.

Everything here is called on the device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxsrv.engine.caches import Caches
from mlxsrv.engine.lanes import Lane, Row, close_lanes
from mlxsrv.engine.prefill import Pace, Prefill, PrefillError
from mlxsrv.engine.processors import Drawn, Likelihoods, Masks, Penalties
from mlxsrv.engine.prompt_cache import Cache, PromptCache
from mlxsrv.engine.sampling import Sampler
from mlxsrv.engine.speculative import Round, Speculation, find_obstacle
from mlxsrv.events import Constraint, Event, Failed, FinishReason, Job, Started, Token

_log = logging.getLogger("mlxsrv.engine")

_LEAST_PASS = 4 * 1024 * 1024  # bytes; a pass of the smallest model costs as much in calls
_CLEAR_EVERY = 256  # steps; buffers of outgrown caches go back to the system


class Step:
    """What one decode step does with the logits of certain rows; made anew when they change."""

    def __init__(self, rows: Sequence[Row], vocabulary: int) -> None:
        # A row that is not fresh has one token drawn and not yet delivered: its input.
        drawn = [0 if row.fresh else len(row.drawn) + 1 for row in rows]
        settings = [row.job.sampling for row in rows]
        self._sampler = Sampler(settings, drawn)
        penalised = any(map(Penalties.wanted, settings))
        self._penalties = Penalties(rows, vocabulary) if penalised else None
        scored = any(row.job.logprobs is not None for row in rows)
        self._likelihoods = Likelihoods(rows) if scored else None
        constraints = [row.constraint for row in rows]
        self.masks = Masks(constraints, vocabulary) if any(constraints) else None

    def draw(self, logits: mx.array, inputs: mx.array) -> tuple[mx.array, Drawn | None]:
        """The tokens that follow `inputs`, launched; and how likely they are, if a row asks.

        Log-probabilities are those before temperature, filters and masks: what the model says.
        """
        if self._penalties is not None:
            logits = self._penalties(logits, inputs)
        tokens = self._sampler(logits if self.masks is None else self.masks(logits))
        if self._likelihoods is None:
            mx.async_eval(tokens)  # type: ignore[no-untyped-call]  # as mlx's stubs have it
            return tokens, None
        drawn = self._likelihoods(logits, tokens)
        mx.async_eval(tokens, *drawn[1:])  # type: ignore[no-untyped-call]  # as above
        return tokens, drawn


class Batch:
    """Decodes all rows of one model together.

    Args:
        model: a model of mlx-lm's.
        max_rows: rows decoded together, those being read included.
        pace: how much of a prompt is read between two steps.
        cached: prompts that have been read before; rows that end are kept there.
        caches: makes the caches of rows; the model's own kind, unless given.
        padding: the most bytes of it for which rows share a pass; as many as the weights have,
            unless given.
        draft: a small model that proposes tokens to a row that is alone. Unused where a cache
            cannot be cut back; ValueError where its vocabulary is another.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int,
        pace: Pace,
        cached: PromptCache,
        caches: Caches | None = None,
        padding: int | None = None,
        draft: Any | None = None,
    ) -> None:
        self._model = model
        self._pace = pace
        self._cached = cached
        caches = Caches(model) if caches is None else caches
        self._prefill = Prefill(model, pace=pace, cached=cached, caches=caches)
        self.batched = self._prefill.batched
        self.cuts = self._prefill.cuts
        self._max_rows = max_rows if self.batched else 1
        self._padding = most_padding(model) if padding is None else padding
        self._lanes: list[Lane] = []
        self._inputs: mx.array | None = None  # (rows,), what each row is fed next, lane by lane
        self._drawn: Drawn | None = None  # how likely the inputs were, for rows that ask
        self._step: Step | None = None  # None: rows have changed
        self._steps = 0
        self._stepped: float | None = None  # when the last step's tokens came, if rows are the same
        usable = draft is not None and find_obstacle(model, draft) is None
        self._speculation = Speculation(model, draft) if usable else None
        self._round: Round | None = None  # what came of the last step, if it was one

    @property
    def _rows(self) -> list[Row]:
        """All rows, in the order of the inputs."""
        return [row for lane in self._lanes for row in lane.rows]

    @property
    def streaming(self) -> bool:
        """Whether rows are being decoded."""
        return bool(self._lanes)

    @property
    def idle(self) -> bool:
        return not (self._lanes or self._prefill.reading or self._prefill.waiting)

    def statistics(self) -> dict[str, int]:
        return {
            "rows": len(self._rows),
            "lanes": len(self._lanes),
            "reading": self._prefill.reading,
            "waiting": self._prefill.waiting,
            **({} if self._speculation is None else self._speculation.statistics()),
        }

    def submit(self, job: Job, constraint: Constraint | None = None) -> list[Event]:
        self._prefill.submit(job, constraint)
        return [Started(job.id)]

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Free the rows of these jobs, at whatever stage they are."""
        gone = set(job_ids)
        self._prefill.cancel(gone)
        self._keep([i for i, row in enumerate(self._rows) if row.job.id not in gone])

    # One slice of work is decode(), then prefill(): tokens are delivered between the two, so that
    # no stream waits for somebody else's prompt longer than it must.

    def decode(self) -> list[Event]:
        """Launch a step for all rows; return the tokens of the step before.

        Or run a round: several tokens of the one row there is.
        """
        if not self._lanes:
            return []
        if proposals := self._count_proposals():
            return self._run_round(proposals)
        assert self._inputs is not None
        inputs, drawn, rows = self._inputs, self._drawn, self._rows
        logits = self._forward(inputs)
        step = self._step or self._prepare(rows, logits.shape[-1])
        if step.masks is None:
            self._inputs, self._drawn = step.draw(logits, inputs)
            ids = _ids(inputs)
        else:
            # What may come next depends on what came, so the model runs while that is looked at.
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # as mlx's stubs have it
            ids = _ids(inputs)
            for row, token in zip(rows, ids, strict=True):
                if row.constraint is not None and not row.fresh:
                    row.constraint.accept(token)
            self._inputs, self._drawn = step.draw(logits, inputs)
        self._count_step()
        likelihoods = {} if drawn is None else drawn.read()
        events: list[Event] = []
        keep: list[int] = []
        for i, (row, token) in enumerate(zip(rows, ids, strict=True)):
            if row.fresh:
                row.fresh = False
                keep.append(i)
                continue
            row.drawn.append(token)
            finish = row.finish(token)
            events.append(Token(row.job.id, token, finish, likelihoods.get(row)))
            if finish is not None:
                continue
            if row.constraint is not None and row.constraint.failure is not None:
                events.append(Failed(row.job.id, row.constraint.failure))
                continue
            keep.append(i)
        self._time_step()
        self._keep(keep)
        return events

    # What holds between any two of the batch's methods, whether the last step was a plain one or
    # a round: each row's cache holds `row.seen`; its input is the next token, drawn with the key
    # of its place and neither fed nor delivered; the draft's cache holds a beginning of the seen
    # tokens of some row, of whose end it may lack as much as it likes. So rounds give way to plain
    # steps, rows join and leave, and a row's cache is filed, as if there were no rounds.

    def _count_proposals(self) -> int:
        """How many tokens to propose now; 0 for a plain step."""
        lane = self._lone_lane()
        if lane is None:
            return 0
        assert self._speculation is not None
        if self._round is not None and self._round.following in lane.rows[0].job.end_tokens:
            return 0
        return self._speculation.choose(lane)

    def _lone_lane(self) -> Lane | None:
        """The lane of the only row, where there is a draft and no prompt to be read."""
        if self._speculation is None or len(self._lanes) != 1 or len(self._lanes[0].rows) != 1:
            return None
        asked = self._prefill.reading or self._prefill.waiting
        return None if asked and self._max_rows > 1 else self._lanes[0]

    def _run_round(self, proposals: int) -> list[Event]:
        """Several tokens of the only row: its input, and the proposals that hold."""
        assert self._speculation is not None
        assert self._inputs is not None
        [lane] = self._lanes
        [row] = lane.rows
        came = self._speculation.run(self._model, lane, self._inputs, proposals, self._round)
        self._inputs, self._drawn, self._round = came.inputs, None, came
        self._step, self._stepped = None, None  # the step's sampler is behind, its clock too
        self._count_step()
        events: list[Event] = []
        finish: FinishReason | None = None
        for token in came.seen:
            row.drawn.append(token)
            finish = row.finish(token)
            events.append(Token(row.job.id, token, finish))
            if finish is not None:
                break
        self._speculation.settle(lane, proposals + 1 - len(events))
        self._keep([0] if finish is None else [])
        return events

    def _prepare(self, rows: Sequence[Row], vocabulary: int) -> Step:
        self._step = Step(rows, vocabulary)
        return self._step

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()

    def _time_step(self) -> None:
        now = perf_counter()
        seconds = None if self._stepped is None else now - self._stepped
        self._pace.saw_step(seconds)
        if seconds is not None and (lane := self._lone_lane()) is not None:
            assert self._speculation is not None
            self._speculation.saw_step(lane, seconds)
        self._stepped = now
        self._round = None

    def _forward(self, inputs: mx.array) -> mx.array:
        """The next logits of all rows."""
        if len(self._lanes) == 1:
            return self._lanes[0].decode(self._model, inputs)
        ends = list(accumulate(len(lane.rows) for lane in self._lanes))
        parts = mx.split(inputs, ends[:-1])
        return mx.concatenate(
            [lane.decode(self._model, part) for lane, part in zip(self._lanes, parts, strict=True)]
        )

    def prefill(self, *, beside: bool = False) -> list[Event]:
        """Read at most one slice of prompts, shorter if `beside` are streams of other models. An
        error there fails the jobs read, no others."""
        free = self._max_rows - len(self._rows)
        if free <= 0 or not (self._prefill.reading or self._prefill.waiting):
            self._prepare_draft()
            return []
        try:
            read = self._prefill.step(free, decoding=self.streaming, beside=beside)
        except PrefillError as error:
            _log.exception("prefill failed")
            return [Failed(job.id, describe(error.__cause__ or error)) for job in error.jobs]
        if read is None:
            return []
        if read.rows:
            self._join(read.rows, read.cache)
        return read.events

    def _prepare_draft(self) -> None:
        """Have the draft read a slice of what the only row has seen, if it lacks much of it."""
        lane = self._lone_lane()
        if lane is None:
            return
        assert self._speculation is not None
        # The step that is under way is not the draft's to pay for; the next waits for both.
        limit = self._pace.limit(decoding=True, long=True)
        if self._speculation.read(lane, limit, self._inputs):
            self._stepped, self._round = None, None

    def _join(self, group: list[Row], cache: Cache) -> None:
        inputs = mx.array([row.job.prompt[-1] for row in group], dtype=mx.uint32)
        if self._inputs is not None:
            inputs = mx.concatenate([self._inputs, inputs])
        self._lanes.append(Lane(group, cache))
        self._inputs = inputs
        self._step = None
        self._stepped = None
        self._unite()

    def _keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but those at `indices`, leaving what they have seen to the prompt cache."""
        if len(indices) == len(self._rows):
            return
        self._step = None
        self._stepped = None
        kept = set(indices)
        lanes: list[Lane] = []
        first = 0
        for lane in self._lanes:
            keep = [i for i in range(len(lane.rows)) if first + i in kept]
            first += len(lane.rows)
            for i in set(range(len(lane.rows))).difference(keep):
                self._file(lane, i)
            if len(keep) == len(lane.rows):
                lanes.append(lane)
            elif keep:
                lane.keep(keep)
                lanes.append(lane)
        self._lanes = lanes
        if not lanes:
            self._inputs, self._drawn = None, None
            return
        assert self._inputs is not None
        self._inputs = self._inputs[mx.array(list(indices))]
        self._unite()

    def _unite(self) -> None:
        """Merge lanes that need not be apart."""
        while (pair := close_lanes(self._lanes, self._padding)) is not None:
            one, other = pair
            before = self._rows
            one.absorb(other)
            self._lanes.remove(other)
            after = self._rows
            if after != before:
                assert self._inputs is not None
                self._inputs = self._inputs[mx.array([before.index(row) for row in after])]

    def _file(self, lane: Lane, index: int) -> None:
        """Keep a row's cache for prompts that go on from there."""
        row = lane.rows[index]
        if row.fresh or not self._cached.wants(len(row.job.prompt) + len(row.drawn)):
            return
        cache = lane.extract(index) if self.batched else lane.cache
        # Evaluated behind the step that is under way, and then free of the batch's arrays.
        mx.async_eval([layer.state for layer in cache])  # type: ignore[no-untyped-call]  # as above
        self._cached.put(row.seen, cache)

    def fail(self, reason: str) -> list[Event]:
        """End every job of the batch, as after an error whose row is not known."""
        jobs = [row.job for row in self._rows] + self._prefill.jobs
        self._prefill.clear()
        self._lanes, self._inputs, self._drawn = [], None, None
        self._step, self._stepped, self._round = None, None, None
        if self._speculation is not None:
            self._speculation.forget()
        return [Failed(job.id, reason) for job in jobs]


def most_padding(model: Any) -> int:
    """Bytes of padding that cost as much as another pass of the model."""
    return max(_LEAST_PASS, sum(array.nbytes for array in weights(model)))


def weights(model: Any) -> list[mx.array]:
    """All arrays that were read from the model's files."""
    return [
        array for _, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    ]


def _ids(tokens: mx.array) -> list[int]:
    """The ids on the host; waits for the step that draws them."""
    return cast(list[int], tokens.tolist())


def describe(error: BaseException) -> str:
    """What went wrong in one line, for a client and for the log."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"
