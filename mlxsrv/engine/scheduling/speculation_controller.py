"""Whether proposals are worth their time, and how many to ask for.

A speculative round proposes tokens and checks them in one pass. It is compared with the plain steps
that would have drawn as many tokens. All times are counted in plain steps, so nothing depends on
the machine. Every round of this file is a speculative one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

from mlxsrv.engine.scheduling.round_times import RoundTimes

MOST_UNREAD = 16  # tokens that a draft reads on the way to its first proposal

MOST = 8  # proposals to a row in a round; more than so many in a row rarely hold

_FIRST = 2  # the most proposals of a first round; each one may have twice as many as any before
_GAIN = 1.03  # a round must promise so many times the speed of plain steps
_MEMORY = 0.98  # the weight of what was seen, one step or round later
_HOPE = 2.0  # tokens: so many are thought to have held before any were seen
_TRY = 8  # one in so many rounds has a proposal more than is best: times of one size show no line
_STALE = 64  # rounds that promise too little, after which the times of rounds are forgotten
_KEPT = 32  # steps whose times are kept
_LEAST_STEPS = 4  # plain steps to be timed before rounds are compared with them
_TIME_AGAIN = 64  # rounds, after which plain steps are timed anew: they get slower with the text

_SHARE = 0.03  # of the time of plain steps: the most that is lost where proposals do not help
_PROBE = 4.0  # steps' time that rounds may lose before they are given up
_MOST_CREDIT = 512.0  # steps' time
_READING = 1 / 64  # steps' time for which a draft reads a token, until it is known


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


class SpeculationController:
    """Decides between rounds and plain steps by what they have taken so far.

    - A round has as many proposals as promise the most tokens a second: by how often proposals have
      held of late, and by what rounds of different sizes have taken. If even these promise no more
      than a plain step, it is a plain step's turn.
    - Rounds may go on while they are faster than plain steps, and end when they have lost `_PROBE`
      steps' time.
    - What may be lost is a credit: plain steps earn a share of their time, rounds earn what they
      save, and reading a text with the draft is paid from it. Rounds begin when the credit covers
      what they may lose. That doubles with each time that rounds were given up, until they have
      proven faster. So a draft that does not help slows decoding down by the share at most, a few
      steps at the start aside.
    """

    def __init__(self) -> None:
        self.on = False  # rounds are being run
        self._steps: deque[float] = deque(maxlen=_KEPT)  # seconds
        self._rounds = RoundTimes()
        self._proposals = _Chance()  # that one holds, where those before it do
        self._inputs = _Chance()  # that a row's next input is guessed rightly
        self._plain = 0.0  # seconds of a plain step: the median
        self._reading: float | None = None  # steps' time in which the draft reads a token
        self._credit = 2 * _PROBE  # steps' time: for the first rounds, and to read a text for them
        self._price = _PROBE  # credit with which rounds begin
        self._balance = 0.0  # steps' time that rounds have won of late
        self._untimed = 0  # rounds since plain steps were timed
        self._declined = 0  # rounds that promised too little, since the last one

    def affords(self, unread: int) -> bool:
        """Whether to decode in rounds, if the draft has so many tokens to read first."""
        if len(self._steps) < _LEAST_STEPS:
            return False
        price = 0.0 if self.on else self._price
        if unread > MOST_UNREAD:
            price += unread * (_READING if self._reading is None else self._reading)
        return self._credit >= price

    def bound(self, limit: int) -> int:
        """Return how many of `limit` tokens the draft may read at once: few, until it is timed."""
        return min(limit, MOST_UNREAD) if self._reading is None else limit

    def choose(self, found: Sequence[int], *, known: bool = True) -> int:
        """Return how many tokens to propose to a row at most; 0 if a plain step promises more.

        Args:
            found: for each row, how many tokens could be proposed to it.
            known: the rows' inputs need not be guessed.
        """
        if not self.on:
            self.on = True
            self._balance = 0.0
        rows, chance = len(found), self._proposals.share
        longest = min(max(found), MOST, max(2 * self._rounds.widest, _FIRST))
        best, speed = 0, _GAIN * rows / self._plain
        tokens, holds = float(rows), 1.0 if known else self._inputs.share
        for size in range(1, longest + 1):
            holds *= chance
            tokens += holds * sum(each >= size for each in found)
            seconds = self._rounds.estimate(size) if self._rounds.widest else 0.0
            if tokens > speed * seconds:
                best, speed = size, tokens / seconds if seconds else 0.0
        if 0 < best < longest and self._untimed % _TRY == _TRY - 1:
            return best + 1
        self._declined += best == 0
        if self._declined == _STALE:
            self._declined = 0
            self._rounds.clear()
        return best

    def saw_step(self, seconds: float) -> None:
        """Learn from a plain step."""
        self._steps.append(seconds)
        self._plain = median_low(self._steps)
        self._untimed = 0
        self._earn(_SHARE)
        self._fade()

    def saw_reading(self, tokens: int, seconds: float) -> None:
        """Learn from the draft's reading so many tokens."""
        steps = seconds / self._plain
        known = steps / tokens if self._reading is None else self._reading
        self._reading = (known + steps / tokens) / 2
        self._earn(-steps)

    def saw_round(
        self, proposed: Sequence[int], accepted: Sequence[int], rows: int, seconds: float
    ) -> None:
        """Learn from a round.

        Args:
            proposed: to each row whose proposals were checked.
            accepted: of them.
            rows: that were decoded, those without proposals included.
            seconds: what it took.
        """
        self._fade()
        self._proposals.saw(sum(accepted), sum(map(_count_tried, proposed, accepted)))
        seconds = self._rounds.add(max(proposed), seconds)
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
        """Learn that a plain step took so long, since a round was wanted and came to nothing."""
        self._fade()
        self._win(max(min(1 - seconds / self._plain, 1.0), -1.0))

    def saw_fault(self) -> None:
        """Learn that a round has failed."""
        self._give_up()

    def _fade(self) -> None:
        self._proposals.fade()
        self._inputs.fade()

    def _win(self, won: float) -> None:
        self._earn(won)
        self._balance = min(self._balance + won, 2 * _PROBE)
        if self._balance == 2 * _PROBE:
            self._price = _PROBE
        elif self._balance < -_PROBE:
            self._give_up()

    def _give_up(self) -> None:
        self.on = False
        self._price = min(2 * self._price, _MOST_CREDIT)
        self._credit = min(self._credit, 0.0)

    def _earn(self, steps: float) -> None:
        self._credit = min(self._credit + steps, _MOST_CREDIT)


def _count_tried(proposed: int, accepted: int) -> int:
    """The proposals of a row that held, and the first that did not: no other was tried."""
    return min(accepted + 1, proposed)
