"""Servers with keys and without, and the refusals of their guard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

import mlxsrv
from mlxsrv.settings import Settings
from tests.support.client import check_schema
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, hosted, serving

MODELS = "/v1/models"
PAGE = "https://app.example"
OTHER_PAGE = "chrome-extension://abcdefgh"

KEY, SECOND, FILED = "first-key", "second+key/=", "key-of-a-file"


def told(response: httpx.Response, status: int, kind: str, code: str) -> str:
    """The message of a refusal by the guard."""
    assert response.status_code == status, response.text
    check_schema(response.json(), "ErrorResponse")
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (kind, code, None)
    assert response.headers["x-request-id"]
    return str(error["message"])


def told_401(response: httpx.Response) -> str:
    assert response.headers["www-authenticate"] == "Bearer"
    return told(response, 401, "authentication_error", "invalid_api_key")


def raw(**headers: str) -> list[tuple[bytes, bytes]]:
    """Headers with any byte in them."""
    return [
        (name.replace("_", "-").encode(), value.encode("latin-1"))
        for name, value in headers.items()
    ]


@contextmanager
def served(folders: Folders, *, local: bool = True, **options: Any) -> Iterator[httpx.Client]:
    app = mlxsrv.create_app(Settings(model=(f"t={folders.plain}",), **options), local=local)
    with hosted(app) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Iterator[httpx.Client]:
    """A client of a server with default options: on loopback, without keys."""
    with served(folders) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys by flags and by a file, on all addresses, open to one page."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys"
    keys.write_text(f"# of the team\n\n{FILED}  # Ada's\n")
    keys.chmod(0o644)
    flags = ["--api-key", KEY, "--api-key", SECOND, "--api-key-file", str(keys)]
    with serving(folder, "--model", f"t={folders.plain}", *flags, "--allowed-origin", PAGE) as one:
        yield one
