"""Web pages of other origins, and names that point at this machine."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from tests.support.client import CHAT, chat
from tests.support.fixtures import Folders
from tests.support.guarding import (
    KEY,
    MODELS,
    OTHER_PAGE,
    PAGE,
    guarded,
    plain,
    raw,
    served,
    told,
    told_401,
)
from tests.support.serving import Server

__all__ = ["guarded", "plain"]


# Web pages.


def host_of(client: httpx.Client) -> str:
    return client.base_url.netloc.decode()


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "https://evil.example",
        "http://localhost",
        "http://localhost:3000",
        "http://127.0.0.1",
        "http://{host}.evil.example",
        "http://evil.example#{host}",
        "http://user@{host}",
        "http://127.0.0.1:8{port}",
        "file://",
        "{host}",
        "",
        "\xe9",
        "*",
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
def test_a_foreign_page_is_refused(plain: httpx.Client, origin: str, method: str) -> None:
    host = host_of(plain)
    given = origin.format(host=host, port=host.rpartition(":")[2])
    # What a form can send without the browser asking first.
    headers = raw(Origin=given, Content_Type="text/plain")
    path = MODELS if method == "GET" else CHAT
    if method == "OPTIONS":
        headers += raw(Access_Control_Request_Method="POST")
    response = plain.request(method, path, content=json.dumps(chat()), headers=headers)
    told(response, 403, "permission_error", "origin_not_allowed")
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_the_servers_own_page_is_welcome(plain: httpx.Client) -> None:
    for scheme in ("http", "https"):  # TLS may end before us
        response = plain.post(CHAT, json=chat(), headers={"Origin": f"{scheme}://{host_of(plain)}"})
        assert response.status_code == 200
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost", "localhost", True),
        ("http://localhost", "localhost:80", True),
        ("https://localhost", "localhost:443", True),
        ("http://LOCALHOST", "localhost", True),
        ("http://localhost", "localhost:443", False),
        ("http://localhost:80", "localhost", False),
        ("http://localhost", "127.0.0.1", False),
        ("http://[::1]:8000", "[::1]:8000", True),
    ],
)
def test_the_port_is_part_of_an_origin(
    plain: httpx.Client, origin: str, host: str, same: bool
) -> None:
    response = plain.get(MODELS, headers={"Origin": origin, "Host": host})
    assert response.status_code == (200 if same else 403)


@pytest.mark.parametrize(
    ("site", "mode", "dest", "status"),
    [
        ("cross-site", "no-cors", "image", 403),
        ("cross-site", "no-cors", "script", 403),
        ("cross-site", "navigate", "iframe", 403),
        ("same-site", "no-cors", "image", 403),
        ("cross-site", "navigate", "document", 200),
        ("same-origin", "cors", "empty", 200),
        ("none", "navigate", "document", 200),
    ],
)
def test_what_pages_load_without_an_origin(
    plain: httpx.Client, site: str, mode: str, dest: str, status: int
) -> None:
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    assert plain.get(MODELS, headers=headers).status_code == status
    if status == 403:
        told(plain.get("/health", headers=headers), 403, "permission_error", "origin_not_allowed")


def exposed(response: httpx.Response) -> set[str]:
    return set(re.split(", *", response.headers["access-control-expose-headers"].lower()))


def test_an_allowed_page_reads_answers_and_refusals(guarded: Server) -> None:
    page = {"Origin": PAGE}
    with guarded.client(headers=page) as client:
        key = {"Authorization": f"Bearer {KEY}"}
        told_401(refusal := client.get(MODELS))
        for response in (client.get(MODELS, headers=key), refusal, client.get("/health")):
            assert response.headers["access-control-allow-origin"] == PAGE
            assert response.headers["vary"] == "Origin"
            assert "access-control-allow-credentials" not in response.headers
            assert {"x-request-id", "retry-after", "x-ignored-params"} <= exposed(response)
        other = client.get(MODELS, headers={**key, "Origin": "https://evil.example"})
    told(other, 403, "permission_error", "origin_not_allowed")
    assert "access-control-allow-origin" not in other.headers
    assert other.headers["vary"] == "Origin"


def test_an_allowed_page_may_ask_before_it_asks(guarded: Server) -> None:
    wanted = "authorization,content-type,x-stainless-os"
    headers = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": wanted,
        "Access-Control-Request-Private-Network": "true",
    }
    with guarded.client() as client:
        response = client.options(CHAT, headers=headers)
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == wanted
        assert response.headers["access-control-allow-private-network"] == "true"
        assert response.headers["x-request-id"]
        told_401(client.options(CHAT, headers={"Origin": PAGE}))


def test_pages_by_their_names(folders: Folders) -> None:
    allowed = (PAGE + "/", OTHER_PAGE, "null")
    with served(folders, allowed_origin=allowed) as client:
        for origin in (PAGE, PAGE.upper(), OTHER_PAGE, "null"):
            response = client.get(MODELS, headers={"Origin": origin})
            assert response.headers["access-control-allow-origin"] == origin
        for origin in (PAGE + ":444", PAGE + ".evil.example", "http://app.example"):
            told(
                client.get(MODELS, headers={"Origin": origin}),
                *(403, "permission_error", "origin_not_allowed"),
            )


def test_all_pages(folders: Folders) -> None:
    with served(folders, allowed_origin=("*",)) as client:
        for headers in ({"Origin": "https://any.example"}, {"Sec-Fetch-Site": "cross-site"}):
            response = client.get(MODELS, headers=headers)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/path", "", "https://a b"])
def test_a_setting_that_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match="allowed_origin"):
        Settings(allowed_origin=(origin,))


# Host names.


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST.:1",
        "127.0.0.1:9",
        "[::1]:8",
        "10.0.0.7",
        "me.localhost:80",
        "host.docker.internal:8000",
    ],
)
def test_names_of_this_machine_are_answered(plain: httpx.Client, host: str) -> None:
    assert plain.get(MODELS, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "evillocalhost",
        "0x7f.1",
        "[::1].evil.example",
        "127.0.0.1:8000@evil.example",
        "\xe9",
    ],
)
def test_a_name_pointed_at_this_machine_is_not(plain: httpx.Client, host: str) -> None:
    # Such a page is of the same origin: its own name is what gives it away.
    headers = raw(Host=host, Origin=f"http://{host}")
    for path in (MODELS, "/health"):
        response = plain.get(path, headers=headers)
        message = told(response, 403, "permission_error", "host_not_allowed")
        assert "evil" not in message


def test_who_mounts_it_looks_after_names_or_says_which(folders: Folders) -> None:
    evil = {"Host": "evil.example"}
    with served(folders, local=False) as client:
        assert client.get(MODELS, headers=evil).status_code == 200
    with served(folders, local=False, allowed_host=("Models.example",)) as client:
        assert client.get(MODELS, headers={"Host": "models.EXAMPLE:8000"}).status_code == 200
        assert client.get(MODELS).status_code == 200
        assert client.get(MODELS, headers=evil).status_code == 403
    with served(folders, allowed_host=("*",)) as client:
        assert client.get(MODELS, headers=evil).status_code == 200
