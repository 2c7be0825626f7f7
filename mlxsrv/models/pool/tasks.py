"""Work that outlives whoever asked for it first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def start_task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task that several may wait for, so that one who leaves does not end it for others.

    Nobody may be left to hear of its error; so the work logs why it failed, and asyncio does not.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task
