"""Groups: rows of about one length, which share a KV cache and a pass of the model.

mlx-lm's batch caches are as long as their longest row, for every row: one row of 30,000 tokens
beside seven of 300 would fill the memory of 240,000, all of it read at each step, and its joining
would copy as much. A row like that gets a group of its own, at the cost of another pass over the
weights at each step. So groups are kept apart only while padding them to one length would take more
bytes than the weights have.
"""

from __future__ import annotations

from itertools import combinations

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.row import Row


class Groups:
    """The rows that one decoder decodes, in the order of its inputs.

    Args:
        facts: of the model.
    """

    def __init__(self, facts: TextFacts) -> None:
        self._facts = facts
        self._groups: list[list[Row]] = []
        self._changed = False

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self._groups for row in group]

    def add(self, rows: list[Row]) -> None:
        """Take rows that share a KV cache."""
        self._groups.append(rows)
        self._unite()

    def remove(self, row: Row) -> None:
        """Drop a row, if it is there."""
        for group in self._groups:
            if row in group:
                group.remove(row)
                self._groups = [group for group in self._groups if group]
                self._unite()
                return

    def clear(self) -> None:
        self._groups.clear()
        self._changed = True

    def take_changed(self) -> tuple[tuple[int, ...], ...] | None:
        """The ids of the rows, group by group; None if they are the same as at the last call."""
        if not self._changed:
            return None
        self._changed = False
        return tuple(tuple(row.id for row in group) for group in self._groups)

    def _unite(self) -> None:
        """Merge groups that need not be apart, since rows have changed."""
        self._changed = True
        while (pair := self._find_close()) is not None:
            one, other = pair
            one += other
            self._groups.remove(other)

    def _find_close(self) -> tuple[list[Row], list[Row]] | None:
        """The first two groups that need not be apart."""
        pairs = combinations(self._groups, 2)
        return next((pair for pair in pairs if self._padding(*pair) <= self._facts.padding), None)

    def _padding(self, one: list[Row], other: list[Row]) -> int:
        """Bytes by which the KV caches would grow if all rows were as long as the longest."""
        sizes = [self._facts.kv_bytes(max(row.length for row in each)) for each in (one, other)]
        together = max(sizes) * (len(one) + len(other))
        return together - sizes[0] * len(one) - sizes[1] * len(other)
