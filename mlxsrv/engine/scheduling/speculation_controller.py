"""Whether a draft model's proposals are worth their time, and how many to ask for.

A speculative round proposes tokens and checks them in one pass. It is compared with the plain steps
that would have drawn as many tokens. All times are counted in plain steps, so nothing depends on
the machine. Every round of this file is a speculative one.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

MOST_UNREAD = 16  # tokens that a draft reads on the way to its first proposal

MOST = 8  # proposals to a row in a round; more than so many in a row rarely hold

_FIRST = 2  # proposals of a probe's first round
_KEPT = 32  # steps and rounds whose times are kept
_LEAST_STEPS = 4  # plain steps to be timed before rounds are compared with them
_TIME_AGAIN = 64  # rounds, after which plain steps are timed anew: they get slower with the text

_SHARE = 0.03  # of the time of plain steps: the most that is lost where proposals do not help
_PROBE = 4.0  # steps' time that rounds may lose before they are given up
_MOST_CREDIT = 512.0  # steps' time
_READING = 1 / 64  # steps' time for which a draft reads a token, until it is known


class SpeculationController:
    """Decides between rounds and plain steps by what they have taken so far.

    - A round asks for one proposal more than the last if all held, else for one less.
    - Rounds go on while they are faster than plain steps, and end when they have lost `_PROBE`
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
        self._rounds: deque[float] = deque(maxlen=_KEPT)  # seconds
        self._plain = 0.0  # seconds of a plain step: the median
        self._reading: float | None = None  # steps' time in which the draft reads a token
        self._credit = 2 * _PROBE  # steps' time: for the first rounds, and to read a text for them
        self._price = _PROBE  # credit with which rounds begin
        self._balance = 0.0  # steps' time that rounds have won of late
        self._proposals = _FIRST  # of the next round
        self._untimed = 0  # rounds since plain steps were timed

    def affords(self, unread: int) -> bool:
        """Whether to decode in rounds, if the draft has so many tokens to read first."""
        if len(self._steps) < _LEAST_STEPS:
            return False
        price = 0.0 if self.on else self._price
        if unread > MOST_UNREAD:
            price += unread * (_READING if self._reading is None else self._reading)
        return self._credit >= price

    def bound(self, limit: int) -> int:
        """How many of `limit` tokens the draft may read at once: a few, until it has been timed."""
        return min(limit, MOST_UNREAD) if self._reading is None else limit

    def choose(self, most: int) -> int:
        """How many tokens to propose: at least one, and no more than `most`."""
        if not self.on:
            self.on = True
            self._balance, self._proposals = 0.0, _FIRST
        return min(self._proposals, most)

    def saw_step(self, seconds: float) -> None:
        """Learn from a plain step."""
        self._steps.append(seconds)
        self._plain = median_low(self._steps)
        self._earn(_SHARE)

    def saw_reading(self, tokens: int, seconds: float) -> None:
        """Learn from the draft's reading so many tokens."""
        steps = seconds / self._plain
        known = steps / tokens if self._reading is None else self._reading
        self._reading = (known + steps / tokens) / 2
        self._earn(-steps)

    def saw_round(
        self, proposed: int, accepted: float, seconds: float, *, held: bool | None = None
    ) -> None:
        """Learn from a round.

        Args:
            proposed: to each row.
            accepted: proposals of a row, on average.
            held: the proposals were as good as can be; if all were accepted, unless given.
        """
        held = accepted == proposed if held is None else held
        self._proposals = min(proposed + 1, MOST) if held else max(proposed - 1, 1)
        self._rounds.append(seconds)
        # Other work may have held this round up, which says nothing of the next.
        seconds = min(seconds, 2 * median_low(self._rounds))
        self._win(accepted + 1 - seconds / self._plain)
        self._untimed += 1
        if self._untimed == _TIME_AGAIN:
            self._untimed = 0
            self._steps.clear()

    def saw_delay(self, seconds: float) -> None:
        """Learn that a step began so late, since a round was wanted and came to nothing."""
        self._win(-min(seconds / self._plain, 1.0))

    def saw_fault(self) -> None:
        """Learn that a round has failed."""
        self._give_up()

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
