"""A text that is being read: its source, its rows, and how many of its tokens are done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxsrv.engine.scheduling.prompt_index import Source, Tokens, as_tokens, find_beginning
from mlxsrv.engine.scheduling.row import Row


class Reading:
    """One text that is being read, for one row or for several that have it in common.

    Args:
        rows: these rows. Those after the first are not scored.
        source: the KV cache that the reading begins with.
        moved: the source is a cached prompt that is moved, and so leaves the prompt cache.
        source_bytes: of the KV cache that it begins with, if that was a cached prompt's.

    Attributes:
        cached: tokens of the text that the source holds.
        opened: the runner has begun to read it.
        done: tokens of the text that are read.
        checkpoints: tokens after which a slice ends, so that the KV cache can be kept there.
        began: when its first slice began.
    """

    def __init__(
        self, rows: Sequence[Row], source: Source, *, moved: bool = False, source_bytes: int = 0
    ) -> None:
        first = rows[0]
        self.rows = list(rows)
        self.text = first.text
        self.scored = not first.read and first.job.scores is not None
        self.number = first.number
        self.steering = first.job.steering
        self.beginning = find_beginning(self.text, self.steering)
        self.source = source
        self.moved = moved
        self.source_bytes = source_bytes
        self.cached = source.tokens
        self.done = self.cached
        self.opened = False
        self.checkpoints: tuple[int, ...] = ()
        self.began = 0.0

    @property
    def left(self) -> int:
        """The number of tokens to read: all but the last, which is the row's first input."""
        return self.text.size - 1 - self.done

    @property
    def suspect(self) -> bool:
        """Whether its row is a suspect, which has the text to itself."""
        return self.rows[0].suspect

    @property
    def tried(self) -> bool:
        """Whether the text is read, and its row is a suspect, which draws its next token alone."""
        return self.suspect and self.opened and not self.left

    def append(self, token: int) -> None:
        """Note that the suspect whose text it is has drawn a token, which was fed the last one."""
        self.text = np.append(self.text, as_tokens([token]))
        self.done += 1

    @property
    def tokens_read(self) -> Tokens | None:
        """The tokens that the runner has read; None: it has not begun. A KV cache of exactly these
        can be cached even if it cannot be cut back."""
        return self.text[: self.done] if self.opened else None

    @property
    def decoded(self) -> tuple[int, ...]:
        """The rows that are decoded when the text is read."""
        return tuple([row.id for row in self.rows if row.job.max_tokens > 0])

    def drop_row(self, row: Row) -> bool:
        """Forget a row. Returns whether none is left."""
        if row is self.rows[0]:
            self.scored = False
        self.rows.remove(row)
        return not self.rows

    def restart(self) -> None:
        """Note that the text is to be read anew. Activations that were sent are not sent again."""
        for row in self.rows:
            row.reported = max(row.reported, self.done)
