"""The look inside an answer: its tokens, their probabilities, and the alternatives."""

from __future__ import annotations

import math
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.test_accessibility import look, violations

SHOW = """async (tokens) => {
    const { InsideView, beginning } = await import("./page/inside.js");
    window.beginning = beginning;
    window.chosen = [];
    window.tokens = tokens;
    window.view = new InsideView((index, other) => window.chosen.push([index, other.token]));
    document.querySelector("main").replaceChildren(window.view.element);
    window.view.update(tokens);
}"""


def alternative(text: str | bytes, probability: float) -> dict[str, Any]:
    content = text if isinstance(text, bytes) else text.encode()
    shown = content.decode(errors="replace")
    return {"token": shown, "bytes": list(content), "logprob": math.log(probability)}


def token(text: str | bytes, probability: float = 0.95, *others: Any) -> dict[str, Any]:
    taken = alternative(text, probability)
    return {**taken, "top_logprobs": [taken, *others]}


@pytest.fixture
def tokens(page: Any, url: str) -> Any:
    """Show tokens; return them on the page."""
    page.goto(url)
    page.get_by_role("region", name="Chat").wait_for()

    def show(*all: Any) -> Any:
        page.evaluate(SHOW, list(all))
        return page.locator("main .tokens [role=button]")

    return show


def test_a_token_tells_its_probability_and_not_by_colour_alone(tokens: Any) -> None:
    shown = tokens(token(" Hi", 0.95), token("!", 0.3), token("\n", 0.000001))
    expect(shown).to_have_count(3)
    names = [each.get_attribute("aria-label") for each in shown.all()]
    assert names == ["␣Hi, 95.0 %", "!, 30.0 %", "↵, < 0.01 %"]
    styles = "all => all.map(each => getComputedStyle(each).borderBottomStyle)"
    assert shown.evaluate_all(styles) == ["solid", "dashed", "double"]
    assert shown.all_text_contents() == [" Hi", "!", "↵\n"]


def test_a_character_of_several_tokens_is_shown_with_the_last(tokens: Any, page: Any) -> None:
    euro = "€".encode()
    shown = tokens(token("a"), token(euro[:1]), token(euro[1:2]), token(euro[2:] + b"b"))
    expect(shown).to_have_count(4)
    assert shown.all_text_contents() == ["a", "·", "·", "€b"]
    assert shown.nth(1).get_attribute("aria-label") == "part of a character, 95.0 %"
    begun = page.evaluate("""() => window.beginning(
        { reasoning: "r", tokens: window.tokens }, 3, window.tokens[3]
    )""")
    assert (begun["content"], begun["reasoning"], len(begun["tokens"])) == ("a€b", "r", 4)


def test_what_hides_is_named_and_nothing_is_run(tokens: Any, page: Any) -> None:
    shown = tokens(token("<script>"), token("\u202e"), token("\x1b[1m"))
    expect(shown).to_have_count(3)
    assert shown.all_text_contents() == ["<script>", "U+202E", "U+001B[1m"]
    assert page.locator("main script").count() == 0


def test_the_mouse_opens_the_alternatives_and_chooses_one(tokens: Any, page: Any) -> None:
    others = [alternative(" B", 0.25), alternative(b"\xe2\x82", 0.2)]
    shown = tokens(token("x"), token(" A", 0.5, *others))
    shown.nth(1).click()
    dialog = page.get_by_role("dialog", name="Token 2: ␣A")
    expect(dialog.get_by_role("button", name="␣A 50.0 %")).to_have_attribute("aria-current", "true")
    # A part of a character cannot stand in a request.
    expect(dialog.get_by_role("button", name="e2 82 20.0 %")).to_be_disabled()
    expect(dialog.get_by_role("button", name="␣B 25.0 %")).to_be_enabled()
    bar = dialog.get_by_role("button", name="␣B 25.0 %").locator(".share")
    assert bar.evaluate("each => each.style.width") == "25%"
    dialog.get_by_role("button", name="␣B").click()
    expect(dialog).to_be_hidden()
    assert page.evaluate("window.chosen") == [[1, " B"]]
    shown.nth(1).click()
    dialog.get_by_role("button", name="␣A").click()
    expect(dialog).to_be_hidden()
    assert page.evaluate("window.chosen.length") == 1


def test_a_special_token_cannot_be_gone_on_from(tokens: Any, page: Any) -> None:
    """As a text it is another token, or the end of the request's last turn."""
    special = ("<|im_end|>", "<｜end▁of▁sentence｜>", "</s>", "<end_of_turn>", "[INST]")
    usual = ("<", "<|", " <b>", "[", "[1]", "|>")
    shown = tokens(token("x", 0.5, *(alternative(each, 0.01) for each in (*special, *usual))))
    shown.first.click()
    for names, able in ((special, False), (usual, True)):
        for name in names:
            choice = page.get_by_role("button", name=f"{name.replace(' ', '␣')} 1.0 %", exact=True)
            expect(choice).to_be_enabled(enabled=able)


def test_the_keyboard_does_all(tokens: Any, page: Any) -> None:
    shown = tokens(*(token(f"{n} ", 0.5, alternative("other", 0.5)) for n in range(30)))
    expect(shown).to_have_count(30)
    shown.first.focus()
    for key, place in [("ArrowRight", 1), ("ArrowDown", 11), ("ArrowLeft", 10), ("End", 29)]:
        page.keyboard.press(key)
        expect(shown.nth(place)).to_be_focused()
    assert page.locator("main .tokens [tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Token 30")
    expect(dialog.get_by_role("button").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(shown.nth(29)).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("window.chosen") == [[29, "other"]]


def test_eight_thousand_tokens_are_added_to_and_not_made_again(tokens: Any, page: Any) -> None:
    shown = tokens(*(token("word\n" if n % 50 == 0 else f"{n} ") for n in range(8_000)))
    expect(shown).to_have_count(8_000)
    first = shown.first.element_handle()
    page.evaluate("window.view.update([...window.tokens, ...window.tokens.slice(0, 5)])")
    expect(shown).to_have_count(8_005)
    assert first.evaluate("each => each.isConnected")
    page.evaluate("window.view.update(window.tokens.slice(1, 4))")
    expect(shown).to_have_count(3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_the_alternatives(tokens: Any, page: Any, scheme: Any) -> None:
    levels = (0.95, 0.6, 0.3, 0.1, 0.01)
    shown = tokens(*(token(f"{level} ", level, alternative("b", 0.01)) for level in levels))
    shown.first.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    look(page, scheme)
    assert violations(page) == []
