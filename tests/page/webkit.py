"""WebKit on a display of its own, driven as the W3C's WebDriver says.

Debian has it as `webkit2gtk-driver`; the display is Xvfb's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from tests.clients.serving import stop
from tests.support.serving import wait_for

DRIVER = os.environ.get("MLXSRV_WEBKIT") or shutil.which("WebKitWebDriver")
XVFB = shutil.which("Xvfb")

PATIENCE = 60.0
"""Seconds after which something hangs, on a machine that may be busy."""

ENTER, SHIFT, CONTROL, ESCAPE, BACKSPACE = "\ue007", "\ue008", "\ue009", "\ue00c", "\ue003"
"""Keys. `SHIFT` and `CONTROL` are held to the end of what is typed together."""

START, STARTS = 30.0, 3
"""Seconds that a browser has for its start, and how often it is tried."""

LISTENS = "0A"
"""A state of sockets, as /proc/net/tcp has it."""

OPTIONS = {"args": ["--automation", "--javascript-can-open-windows-automatically=true"]}
WANTED = {"capabilities": {"alwaysMatch": {"webkitgtk:browserOptions": OPTIONS}}}
"""A new browser, as it is asked for."""

NOT_YET = (
    "no such element",
    "stale element reference",
    "element not interactable",
)
"""Answers of WebDriver about an element that is not drawn yet, or is drawn anew."""

CLEAR = """
localStorage.clear();
sessionStorage.clear();
indexedDB.databases().then(found => {
    const gone = ({ name }) => new Promise((resolve, reject) => {
        const asked = indexedDB.deleteDatabase(name);
        asked.onsuccess = resolve;
        asked.onerror = reject;
    });
    return Promise.all(found.map(gone));
}).then(() => { window.cleared = true; });
"""
"""Empties the store."""

PRESS = """
const found = document.evaluate(arguments[0], document, null, XPathResult.FIRST_ORDERED_NODE_TYPE);
const element = found.singleNodeValue;
if (!element?.checkVisibility()) return false;
element.click();
return true;
"""

OPEN = """
const [url, size] = arguments;
window.told = [];
const tab = window.open(url, "_blank", `popup,${size}`);
const tell = event => told.push(`${event.message ?? event.reason ?? event.violatedDirective}`);
setInterval(() => {
    if (tab.watched || tab.location.href === "about:blank") return;
    tab.watched = true;
    for (const name of ["error", "unhandledrejection", "securitypolicyviolation"])
        tab.addEventListener(name, tell);
});
"""
"""Opens a window of exactly this size, and collects its errors, those behind a reload included."""


class RefusedError(Exception):
    """The driver did not do what it was told."""

    def __init__(self, path: str, value: Mapping[str, Any]) -> None:
        super().__init__(f"{path}: {value}")
        self.kind = value["error"]


class WebKit:
    """A browser, and the window that was opened last."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client = client
        self._path = f"/session/{session}"
        [self._first] = self.call("GET", "/window/handles")

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Give a command; what it answers."""
        answer = self._client.request(method, self._path + path, json=body)
        value = answer.json()["value"]
        if answer.is_error:
            raise RefusedError(path, value)
        return value

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function's body in the page."""
        return self.call("POST", "/execute/sync", {"script": script, "args": arguments})

    def open(self, url: str, *, width: int = 1280) -> None:
        """Open a URL of the server in a new window; the first one hears its errors."""
        for each in self._others():
            self._to(each)
            self.call("DELETE", "/window")
        self._to(self._first)
        self.call("POST", "/url", {"url": f"{url}/page/icon.svg"})
        self.run(CLEAR)
        self.until("return window.cleared")
        self.run(OPEN, url, f"width={width},height=800")
        [tab] = self._others()
        self._to(tab)
        self.until("return document.title.endsWith('· mlxsrv')")

    def _others(self) -> set[str]:
        return {*self.call("GET", "/window/handles")} - {self._first}

    def _to(self, window: str) -> None:
        self.call("POST", "/window", {"handle": window})

    def errors(self) -> list[str]:
        """Tell what the page's scripts did not catch, and what its policy held back."""
        return [str(each) for each in self.run("return opener.told")]

    def until(self, script: str, *arguments: Any) -> Any:
        """Wait until a script returns something true."""
        return wait_for(lambda: self.run(script, *arguments), seconds=PATIENCE, why=script)

    def on(self, path: str, method: str, command: str, **body: str) -> Any:
        """Give a command to the element on an XPath, once it is there and can take it."""
        query = {"using": "xpath", "value": path}
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                [number] = self.call("POST", "/element", query).values()
                return self.call(method, f"/element/{number}/{command}", body)
            except RefusedError as refused:
                if refused.kind not in NOT_YET or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def press(self, path: str) -> None:
        """Press what is seen there. A script does it, so nothing that moves meanwhile is missed."""
        self.until(PRESS, path)

    def type(self, path: str, *keys: str) -> None:
        """Type into a control; a file is chosen by its path."""
        self.on(path, "POST", "value", text="".join(keys))

    def text(self, path: str) -> str:
        return str(self.on(path, "GET", "text"))

    def height(self, path: str) -> float:
        return float(self.on(path, "GET", "rect")["height"])

    def shows(self, path: str, text: str) -> None:
        """Wait until an element shows a text."""
        wait_for(lambda: text in self.text(path), seconds=PATIENCE, why=f"{path}: {text}")


def named(name: str) -> str:
    """The XPath of the control with this name."""
    own = f"@aria-label='{name}' or normalize-space()='{name}'"
    labelled = f"@id=//label[normalize-space()='{name}']/@for"
    return f"//*[self::button or self::input or self::textarea][{own} or {labelled}]"


@contextmanager
def browser(log: Path) -> Iterator[WebKit]:
    """A browser on a display without a screen.

    Driver and browser meet at a port that may be another's, and then neither says so: it is
    begun anew.
    """
    with log.open("wb") as output, _display(output) as display:
        for _ in range(STARTS):
            with _driver(display, output) as client:
                try:
                    answer = client.post("/session", json=WANTED, timeout=START)
                except httpx.ReadTimeout:
                    continue
                assert answer.is_success, answer.text
                made = WebKit(client, answer.json()["value"]["sessionId"])
                yield made
                made.call("DELETE", "")
                return
    pytest.fail(f"WebKit does not start; its log is {log}")


@contextmanager
def _display(output: IO[bytes]) -> Iterator[str]:
    assert XVFB is not None
    told, tell = os.pipe()
    size = ["-screen", "0", "1400x1000x24", "-nolisten", "tcp"]
    command = [XVFB, "-displayfd", str(tell), *size]
    process = subprocess.Popen(command, pass_fds=[tell], stderr=output)
    os.close(tell)
    try:
        with os.fdopen(told) as number:
            yield f":{number.readline().strip()}"
    finally:
        stop(process)


@contextmanager
def _driver(display: str, output: IO[bytes]) -> Iterator[httpx.Client]:
    assert DRIVER is not None
    surroundings = os.environ | {"DISPLAY": display}
    process = subprocess.Popen([DRIVER, "--port=0"], env=surroundings, stderr=output)
    try:
        port = wait_for(lambda: _port(process.pid), seconds=PATIENCE, why=DRIVER)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            yield client
    finally:
        stop(process)


def _port(process: int) -> int | None:
    """The port at which a process of Linux listens: this driver does not tell it."""
    own = {each.resolve().name for each in Path(f"/proc/{process}/fd").iterdir()}
    for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENS and f"socket:[{fields[9]}]" in own:
            return int(fields[1].rpartition(":")[2], 16)
    return None
