"""The view "Steer", as somebody meets it who has just started the server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.page.conftest import Serve
from tests.support.serving import wait_for
from tests.support.tiny import write_model

DOCS = Path(__file__).parent.parent.parent / "docs/steering.md"
CELL = r" (.+?) \|"
ROW = re.compile(rf"^\| (\d+), (.+?) \|{CELL * 5}$", re.MULTILINE)
PRESETS = [
    {"feature": int(feature), "name": name, "value": float(value), "effect": effect, "question": q}
    for feature, name, value, effect, q, _, _ in ROW.findall(DOCS.read_text())
]
ANSWERS = {row[4]: row[5:] for row in ROW.findall(DOCS.read_text())}
UNSTEERED, STEERED = "Unsteered answer", "Steered answer"


class Server:
    """The API below `/api` of a server."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self._client = client

    def get(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()["data"]

    def post(self, path: str, body: object = None) -> Any:
        return self._client.post(path, json=body or {}).raise_for_status().json()["data"]

    def delete(self, path: str) -> None:
        self._client.delete(path).raise_for_status()


@pytest.fixture(scope="module")
def steerable(serve: Serve) -> Iterator[Server]:
    with serve() as url, httpx.Client(base_url=f"{url}/api/", timeout=60) as client:
        yield Server(url, client)


@pytest.fixture
def server(steerable: Server) -> Iterator[Server]:
    """A server without an SAE and without profiles, before and after."""
    yield steerable
    if steerable.get("saes/attachment")["attached"]:
        steerable.post("saes/demo/detach")
    for profile in steerable.get("profiles"):
        steerable.delete(f"profiles/{profile['id']}")


@pytest.fixture
def view(page: Any, server: Server) -> Any:
    """The view, with the demo's SAE attached."""
    server.post("saes/demo/attach")
    page.goto(f"{server.url}/#steer")
    page.get_by_role("button", name="Detach").wait_for()
    return page


def answer(page: Any, which: str) -> Any:
    return page.get_by_role("region", name=which, exact=True)


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def add(page: Any, wanted: str) -> None:
    page.get_by_label("Add by number or name").fill(wanted)
    press(page, "Add")


def set_value(page: Any, feature: str, value: str) -> None:
    typed = page.get_by_label(f"Value of feature {feature}")
    typed.fill(value)
    typed.press("Enter")


def ask(page: Any, question: str) -> None:
    page.get_by_label("Question").fill(question)
    press(page, "Ask")


def complete(server: Server, question: str, **fields: object) -> str:
    """The greedy answer over the API."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    return str(response.raise_for_status().json()["choices"][0]["message"]["content"])


def test_the_sae_is_attached_and_detached_by_a_button(page: Any, server: Server) -> None:
    page.goto(f"{server.url}/#steer")
    expect(page.get_by_text("It fits demo.")).to_be_visible()
    expect(page.get_by_label("Question")).to_be_hidden()
    press(page, "Attach")
    expect(page.get_by_text("demo is attached: 1,536 features")).to_be_visible()
    assert server.get("saes/attachment")["sae_id"] == "demo"
    expect(page.get_by_label("Question")).to_be_visible()
    press(page, "Detach")
    expect(page.get_by_label("Question")).to_be_hidden()
    expect(page.get_by_role("button", name="Attach", exact=True)).to_be_enabled()
    assert not server.get("saes/attachment")["attached"]


def test_the_presets_are_those_of_the_documentation(view: Any, server: Server) -> None:
    assert len(PRESETS) == 5
    presets = view.evaluate("""import("/page/presets.js").then(({ presetsOf }) =>
        presetsOf("demo").map(({ values: [[feature, value]], name, effect, question }) =>
            ({ feature, name, value, effect, question })))""")
    assert presets == PRESETS
    cards = view.get_by_role("group", name="Try a feature").get_by_role("button")
    expect(cards).to_have_count(5)
    for index, preset in enumerate(PRESETS):
        for field in ("name", "effect", "question"):
            expect(cards.nth(index)).to_contain_text(str(preset[field]))


def test_the_texts_of_a_preset_have_room(view: Any) -> None:
    card = view.get_by_role("group", name="Try a feature").get_by_role("button").first
    texts = card.locator("> *")
    expect(texts).to_have_count(4)
    hidden = "all => all.map(each => each.scrollHeight - each.clientHeight)"
    assert max(texts.evaluate_all(hidden)) <= 1


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset["name"])
def test_a_preset_changes_the_answer_as_the_documentation_says(
    view: Any, preset: dict[str, Any]
) -> None:
    view.get_by_role("group", name="Try a feature").get_by_role(
        "button", name=preset["name"]
    ).click()
    slider = view.get_by_role("slider", name=f"Feature {preset['feature']}, {preset['name']}")
    expect(slider).to_have_value(f"{preset['value']:g}")
    expect(view.get_by_label("Question")).to_have_value(preset["question"])
    unsteered, steered = ANSWERS[preset["question"]]
    expect(answer(view, UNSTEERED)).to_contain_text(unsteered)
    expect(answer(view, STEERED)).to_contain_text(steered)


def test_a_feature_added_by_number_changes_nothing_until_its_value_does(
    view: Any, server: Server
) -> None:
    ask(view, "Is it free software?")
    expect(answer(view, UNSTEERED)).to_contain_text("MIT licence")
    expect(view.get_by_text("No feature is set.")).to_be_visible()
    add(view, "86")
    expect(answer(view, STEERED)).to_contain_text("MIT licence")
    set_value(view, "86, the health check", "9")
    expect(answer(view, STEERED)).to_contain_text("GET /health tells")
    expect(view.get_by_role("slider")).to_have_value("9")
    press(view, "Remove feature 86, the health check")
    expect(view.get_by_text("No feature is set.")).to_be_visible()
    expect(view.get_by_label("Add by number or name")).to_be_focused()


def test_a_slider_is_moved_by_the_keyboard_alone(view: Any) -> None:
    ask(view, "Is it free software?")
    add(view, "The health check")
    slider = view.get_by_role("slider", name="Feature 86, the health check")
    expect(answer(view, STEERED)).to_contain_text("GET /health tells")
    for _ in range(4):  # back through the other fields that the view has before it
        view.keyboard.press("Shift+Tab")
        if slider.evaluate("element => element === document.activeElement"):
            break
    expect(slider).to_be_focused()
    for _ in range(18):
        view.keyboard.press("ArrowLeft")
    expect(slider).to_have_value("0")
    expect(view.get_by_label("Value of feature 86, the health check")).to_have_value("0")
    expect(answer(view, STEERED)).to_contain_text("MIT licence")


def test_the_mode_is_chosen(view: Any, server: Server) -> None:
    question = "Is it free software?"
    added, clamped = (
        complete(server, question, steering={"545": 9}, steering_mode=mode, max_tokens=30)
        for mode in ("additive", "clamp")
    )
    assert added != clamped
    ask(view, question)
    add(view, "545")
    set_value(view, "545", "9")
    expect(answer(view, STEERED)).to_contain_text(added)
    view.get_by_label("Mode", exact=True).select_option("clamp")
    expect(answer(view, STEERED)).to_contain_text(clamped)


def test_values_beyond_those_of_the_api_are_not_taken(view: Any) -> None:
    add(view, "7")
    set_value(view, "7", "1000")
    expect(view.get_by_label("Value of feature 7")).to_have_value("200")
    expect(view.get_by_role("slider")).to_have_value("200")
    set_value(view, "7", "")
    expect(view.get_by_label("Value of feature 7")).to_have_value("200")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [("1536", "The SAE has 0 to 1535"), ("love", "no feature love"), ("-1", "no feature -1")],
)
def test_what_is_no_feature_is_told(view: Any, wanted: str, says: str) -> None:
    add(view, wanted)
    expect(view.get_by_role("alert").filter(has_text=says)).to_be_visible()
    expect(view.get_by_role("slider")).to_have_count(0)


def shown_heat(page: Any) -> tuple[list[str], dict[int, dict[str, str]]]:
    """The tokens of the heat map, and the cells that are not empty, by token and feature."""
    table = page.get_by_role("table")
    heads = table.locator("thead button").all_inner_texts()
    rows = [row for row in table.locator("tbody tr").all() if row.locator("td").count()]
    tokens = [row.get_by_role("rowheader").inner_text() for row in rows]
    cells = {}
    for position, row in enumerate(rows):
        texts = dict(zip(heads, row.locator("td").all_inner_texts(), strict=True))
        cells[position] = {feature: text for feature, text in texts.items() if text}
    return tokens, cells


def test_the_heat_map_shows_the_activations_of_the_monitor(view: Any, server: Server) -> None:
    question = "Is it free software?"
    ask(view, question)
    expect(answer(view, UNSTEERED)).to_contain_text("written")  # it is not watched
    before = server.get("monitoring")
    press(view, "Read the unsteered answer")
    view.get_by_role("table").wait_for()
    assert {**server.get("monitoring"), "features_seen": 0} == before
    tokens, cells = shown_heat(view)
    assert tokens[3:7] == ["Is", "␣it", "␣free", "␣software"]
    assert "".join(tokens[13:23]).replace("␣", " ") == ANSWERS[question][0]

    server.post("monitoring/configure", {"enabled": True, "top_k": 50, "history_size": 100})
    complete(server, question)
    history = {
        entry["token_position"]: entry["activations"] for entry in server.get("monitoring/history")
    }
    assert len(history) == 23
    shown = {feature for active in cells.values() for feature in active}
    assert len(shown) == 12
    for position, active in history.items():
        told = {feature: float(text) for feature, text in cells[position].items()}
        assert told == pytest.approx({k: v for k, v in active.items() if k in shown}, abs=0.051)


def test_the_heat_map_leaves_a_monitor_that_is_watching_as_it_was(
    view: Any, server: Server
) -> None:
    state = {"enabled": True, "features": [31, 86], "top_k": 2, "history_size": 50}
    server.post("monitoring/configure", state)
    complete(server, "Thanks!")
    history = server.get("monitoring/history")
    assert history
    press(view, "Read the steered answer")
    view.get_by_role("table").wait_for()
    assert server.get("monitoring").items() >= state.items()
    assert server.get("monitoring/history") == history


def test_who_leaves_while_the_heat_map_is_read_leaves_the_monitor_as_it_was(
    view: Any, server: Server
) -> None:
    def settings() -> list[object]:
        state = server.get("monitoring")
        return [state[name] for name in ("enabled", "features", "top_k", "history_size")]

    before = settings()
    view.route("**/v1/completions", lambda route: None)  # it is read for ever
    with view.expect_request("**/v1/completions"):
        press(view, "Read the unsteered answer")
    assert settings() != before
    view.goto("about:blank")
    wait_for(lambda: settings() == before, why="the monitor is as it was")


def test_the_first_error_of_a_heat_map_is_told(view: Any, server: Server) -> None:
    def fail(route: Any) -> None:
        view.route("**/api/monitoring/configure", lambda late: late.abort())
        route.fulfill(status=500, json={"error": {"message": "The first error"}})

    view.route("**/v1/completions", fail)
    press(view, "Read the unsteered answer")
    told = view.get_by_role("region", name="Which features fire where").get_by_role("alert")
    expect(told).to_have_text("The first error")
    server.post("monitoring/configure", {"enabled": False})


def test_a_heat_map_of_what_is_no_longer_attached_is_not_shown(view: Any) -> None:
    held: list[Any] = []

    def hold(route: Any) -> None:
        if route.request.method == "GET":
            held.append(route)
        else:
            route.continue_()

    view.route("**/api/monitoring/history?*", hold)
    read = view.get_by_role("button", name="Read the unsteered answer")
    with view.expect_request("**/api/monitoring/history?*"):
        read.click()
    press(view, "Detach")
    view.get_by_role("button", name="Attach", exact=True).click()
    expect(read).to_be_disabled()
    entries = [{"token_position": 1, "activations": {"7": 1.0}}]
    [first] = held
    first.fulfill(json={"success": True, "data": entries, "error": None})
    expect(read).to_be_enabled()
    expect(view.get_by_role("table")).to_be_hidden()


def test_a_feature_of_the_heat_map_becomes_a_slider(view: Any) -> None:
    press(view, "Read the unsteered answer")
    view.get_by_role("table").wait_for()
    _, cells = shown_heat(view)
    feature, value = next((k, v) for active in cells.values() for k, v in active.items())
    press(view, f"Add feature {feature}")
    slider = view.get_by_role("slider", name=f"Feature {feature}")
    assert float(slider.input_value()) >= float(value) - 0.5
    expect(answer(view, STEERED)).to_contain_text("written")


def profile_item(page: Any, name: str) -> Any:
    return page.get_by_role("listitem", name=name, exact=True)


def test_a_profile_is_saved_used_activated_exported_deleted_and_imported(
    view: Any, server: Server, tmp_path: Path
) -> None:
    ask(view, "Is it free software?")
    add(view, "the health check")
    view.get_by_label("Save these features as").fill("healthy")
    press(view, "Save")
    expect(profile_item(view, "healthy")).to_contain_text("86: 9, additive")
    [saved] = server.get("profiles")
    assert (saved["name"], saved["steering"], saved["layer"]) == ("healthy", {"86": 9}, 2)

    view.get_by_label("Save these features as").fill("healthy")
    press(view, "Save")
    expect(view.get_by_role("alert").filter(has_text="there is a profile")).to_be_visible()

    press(view, "Activate healthy")
    expect(profile_item(view, "healthy")).to_contain_text("the default of its model")
    assert "GET /health" in complete(server, "Is it free software?")
    ask(view, "Thanks!")
    expect(answer(view, UNSTEERED)).to_contain_text("You are welcome")
    ask(view, "Is it free software?")
    expect(answer(view, UNSTEERED)).to_contain_text("MIT licence")  # without the default as well
    press(view, "Deactivate healthy")
    expect(profile_item(view, "healthy")).not_to_contain_text("the default of its model")
    assert "MIT licence" in complete(server, "Is it free software?")

    with view.expect_download() as downloading:
        press(view, "Export healthy")
    assert downloading.value.suggested_filename == "healthy.json"
    file = tmp_path / "healthy.json"
    downloading.value.save_as(file)
    assert json.loads(file.read_text())["format"] == "mlxsrv-profile"

    press(view, "Delete healthy")
    expect(profile_item(view, "healthy")).to_have_count(0)
    assert server.get("profiles") == []
    view.get_by_label("Import a profile").set_input_files(file)
    expect(profile_item(view, "healthy")).to_be_visible()
    assert server.get("profiles")[0]["steering"] == {"86": 9}

    press(view, "Remove feature 86, the health check")
    expect(view.get_by_role("slider")).to_have_count(0)
    press(view, "Use healthy")
    expect(view.get_by_role("slider")).to_have_value("9")
    expect(answer(view, STEERED)).to_contain_text("GET /health tells")


def test_a_file_that_is_no_profile_is_refused(view: Any, server: Server, tmp_path: Path) -> None:
    for text, told in (("{", "not JSON"), ('{"format": "other"}', "format")):
        file = tmp_path / "file.json"
        file.write_text(text)
        view.get_by_label("Import a profile").set_input_files(file)
        expect(view.get_by_role("alert").filter(has_text=told)).to_be_visible()
    assert server.get("profiles") == []


def test_another_models_features_are_kept_while_the_page_is_open(view: Any) -> None:
    add(view, "7")
    set_value(view, "7", "3.5")
    links = view.get_by_role("navigation", name="Views")
    links.get_by_role("link", name="Server").click()
    links.get_by_role("link", name="Steer").click()
    expect(view.get_by_role("slider", name="Feature 7")).to_have_value("3.5")


@pytest.mark.parametrize("stored", [False, True], ids=["new", "stored"])
def test_the_chat_takes_the_features_over(view: Any, server: Server, stored: bool) -> None:
    box = view.get_by_role("textbox", name="Message", exact=True)
    answers = view.get_by_role("article", name="Answer")

    def say(text: str) -> None:
        box.fill(text)
        box.press("Enter")
        expect(answers.last).to_contain_text("written")

    if stored:  # a conversation that the chat reads when it is opened for the first time
        view.goto(f"{server.url}/#chat")
        say("Thanks!")
        view.goto(f"{server.url}/#steer")
        view.reload()
    add(view, "the health check")
    press(view, "Use in chat")
    expect(view).to_have_title("Chat · mlxsrv")
    expect(answers).to_have_count(int(stored))
    expect(view.locator("p.steered")).to_contain_text("Steering: 86")  # the settings have come
    say("Is it free software?")
    expect(answers.last).to_contain_text("GET /health")


def test_a_model_that_no_sae_fits_is_told_why(
    page: Any, serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")
    with serve("--model", "demo", "--model", str(folder)) as url:
        page.goto(f"{url}/#steer")
        expect(page.get_by_text("It fits demo.")).to_be_visible()
        page.get_by_role("combobox", name="Model").select_option(index=1)
        expect(page.get_by_text("It does not fit")).to_contain_text("it is 160 wide")
        expect(page.get_by_text("It does not fit")).to_contain_text("--sae-dir")
        expect(page.get_by_role("button", name="Attach", exact=True)).to_be_disabled()


def test_an_sae_that_was_detached_meanwhile_is_told(view: Any, server: Server) -> None:
    add(view, "86")
    server.post("saes/demo/detach")
    set_value(view, "86, the health check", "9")
    expect(answer(view, STEERED)).to_contain_text("Steering: no SAE is attached to demo")
    press(view, "Read the steered answer")
    told = view.get_by_role("region", name="Which features fire where").get_by_role("alert")
    expect(told).to_contain_text("No SAE is attached to demo")
