"""Proposals from the rows' own texts, where that is faster.

A plan guesses the next input of a row, which is drawn already and not delivered, and what follows
it: see `prompt_lookup`. To know whether a guess is right, the runner waits for the step under way
instead of launching the next one meanwhile. So also a wrong guess may cost time: what the step
behind it takes longer than others.

One pass checks the proposals of all rows, so rounds are judged for the batch as a whole, and apart
for each number of rows: a pass over several tokens of many rows may be dear where that of one row
is cheap.

Masks, bans, penalties and log-probabilities are computed for one token at a time. While a row needs
these, there are plain steps only. So there are while a row is there that was in a fault: what
failed may have been a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxsrv.engine.outcomes import Decoded, Outcome
from mlxsrv.engine.scheduling.draft_policy import takes_proposals
from mlxsrv.engine.scheduling.prompt_lookup import AT_ONCE, PromptLookup
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.speculation_controller import MOST, SpeculationController


class LookupPolicy:
    """Proposals to all rows of a batch.

    Args:
        make_controller: decides about rounds of one number of rows.
    """

    def __init__(
        self, make_controller: Callable[[], SpeculationController] = SpeculationController
    ) -> None:
        self._make_controller = make_controller
        self._controllers: dict[int, SpeculationController] = {}  # by the number of rows
        self._last: SpeculationController | None = None  # that of the last step
        self._drafted = 0
        self._accepted = 0
        # Of the last plan.
        self._allowed = False  # each of the rows may be proposed to
        self._rows = 0
        self._most = 0  # proposals to a row
        self._known = False  # the rows' inputs are not guessed
        self._asked: dict[int, int] = {}  # proposals, by row
        self._following: dict[int, int] = {}  # next inputs, known after a round
        self._ended: float | None = None  # when the last step ended, or the last round
        self._round = False  # it was a round
        self._bound: frozenset[int] = frozenset()  # rows whose constraint binds the next token

    def counters(self) -> dict[str, int]:
        return {
            "speculating": int(self._last is not None and self._last.on),
            "drafted": self._drafted,
            "accepted": self._accepted,
        }

    def guess(self, rows: Sequence[Row]) -> tuple[tuple[int, ...], ...]:
        """The guesses of a `Decode` of all rows; empty where a plain step is better, or the only
        way. `rows` is empty if nothing may be proposed to them together."""
        self._allowed = bool(rows) and self._may_propose(rows)
        if not self._allowed:
            return ()
        controller = self._last = self._choose_controller(rows)
        if not controller.affords(0):
            return ()
        left = AT_ONCE
        found: list[Sequence[int]] = []
        for row in rows:
            left -= self._look(row, left)
            found.append(self._continue(row))
        counts = [max(len(each) - 1, 0) for each in found]
        if not any(counts):
            return ()
        self._rows, self._known = len(rows), bool(self._following)
        self._most = controller.choose(counts, known=self._known)
        if not self._most:
            return ()
        guesses = tuple(tuple(each[: self._most + 1]) for each in found)
        self._asked = {
            row.id: len(guess) - 1 for row, guess in zip(rows, guesses, strict=True) if guess
        }
        return guesses

    def _choose_controller(self, rows: Sequence[Row]) -> SpeculationController:
        found = self._controllers.get(len(rows))
        if found is None:
            found = self._controllers[len(rows)] = self._make_controller()
        return found

    def _may_propose(self, rows: Sequence[Row]) -> bool:
        return all(takes_proposals(row, self._bound) and not row.incidents for row in rows)

    def _look(self, row: Row, limit: int) -> int:
        """Look at what is new of the row's text, its next input included if that is known; at most
        so many tokens. Returns how many."""
        if row.lookup is None:
            row.lookup = PromptLookup()
        known, prompt = len(row.lookup), row.job.prompt
        fresh = [*prompt[known:], *row.drawn[max(known - len(prompt), 0) :]]
        if known <= row.length and row.id in self._following:
            fresh.append(self._following[row.id])
        return row.lookup.extend(fresh, limit)

    def _continue(self, row: Row) -> Sequence[int]:
        """The row's next input, and at least one token behind it; or none."""
        assert row.lookup is not None
        most = min(MOST, row.job.max_tokens - len(row.drawn) - 1)  # the input is one of them
        if most < 1:
            return ()
        if (following := self._following.get(row.id)) is not None:
            found = [following, *row.lookup.propose(most)]
        else:
            found = row.lookup.propose(most + 1)
        return found if len(found) > 1 and found[0] not in row.job.end_tokens else ()

    def saw_step(self, outcome: Outcome, seconds: float | None) -> None:
        """Learn from a plain step; `seconds` if it is known what it took."""
        assert isinstance(outcome.done, Decoded)
        self._note(outcome, outcome.done, {}, round=False)
        if self._allowed and seconds is not None and self._last is not None:
            self._last.saw_step(seconds)

    def saw_round(self, outcome: Outcome) -> None:
        """Learn from a step with guesses."""
        done, controller, ended = outcome.done, self._last, self._ended
        assert isinstance(done, Decoded)
        assert controller is not None
        if not self._known:
            controller.saw_inputs(len(done.accepted), len(self._asked))
        if not done.accepted:  # no input was guessed rightly, so it was a plain step
            if ended is not None and not self._round:
                controller.saw_delay(outcome.ended - ended)
            self._note(outcome, done, {}, round=False)
            return
        proposed = [self._asked[row_id] for row_id in done.accepted]
        accepted = [*done.accepted.values()]
        self._drafted += sum(proposed)
        self._accepted += sum(accepted)
        # What is left of a step under way is that step's own time.
        begun = ended if self._round and ended is not None else done.waited
        controller.saw_round(proposed, accepted, self._rows, outcome.ended - begun)
        self._note(outcome, done, done.following, round=True)

    def _note(
        self, outcome: Outcome, done: Decoded, following: dict[int, int], *, round: bool
    ) -> None:
        """Note what the next plan is to know of this step."""
        self._bound = frozenset(done.bound)
        self._following, self._ended, self._round = following, outcome.ended, round

    def saw_fault(self, *, guessed: bool) -> None:
        """Note that a step has failed; `guessed`: one with guesses."""
        self._following, self._ended = {}, None
        if guessed and self._last is not None:
            self._last.saw_fault()

    def skip(self) -> None:
        """Note that something else was done since the last step."""
        self._ended = None
