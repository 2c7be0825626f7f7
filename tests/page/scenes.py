"""Each view as one sees it when it is in use: for the tests of all views, and for screenshots."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import httpx
from playwright.sync_api import expect

Scene = Callable[[Any, str], None]
"""Brings a tab to its view of the server with this URL."""

CHAT = "/v1/chat/completions"


def show_chat(page: Any, url: str) -> None:
    page.goto(url)
    box = page.get_by_role("textbox", name="Message", exact=True)
    answer = page.get_by_role("article", name="Answer").last
    for question in ("What can you do?", "How do I stop the server?"):
        box.fill(question)
        box.press("Enter")
        expect(answer).to_contain_text(" written")
    answer.get_by_role("button", name="Regenerate").click()
    expect(answer).to_contain_text("2 / 2")
    expect(answer).to_contain_text(" written")


def show_settings(page: Any, url: str) -> None:
    """The chat with its settings, and a call of a tool that waits for its result."""
    page.goto(url)
    settings = page.get_by_role("button", name="Settings")
    settings.click()
    page.get_by_label("Tools").fill('{"name": "get_weather", "parameters": {"type": "object"}}')
    page.get_by_label("Temperature").fill("0")
    settings.click()
    box = page.get_by_role("textbox", name="Message", exact=True)
    box.fill("What is the weather in Paris?")
    box.press("Enter")
    expect(page.get_by_label("Result of get_weather")).to_be_visible()
    settings.click()
    page.get_by_label("JSON schema").fill("{")
    expect(page.get_by_role("alert").filter(has_text="no JSON")).to_be_visible()


def show_server(page: Any, url: str) -> None:
    httpx.post(url + CHAT, json={"messages": [], "model": "nobody-has-this"})
    page.goto(f"{url}/#server")
    view = page.get_by_role("region", name="Server", exact=True)
    expect(view.get_by_role("status")).to_have_text("Ready")
    for number in range(6):
        message = {"role": "user", "content": f"Tell me of number {number}. " + "And more. " * 40}
        body = {"messages": [message], "n": 1 + number % 4, "max_tokens": 200, "ignore_eos": True}
        httpx.post(url + CHAT, json=body, timeout=60).raise_for_status()
    name = re.compile("Tokens per second: .* to [1-9]")
    expect(view.get_by_role("img", name=name)).to_be_visible()
    expect(view.get_by_role("row", name=re.compile("^demo"))).to_contain_text("loaded")
    view.get_by_label("Download a model").fill("org/name")
    view.get_by_role("button", name="Pull").click()
    expect(view.get_by_role("alert").filter(has_text="--allow-download")).to_be_visible()


def show_steer(page: Any, url: str) -> None:
    page.goto(f"{url}/#steer")
    page.get_by_role("button", name="Attach").click()
    page.get_by_role("button", name="the health check").click()
    answer = page.get_by_role("region", name="Steered answer", exact=True)
    expect(answer).to_contain_text(" written")
    page.get_by_label("Save these features as").fill("health")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("listitem", name="health").wait_for()
    page.get_by_role("button", name="Read the steered answer").click()
    page.get_by_role("table").wait_for()
    # The view shows what it has read, and other scenes find the server as it was.
    [profile] = httpx.get(f"{url}/api/profiles").json()["data"]
    httpx.delete(f"{url}/api/profiles/{profile['id']}").raise_for_status()
    httpx.post(f"{url}/api/saes/demo/detach", json={}).raise_for_status()


def show_compare(page: Any, url: str) -> None:
    page.goto(f"{url}/#compare")
    page.get_by_role("group", name="A", exact=True).get_by_label("Temperature").fill("2")
    page.get_by_label("Prompt for both").fill("Is it free software?")
    page.get_by_role("button", name="Compare").click()
    for name in "AB":
        answer = page.get_by_role("region", name=f"Answer {name}")
        expect(answer).to_contain_text(" written")
    answer.get_by_label("Look inside").check()
    expect(answer.locator(".tokens [role=button]").nth(1)).to_be_visible()


def show_inside(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_label("Look inside").check()
    page.get_by_role("button", name="Settings").click()
    settings = page.get_by_role("complementary", name="Settings")
    settings.get_by_label("Temperature").fill("1.1")
    settings.get_by_label("Seed").fill("2")
    if page.viewport_size["width"] < 800:
        page.get_by_role("button", name="Settings").click()  # it covers the chat
    box = page.get_by_role("textbox", name="Message", exact=True)
    box.fill("What is a token?")
    box.press("Enter")
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_contain_text(" written")
    answer.locator(".tokens [role=button]").nth(2).click()
    page.get_by_role("dialog", name="Token 3").wait_for()


SCENES: Mapping[str, Scene] = MappingProxyType(
    {
        "chat": show_chat,
        "settings": show_settings,
        "compare": show_compare,
        "inside": show_inside,
        "steer": show_steer,
        "server": show_server,
    }
)
