"""Each failure of the server in each dialect: its status and shape before a stream, its event or
line within one, and what is sent while a client waits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer

import mlxsrv
from mlxsrv import errors
from mlxsrv.errors import ServeError
from mlxsrv.web.app import App
from tests.support.anthropic_streams import read_events
from tests.support.client import Body
from tests.support.fixtures import Folders
from tests.support.ollama import read_lines
from tests.support.scripted import cut, spell, write_scripted
from tests.support.serving import wait_for
from tests.web.dialects.asking import DIALECTS
from tests.web.dialects.refusals import told, told_within
from tests.web.dialects.spoken import Asked, Client, Response, Spoken, asking
from tests.wire.responses.asking import read_events as read_responses

FOR_EVER = 900_000
LONG = "word " * 16_000
"""A prompt that takes longer to read than a test may wait."""
PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of a row's KV cache: keys and values, layers, heads, their width, and of a number."""


@pytest.fixture(params=DIALECTS.values(), ids=[*DIALECTS])
def spoken(request: pytest.FixtureRequest) -> Spoken:
    spoken: Spoken = request.param
    return spoken


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# Apps, and what they are asked.


def make_app(*models: str, local: bool = False, **options: Any) -> App:
    return mlxsrv.create_app(mlxsrv.Settings(model=models, hf_cache=False, **options), local=local)


@contextmanager
def served(*models: str, **options: Any) -> Iterator[TestClient]:
    with TestClient(make_app(*models, **options), base_url="http://localhost") as client:
        yield client


def write_broken(folder: Path, source: Path) -> Path:
    """A model whose weights are no numbers."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


@pytest.fixture(scope="module")
def client(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    broken = write_broken(tmp_path_factory.mktemp("failures") / "broken", folders.plain)
    models = (f"t={folders.plain}", f"broken={broken}")
    with served(*models, local=True, max_body=2**20) as client:
        yield client


def short(**fields: Any) -> Asked:
    return asking("Tell me of the sea.", model="t", **{"limit": 4, **fields})


def endless(**fields: Any) -> Asked:
    return short(limit=FOR_EVER, **fields)


# Before a stream: what the request is to blame for.


def changed(spoken: Spoken, **fields: Any) -> Body:
    """A body with other values at its top; None leaves one out."""
    body = spoken.body(short()) | fields
    return {name: value for name, value in body.items() if value is not None}


def hot(spoken: Spoken) -> Body:
    wrong = {"temperature": "hot"}
    return changed(spoken, options=wrong) if spoken.name == "ollama" else changed(spoken, **wrong)


def empty(spoken: Spoken) -> Body:
    return changed(
        spoken, **{{"ollama": "model", "responses": "input"}.get(spoken.name, "messages"): None}
    )


def picture(spoken: Spoken) -> Body:
    parts: dict[str, Body] = {
        "chat": {"type": "image_url", "image_url": {"url": "data:,"}},
        "messages": {"type": "image", "source": {}},
        "responses": {"type": "input_image", "image_url": "data:,"},
    }
    message = {"content": [parts[spoken.name]]} if spoken.name in parts else {"images": ["aa"]}
    name = "input" if spoken.name == "responses" else "messages"
    return changed(spoken, **{name: [{"role": "user", **message}]})


BODIES: dict[str, tuple[Callable[[Spoken], Body], type[ServeError], str]] = {
    "a wrong type": (hot, errors.InvalidRequest, "temperature"),
    "a missing field": (empty, errors.MissingParameter, "missing required parameter"),
    "an image": (picture, errors.UnsupportedParameter, "[0]"),
    "a long prompt": (
        lambda spoken: spoken.body(asking("word " * 5000, model="t")),
        errors.ContextLengthExceeded,
        "4096",
    ),
    "a prompt longer by far": (
        lambda spoken: spoken.body(asking("word " * 100_000, model="t")),
        errors.ContextLengthExceeded,
        "4096",
    ),
    "a large body": (
        lambda spoken: spoken.body(asking("x" * 2**20, model="t")),
        errors.RequestTooLarge,
        "1048576",
    ),
    "an unknown model": (
        lambda spoken: changed(spoken, model="nobody"),
        errors.ModelNotFound,
        "nobody",
    ),
    "an unknown profile": (
        lambda spoken: changed(spoken, profile="nobody"),
        errors.ProfileNotFound,
        "nobody",
    ),
    "features without an SAE": (
        lambda spoken: changed(spoken, steering={"5": 1}),
        errors.SAENotAttached,
        "steering",
    ),
    "damaged weights": (
        lambda spoken: changed(spoken, model="broken"),
        errors.ModelNotLoaded,
        "broken",
    ),
}


@pytest.mark.parametrize(("make", "error", "words"), BODIES.values(), ids=[*BODIES])
def test_wrong_bodies(
    client: TestClient,
    spoken: Spoken,
    stream: bool,
    make: Callable[[Spoken], Body],
    error: type[ServeError],
    words: str,
) -> None:
    response = client.post(spoken.path, json=make(spoken) | {"stream": stream})
    assert words in told(spoken, response, error)


def test_wrong_requests(client: TestClient, spoken: Spoken) -> None:
    def posted(**headers: str) -> Response:
        return client.post(spoken.path, json=spoken.body(short()), headers=headers)

    for text in (b"{", b"", b'{"model": "\xff"}', b'{"x": ' + b"[" * 10**5):
        told(spoken, client.post(spoken.path, content=text), errors.InvalidJSON)
    assert "GET" in told(spoken, client.get(spoken.path), errors.MethodNotAllowed)
    told(spoken, posted(Origin="https://page.example"), errors.OriginNotAllowed)
    told(spoken, posted(Host="page.example"), errors.HostNotAllowed)
    told(spoken, posted(Odd="x" * 70_000), errors.HeadersTooLarge)


def test_keys_and_rates(folders: Folders, spoken: Spoken, stream: bool) -> None:
    with served(f"t={folders.plain}", api_key=("k",), rate_limit=1) as client:
        told(spoken, spoken.post(client, short(), stream=stream), errors.InvalidAPIKey)
        client.headers["x-api-key"] = "k"
        assert spoken.post(client, short(), stream=stream).status_code == 200
        limited = spoken.post(client, short(), stream=stream)
        told(spoken, limited, errors.RateLimited)
        assert int(limited.headers["retry-after"]) > 0


def test_a_model_that_does_not_fit(folders: Folders, spoken: Spoken, stream: bool) -> None:
    with served(f"t={folders.plain}", memory_limit=1000) as client:
        told(spoken, spoken.post(client, short(), stream=stream), errors.InsufficientMemory)


def test_a_prompt_that_does_not_fit_into_memory(
    folders: Folders, spoken: Spoken, stream: bool
) -> None:
    """The engine finds out, and asks for more memory first; the stream has not begun by then."""
    weights = sum(file.stat().st_size for file in folders.plain.glob("*.safetensors"))
    row = 2 * 512 * PER_TOKEN
    with served(f"t={folders.plain}", memory_limit=weights + 2 * row) as client:
        assert spoken.post(client, short(), stream=stream).status_code == 200
        refused = spoken.post(client, asking("word " * 600, model="t"), stream=stream)
        message = told(spoken, refused, errors.InsufficientMemory)
        numbers = [int(number) for number in re.findall(r"\d+", message)]
        tokens, needed, available = numbers
        assert tokens > 1500
        assert needed > tokens * PER_TOKEN > available > row
        assert spoken.post(client, short(), stream=stream).status_code == 200


# Waiting.


def rows(client: Client) -> int:
    models = client.get("/health?verbose=1").json()["models"]
    return sum(int(model["rows"]) for model in models)


def wait_for_model(client: TestClient) -> None:
    wait_for(lambda: client.get("/v1/models/t").json()["loaded"], why="the model is loaded")


def wait_for_answer(client: TestClient) -> None:
    """Wait until there is one in time: the first prompt of all takes longer to prepare."""
    post = DIALECTS["chat"].post
    wait_for(lambda: post(client, short()).status_code == 200, why="it answers in time")


def in_every_way(
    client: TestClient, asked: Asked
) -> Mapping[tuple[Spoken, bool], Callable[[], Response]]:
    """Ask the same in each dialect, whole and streamed, all at once. Return the functions that wait
    for the responses."""
    threads = ThreadPoolExecutor(8)
    ways = [(spoken, stream) for spoken in DIALECTS.values() for stream in (False, True)]
    waiting = {
        (spoken, stream): threads.submit(spoken.post, client, asked, stream=stream).result
        for spoken, stream in ways
    }
    threads.shutdown(wait=False)
    return waiting


@contextmanager
def beside_another(folders: Folders, **options: Any) -> Iterator[TestClient]:
    """A client of a server whose only row another request has, until the block ends."""
    app = make_app(f"t={folders.endless}", max_concurrency=1, shutdown_grace=0, **options)
    with TestClient(app) as client, ThreadPoolExecutor(1) as threads:
        wait_for_model(client)
        threads.submit(DIALECTS["chat"].post, client, endless())
        wait_for(lambda: rows(client) == 1, why="the other has the row")
        yield client
        drain(app, client)


def drain(app: App, client: TestClient) -> None:
    assert client.portal is not None
    client.portal.call(app.drain)


def test_a_full_queue(folders: Folders) -> None:
    with beside_another(folders, max_queue=0) as client:
        for spoken in DIALECTS.values():
            for stream in (False, True):
                told(spoken, spoken.post(client, short(), stream=stream), errors.Overloaded)


def test_a_turn_that_does_not_come(folders: Folders) -> None:
    """Whoever streams is kept waiting in a form that its clients understand."""
    with beside_another(folders, queue_timeout=2.0, keepalive=0.1) as client:
        for (spoken, stream), waited in in_every_way(client, short()).items():
            response = waited()
            tell = told_within if stream else told
            assert "--queue-timeout" in tell(spoken, response, errors.Overloaded)
            if stream:
                assert response.content.startswith(spoken.keepalive)
                assert keepalives(spoken, response.content) >= 1


def keepalives(spoken: Spoken, data: bytes) -> int:
    """Return the number of keep-alives in a stream without text."""
    match spoken.name:
        case "chat":
            return data.count(spoken.keepalive)
        case "messages":
            return [event["type"] for event in read_events(data)].count("ping")
        case "responses":
            return [e["type"] for e in read_responses(data)].count("response.in_progress")
    lines = read_lines(data)[:-1]
    return [line["message"]["content"] for line in lines].count("")


# Deadlines.


def test_a_deadline_before_any_text(folders: Folders) -> None:
    limits: Body = {"prefill_chunk": 16, "request_timeout": 1.0, "keepalive": 0.1}
    with served(f"t={folders.endless}", **limits) as client:
        wait_for_answer(client)
        long = msgspec.structs.replace(short(), turns=asking(LONG).turns)
        for (spoken, stream), waited in in_every_way(client, long).items():
            response = waited()
            # A stream begins when its prompt has become tokens, which a busy machine may delay.
            begun = stream and response.status_code == 200
            (told_within if begun else told)(spoken, response, errors.DeadlineExceeded)


def test_a_deadline_after_some_text(folders: Folders) -> None:
    finishes = {
        "chat": "timeout",
        "messages": "max_tokens",
        "responses": {"reason": "timeout"},
        "ollama": "length",
    }
    with served(f"t={folders.endless}", request_timeout=3.0) as client:
        wait_for_answer(client)
        for (spoken, stream), waited in in_every_way(client, endless()).items():
            response = waited()
            assert response.status_code == 200, response.text
            body = last_of(spoken, response) if stream else response.json()
            assert finish(spoken, body) == finishes[spoken.name]


def last_of(spoken: Spoken, response: Response) -> Body:
    """Return the event or line of a stream that tells its finish."""
    if spoken.name == "ollama":
        return read_lines(response.content)[-1]
    events = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    place = {"chat": -2, "messages": -2, "responses": -1}
    event: Body = events[place[spoken.name]]
    return {"messages": event.get("delta"), "responses": event.get("response")}.get(
        spoken.name
    ) or event


def finish(spoken: Spoken, body: Body) -> Any:
    match spoken.name:
        case "chat":
            return body["choices"][0]["finish_reason"]
        case "messages":
            return body["stop_reason"]
        case "responses":
            return body["incomplete_details"]
    return body["done_reason"]


# The end of the server, and of the engine's strength.


def test_a_shutdown(folders: Folders) -> None:
    app = make_app(f"t={folders.endless}", shutdown_grace=0.1)
    with TestClient(app) as client:
        running = in_every_way(client, endless())
        wait_for(lambda: rows(client) == 8, why="all have their rows")
        drain(app, client)
        for (spoken, stream), response in running.items():
            (told_within if stream else told)(spoken, response(), errors.ShuttingDown)
        for spoken in DIALECTS.values():
            for stream in (False, True):
                told(spoken, spoken.post(client, short(), stream=stream), errors.ShuttingDown)


def write_faulty(folder: Path) -> Path:
    """A model that says some words, and then computes NaN."""
    words = cut("Once upon a time there was a fault", 3)
    write_scripted(folder, words)
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    assert isinstance(weights, dict)
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(spell(words[6]))
    embedding = weights["model.embed_tokens.weight"]
    embedding[token] = float("nan")
    mx.save_safetensors(file, {**weights, "model.embed_tokens.weight": embedding})
    return folder


def test_a_fault_of_the_engine(tmp_path: Path) -> None:
    with served(f"t={write_faulty(tmp_path / 'faulty')}") as client:
        for spoken in DIALECTS.values():
            told(spoken, spoken.post(client, short(limit=50)), ServeError)
            streamed = spoken.post(client, short(limit=50), stream=True)
            assert "NaN" in told_within(spoken, streamed, ServeError)
            assert b'"Onc' in streamed.content, "the text before it was sent"
