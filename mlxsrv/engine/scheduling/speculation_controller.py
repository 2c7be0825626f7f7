"""Whether speculative steps are worth their time, and how many tokens to propose.

A speculative step is compared with the plain steps that would have drawn as many tokens. What is
won and lost is counted in plain steps, so nothing depends on the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

from mlxsrv.engine.scheduling.proposers import MOST, MOST_UNREAD

_FIRST = 2  # the most proposals of a first step; each one may have twice as many as any before
_GAIN = 1.03  # a speculative step must promise so many times the speed of plain ones
_MEMORY = 0.98  # the weight of what was seen, one step later
_HOPE = 2.0  # tokens: so many are thought to have held before any were seen
_TRY = 8  # one in so many steps has a proposal more than is best: times of one size show no line
_STALE = (
    64  # steps that promise too little, after which the times of speculative ones are forgotten
)
_HELD_UP = 2.0  # times what is expected: what takes longer was held up by other work
_KEPT = 32  # plain steps whose times are kept
_LEAST_STEPS = 4  # plain steps to be timed before others are compared with them
_TIME_AGAIN = 64  # speculative steps, after which plain ones are timed anew: texts get longer

_SHARE = 0.03  # of the time of plain steps: the most that is lost where proposals do not help
_PROBE = 4.0  # steps' time that may be lost before speculation is given up
_MOST_CREDIT = 512.0  # steps' time
_READING = 1 / 64  # steps' time in which the proposer is thought to read a token, at first


class _Chance:
    """The share of tries that came true of late. It begins with a hope, until more was seen."""

    def __init__(self) -> None:
        self._held = self._seen = 0.0

    @property
    def share(self) -> float:
        return (self._held + _HOPE) / (self._seen + _HOPE)

    def saw(self, held: int, seen: int) -> None:
        self._held += held
        self._seen += seen

    def fade(self) -> None:
        self._held *= _MEMORY
        self._seen *= _MEMORY


class _Times:
    """Seconds of speculative steps, by proposals to a row: a line, for a pass takes some time for
    the weights and some for each token."""

    def __init__(self) -> None:
        self.widest = 0  # proposals; 0: nothing is known
        self._sums = [0.0] * 5  # of 1, x, y, x * x, x * y

    def saw(self, size: int, seconds: float) -> None:
        self.widest = max(self.widest, size)
        new = (1, size, seconds, size * size, size * seconds)
        self._sums = [_MEMORY * a + b for a, b in zip(self._sums, new, strict=True)]

    def estimate(self, size: int) -> float:
        """Least squares. A proposal never takes less than nothing. Where only one size is known,
        it is thought to take nothing: so longer steps are tried."""
        count, x, y, xx, xy = self._sums
        spread, product = count * xx - x * x, count * xy - x * y
        slope = max(product / spread, 0.0) if spread > 1e-6 else 0.0
        return (y - slope * x) / count + slope * size


class SpeculationController:
    """Decides between speculative and plain steps by what they have taken so far.

    - As many tokens are proposed as promise the most tokens a second: by how often proposals have
      held of late, and by what steps of different sizes have taken. If even these promise no more
      than a plain step, it is a plain step's turn.
    - Speculation goes on while it is faster than plain steps, and ends when it has lost `_PROBE`
      steps' time.
    - What may be lost is a credit: plain steps earn a share of their time, speculative steps earn
      what they save, and reading is paid from it. Speculation begins when the credit covers what
      it may lose. That doubles each time it was given up, until it has proven faster. So proposals
      that do not help slow decoding down by the share at most, a few steps at the start aside.
    """

    def __init__(self) -> None:
        self.on = False  # tokens are being proposed
        self._steps: deque[float] = deque(maxlen=_KEPT)  # seconds of plain steps
        self._plain = 0.0  # the median of these
        self._times = _Times()
        self._proposals = _Chance()  # that one holds, where those before it do
        self._inputs = _Chance()  # that a row's next input is guessed rightly
        self._reading = _READING  # steps' time in which the proposer reads a token
        self._credit = 2 * _PROBE  # steps' time: for the first steps, and to read a text for them
        self._price = _PROBE  # credit with which speculation begins
        self._balance = 0.0  # steps' time that it has won of late
        self._untimed = 0  # speculative steps since plain ones were timed
        self._declined = 0  # steps that promised too little, since the last speculative one

    def affords(self, unread: int) -> bool:
        """Whether to speculate, if the proposer has so many tokens to read first."""
        if len(self._steps) < _LEAST_STEPS:
            return False
        price = 0.0 if self.on else self._price
        if unread > MOST_UNREAD:
            price += unread * self._reading
        return self._credit >= price

    def choose(self, found: Sequence[int], *, known: bool = True) -> int:
        """Return how many tokens to propose to a row at most; 0 if a plain step promises more.

        Args:
            found: for each row, how many tokens could be proposed to it.
            known: the rows' inputs need not be guessed.
        """
        if not self.on:
            self.on, self._balance = True, 0.0
        rows, chance, times = len(found), self._proposals.share, self._times
        longest = min(max(found), MOST, max(2 * times.widest, _FIRST))
        if not times.widest:
            return longest
        best, speed = 0, _GAIN * rows / self._plain
        tokens, holds = float(rows), 1.0 if known else self._inputs.share
        for size in range(1, longest + 1):
            holds *= chance
            tokens += holds * sum(each >= size for each in found)
            # A pass over more tokens takes no less than one over a single token of each row.
            seconds = max(times.estimate(size), self._plain)
            if tokens > speed * seconds:
                best, speed = size, tokens / seconds
        if 0 < best < longest and self._untimed % _TRY == _TRY - 1:
            return best + 1
        self._declined += best == 0
        if self._declined == _STALE:
            self._declined, self._times = 0, _Times()
        return best

    def saw_plain_step(self, seconds: float) -> None:
        """Learn from a plain step."""
        self._steps.append(seconds)
        self._plain = median_low(self._steps)
        self._untimed = 0
        self._earn(_SHARE)
        self._fade()

    def saw_reading(self, tokens: int, seconds: float) -> None:
        """Learn from the proposer's reading so many tokens."""
        steps = seconds / self._plain
        self._reading = (self._reading + steps / tokens) / 2
        self._earn(-steps)

    def saw_speculative_step(
        self, proposed: Sequence[int], accepted: Sequence[int], rows: int, seconds: float
    ) -> None:
        """Learn from a speculative step.

        Args:
            proposed: to each row whose proposals were verified.
            accepted: of them.
            rows: that were decoded, those without proposals included.
            seconds: what it took.
        """
        self._fade()
        # The proposals of a row that held, and the first that did not: no other was tried.
        tried = [min(held + 1, count) for count, held in zip(proposed, accepted, strict=True)]
        self._proposals.saw(sum(accepted), sum(tried))
        if self._times.widest:  # before, nothing is expected
            seconds = min(seconds, _HELD_UP * self._times.estimate(max(proposed)))
        self._times.saw(max(proposed), seconds)
        self._win(sum(accepted) / rows + 1 - seconds / self._plain)
        self._declined = 0
        self._untimed += 1
        if self._untimed == _TIME_AGAIN:
            self._untimed = 0
            self._steps.clear()

    def saw_inputs(self, right: int, guessed: int) -> None:
        """Learn how many of the inputs that were guessed were right."""
        self._inputs.saw(right, guessed)

    def saw_delay(self, seconds: float) -> None:
        """Learn that a plain step took so long, since a speculative one came to nothing."""
        self._fade()
        self._win(max(min(1 - seconds / self._plain, 1.0), -1.0))

    def _fade(self) -> None:
        self._proposals.fade()
        self._inputs.fade()

    def _win(self, won: float) -> None:
        self._earn(won)
        self._balance = min(self._balance + won, 2 * _PROBE)
        if self._balance == 2 * _PROBE:
            self._price = _PROBE
        elif self._balance < -_PROBE:
            self.give_up()

    def give_up(self) -> None:
        """Have plain steps for a while: speculation has cost too much, or a step has failed."""
        self.on = False
        self._price = min(2 * self._price, _MOST_CREDIT)
        self._credit = min(self._credit, 0.0)

    def _earn(self, steps: float) -> None:
        self._credit = min(self._credit + steps, _MOST_CREDIT)
