"""The command: how it starts, what it logs, how it stops, and what it says of its models."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxsrv.version import __version__
from tests.support import faulty
from tests.support.client import (
    CHAT,
    FIRST_CONTENT,
    RawClient,
    answer,
    ask,
    chat,
    check_schema,
    completion,
    refused,
    stream,
)
from tests.support.crowds import states
from tests.support.fixtures import CONTEXT, Folders
from tests.support.leaving import queued
from tests.support.serving import (
    DATED,
    PATIENCE,
    Server,
    environment,
    serving,
    serving_faulty,
    wait_for,
)

FOR_EVER = 500_000

# Starting.


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlxsrv", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "x"], "--port"),
        pytest.param(["--max-concurrency", "0"], "--max-concurrency", marks=pytest.mark.long),
        pytest.param(["--log-format", "xml"], "--log-format", marks=pytest.mark.long),
        (["--model", "a=/no/such/folder"], "/no/such/folder"),
        pytest.param(["--model", "/no/such/folder"], "/no/such/folder", marks=pytest.mark.long),
        pytest.param(["--model", "/" + "long" * 1000], "long", marks=pytest.mark.long),
        pytest.param(["--config", "/no/such/file"], "/no/such/file", marks=pytest.mark.long),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(arguments: list[str], told: str) -> None:
    result = command(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert told in line


def test_an_unknown_flag_is_status_2() -> None:
    result = command("--frobnicate")
    assert result.returncode == 2
    assert "--frobnicate" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_one_line_and_status_1(folders: Folders) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = command("--model", str(folders.plain), "--port", port)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert f"127.0.0.1:{port}" in line


@pytest.mark.parametrize(
    "moment",
    [
        "import mlxsrv.commands",
        pytest.param("import uvicorn", marks=pytest.mark.long),
        pytest.param("socket.bind", marks=pytest.mark.long),
        pytest.param("import mlx.core", marks=pytest.mark.long),  # on the device thread
        "import mlx_lm",
        pytest.param("import transformers", marks=pytest.mark.long),
        "open model.safetensors",
    ],
)
def test_ctrl_c_at_any_moment_of_the_start_is_one_line_and_status_130(
    tmp_path: Path, moment: str
) -> None:
    with serving(
        tmp_path,
        log_format="text",
        variables={"AT": moment},
        module="tests.support.interrupted",
    ) as server:
        assert server.exit_status() == 130
        lines = server.log_text().splitlines()
    told = ("mlxsrv: interrupted", "shutting down")
    assert sum(any(each in line for each in told) for line in lines) == 1, lines
    for line in lines:
        assert re.match(f"mlxsrv: interrupted$|{DATED}", line), lines


def test_a_default_model_whose_files_cannot_be_served_is_one_line_and_status_1(
    folders: Folders, tmp_path: Path
) -> None:
    broken = shutil.copytree(folders.plain, tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    result = command("--model", str(broken), "--port", "0")
    assert (result.returncode, result.stdout) == (1, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("mlxsrv: the model 'broken' cannot be served: it has no tokenizer")


def test_the_version_is_told() -> None:
    result = command("--version")
    assert (result.returncode, result.stdout) == (0, f"mlxsrv {__version__}\n")


# Stopping.


# A terminal that closes sends SIGHUP, and so does its shell.
HUNG_UP = pytest.param(
    [signal.SIGHUP] * 2,
    marks=pytest.mark.skipif(
        signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="nohup ignores SIGHUP"
    ),
)


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], HUNG_UP])
def test_a_signal_lets_streams_finish_and_refuses_new_requests(
    folders: Folders, tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    options = ["--model", f"t={folders.endless}", "--shutdown-grace", "600"]
    with serving(tmp_path, *options) as server, server.client() as client:
        endless = chat(max_tokens=FOR_EVER, stream=True)
        with (
            RawClient(
                server, endless
            ) as holder,  # with it the server stays until the test has seen it
            RawClient(server, chat(max_tokens=100, stream=True)) as running,
        ):
            holder.until(FIRST_CONTENT)
            running.until(FIRST_CONTENT)
            for number in numbers:
                server.signal(number)
                server.logged("shutting down")
            seen = len(holder.data)
            response = client.post(CHAT, json=chat())
            refused(response, 503, "shutting_down")
            assert int(response.headers["retry-after"]) >= 1
            health = client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            live = client.get("/health/live")
            assert (live.status_code, live.json()["status"]) == (200, "draining")
            running.until(rb"\[DONE\]")
            assert b'"finish_reason":"length"' in running.data
            holder.until(rb"(?s).{%d}" % (seen + 1000))
            assert b'"finish_reason":"' not in holder.data
            holder.hang_up()
        assert server.exit_status() == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_after_the_grace_streams_end_with_an_error(
    folders: Folders, tmp_path: Path, number: signal.Signals
) -> None:
    options = ["--model", f"t={folders.endless}", "--shutdown-grace", "1"]
    with serving(tmp_path, *options, "--max-concurrency", "1") as server:
        with RawClient(server, chat(max_tokens=FOR_EVER, stream=True)) as streaming:
            streaming.until(FIRST_CONTENT)
            with RawClient(server, chat(max_tokens=FOR_EVER)) as waiting:
                wait_for(lambda: queued(server) == 1, why="the second is in the queue")
                server.signal(number)
                refusal = waiting.until(rb'"code":"shutting_down"')
            tail = streaming.until(rb"\[DONE\]").rpartition(b"data: {")[2]
            assert b'"finish_reason":"error"' in tail
            assert b'"code":"shutting_down"' in tail
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after:" in refusal.lower()
        assert server.exit_status() == 0
        assert server.logged("stream end", request=streaming.request)["finish"] == "shutting_down"
        assert server.log_text().count("Traceback") == 0


def test_a_second_sigint_ends_the_grace(folders: Folders, tmp_path: Path) -> None:
    options = ["--model", f"t={folders.endless}", "--shutdown-grace", "60"]
    with (
        serving(tmp_path, *options) as server,
        RawClient(server, chat(max_tokens=FOR_EVER, stream=True)) as running,
    ):
        running.until(FIRST_CONTENT)
        server.signal(signal.SIGINT)
        server.logged("shutting down")
        server.signal(signal.SIGINT)
        running.until(rb'"code":"shutting_down".*\n\ndata: \[DONE\]')
        assert server.exit_status() == 0
        assert server.log_text().count("Traceback") == 0


LOOPING = (
    "{% if messages[-1].content == 'loop' %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)
"""A template that a thread is at for hours."""


@pytest.fixture(scope="module")
def looping(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("looping") / "m"
    shutil.copytree(folders.plain, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"chat_template": LOOPING}))
    return folder


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_after_the_grace_it_ends_whatever_threads_do(
    folders: Folders, tmp_path: Path, number: signal.Signals
) -> None:
    options = ["--model", f"t={folders.plain}", "--shutdown-grace", "0.5"]
    with (
        serving_faulty(tmp_path, *options) as server,
        RawClient(server, chat(faulty.ASLEEP)) as running,
    ):
        wait_for(lambda: faulty.ASLEEP in server.log_text(), why="a thread is at the template")
        server.signal(number)
        running.until(rb'"code":"shutting_down"')
        assert server.exit_status() == 0
        assert "Traceback" not in server.log_text()


@pytest.mark.long
def test_a_thread_that_nobody_waits_for_keeps_no_server(folders: Folders, tmp_path: Path) -> None:
    options = ["--model", f"t={folders.plain}", "--request-timeout", "1", "--shutdown-grace", "1"]
    with serving_faulty(tmp_path, *options) as server, server.client() as client:
        server.logged("model loaded")
        refused(client.post(CHAT, json=chat(faulty.ASLEEP)), 504, "timeout")
        client.close()
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_second_signal_ends_it_at_once(
    looping: Path, tmp_path: Path, number: signal.Signals
) -> None:
    options = ["--model", f"t={looping}", "--shutdown-grace", "600"]
    with serving(tmp_path, *options) as server, RawClient(server, chat("loop")) as running:
        wait_for(lambda: states(server).get("t", {}).get("requests"), why="it is with the template")
        server.signal(number)
        server.logged("shutting down")
        server.signal(number)
        running.until(rb'"code":"shutting_down"')
        assert server.exit_status() == 0


def test_clients_that_never_finish_their_requests_do_not_keep_the_server(
    folders: Folders, tmp_path: Path
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\n"
    half_a_body = head + b"Host: localhost\r\nContent-Length: 99\r\n\r\n{"
    options = ["--model", f"t={folders.plain}", "--shutdown-grace", "1"]
    with (
        serving(tmp_path, *options) as server,
        server.client() as client,
        ExitStack() as stack,
    ):
        for sent in (b"", head, half_a_body):
            stack.enter_context(socket.create_connection(server.address)).sendall(sent)
        ask(client, chat())
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0


# Logs.


def test_the_json_log_is_json_and_tells_of_each_stream(
    server: Server, client: httpx.Client
) -> None:
    streamed = stream(client, chat(max_tokens=1000), **{"X-Request-ID": "log me"})
    line = server.logged("stream end", request="log me")
    assert line["finish"] == "length"
    assert line["model"] == "t"
    assert line["tokens"] == streamed.usage["completion_tokens"] == 1000
    assert line["prompt_tokens"] == streamed.usage["prompt_tokens"]
    assert 0 < line["ttft"] <= line["seconds"]
    assert line["tokens_per_second"] >= 999 / line["seconds"]
    request = server.logged("request", request="log me")
    assert (request["method"], request["path"], request["status"]) == ("POST", CHAT, 200)
    for text in server.log_text().rpartition("\n")[0].splitlines():
        assert {"time", "level", "event"} <= json.loads(text).keys()


def test_short_answers_are_logged_without_a_bug(server: Server) -> None:
    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as many:
            answers = await asyncio.gather(
                *(many.post(CHAT, json=chat(max_tokens=2)) for _ in range(40))
            )
            return [answer.headers["x-request-id"] for answer in answers]

    # Many of these get both tokens at one reading of the clock.
    for request in asyncio.run(ask_all()):
        assert server.logged("stream end", request=request)["tokens"] == 2
        assert server.log("bug", request=request) == []


def test_the_text_log_is_for_people(folders: Folders, tmp_path: Path) -> None:
    model = ("--model", f"t={folders.plain}")
    with (
        serving(tmp_path, *model, log_format="text") as server,
        server.client() as client,
    ):
        forged = {"X-Request-ID": "a b=c", "Content-Type": "text/plain"}
        ask(client, chat(user="x\n12:00:00.000 info  forged", max_tokens=30), **forged)
        client.close()
        server.close()
        lines = server.log_text().splitlines()
    assert all(re.match(DATED, line) for line in lines)
    [end] = [line for line in lines if " stream end " in line]
    for part in ("request='a b=c'", "tokens=30", "ttft=", "seconds=", "finish=length"):
        assert part in end


# Health and the catalogue.


def test_health_is_ok_once_the_model_is_there(client: httpx.Client) -> None:
    ask(client, chat())
    response = client.get("/health")
    assert (response.status_code, response.json()["status"]) == (200, "ok")


def test_health_is_loading_while_the_default_model_loads(folders: Folders, tmp_path: Path) -> None:
    name = faulty.HELD_MODEL
    with (
        serving_faulty(tmp_path, "--model", f"{name}={folders.plain}") as server,
        server.client() as client,
    ):
        wait_for(lambda: "load" in client.get("/health").json(), why="the load begins")
        response = client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "loading")
        total = folders.plain.joinpath("model.safetensors").stat().st_size
        read = response.json()["load"]
        assert read["completed"] == 0 < read["total"] < total
        [entry] = [each for each in client.get("/v1/models").json()["data"] if each["id"] == name]
        assert (entry["state"], entry["load"]) == ("loading", read)
        assert client.get("/health/live").status_code == 200
        server.signal(faulty.RELEASE)
        wait_for(lambda: client.get("/health").status_code == 200, why="the model is loaded")
        assert client.get("/v1/models/default").json()["load"] is None
        assert server.log("model loaded", model=name)


def test_the_catalogue_lists_what_is_served(client: httpx.Client) -> None:
    ask(client, chat())
    body = client.get("/v1/models").json()
    check_schema(body, "ListModelsResponse")
    models = {model["id"]: model for model in body["data"]}
    assert {"t", "thinking", "org/name"} <= models.keys()
    assert models["t"]["loaded"] is True
    assert models["t"]["context_length"] == CONTEXT
    order = [(not model["loaded"], model["id"]) for model in body["data"]]
    assert order == sorted(order), "loaded models first, then by id"


def test_the_version_may_be_left_out_of_paths(client: httpx.Client) -> None:
    for path, body in (
        ("/chat/completions", chat()),
        ("/completions", completion()),
        ("/embeddings", {"input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        alike = [client.post(prefix + path, json=body) for prefix in ("", "/v1")]
        assert alike[0].status_code == alike[1].status_code != 404, path
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/models/org/name").json()["id"] == "org/name"
    refused(client.get("/chat/completions"), 405, "method_not_allowed")


@pytest.mark.parametrize("name", ["t", "org/name", "org%2Fname"])
def test_a_model_is_shown_alone_as_in_the_list(client: httpx.Client, name: str) -> None:
    alone = client.get(f"/v1/models/{name}").json()
    check_schema(alone, "Model")
    assert alone in client.get("/v1/models").json()["data"]


@pytest.mark.parametrize("name", ["nobody", "org", "org/other"])
def test_an_unknown_model_is_not_shown(client: httpx.Client, name: str) -> None:
    refused(client.get(f"/v1/models/{name}"), 404, "model_not_found", param="model")


def test_a_model_that_cannot_be_loaded_fails_alone_and_is_tried_again(
    folders: Folders, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders.plain, broken)
    (broken / "model.safetensors").write_bytes(b"not a model")
    models = ["--model", f"good={folders.plain}", "--model", f"broken={broken}"]
    with serving(tmp_path, *models) as server, server.client() as client:
        for streaming in (False, True):
            body: dict[str, Any] = chat(model="broken", stream=streaming)
            response = client.post(CHAT, json=body, headers={"Accept": "application/json"})
            error = refused(response, 503, "model_not_loaded")
            assert "broken" in error["message"]
            assert "safetensors" in error["message"], "the reason is told"
            assert int(response.headers["retry-after"]) >= 1
        assert len(server.log("load failed", model="broken")) == 2
        assert answer(ask(client, chat(model="good")))
        assert client.get("/health").json()["status"] == "ok"

        shutil.copy(folders.plain / "model.safetensors", broken)
        mended = ask(client, chat(model="broken"))
        assert mended["model"] == "broken"
        assert answer(mended) == answer(ask(client, chat(model="good")))
