"""Which rows end when a step or a slice of prompts fails.

Used on the device thread only.
"""

from __future__ import annotations

from mlxsrv.engine.events import Failed
from mlxsrv.engine.faults import Fault
from mlxsrv.engine.row import Row

MOST_FAULTS = 3  # steps of a row that failed and nobody was to blame for: then it ends, too


def blame(row: Row, fault: Fault) -> Failed:
    """End the row: it was alone in the slice, or in too many. Others that were in slices with it
    have nothing to answer for."""
    row.ended = True
    for each in row.faults:
        each.explained = True
    return fault.end(row.job.id)


def exhausted(row: Row) -> bool:
    """Whether too many of the row's slices have failed for no reason that was found."""
    return sum(not fault.explained for fault in row.faults) >= MOST_FAULTS


def short(row: Row) -> int:
    """In how many of the row's slices memory was short."""
    return sum(fault.memory for fault in row.faults)
