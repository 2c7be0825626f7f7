"""The page over HTTP: its files, its headers, and where it is mounted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.web.app import App

FILES = Path(mlxsrv.__file__).parent / "web/page/files"
MOST_BYTES = 220_000


def make_app(**options: object) -> App:
    return mlxsrv.create_app(mlxsrv.Settings(**options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_app()) as made:
        yield made


def links(text: str) -> list[str]:
    """The addresses that the HTML names."""
    return [found for found in re.findall(r'(?:href|src)="([^"]+)"', text) if found[0] != "#"]


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES.iterdir()) < MOST_BYTES


def test_every_file_is_named_by_another() -> None:
    texts = {path.name: path.read_text() for path in FILES.iterdir()}
    for name in texts.keys() - {"index.html"}:
        others = "".join(text for other, text in texts.items() if other != name)
        assert f"/{name}" in others, f"nobody loads {name}"


@pytest.mark.parametrize("prefix", ["", "/llm", "/a/b"])
def test_every_link_leads_to_a_file(prefix: str) -> None:
    app = make_app()
    parent = Starlette(routes=[Mount(prefix, app=app)]) if prefix else app
    with TestClient(parent) as client:
        index = client.get(prefix + "/")
        assert index.status_code == 200
        found = links(index.text)
        assert len(found) > 3
        for link in found:
            assert link.startswith(f"{prefix}/page/")
            assert client.get(link).content == (FILES / Path(link).name).read_bytes()


def test_links_have_the_prefix_that_a_proxy_removes() -> None:
    with TestClient(make_app(root_path="/llm")) as client:
        assert all(link.startswith("/llm/page/") for link in links(client.get("/").text))


def test_a_prefix_is_no_html() -> None:
    parent = Starlette(routes=[Mount('/"><script>', app=make_app())])
    with TestClient(parent) as client:
        assert "<script>" not in client.get("/%22%3E%3Cscript%3E/").text


def test_a_prefix_is_no_shell_command() -> None:
    """The page makes commands with its address between single quotes."""
    with TestClient(Starlette(routes=[Mount("/{name}", app=make_app())])) as client:
        found = links(client.get("/it's a $(name)%3F/").text)
        assert all(link.startswith("/it%27s%20a%20%24%28name%29%3F/page/") for link in found)
        assert client.get(found[0]).status_code == 200


def test_every_answer_has_the_policy(client: TestClient) -> None:
    for path in ("/", *(f"/page/{path.name}" for path in FILES.iterdir())):
        if path == "/page/index.html":
            continue
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_file_that_is_known_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/page/app.js").headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        again = client.get("/page/app.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["none.js", "index.html", "..%2fserving.py", "%2e%2e/serving.py"])
def test_other_files_are_not_there(client: TestClient, name: str) -> None:
    refused = client.get(f"/page/{name}")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "not_found"


def test_the_files_need_no_key_and_the_api_does() -> None:
    with TestClient(make_app(api_key=("secret",))) as client:
        assert client.get("/").status_code == client.get("/page/app.js").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.post("/").status_code == 401


def test_without_the_page_there_is_none_of_it() -> None:
    with TestClient(make_app(page="off")) as client:
        assert client.get("/").status_code == client.get("/page/app.js").status_code == 404
    with TestClient(make_app(page="off", api_key=("secret",))) as client:
        assert client.get("/").status_code == client.get("/page/app.js").status_code == 401


@pytest.mark.parametrize("page", ["on", "off"])
def test_that_ollama_is_running_is_told_without_a_key_and_nothing_else_is(page: str) -> None:
    with TestClient(make_app(page=page, ollama_root=True, api_key=("secret",))) as client:
        assert client.get("/").text == "Ollama is running"
        assert client.head("/").status_code == 200
        assert client.post("/").status_code == client.get("/api/tags").status_code == 401
        assert client.get("/page/app.js").status_code == (200 if page == "on" else 401)
        browser = {"Accept": "text/html"}
        assert client.get("/", headers=browser).status_code == 200
        assert client.get("/openapi.json").status_code == 401


def test_the_log_tells_of_its_files_and_of_probes_only_to_who_debugs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="mlxsrv.access")
    probes = ("/health", "/health/live", "/health?verbose=1", "/metrics")
    with TestClient(make_app(metrics=True)) as client:
        for path in ("/", "/page/app.js", *probes, "/v1/models", "/page/none.js"):
            client.get(path)
    # The model is loaded meanwhile, and tells so.
    told = [record.levelname for record in caplog.records if record.name == "mlxsrv.access"]
    assert told == [*6 * ["DEBUG"], "INFO", "INFO"]


@pytest.mark.parametrize("page", ["on", "off"])
def test_who_looks_for_ollama_is_in_the_log(page: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="mlxsrv.access")
    with TestClient(make_app(page=page, ollama_root=True)) as client:
        client.get("/")
        client.get("/", headers={"Accept": "text/html"})
    told = [record.levelname for record in caplog.records if record.name == "mlxsrv.access"]
    assert told == ["INFO", "DEBUG" if page == "on" else "INFO"]
