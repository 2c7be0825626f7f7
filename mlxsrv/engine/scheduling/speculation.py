"""Speculation: who decides whether tokens are proposed to the rows of one model.

One pass verifies the proposals of all rows. So speculative steps are judged for all rows together,
and apart for each number of rows: a pass over several tokens of many rows may be dear where that of
one row is cheap.

Masks, bans, penalties and log-probabilities are computed for one token at a time. While a row needs
these, there are plain steps only. A dormant constraint has no mask. Plain steps are also taken
while a row is there that was in a fault: what failed may have been a speculative step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from mlxsrv.engine.outcomes import Decoded, DraftRead, Outcome
from mlxsrv.engine.plans import Proposal, count_proposed
from mlxsrv.engine.scheduling.proposers import MOST, Proposer
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.speculation_controller import SpeculationController


class Speculation:
    """Asks the proposer where that has proven faster.

    Args:
        proposer: of the model.
        make_controller: decides about the steps of one number of rows.
    """

    def __init__(
        self,
        proposer: Proposer,
        make_controller: Callable[[], SpeculationController] = SpeculationController,
    ) -> None:
        self.proposer = proposer
        self._controllers = defaultdict[int, SpeculationController](make_controller)  # by rows
        self._drafted = self._accepted = 0
        # Of the last plan.
        self._controller: SpeculationController | None = None  # None: nothing may be proposed
        self._rows = 0
        self._asked: dict[int, int] = {}  # proposals by row
        self._guessed = 0  # inputs
        # Of the last step.
        self._inputs: dict[int, int] = {}  # that follow it, known if it was speculative
        self._bound: frozenset[int] = frozenset()  # rows whose constraint binds the next token

    def counters(self) -> dict[str, int]:
        """In numbers, as `/health` lists them."""
        on = self._controller is not None and self._controller.on
        counted = {"speculating": int(on), "drafted": self._drafted, "accepted": self._accepted}
        return counted | (
            {"draft_bytes": self.proposer.cache_bytes} if self.proposer.computes else {}
        )

    # Planning.

    def propose(self, rows: Sequence[Row]) -> tuple[Proposal, ...]:
        """The proposals of a `Decode` of all rows; empty where a plain step is better, or the only
        way. `rows` is empty if nothing may be proposed to them together."""
        self._asked, self._controller = {}, None
        if not self._may_propose(rows):
            return ()
        controller = self._controller = self._controllers[len(rows)]
        if not controller.affords(0):
            return ()
        found = self.proposer.find(rows, [*map(self._find_most, rows)], self._inputs)
        counts = [*map(count_proposed, found)]
        if not any(counts):
            return ()
        self._guessed = sum(
            isinstance(each, tuple) and each != () and row.id not in self._inputs
            for row, each in zip(rows, found, strict=True)
        )
        if not (most := controller.choose(counts, known=not self._guessed)):
            return ()
        self._rows = len(rows)
        asked = zip(rows, counts, strict=True)
        self._asked = {row.id: min(count, most) for row, count in asked if count}
        return tuple(min(x, most) if isinstance(x, int) else x[: most + 1] for x in found)

    def plan_reading(self, rows: Sequence[Row], limit: int) -> tuple[Row, int, int] | None:
        """The tokens that the proposer is to read of a row's text: the first, and how many, at most
        `limit`; None if it has read enough, or need not."""
        if not self._may_propose(rows):
            return None
        [row], controller = rows, self._controllers[len(rows)]
        # First whether any reading is worth it: to compare two long texts takes a while.
        if not controller.affords(0):
            return None
        begin, unread = self.proposer.find_unread(row)
        if not unread or not controller.affords(unread):
            return None
        return row, begin, min(unread, limit)

    def _may_propose(self, rows: Sequence[Row]) -> bool:
        fits = 0 < len(rows) <= self.proposer.most_rows and self.proposer.fits
        return fits and all(map(self._takes_proposals, rows))

    def _takes_proposals(self, row: Row) -> bool:
        job = row.job
        return (
            not row.fresh
            and not row.incidents
            and row.id not in self._bound
            and job.logprobs is None
            and not job.sampling.changes_logits
            and (job.bans is None or not job.bans.bind(len(row.drawn) + 1))
        )

    def _find_most(self, row: Row) -> int:
        """Tokens that may be proposed to a row at most."""
        if self._inputs.get(row.id) in row.job.end_tokens:
            return 0
        return max(min(MOST, row.job.max_tokens - len(row.drawn) - 1), 0)  # one is the input

    # Outcomes.

    def saw_step(self, outcome: Outcome, before: float | None, *, plain: bool) -> None:
        """Learn from a step of all rows.

        Args:
            outcome: of the step.
            before: when the step before ended, if nothing else was done since.
            plain: nothing was proposed in that one.
        """
        done, ended = outcome.done, outcome.ended
        assert isinstance(done, Decoded)
        if self._asked:
            self._saw_proposals(done, before, ended)
        elif self._controller is not None and plain and before is not None:
            self._controller.saw_plain_step(ended - before)
        self._bound, self._inputs = frozenset(done.bound), done.following

    def _saw_proposals(self, done: Decoded, before: float | None, ended: float) -> None:
        controller, accepted = self._controller, done.accepted
        assert controller is not None
        if self._guessed:
            controller.saw_inputs(len(accepted), self._guessed)
        if not accepted:  # no input was guessed rightly, so it was a plain step
            if before is not None and not self._inputs:
                controller.saw_delay(ended - before)
            return
        proposed = {row_id: self._asked[row_id] for row_id in accepted}
        self._drafted += sum(proposed.values())
        self._accepted += sum(accepted.values())
        self.proposer.saw_step(proposed, accepted)
        # What is left of a plain step under way is that step's own time.
        begun = before if self._inputs and before is not None else done.waited
        seconds = ended - begun
        controller.saw_speculative_step(
            [*proposed.values()], [*accepted.values()], self._rows, seconds
        )

    def saw_reading(self, row: Row | None, begin: int, tokens: int, outcome: Outcome) -> None:
        """Learn from the proposer's reading; `row` is None if it has ended meanwhile."""
        self.proposer.saw_reading(row, begin, tokens)
        done = outcome.done
        waited = done.waited if isinstance(done, DraftRead) else outcome.began
        self._controllers[1].saw_reading(tokens, outcome.ended - waited)

    def saw_fault(self) -> None:
        """Note that a step has failed."""
        self._inputs = {}
        if self._asked and self._controller is not None:
            self._controller.give_up()
