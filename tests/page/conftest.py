"""A real Chromium, and the server as shipped, for the tests of the page."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="`make test-page` installs it")

from tests.clients.serving import ROOT, serving  # noqa: E402

# Long, for a machine that is busy: what is awaited comes much sooner.
sync_api.expect.set_options(timeout=60_000)

CHROMIUM = os.environ.get("MLXSRV_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

# A container's root has no sandbox, and its /dev/shm is small.
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


class Serve(Protocol):
    """Starts a server with more arguments; its value is the URL."""

    def __call__(self, *arguments: str) -> AbstractContextManager[str]: ...


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, with more context than a test lasts."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    folder.mkdir()
    for file in (ROOT / "mlxsrv" / "models" / "demo").glob("*.*"):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = 10**6
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> Serve:
    """Starts servers of the demo model, unless the arguments name others."""

    def start(*arguments: str) -> AbstractContextManager[str]:
        folder = tmp_path_factory.mktemp("server")
        if "--model" not in arguments:
            arguments += ("--model", "demo")
        named = [f"demo={demo}" if each == "demo" else each for each in arguments]
        return serving(folder / "log", "--data-dir", str(folder), *named)

    return start


@pytest.fixture(scope="session")
def url(serve: Serve) -> Iterator[str]:
    """The URL of a server that the tests of a run share."""
    with serve() as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here; MLXSRV_CHROMIUM may name one")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def hide(page: Any, hidden: bool) -> None:
    """Hide a tab, or show it again: a headless browser has no tab behind another."""
    page.evaluate(
        """value => {
            Object.defineProperty(document, "hidden", { configurable: true, value });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


class Told:
    """The complaints of the browser."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def watch(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: self._hear(line.type, line.text))

    def _hear(self, kind: str, text: str) -> None:
        # A status that the page handles is told by Chromium nevertheless.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.errors.append(text)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    """A new profile of the browser, with an empty store."""
    made = browser.new_context(viewport={"width": 1280, "height": 800})
    made.grant_permissions(["clipboard-read", "clipboard-write"])
    made.set_default_timeout(60_000)
    yield made
    made.close()


@pytest.fixture
def page(context: Any, told: Told) -> Iterator[Any]:
    """A tab. The test fails if a script failed in it, or if its policy was broken."""
    made = context.new_page()
    told.watch(made)
    yield made
    assert told.errors == []
