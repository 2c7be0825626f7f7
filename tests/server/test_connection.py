"""The connection depends on what uvicorn and its parsers do inside."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import mlxsrv.server.connection


def test_what_is_installed_is_what_it_is_tested_with() -> None:
    """Another version may be good: run the tests of the connection with it, then name it."""
    told = re.findall(r"(uvicorn|h11|httptools) (\d+\.\d+)", mlxsrv.server.connection.__doc__ or "")
    assert [name for name, _ in told] == ["uvicorn", "h11", "httptools"]
    for name, tested in told:
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue  # httptools is an extra
        assert installed.startswith(f"{tested}."), name
