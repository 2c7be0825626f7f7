"""Hypothesis settings, marks by folder, and the fixtures that tests of several rooms share."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from mlxsrv.engine.patches.imports import patch_imports
from tests.support.commands import run
from tests.support.effort import EFFORT, examples
from tests.support.fixtures import client, folders, model_folder, narrow, near_sandbox, server

__all__ = ["client", "folders", "model_folder", "narrow", "near_sandbox", "run", "server"]

# A shared machine may stop for a moment at any example, so none has a deadline. A change is judged
# by the same examples each time; only long runs look for others.
settings.register_profile(
    "mlxsrv",
    max_examples=examples(80),
    deadline=None,
    derandomize=EFFORT != "long",
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mlxsrv")

if sys.platform == "linux":
    # A thread that is woken does not interrupt the one that woke it. MLX wakes its thread for each
    # operation, and so tests would change threads a hundred times for each token.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

patch_imports()  # as servers do: transformers is imported in half the time

gc.disable()  # until all tests are collected: imports make no garbage

_TESTS = Path(__file__).parent
_SERVED = {
    *("web", "server", "terminal", "engine/patches"),
    *("test_docs_examples.py", "test_commands.py", "test_fuzz.py"),
}
"""Folders and files whose tests need sockets or processes, or take long."""

_LONGEST = (
    "web/test_memory.py",
    "web/test_timeouts.py",
    "web/test_server.py",
    "web/test_structured.py",
    "web/test_models.py",
    "web/test_fairness.py",
    "web/dialects/test_same.py",
    "web/test_openapi.py",
    "web/test_restart.py",
    "web/test_downloads.py",
    "web/test_streaming.py",
    "web/test_limits.py",
    "prompts/test_encoding.py",
    "engine/text/test_chats.py",
    "engine/text/test_greedy.py",
    "engine/text/test_lookup.py",
)
"""Files that take longest. They come first, so that no process has a long one left at the end."""

_FORBIDDEN = {"socket.connect", "socket.bind", "subprocess.Popen", "os.posix_spawn"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(_TESTS)
        if {path.as_posix(), path.name, *(folder.as_posix() for folder in path.parents)} & _SERVED:
            item.add_marker(pytest.mark.served)
        if item.get_closest_marker("ranks") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))  # they wait for cores, in every layer
    places = {_TESTS / name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def _forbid(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _FORBIDDEN:
        raise AssertionError(f"{event} in a quick test; mark the test with pytest.mark.served")


def pytest_collection_finish() -> None:
    """Freeze the objects that stay to the end: the garbage collector need not look through them.
    A quick run proves that its tests need neither socket nor process."""
    gc.freeze()
    gc.enable()
    if EFFORT == "quick":
        sys.addaudithook(_forbid)
