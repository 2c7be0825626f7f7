"""The number of prompt tokens that a slice reads, so that running streams keep their pace."""

from __future__ import annotations

from collections import deque

LEAST_SLICE = 8  # tokens; a slice of fewer would cost a whole forward pass for next to nothing

_SMOOTHING = 0.2  # weight of a new measurement in the exponential average
_STEPS_KEPT = 64


class Pace:
    """The lengths of one model's slices, learnt from how long steps and slices take.

    The gap between two tokens of a stream, where a slice is read in between, is one decode step,
    one pass over the weights (about another step) and the time of the slice's own tokens. Short
    prompts, which are read in a slice or two, may take all that is left of `max_gap`. A long prompt
    takes many slices, and streams must not be slow all that time: it takes turns with them, a
    step's time each. Where several prompts are to be read, each of them has a step's time, for they
    wait for each other: then reading ends sooner, and the streams that come of it share their
    steps. Where steps alone fill the gap, short prompts take turns as well.

    The time per token is measured from real gaps, so the next slice corrects errors of this
    estimate. Where only other models have streams, a slice may fill `max_gap` by
    itself.

    Args:
        most: the most tokens of a slice.
        max_gap: the longest gap that a stream may have, in seconds.
    """

    def __init__(self, most: int, max_gap: float) -> None:
        self.most = most
        self._max_gap = max_gap
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)  # seconds of each
        self._median: float | None = 0.0  # of these; None: it is to be found anew
        self._token: float | None = None  # seconds of one, beyond the two passes of a gap
        self._read = 0  # tokens read since the last step

    def limit(self, *, decoding: bool, long: bool, beside: bool = False, prompts: int = 1) -> int:
        """The most tokens of the next slice.

        Args:
            decoding: the model has streams.
            long: the slice belongs to a prompt that takes several.
            beside: other models have streams.
            prompts: how many prompts are to be read and have a row.
        """
        if decoding:
            seconds = self._seconds_beside_steps(prompts if long else None)
        elif beside:
            if self._token is None:
                return min(self.most, LEAST_SLICE)
            seconds = self._max_gap
        else:
            return self.most
        if self._token is None:
            return self.most
        return min(self.most, max(LEAST_SLICE, int(seconds / self._token)))

    def estimate(self, tokens: int) -> float | None:
        """About how many seconds it takes to read so many tokens; None if that is not known."""
        if self._token is None:
            return None
        return tokens * self._token + -(-tokens // self.most) * self._step

    def _seconds_beside_steps(self, turns: int | None) -> float:
        """The time that the slice's own tokens may take while this model has streams; at most so
        many steps' time, where `turns` are taken with them."""
        if not self._steps:
            # The first stream beside prompts that were begun before: its steps are not known yet.
            return self._max_gap
        step = self._step
        left = self._max_gap - 2 * step
        if left <= 0:
            return step
        if turns is None:
            return max(left, step)
        return min(turns * step, max(left, step / 2))

    def saw_step(self, seconds: float | None) -> None:
        """Learn from the last gap between two tokens; None where it says nothing of the next."""
        read, self._read = self._read, 0
        if seconds is None:
            return
        if read == 0:
            self._steps.append(seconds)
            self._median = None
        elif self._steps:
            self._learn(read, seconds, passes=2)

    def saw_slice(self, tokens: int, seconds: float, *, decoding: bool) -> None:
        """Learn from a slice. While the model has streams, the gap around it says more."""
        self._read += tokens
        if not decoding:
            self._learn(tokens, seconds, passes=1)

    def _learn(self, tokens: int, seconds: float, passes: int) -> None:
        if tokens >= LEAST_SLICE:
            own = max(seconds - passes * self._step, 0.1 * seconds) / tokens
            known = own if self._token is None else self._token
            self._token = known + _SMOOTHING * (own - known)

    @property
    def _step(self) -> float:
        """Seconds of a plain step: the median, for other work holds up some, above all the
        tokenizing of the very prompt that is to be read."""
        if self._median is None:
            self._median = sorted(self._steps)[len(self._steps) // 2]
        return self._median
