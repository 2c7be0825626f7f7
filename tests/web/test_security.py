"""Security: keys, rate limits; requests that attack the log or a template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import mlxsrv
from mlxsrv.configuration import load_settings
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from mlxsrv.web.security.rates import RateLimit
from tests.support.client import CHAT, Body, ask, chat, refused
from tests.support.fixtures import Folders
from tests.support.guarding import FILED, KEY, MODELS, SECOND, guarded, raw, served, told, told_401
from tests.support.serving import DATED, PATIENCE, Server, hosted, serving, wait_for
from tests.support.tiny import write_model

__all__ = ["guarded"]


# Keys.


@pytest.mark.parametrize("key", [KEY, SECOND, FILED])
@pytest.mark.parametrize(
    "header", ["Authorization: Bearer {}", "authorization: bearer  {}", "X-API-Key: {}"]
)
def test_each_key_opens_in_each_header(keyless: httpx.Client, header: str, key: str) -> None:
    name, _, value = header.format(key).partition(": ")
    assert keyless.get(MODELS, headers={name: value}).status_code == 200


@pytest.fixture(scope="module")
def keyless(guarded: Server) -> Iterator[httpx.Client]:
    with guarded.client() as client:
        yield client


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Authorization", ""),
        ("Authorization", "Bearer"),
        ("Authorization", "Bearer " + KEY + "x"),
        ("Authorization", "Bearer " + KEY[:-1]),
        ("Authorization", "Bearer " + KEY.upper()),
        ("Authorization", KEY),
        ("Authorization", "Basic " + KEY),
        ("Authorization", f"Bearer {KEY},{SECOND}"),
        ("X-API-Key", "#"),
        ("X-API-Key", "Ada's"),
        ("X-API-Key", "\xe9"),
        ("Cookie", "api_key=" + KEY),
    ],
)
def test_a_wrong_key_opens_nothing(keyless: httpx.Client, name: str, value: str) -> None:
    message = told_401(keyless.get(MODELS, headers=raw(**{name: value})))
    assert KEY not in message


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", MODELS),
        ("POST", CHAT),
        ("GET", CHAT),
        ("GET", "/nowhere"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", f"{MODELS}?api_key={KEY}&key={KEY}"),
        ("GET", "/Health"),
        ("GET", "/health%0a"),
        ("GET", "/v1/models/health"),
        ("GET", "//health"),
        ("OPTIONS", MODELS),
    ],
)
def test_without_a_key_nothing_is_answered(keyless: httpx.Client, method: str, path: str) -> None:
    told_401(keyless.request(method, str(keyless.base_url).rstrip("/") + path))


@pytest.mark.parametrize(
    "path", ["/health", "/health/", "/health?verbose", "/health?t=1", "/health/live"]
)
def test_health_needs_no_key(keyless: httpx.Client, path: str) -> None:
    response = keyless.get(path)
    assert response.status_code in (200, 503)
    assert response.json().keys() == {"status"}


@pytest.mark.parametrize(
    "query",
    ["verbose=1", "verbose=yes", "verbose=0&verbose=1", "%76erbose=1", "verbose=1%20"],
)
@pytest.mark.parametrize("path", ["/health", "/health/"])
def test_what_health_tells_of_the_server_needs_the_key(
    keyless: httpx.Client, path: str, query: str
) -> None:
    told_401(keyless.get(f"{path}?{query}"))
    response = keyless.get(f"{path}?{query}", headers={"X-API-Key": KEY})
    assert "models" in response.json(), response.text


def test_the_managements_refusals_keep_their_envelope(keyless: httpx.Client) -> None:
    response = keyless.get("/api/saes")
    assert response.status_code == 401
    body = response.json()
    assert (body["success"], body["error"]["code"]) == (False, "invalid_api_key")


def test_keys_are_in_no_log(guarded: Server) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-ID": "with a key"}
    with guarded.client(headers=headers) as client:
        ask(client, chat())
    guarded.logged("request", request="with a key")
    assert guarded.logged("listening")["keys"] == 3
    assert "keys" in guarded.logged("api key file can be read by every user")["path"]
    for key in (KEY, SECOND, FILED):
        assert key not in guarded.log_text()
    assert KEY not in repr(Settings(api_key=(KEY,)))


def test_a_variable_brings_keys(folders: Folders) -> None:
    variables = {"MLXSRV_MODEL": f"t={folders.plain}", "MLXSRV_API_KEY": f"{KEY},{FILED}"}
    parent = Starlette(
        routes=[Mount("/llm", app=mlxsrv.create_app(load_settings(None, variables)))]
    )
    with hosted(parent) as url, httpx.Client(base_url=url + "/llm", timeout=PATIENCE) as client:
        for key in (KEY, FILED):
            assert client.get(MODELS, headers={"X-API-Key": key}).status_code == 200
        assert client.get("/health").status_code == 200, "as open as without a mount"
        told_401(client.get(MODELS))
        assert client.get("/api/saes").json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"", "no key"),
        (b"# x\n", "no key"),
        (b" \n\t\n", "no key"),
        (b"a b\n", "line 1"),
        ("kéy\n".encode(), "line 1"),
        (b"ok\n\xff\n", "UTF-8"),
    ],
)
def test_a_file_without_good_keys_is_refused(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=why) as refusal:
        mlxsrv.create_app(Settings(api_key_file=str(file)))
    assert "a b" not in str(refusal.value)


@pytest.mark.parametrize("variable", ["MLXSRV_API_KEY", "MLXSRV_API_KEY_FILE"])
@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_a_variable_that_is_set_but_empty_does_not_open_the_server(
    variable: str, value: str
) -> None:
    with pytest.raises(SettingsError) as refusal:
        mlxsrv.create_app(load_settings(None, {variable: value}))
    assert variable.removeprefix("MLXSRV_").lower() in str(refusal.value).lower().replace("-", "_")


def test_no_keys_in_the_options_file_do_not_open_the_server(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("api_key = []\n")
    with pytest.raises(SettingsError, match="api_key: given, but empty"):
        load_settings(["--config", str(file)], {})


@pytest.mark.parametrize("key", ["", "a b", "a\nb", "é", "x\n"])
def test_a_setting_that_is_no_key_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(SettingsError, match="--api-key") as refusal:
        load_settings(["--api-key", key], {})
    assert not key.strip() or key not in str(refusal.value)


@pytest.fixture(scope="module")
def public(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on all addresses, without keys, whose log is for people."""
    options = ["--model", f"t={folders.plain}", "--host", "0.0.0.0"]
    with serving(tmp_path_factory.mktemp("public"), *options, log_format="text") as server:
        yield server


def test_a_public_address_without_a_key_is_warned_of(public: Server) -> None:
    url = public.url.replace("0.0.0.0", "127.0.0.1")
    assert re.search(r" warning no api key  why='.*--api-key-file", public.log_text())
    # Its names are not known, so whatever is asked for is fine.
    response = httpx.get(f"{url}/health", headers={"Host": "models.example:8000"})
    assert response.status_code in (200, 503)


def test_loopback_and_keys_are_not_warned_of(server: Server, guarded: Server) -> None:
    for one in (server, guarded):
        one.logged("listening")
        assert one.log("no api key") == []


# How often.


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("limit", [1, 3, 7, 60, 1000])
def test_a_bucket_holds_a_minutes_requests_and_fills_evenly(limit: int) -> None:
    clock = Clock()
    rates = RateLimit(limit, clock=clock)
    for left in reversed(range(limit)):
        granted = rates.take("a")
        assert (granted.wait, granted.remaining) == (None, left)
    assert rates.take("b").wait is None, "each has a bucket of its own"
    for _ in range(3):
        refusal = rates.take("a")
        assert refusal.wait == pytest.approx(60 / limit)
        assert refusal.reset == pytest.approx(60)
        clock.now += refusal.wait or 0
        assert rates.take("a").wait is None
        assert rates.take("a").wait is not None
    clock.now += 60
    assert [rates.take("a").wait is None for _ in range(limit + 1)] == [True] * limit + [False]


def test_retry_after_is_never_too_early() -> None:
    clock = Clock()
    rates = RateLimit(7, clock=clock)
    while (refused := rates.take("a")).wait is None:
        clock.now += 0.1
    clock.now += int(refused.headers["Retry-After"]) - 1
    assert rates.take("a").wait is not None
    clock.now += 1
    assert rates.take("a").wait is None


def test_buckets_are_only_so_many() -> None:
    rates = RateLimit(1, clock=Clock(), most=100)
    for client in range(1000):
        rates.take("known" if client % 2 else client)
    assert len(rates) == 100
    assert rates.take("known").wait is not None, "who is there stays"


@pytest.mark.parametrize(
    ("limit", "told"), [(6000, "10ms"), (60, "1s"), (30, "2s"), (7, "8.571s"), (1, "1m0s")]
)
def test_the_reset_is_told_as_openai_tells_it(limit: int, told: str) -> None:
    granted = RateLimit(limit, clock=Clock()).take("a")
    assert granted.headers["X-RateLimit-Reset-Requests"] == told


def test_over_the_limit_is_a_429_for_that_client_alone(folders: Folders) -> None:
    with served(folders, rate_limit=2, api_key=(KEY, SECOND)) as client:
        one, other = {"X-API-Key": KEY}, {"X-API-Key": SECOND}
        left = [
            client.get(MODELS, headers=one).headers["x-ratelimit-remaining-requests"]
            for _ in range(2)
        ]
        assert left == ["1", "0"]
        response = client.post(CHAT, json=chat(), headers=one)
        told(response, 429, "rate_limit_error", "rate_limit_exceeded")
        assert 0 < int(response.headers["retry-after"]) <= 30
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert client.get(MODELS, headers=other).status_code == 200
        for _ in range(3):
            assert "x-ratelimit-limit-requests" not in client.get("/health").headers
        for _ in range(2):
            told_401(client.get(MODELS, headers={"X-API-Key": "guess"}))
        guess = client.get(MODELS, headers={"X-API-Key": "guess again"})
        told(guess, 429, "rate_limit_error", "rate_limit_exceeded")


def test_without_keys_the_address_counts(folders: Folders) -> None:
    with served(folders, rate_limit=1) as client:
        # uvicorn takes the word of a proxy on this machine.
        def status(address: str) -> int:
            return client.get(MODELS, headers={"X-Forwarded-For": address}).status_code

        assert [status("10.0.0.1"), status("10.0.0.1"), status("10.0.0.2")] == [200, 429, 200]
        # Who has one address of IPv6 has all of its network.
        assert [status("2001:db8::1"), status("2001:db8::2"), status("2001:db9::")] == [
            *(200, 429, 200)
        ]


# Templates.

ATTACKS = {
    "mro": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'] }}",
    "self": "{{ self.__init__.__globals__ }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "raise": "{{ raise_exception.__globals__ }}",
    "code": "{{ raise_exception.__code__.co_filename }}",
    "format": "{{ '{0.__class__.__mro__}'.format('x') }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "append": "{{ messages.append({}) }}",
    "pop": "{{ messages[0].pop('role') }}",
    "include": "{% include '/etc/passwd' %}",
    "range": "{{ range(10 ** 9)|length }}",
    "divide": "{{ 1 / nothing|default(0) }}",
    "client": "{{ given.__class__ }}",
    "client_format": "{{ given.format(messages) }}",
}


@pytest.fixture(scope="module")
def hostile(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a model whose chat template tries the attack that the message names."""
    folder = write_model(tmp_path_factory.mktemp("hostile") / "m", "qwen3", plain=True)
    path = folder / "tokenizer_config.json"
    attacks = "".join(f"{{% elif what == '{name}' %}}{attack}" for name, attack in ATTACKS.items())
    template = "{% set what = messages[0].content %}{% if false %}" + attacks + "{% endif %}fine"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with served(Folders(folder, folder, folder, folder)) as client:
        yield client


@pytest.mark.parametrize("name", ATTACKS)
def test_a_template_gets_nowhere(hostile: httpx.Client, name: str) -> None:
    body = chat(name, chat_template_kwargs={"given": "{0.__class__.__init__.__globals__}"})
    response = hostile.post(CHAT, json=body)
    if response.status_code == 200:  # nothing came of it: an undefined value is empty
        assert response.json()["usage"]["prompt_tokens"] < 12
        return
    message = refused(response, 400, "invalid_value", param="messages")["message"]
    assert "Traceback" not in message
    assert "root:" not in message


def test_a_template_is_served_otherwise(hostile: httpx.Client) -> None:
    assert ask(hostile, chat("none of them"))


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "conversation",
        "conversations",
        "tools",
        "chat_template",
        "documents",
        "self",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_dict",
    ],
)
def test_what_rendering_sets_is_no_variable(client: httpx.Client, name: str) -> None:
    response = client.post(CHAT, json=chat(chat_template_kwargs={name: "{{ 1 }}" * 50}))
    path = f"chat_template_kwargs.{name}"
    message = refused(response, 400, "invalid_value", param=path)["message"]
    assert message == f"{path}: the server sets it; leave it out"


@pytest.mark.parametrize(
    "name", ["raise_exception", "strftime_now", "namespace", "range", "add_generation_prompt"]
)
def test_variables_are_data_and_call_nothing(client: httpx.Client, name: str) -> None:
    body = chat(chat_template_kwargs={name: {"__class__": "x", "__call__": "y"}})
    assert client.post(CHAT, json=body).status_code in (200, 400)


# What a request says stays where it belongs.

NASTY = "x\n12:00:00.000 info    forged  a=b\r\x1b[31mred\u2028\u202e\x00"


def test_nothing_in_a_request_forges_a_line_of_the_log(public: Server) -> None:
    with httpx.Client(
        base_url=public.url.replace("0.0.0.0", "127.0.0.1"), timeout=PATIENCE
    ) as client:
        ask(client, chat(user=NASTY))
        for given in (b"a\x1b[31mb", b"tab\there", b"\xe2\x80\xa8", b"x" * 200):
            response = client.get("/health", headers={b"X-Request-ID": given})
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
        client.get(f"/{httpx.QueryParams({'': NASTY})}")
        client.get("/%0a12:00:00.000%20info%20%20%20%20forged%1b[31m")
        client.get("/v1/models/%0aforged")
        client.get(MODELS, params={NASTY: NASTY})
        assert client.post(CHAT, json=chat(model=NASTY)).status_code == 404
        assert client.post(CHAT, json=chat(**{NASTY: 1})).status_code == 200
        assert client.get(MODELS, headers={"Origin": "http://forged"}).status_code == 403
        client.get("/the-last-one")
    wait_for(lambda: "/the-last-one" in public.log_text(), why="the last request is logged")
    lines = public.log_text().rpartition("\n")[0].split("\n")
    assert all(re.match(DATED, line) for line in lines)
    assert all(line.isprintable() for line in lines)
    # It is there, but as a part of other lines.
    assert not [line for line in lines if re.match(r"\S+ \w+ +forged", line)]
    assert [line for line in lines if "stream end" in line and "forged" in line]


PATHS = ["../t", "../../etc/passwd", "/etc/passwd", "..", "t/../t", "t\x00", "~", "file:///etc"]


@pytest.mark.parametrize("path", PATHS)
def test_no_name_is_a_path(client: httpx.Client, folders: Folders, path: str) -> None:
    for name in (path, f"{folders.plain}", f"t+{folders.plain}", f"x={folders.plain}"):
        refused(client.post(CHAT, json=chat(model=name)), 404, "model_not_found", param="model")
    quoted = quote(path, safe="")
    for one in (quoted, quoted.replace(".", "%2e")):
        response = client.get(f"/v1/models/{one}")
        assert response.status_code == 404
        assert "root:" not in response.text


@pytest.mark.parametrize("name", ["a\r\nX-Evil: 1", "a\nX-Evil: 1", "a\x00b", "é\r\n\r\n<html>"])
def test_no_name_writes_a_header(client: httpx.Client, name: str) -> None:
    body: Body = chat(**{name: 1})
    response = client.post(CHAT, json=body)
    assert response.status_code == 200
    assert "x-evil" not in response.headers
    assert response.headers["x-ignored-params"].isascii()
