"""Servers in all their states: loading a model, away and back, with a key, below a prefix."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

from playwright.sync_api import expect
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import mlxsrv
from tests.page.chatting import ENDLESS, QUESTION, answers, ask, box, press, setting
from tests.page.conftest import Serve, hide
from tests.support.scripted import write_scripted
from tests.support.serving import hosted


def test_a_model_that_is_loading_is_told_of(page: Any, serve: Serve, tmp_path: Path) -> None:
    """One model may be loaded at a time; the second waits until the answer of the first ends."""
    second = write_scripted(tmp_path / "second", ["Here", " I", " am", "."])
    options = ("--model", "demo", "--model", f"second={second}", "--max-models", "1")
    with serve(*options) as url:
        page.goto(url)
        model = page.get_by_role("combobox", name="Model")
        model.select_option("demo")
        setting(page, "Other fields").fill(ENDLESS)
        ask(page, QUESTION)
        expect(answers(page)).to_contain_text("Ctrl-C")
        page.get_by_role("button", name="New chat").click()
        model.select_option("second")
        setting(page, "Other fields").fill("")
        ask(page, "Hello")
        expect(answers(page)).to_contain_text("The model is waiting for room.")
        page.get_by_role("button", name=QUESTION, exact=True).click()
        expect(answers(page)).to_contain_text("Ctrl-C")  # before that, Stop is for the other answer
        press(page, "Stop")
        page.get_by_role("button", name="Hello", exact=True).click()
        expect(answers(page)).to_contain_text("Here I am.")


def test_of_several_models_an_answer_names_its_own(page: Any, serve: Serve, tmp_path: Path) -> None:
    second = write_scripted(tmp_path / "second", ["Here", " I", " am", "."])
    with serve("--model", "demo", "--model", f"second={second}") as url:
        page.goto(url)
        for number, name in enumerate(("demo", "second")):
            page.get_by_role("combobox", name="Model").select_option(name)
            ask(page, "Hello")
            told = answers(page).nth(number).locator(".figures")
            expect(told).to_have_text(re.compile(rf"^{name}\s· .* written"))
        page.reload()
        expect(answers(page).locator(".figures")).to_have_text(
            [re.compile(r"^demo\s· "), re.compile(r"^second\s· ")]
        )


def test_where_there_is_one_model_no_answer_names_it(page: Any, url: str) -> None:
    page.goto(url)
    ask(page, "Hello")
    told = answers(page).locator(".figures")
    expect(told).to_have_text(re.compile("^[0-9]+ tokens read"))
    page.reload()
    expect(told).to_have_text(re.compile("^[0-9]+ tokens read"))


def test_a_server_goes_away_and_comes_back(page: Any, serve: Serve) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with serve("--port", port, "--shutdown-grace", "0.1") as url:
        page.goto(url)
        setting(page, "Other fields").fill(ENDLESS)
        ask(page, QUESTION)
        expect(answers(page)).to_contain_text("Ctrl-C")
    expect(answers(page).get_by_role("button", name="Try again")).to_be_visible()
    expect(answers(page)).to_contain_text("Ctrl-C")
    setting(page, "Other fields").fill("")
    ask(page, "Who are you?")
    expect(answers(page).last).to_contain_text("The server cannot be reached")
    with serve("--port", port):
        press(answers(page).last, "Try again")
        expect(answers(page).last).to_contain_text(" written")
        expect(answers(page).last).not_to_contain_text("cannot be reached")


def test_another_server_has_other_models(page: Any, serve: Serve, tmp_path: Path) -> None:
    """The page asks each for its default, which need not be the first of the list."""
    here = write_scripted(tmp_path / "here", ["Here", " I", " am", "."])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    model = page.get_by_role("combobox", name="Model")
    with serve("--port", port, "--model", f"first={here}") as url:
        page.goto(url)
        expect(model).to_have_value("first")
        expect(box(page)).to_be_visible()  # all of the page is here
    with serve("--port", port, "--model", f"second={here}"):
        ask(page, "Hello")
        expect(model).to_have_value("second")
        press(answers(page), "Regenerate")
        expect(answers(page)).to_contain_text("Here I am.")


def test_another_try_asks_the_model_that_is_chosen_now(
    page: Any, serve: Serve, tmp_path: Path
) -> None:
    """A reload keeps the choice."""
    second = write_scripted(tmp_path / "second", ["Here", " I", " am", "."])
    with serve("--model", "demo", "--model", f"second={second}") as url:
        page.goto(url)
        model = page.get_by_role("combobox", name="Model")
        expect(model).to_have_value("demo")
        page.route("**/v1/chat/completions", lambda route: route.abort())
        ask(page, "Hello")
        expect(answers(page)).to_contain_text("cannot be reached")
        page.unroute("**/v1/chat/completions")
        model.select_option("second")
        press(answers(page), "Try again")
        expect(answers(page)).to_contain_text("Here I am.")
        page.reload()
        expect(model).to_have_value("second")
        expect(answers(page)).to_contain_text("Here I am.")


def test_while_an_answer_waits_the_server_is_asked_only_if_somebody_sees_it(
    page: Any, url: str
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.install()
    page.goto(url)
    page.route("**/v1/chat/completions", lambda route: None)  # it waits for ever

    def looks(seconds: int) -> int:
        before = asked.count(f"{url}/health?verbose=1")
        for _ in range(seconds):
            page.clock.run_for(1000)
            page.evaluate("fetch('/health/live').then(() => null)")
        return asked.count(f"{url}/health?verbose=1") - before

    ask(page, "Hello")
    expect(answers(page)).to_be_visible()
    assert 2 <= looks(7) <= 4
    page.get_by_role("button", name="New chat").click()
    assert looks(7) == 0
    page.get_by_role("button", name="Hello", exact=True).click()
    assert looks(7) > 0
    hide(page, True)
    assert looks(7) == 0
    hide(page, False)
    assert looks(7) > 0
    refusal = {"status": 429, "headers": {"Retry-After": "60"}, "json": {"error": {"message": "x"}}}
    page.route("**/health?verbose=1", lambda route: route.fulfill(**refusal))
    assert looks(20) == 1
    press(page, "Stop")


class Cutting:
    """A proxy that ends an answer as if it were whole, after its first text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        over = False

        async def send_some(message: Message) -> None:
            nonlocal over
            if over:
                return
            body = message.get("body", b"") if scope["path"].endswith("/chat/completions") else b""
            if text := re.search(rb'"content":"[^"].*?\n\n', body):
                over = True
                message = {**message, "body": body[: text.end()], "more_body": False}
            await send(message)

        await self._app(scope, receive, send_some)


def test_an_answer_that_lacks_its_end_is_an_error(page: Any) -> None:
    app = mlxsrv.create_app(mlxsrv.Settings())
    with hosted(Starlette(routes=[Mount("/", app=Cutting(app))], lifespan=app.lifespan)) as url:
        page.goto(url)
        ask(page, QUESTION)
        expect(answers(page)).to_contain_text("The connection to the server broke")
        expect(answers(page).get_by_role("button", name="Try again")).to_be_visible()


def test_a_key_is_asked_for_and_used(page: Any, serve: Serve) -> None:
    with serve("--api-key", "secret") as url:
        page.goto(url)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("The server wants an API key").fill("ключ")
        page.keyboard.press("Enter")
        expect(dialog.locator(":invalid").last).to_be_visible()
        dialog.get_by_label("The server wants an API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("does not know this key")
        press(dialog, "Cancel")
        ask(page, QUESTION)
        dialog.get_by_label("The server wants an API key").fill("secret")
        page.keyboard.press("Enter")
        expect(answers(page)).to_contain_text("Ctrl-C")


def test_below_a_prefix(page: Any) -> None:
    llm = mlxsrv.create_app(mlxsrv.Settings())
    parent = Starlette(routes=[Mount("/llm", app=llm)], lifespan=llm.lifespan)
    with hosted(parent) as url:
        page.goto(f"{url}/llm/")
        ask(page, QUESTION)
        expect(answers(page)).to_contain_text("Ctrl-C")
        keys = page.evaluate("Object.keys(sessionStorage)")
        assert keys == ["mlxsrv /llm/ conversation"]
        names = page.evaluate("indexedDB.databases().then(all => all.map(each => each.name))")
        assert names == ["mlxsrv /llm/"]
