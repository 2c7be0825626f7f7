"""Ollama's API over HTTP: chats, texts, names, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tests.support.client import Body, ask, chat
from tests.support.effort import often
from tests.support.fixtures import Folders
from tests.support.ollama import RECORDED, Line, check_type, read_lines
from tests.support.scripted import cut, write_scripted
from tests.support.serving import Server, serving, wait_for
from tests.support.tiny import write_model

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCRIPTS = {
    "calls": f"I will look.\n\n{CALL}",
    "breaks": 'So: <tool_call>\n{"name": "get_weather", "arguments": {"city": nonsense',
    "thinks": "<think>\nParis, then.\n</think>\n\nSunny.",
}
WEATHER: Body = (RECORDED["chat-tools"].body or {})["tools"][0]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def ollama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ollama")
    models = {name: write_scripted(folder / name, cut(text, 3)) for name, text in SCRIPTS.items()}
    models["base"] = write_scripted(folder / "base", ["Once", " more"], template=None)
    models["t"] = write_model(folder / "t", "qwen3", plain=True)
    models["endless"] = write_model(
        folder / "endless", "qwen3", plain=True, max_position_embeddings=10**6
    )
    models["a"] = write_model(folder / "a", "qwen3", plain=True, seed=1, max_position_embeddings=64)
    arguments = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    options = ("--pin", "t", "--ollama-root", "--allow-chat-template")
    with serving(folder, *arguments, *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(ollama: Server) -> Iterator[httpx.Client]:
    with ollama.client() as client:
        yield client


def whole(client: httpx.Client, path: str, **fields: Any) -> Body:
    """The answer to a request that is not streamed."""
    response = client.post(path, json={"stream": False, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return dict(response.json())


def streamed(client: httpx.Client, path: str, **fields: Any) -> list[Line]:
    """The lines of the answer to a request that says nothing of streams."""
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return read_lines(response.content)


def refused(response: httpx.Response, status: int) -> str:
    """The message of a refusal."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert response.headers["x-request-id"]
    return str(body["error"])


# What the client sends is answered.


@pytest.mark.parametrize(
    "label", [each.label for each in RECORDED.values() if each.path == "/api/chat"]
)
def test_recorded_chats_are_answered(client: httpx.Client, label: str) -> None:
    each = RECORDED[label]
    response = client.request(each.method, each.path, json=each.body, headers=each.headers)
    if label == "chat-image":
        assert "messages[0].images" in refused(response, 400)
        return
    assert response.status_code == 200, response.text
    lines = read_lines(response.content) if each.body and each.body["stream"] else [response.json()]
    for line in lines:
        check_type(line, "ChatResponse")
    assert lines[-1]["done"]
    text = "".join(line["message"]["content"] for line in lines)
    if label.startswith("chat-format"):
        assert isinstance(json.loads(text), dict)
    if label.startswith("chat-think"):
        assert lines[0]["message"]["thinking"]
    if label == "chat-logprobs":
        assert "".join(each["token"] for each in lines[0]["logprobs"]).startswith(text)
        assert all(len(each["top_logprobs"]) == 2 for each in lines[0]["logprobs"])
    if label == "chat-tool-result":
        assert "sunny" in text


@pytest.mark.parametrize("label", ["generate", "generate-stream", "generate-load"])
def test_recorded_texts_are_answered(client: httpx.Client, label: str) -> None:
    each = RECORDED[label]
    assert each.body is not None
    response = client.request(each.method, each.path, json=each.body)
    assert response.status_code == 200, response.text
    lines = read_lines(response.content) if each.body["stream"] else [response.json()]
    for line in lines:
        check_type(line, "GenerateResponse")
    assert lines[-1]["done_reason"] == ("load" if label == "generate-load" else "stop")


def test_raw_texts_have_no_template(client: httpx.Client) -> None:
    body = RECORDED["generate-all"].body or {}
    assert "raw" in refused(client.post("/api/generate", json=body), 400)
    body = {**body, "model": "t", "system": "", "template": "", "suffix": "", "format": ""}
    response = client.post("/api/generate", json=body)
    assert response.headers["x-ignored-params"] == "context"
    assert response.json()["eval_count"] == 3
    raw = client.post("/v1/completions", json={"model": "t", "prompt": "Hello", "max_tokens": 3})
    assert response.json()["prompt_eval_count"] == raw.json()["usage"]["prompt_tokens"]


# Texts, thoughts and calls are those of chat completions.


@pytest.mark.parametrize("model", ["calls", "breaks", "thinks", "t"])
def test_a_chat_says_the_same_in_both_dialects(client: httpx.Client, model: str) -> None:
    openai = ask(client, chat("Hello", model=model, tools=[WEATHER], max_tokens=60, seed=5))
    options = {"temperature": 0, "num_predict": 60, "seed": 5}
    fields = {"model": model, "messages": HELLO, "tools": [WEATHER], "options": options}
    body = whole(client, "/api/chat", **fields)
    lines = streamed(client, "/api/chat", **fields)
    said, message = openai["choices"][0]["message"], body["message"]
    if model != "breaks":
        assert message["content"] == (said["content"] or "")
        assert message.get("thinking") == said.get("reasoning_content")
    calls = [
        {"id": call["id"], "function": {"index": index, "name": call["function"]["name"]}}
        | {
            "function": {"index": index, "name": call["function"]["name"]}
            | {"arguments": json.loads(call["function"]["arguments"])}
        }
        for index, call in enumerate(said.get("tool_calls", []) if model != "breaks" else [])
    ]
    assert without_ids(message.get("tool_calls", [])) == without_ids(calls)
    assert body["eval_count"] == openai["usage"]["completion_tokens"]
    assert body["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
    for line in lines:
        check_type(line, "ChatResponse")
    messages = [line["message"] for line in lines]
    assert "".join(each["content"] for each in messages) == message["content"]
    sent = [call for each in messages for call in each.get("tool_calls", [])]
    assert without_ids(sent) == without_ids(calls)
    assert lines[-1]["eval_count"] == body["eval_count"]
    assert [line["done"] for line in lines].count(True) == 1


def without_ids(calls: list[Body]) -> list[Body]:
    return [call["function"] for call in calls]


def test_a_broken_call_is_text(client: httpx.Client) -> None:
    lines = streamed(client, "/api/chat", model="breaks", messages=HELLO, tools=[WEATHER])
    text = "".join(line["message"]["content"] for line in lines)
    assert text.startswith("So:")
    assert "nonsense" in text
    assert not any("tool_calls" in line["message"] for line in lines)
    assert lines[-1]["done_reason"] == "stop"


def test_durations_are_measured(client: httpx.Client) -> None:
    last = streamed(client, "/api/chat", model="t", messages=HELLO, options={"num_predict": 8})[-1]
    assert last["done_reason"] == "length"
    parts = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
    assert 0 < parts <= last["total_duration"] < 20e9


def test_a_prompt_that_was_read_before_counts_whole(client: httpx.Client) -> None:
    fields = {"model": "t", "messages": [{"role": "user", "content": "Tell me " * 50}]}
    first, second = (
        whole(client, "/api/chat", **fields, options={"num_predict": 2}) for _ in range(2)
    )
    assert second["prompt_eval_count"] == first["prompt_eval_count"] > 100


def test_the_last_message_of_the_assistant_goes_on(client: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hello! I am the"}]
    body = whole(client, "/api/chat", model="demo", messages=messages, options={"temperature": 0})
    assert body["message"]["content"].startswith(" demo model")


def test_a_model_without_a_template_continues_the_prompt(client: httpx.Client) -> None:
    body = whole(client, "/api/generate", model="base", prompt="Say\n", system="no place for it")
    assert body["response"] == "Once more"
    assert body["done_reason"] == "stop"


def test_steering_is_an_extension(client: httpx.Client) -> None:
    body = {"model": "t", "messages": HELLO, "profile": "none"}
    assert "none" in refused(client.post("/api/chat", json=body), 404)


# The context.


def test_num_ctx_bounds_prompt_and_answer(client: httpx.Client) -> None:
    options: Body = {"temperature": 0, "num_predict": -1}
    fields = {"model": "t", "messages": HELLO}
    prompt = whole(client, "/api/chat", **fields, options={"num_predict": 1})["prompt_eval_count"]
    body = whole(client, "/api/chat", **fields, options={**options, "num_ctx": prompt + 5})
    assert (body["eval_count"], body["done_reason"]) == (5, "length")
    response = client.post("/api/chat", json={**fields, "options": {**options, "num_ctx": prompt}})
    message = refused(response, 400)
    assert message.startswith(f"options.num_ctx is {prompt} tokens; the prompt has {prompt}")


def test_a_prompt_that_does_not_fit_the_model_is_refused(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "word " * 9000}]
    body = {"model": "t", "messages": messages, "options": {"num_ctx": 10**6}}
    assert "4096" in refused(client.post("/api/chat", json=body), 400)


# Models.


def test_models_are_listed_with_a_tag_and_found_with_and_without(client: httpx.Client) -> None:
    listed = client.get("/api/tags").json()
    check_type(listed, "ListResponse")
    ours = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert {each["name"] for each in listed["models"]} == {f"{id}:latest" for id in ours}
    for each in listed["models"]:
        assert each["model"] == each["name"]
        id = each["name"].removesuffix(":latest")
        assert each["size"] == ours[id]["size"]
        assert each["details"].items() >= ours[id]["details"].items()
        assert len(each["digest"]) == 64
    for name in ("t", "t:latest"):
        body = whole(client, "/api/generate", model=name, prompt="a", options={"num_predict": 1})
        assert body["model"] == name
        assert ask(client, chat(model=name, max_tokens=1))["model"] == "t"
        assert client.get(f"/v1/models/{name}").json()["id"] == "t"


def test_the_version_has_numbers_only(client: httpx.Client) -> None:
    version = client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # what Copilot asks for


@pytest.mark.parametrize("path", ["/api/tags", "/api/version"])
def test_head_is_answered(client: httpx.Client, path: str) -> None:
    assert client.head(path).status_code == 200


def test_a_model_is_shown_with_what_copilot_reads(client: httpx.Client) -> None:
    shown = client.post("/api/show", json={"model": "demo:latest"}).json()
    check_type(shown, "ShowResponse")
    info = shown["model_info"]
    assert info["general.architecture"] == "qwen3"
    assert info["qwen3.context_length"] == 4096
    assert info["general.basename"] == "demo"
    assert info["general.parameter_count"] > 10**6
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert "<|im_start|>" in shown["template"]
    assert shown["template"].endswith("{#- .Tools -#}")
    assert shown["details"]["family"] == "qwen3"
    assert shown["parameters"].split() == ["temperature", "0"]
    assert client.post("/api/show", json={"name": "demo"}).json() == shown
    assert client.post("/api/show", json={"model": "base"}).json()["template"] == ""


def running(client: httpx.Client) -> dict[str, Body]:
    body = client.get("/api/ps").json()
    check_type(body, "ProcessResponse")
    return {each["name"].removesuffix(":latest"): each for each in body["models"]}


def seconds_left(model: Body) -> float:
    return (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()


def test_keep_alive_says_how_long_a_model_stays(client: httpx.Client) -> None:
    empty = {"model": "a", "messages": []}
    assert whole(client, "/api/chat", **empty)["done_reason"] == "load"
    assert seconds_left(running(client)["a"]) > 10**9, "by default for ever"
    fields = {"model": "a", "prompt": "Hello", "options": {"num_predict": 1}}
    whole(client, "/api/generate", **fields, keep_alive="5m")
    assert seconds_left(running(client)["a"]) == pytest.approx(300, abs=10)
    whole(client, "/api/embed", model="a", input="x", keep_alive=60)
    told = running(client)["a"]
    assert seconds_left(told) == pytest.approx(60, abs=10)
    whole(client, "/api/embed", model="a", input="x", keep_alive=1e300)
    assert seconds_left(running(client)["a"]) > 10**9, "longer than a date can say"
    assert told["size"] == told["size_vram"] > 0
    assert told["context_length"] == 64
    streamed(client, "/api/chat", model="a", messages=HELLO, keep_alive=0)
    wait_for(lambda: "a" not in running(client), why="a goes after the answer")
    assert whole(client, "/api/generate", model="a")["done_reason"] == "load"
    assert whole(client, "/api/generate", model="a", keep_alive=0)["done_reason"] == "unload"
    assert "a" not in running(client)


def test_a_pinned_model_stays(client: httpx.Client) -> None:
    for path in ("/api/generate", "/api/chat"):
        whole(client, path, model="t")
        assert whole(client, path, model="t", keep_alive=0)["done_reason"] == "unload"
        assert "t" in running(client)


def test_the_root_says_that_ollama_is_running(client: httpx.Client) -> None:
    assert client.get("/").text == "Ollama is running"
    assert client.head("/").status_code == 200


def test_a_browser_gets_the_page_at_the_root(client: httpx.Client) -> None:
    found = client.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert found.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("label", ["delete", "copy", "create"])
def test_models_are_not_changed(client: httpx.Client, label: str) -> None:
    each = RECORDED[label]
    response = client.request(each.method, each.path, json=each.body)
    assert label in refused(response, 403)


def test_nothing_is_pushed(client: httpx.Client) -> None:
    assert "push" in refused(client.post("/api/push", json={"model": "t"}), 403)


# Embeddings.


def test_embeddings_are_those_of_the_other_route(client: httpx.Client) -> None:
    texts = ["a", "Hello there"]
    ours = client.post("/v1/embeddings", json={"model": "demo", "input": texts}).json()
    body = client.post("/api/embed", json={"model": "demo", "input": texts}).json()
    check_type(body, "EmbedResponse")
    assert body["embeddings"] == [each["embedding"] for each in ours["data"]]
    assert body["prompt_eval_count"] == ours["usage"]["prompt_tokens"]
    assert body["total_duration"] > body["load_duration"] > 0
    old = client.post("/api/embeddings", json={"model": "demo", "prompt": texts[1]}).json()
    check_type(old, "EmbeddingsResponse")
    assert old["embedding"] == body["embeddings"][1]


@pytest.mark.parametrize("label", ["embed", "embed-many", "embeddings-old"])
def test_recorded_embeddings_are_answered(client: httpx.Client, label: str) -> None:
    each = RECORDED[label]
    response = client.post(each.path, json=each.body)
    assert response.status_code == 200, response.text
    vectors = response.json().get("embeddings", [response.json().get("embedding")])
    assert len(vectors) == (2 if label == "embed-many" else 1)
    assert {len(vector) for vector in vectors} == {64 if label == "embed-many" else 160}
    ignored = "options" if label == "embed-many" else None
    assert response.headers.get("x-ignored-params") == ignored


def test_long_texts_are_cut_unless_that_is_refused(client: httpx.Client) -> None:
    body = {"model": "a", "input": "word " * 900}
    cut_off = client.post("/api/embed", json=body).json()
    assert cut_off["prompt_eval_count"] == 64
    assert "64" in refused(client.post("/api/embed", json={**body, "truncate": False}), 400)


@pytest.mark.parametrize(
    ("path", "field"), [("/api/embed", "embeddings"), ("/api/embeddings", "embedding")]
)
def test_no_text_loads_the_model(client: httpx.Client, path: str, field: str) -> None:
    response = client.post(path, json={"model": "t", "input": "", "prompt": ""})
    assert response.json()[field] == []
    assert "t" in running(client)


# Errors.


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"model": "nobody", "messages": HELLO}, 404, "nobody"),
        ("/api/chat", {"model": "nobody"}, 404, "nobody"),
        ("/api/chat", {"model": "nobody", "keep_alive": 0}, 404, "nobody"),
        ("/api/embed", {"model": "nobody", "input": "a"}, 404, "nobody"),
        ("/api/embed", {"model": "t", "input": ["a", ""]}, 400, "input[1]"),
        ("/api/embed", {"model": "t", "input": "a", "dimensions": 9999}, 400, "dimensions"),
        ("/api/show", {"model": "nobody"}, 404, "nobody"),
        ("/api/show", {}, 400, "model"),
        ("/api/chat", {"messages": HELLO}, 400, "model"),
        ("/api/chat", {"model": "base", "messages": HELLO}, 400, "no chat template"),
        ("/api/generate", {"model": "t", "prompt": "a", "format": "xml"}, 400, "format"),
        ("/api/generate", {"model": "t", "prompt": "a", "suffix": "b"}, 400, "suffix"),
        (
            "/api/generate",
            {"model": "t", "prompt": "a", "template": "{{ .Prompt }}"},
            400,
            "template: it cannot be rendered",
        ),
        ("/api/chat", {"model": "t", "messages": HELLO, "format": {"type": 3}}, 400, "format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_ollamas_shape(
    client: httpx.Client, path: str, body: Body, status: int, text: str, stream: bool
) -> None:
    assert text in refused(client.post(path, json={**body, "stream": stream}), status)


def test_what_is_no_json_is_refused_in_ollamas_shape(client: httpx.Client) -> None:
    assert "JSON" in refused(client.post("/api/chat", content=b"{"), 400)


def test_another_method_is_refused_in_ollamas_shape(client: httpx.Client) -> None:
    refused(client.get("/api/chat"), 405)


def test_the_management_keeps_its_own_shape(client: httpx.Client) -> None:
    assert client.get("/api/saes/none").json()["success"] is False


def test_a_client_that_leaves_frees_its_row(ollama: Server, client: httpx.Client) -> None:
    body = {"model": "endless", "messages": HELLO, "options": {"num_predict": -1}}
    with client.stream(
        "POST", "/api/chat", json=body, headers={"X-Request-ID": "left"}
    ) as response:
        next(response.iter_lines())
    ollama.logged("stream end", request="left", finish="disconnected")


# While nothing is produced, and when a stream has begun.


@pytest.fixture(scope="module")
def impatient(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one row, which nobody waits for long."""
    arguments = ("--max-concurrency", "1", "--keepalive", "0.1", "--queue-timeout", "2")
    folder = tmp_path_factory.mktemp("impatient")
    with serving(folder, "--model", f"t={folders.endless}", *arguments) as server:
        yield server


@pytest.mark.parametrize("path", often(["/api/chat", "/api/generate"], ["/api/chat"]))
def test_who_waits_gets_empty_lines_and_then_the_error(impatient: Server, path: str) -> None:
    endless = {"model": "t", "prompt": "Hello", "options": {"num_predict": -1}}
    body = {"model": "t", "messages": HELLO, "prompt": "Hello"}
    with (
        impatient.client() as client,
        client.stream("POST", "/api/generate", json=endless) as response,
    ):
        lines = response.iter_lines()
        while not json.loads(next(lines))["response"]:
            pass
        *waiting, last = streamed(client, path, **body)
        assert waiting
        for line in waiting:
            check_type(line, "ChatResponse" if path == "/api/chat" else "GenerateResponse")
            assert not line["done"]
            assert not line.get("response")
            assert not line.get("message", {}).get("content")
        assert last.keys() == {"error"}
        assert "--queue-timeout" in last["error"]
        whole_body = {**body, "stream": False}
        assert "--queue-timeout" in refused(client.post(path, json=whole_body), 503)
