"""The connection depends on what uvicorn and its parser do inside."""

from __future__ import annotations

import re
from importlib.metadata import version

import mlxsrv.server.connection


def test_what_is_installed_is_what_it_is_tested_with() -> None:
    """Another version may be good: run the tests of the connection with it, then name it."""
    named = re.findall(r"(uvicorn|h11) (\d+\.\d+)", mlxsrv.server.connection.__doc__ or "")
    assert [name for name, _ in named] == ["uvicorn", "h11"]
    for name, tested in named:
        assert version(name).startswith(f"{tested}."), name
