"""The log names each stream that fails, how far it had come, and why it failed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

import mlxsrv
from mlxsrv.service.service import Service
from tests.support.client import (
    CHAT,
    FIRST_CONTENT,
    RawClient,
    chat,
    refused,
    stream,
)
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Line, Server, hosted, serving

FOR_EVER = 500_000


@pytest.fixture(scope="module")
def hasty(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one row, where a request may take a second."""
    options = ["--model", f"t={folders.endless}", "--request-timeout", "1"]
    folder = tmp_path_factory.mktemp("hasty")
    with serving(folder, *options, "--max-concurrency", "1") as server:
        server.logged("model loaded")
        yield server


def failure(server: Server, request: str) -> Line:
    """The one line of a stream's failure; all that it is to say is there."""
    line = server.logged("stream error", request=request)
    server.logged("stream end", request=request)
    assert server.log("stream error", request=request) == [line]
    assert line["model"] == "t"
    assert line["cause"]
    return line


def test_a_client_that_leaves(hasty: Server) -> None:
    with RawClient(hasty, chat(stream=True, max_tokens=FOR_EVER)) as leaver:
        leaver.until(FIRST_CONTENT)
        leaver.hang_up()
    line = hasty.logged("client left", request=leaver.request)
    assert (line["level"], line["model"]) == ("info", "t")
    assert line["tokens"] > 0
    assert hasty.logged("stream end", request=leaver.request)["finish"] == "disconnected"
    assert hasty.log("stream error", request=leaver.request) == []


def test_a_stream_whose_time_is_over(hasty: Server) -> None:
    with hasty.client() as client:
        streamed = stream(client, chat(max_tokens=FOR_EVER), **{"X-Request-ID": "slow"})
    assert streamed.finish_reason == "timeout"
    line = failure(hasty, "slow")
    assert (line["code"], line["level"]) == ("timeout", "warning")
    assert 0 < line["tokens"] <= streamed.usage["completion_tokens"]
    assert hasty.logged("stream end", request="slow")["finish"] == "timeout"


def test_a_request_whose_time_is_over_before_it_began(hasty: Server) -> None:
    with hasty.client() as client, RawClient(hasty, chat(stream=True, max_tokens=FOR_EVER)) as one:
        one.until(FIRST_CONTENT)
        long = chat("ä" * 400_000)
        response = client.post(CHAT, json=long, headers={"X-Request-ID": "late"})
        assert response.status_code == 504
    line = failure(hasty, "late")
    assert (line["code"], line["level"], line["tokens"]) == ("timeout", "error", 0)


def test_a_request_that_is_refused(hasty: Server) -> None:
    with hasty.client() as client:
        body = chat(logit_bias={"999999": 1})
        response = client.post(CHAT, json=body, headers={"X-Request-ID": "refused"})
        refused(response, 400, "invalid_value", param="logit_bias")
    line = failure(hasty, "refused")
    assert (line["code"], line["level"]) == ("invalid_value", "info")
    assert "999999" in line["cause"]


def test_every_line_is_an_event_with_fields(hasty: Server) -> None:
    for text in hasty.log_text().rpartition("\n")[0].splitlines():
        assert {"time", "level", "event"} <= json.loads(text).keys()


def test_a_bug_is_an_event_under_its_request(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Service) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Service, "models", fail)
    app = mlxsrv.create_app(mlxsrv.Settings(model=(f"t={folders.plain}",), hf_cache=False))
    with hosted(app) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        response = client.get("/v1/models", headers={"X-Request-ID": "mine"})
        refused(response, 500, "internal_error")
    [record] = [record for record in caplog.records if record.getMessage() == "bug"]
    assert record.__dict__["mlxsrv_fields"] == {"request": "mine"}
    assert record.exc_info


def test_what_libraries_say_has_the_same_form() -> None:
    """Loggers that are not ours, and python's own warnings."""
    code = (
        "import logging, warnings; from mlxsrv.logs import configure; configure('info', 'json');"
        "logging.getLogger('else.where').warning('one\\ntwo'); warnings.warn('old')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    one, old = map(json.loads, result.stderr.splitlines())
    assert (one["event"], one["level"]) == ("one\ntwo", "warning")
    assert "old" in old["event"]
