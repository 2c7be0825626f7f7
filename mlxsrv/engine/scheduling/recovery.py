"""Recovery: which rows end after a work item that failed, and which go on.

An exception does not tell which row caused it, for a step is one pass for all rows. So:

- Prompts of a slice that failed are read again, each alone. One that fails alone ends, unless it
  began with what a cached prompt or another row holds. That may be to blame, so the cached prompt
  is dropped; or the row may have lost it in the same round, which counts against nobody.
- Rows of a step that failed lose their KV caches, since these may already contain part of the
  failed step. They are preempted, like rows that give their memory to older ones, and are suspects:
  each is read again alone, and then draws alone, beside the others, until it is past the token at
  which the step failed. A suspect that fails ends. The others join again and go on with the same
  tokens as if nothing had been: the token that was drawn and not delivered is drawn again, with the
  same key.
- A row that was in several failed work items for which no cause was found ends as well.
- Where memory was short, there were just too many rows. So fewer are decoded together, until some
  have ended, and a row that fails alone has more attempts.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxsrv.engine.events import Failed
from mlxsrv.engine.faults import OUT_OF_MEMORY
from mlxsrv.engine.scheduling.row import Incident, Row

_MOST_INCIDENTS = 3  # of one row that are not explained, or in which memory was short
# What fails is the pass over the token that was drawn last, or the one before, whose error comes
# late. So two passes must succeed, each of which draws a token.
_PASSES = 2


def suspect_row(row: Row) -> None:
    """Have a row of a step that failed draw alone, until it is past the place of the fault."""
    row.suspect_until = row.length + _PASSES


def find_guilty(rows: Sequence[Row], incident: Incident, *, certain: bool) -> list[Row]:
    """Return which of the rows of a work item that failed are to end: those that are to blame, and
    those that were in too many. The others may go on.

    Args:
        rows: all of them.
        incident: the work item that failed.
        certain: nothing else can have caused it.
    """
    for row in rows:
        row.incidents.append(incident)
    return [row for row in rows if _exhausted(row) or (certain and not _may_wait(row))]


def blame(row: Row) -> Failed:
    """Return the event of a row that caused its last incident. Its incidents do not count against
    other rows any more."""
    last = row.incidents[-1]
    for each in row.incidents:
        each.explained = True
    if last.memory:
        return Failed(row.id, f"{OUT_OF_MEMORY}: {last.reason}", clear=OUT_OF_MEMORY)
    return Failed(row.id, last.reason)


def _exhausted(row: Row) -> bool:
    """Whether too many of the row's incidents are unexplained."""
    return sum(not each.explained for each in row.incidents) >= _MOST_INCIDENTS


def _may_wait(row: Row) -> bool:
    """Whether a row that failed alone may wait for memory that others hold."""
    short = sum(each.memory for each in row.incidents)
    return row.incidents[-1].memory and short < _MOST_INCIDENTS
