"""Two answers side by side: other seeds, other steering, another token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.page.conftest import Serve
from tests.support.scripted import write_scripted
from tests.support.serving import wait_for

QUESTION = "Is it free software?"


class Compared:
    """The view, as a user finds it."""

    def __init__(self, page: Any) -> None:
        self.view = page.get_by_role("region", name="Compare", exact=True)
        self.verdict = self.view.get_by_role("status")
        self.answers = [page.get_by_role("region", name=f"Answer {name}") for name in "AB"]

    def set(self, name: str, *values: str) -> None:
        for group, value in zip("AB", values, strict=False):
            self.view.get_by_role("group", name=group, exact=True).get_by_label(name).fill(value)

    def ask(self, question: str) -> list[str]:
        self.view.get_by_label("Prompt for both").fill(question)
        self.view.get_by_role("button", name="Compare").click()
        return self.texts()

    def texts(self) -> list[str]:
        for answer in self.answers:
            expect(answer).to_have_attribute("aria-busy", "false")
            expect(answer).to_contain_text("written")
        return [answer.locator(".markdown").last.inner_text() for answer in self.answers]


@pytest.fixture
def compared(page: Any, url: str) -> Compared:
    page.goto(f"{url}/#compare")
    found = Compared(page)
    found.view.get_by_role("combobox", name="Model").last.locator("option").first.wait_for(
        state="attached"
    )
    return found


def test_the_same_seed_gives_the_same_and_another_does_not(compared: Compared) -> None:
    compared.set("Temperature", "2", "2")
    compared.set("Seed", "7", "7")
    one, other = compared.ask(QUESTION)
    assert one == other
    expect(compared.verdict).to_have_text("Both answers are the same.")
    compared.set("Seed", "7", "8")
    again, different = compared.ask(QUESTION)
    assert again == one
    assert different != one
    expect(compared.verdict).to_contain_text("The answers part at token")


@pytest.fixture
def steerable(url: str) -> Iterator[None]:
    httpx.post(f"{url}/api/saes/demo/attach", json={}, timeout=60).raise_for_status()
    yield
    httpx.post(f"{url}/api/saes/demo/detach", json={}, timeout=60).raise_for_status()


@pytest.mark.usefixtures("steerable")
def test_steered_and_not(compared: Compared) -> None:
    compared.set("Temperature", "0", "0")
    compared.set("Steering", "", "86: 9")
    plain, steered = compared.ask(QUESTION)
    assert plain == "mlxsrv is free software under the MIT licence."
    assert "GET /health" in steered


def test_what_is_no_steering_is_refused(compared: Compared) -> None:
    compared.set("Steering", "", "86 by 9")
    compared.view.get_by_label("Prompt for both").fill(QUESTION)
    compared.view.get_by_role("button", name="Compare").click()
    expect(compared.view.get_by_label("Steering").last).to_be_focused()
    expect(compared.answers[1]).not_to_contain_text("written")


def test_looking_inside_marks_the_first_difference_and_goes_on_from_another(
    compared: Compared, page: Any
) -> None:
    compared.set("Temperature", "0", "0")
    compared.ask(QUESTION)
    expect(compared.verdict).to_have_text("Both answers are the same.")
    side = compared.answers[0]
    side.get_by_label("Look inside").check()
    tokens = side.locator(".tokens [role=button]")
    tokens.nth(3).click()
    dialog = page.get_by_role("dialog", name="Token 4")
    chosen = dialog.locator("button:not([aria-current])").first
    chosen.click()
    compared.texts()
    expect(compared.verdict).to_have_text("The answers part at token 4.")
    expect(side.locator(".differs")).to_have_count(1)
    assert tokens.nth(3).evaluate("each => each.classList.contains('differs')")


def test_each_side_asks_the_default_model_when_the_list_comes_first(
    page: Any, serve: Serve, demo: Path
) -> None:
    with serve("--model", f"one={demo}", "--model", f"a={demo}") as url:
        held: list[Any] = []
        page.route("**/v1/models/default", lambda route: held.append(route))
        with page.expect_request("**/v1/models/default"):
            page.goto(f"{url}/#chat")
        page.get_by_role("link", name="Compare").click()
        sides = Compared(page).view.get_by_role("combobox", name="Model")
        expect(sides).to_have_count(2)
        wait_for(lambda: page.evaluate("true") and held, why="the request is held")
        held[0].continue_()
        for side in sides.all():
            expect(side).to_have_value("one")


def test_thoughts_are_kept_when_an_answer_goes_on(page: Any, serve: Serve, tmp_path: Path) -> None:
    script = ["<think>", "Hm", ".", "</think>", "Here", " I", " am"]
    model = write_scripted(tmp_path / "thinking", script)
    with serve("--model", f"thinking={model}") as url:
        page.goto(f"{url}/#compare")
        compared = Compared(page)
        for side in compared.view.get_by_role("combobox", name="Model").all():
            expect(side).to_have_value("thinking")
        compared.set("Temperature", "0", "0")
        compared.ask("Where are you?")
        side = compared.answers[0]
        side.get_by_label("Look inside").check()
        side.locator(".tokens").get_by_text("am").click()
        other = page.get_by_role("dialog").locator("button:not([aria-current]):enabled").first
        with page.expect_request("**/v1/chat/completions") as sent:
            other.click()
        begun = sent.value.post_data_json["messages"][-1]
        assert begun["content"].startswith("Here I")
        assert begun["reasoning_content"] == "Hm."


def test_an_error_of_one_side_leaves_the_other(compared: Compared) -> None:
    compared.set("Profile", "nobody-has-this")
    compared.view.get_by_label("Prompt for both").fill(QUESTION)
    compared.view.get_by_role("button", name="Compare").click()
    expect(compared.answers[0]).to_contain_text("nobody-has-this")
    expect(compared.answers[1]).to_contain_text("written")


@pytest.mark.usefixtures("steerable")
def test_stop_ends_both(compared: Compared) -> None:
    compared.set("Steering", "1489: 40", "1489: 40")  # so strong that it never ends
    compared.view.get_by_label("Prompt for both").fill(QUESTION)
    compared.view.get_by_role("button", name="Compare").click()
    for answer in compared.answers:
        expect(answer).to_contain_text("1111")
    compared.view.get_by_role("button", name="Stop").click()
    for answer in compared.answers:
        expect(answer).to_have_attribute("aria-busy", "false")
        expect(answer).to_contain_text("Stopped.")
    expect(compared.view.get_by_role("button", name="Stop")).to_be_disabled()


def test_on_a_phone_one_stands_below_the_other(compared: Compared, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    one, other = (answer.bounding_box() for answer in compared.answers)
    assert one["x"] == other["x"]
    assert other["y"] >= one["y"] + one["height"]
    assert page.evaluate("document.querySelector('.compare').scrollWidth") <= 390
