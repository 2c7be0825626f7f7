"""Words and gestures of a user of the chat, for its tests."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

QUESTION = "How do I stop the server?"
"""The demo model knows the answer: it names Ctrl-C."""

ENDLESS = '{"ignore_eos": true, "max_tokens": 200000}'
"""Other fields of a request, with which the demo model writes for longer than a test lasts."""


def box(page: Any) -> Any:
    """The field for the next message."""
    return page.get_by_role("textbox", name="Message", exact=True)


def ask(page: Any, text: str) -> None:
    box(page).fill(text)
    box(page).press("Enter")


def answers(page: Any) -> Any:
    return page.get_by_role("article", name="Answer")


def questions(page: Any) -> Any:
    return page.get_by_role("article", name="You")


def setting(page: Any, name: str) -> Any:
    """A control of the settings, which are opened if need be."""
    toggle = page.get_by_role("button", name="Settings", exact=True)
    if toggle.get_attribute("aria-expanded") == "false":
        toggle.click()
    return page.get_by_role("complementary", name="Settings").get_by_label(name)


def press(message: Any, name: str) -> None:
    """Press a button of a message."""
    message.get_by_role("button", name=name, exact=True).click()


def copied(page: Any) -> str:
    """The text on the clipboard."""
    return str(page.evaluate("navigator.clipboard.readText()"))


def rows(url: str) -> int:
    """The rows of the only model, as the server itself tells."""
    with urllib.request.urlopen(f"{url}/health?verbose=1") as response:
        [model] = json.load(response)["models"]
    return int(model["rows"])
