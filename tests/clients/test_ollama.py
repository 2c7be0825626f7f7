"""Ollama's client for Python, with `host` set, and nothing else about it changed."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.clients.raw import embed
from tests.clients.talk import (
    ANSWER,
    CARD,
    GREETING,
    JSON_QUESTION,
    MODEL,
    PASSAGES,
    QUESTION,
    TOO_MANY,
    WEATHER,
    WEATHER_QUESTION,
    Card,
    Mood,
)

DOCS = Path(__file__).parents[2] / "docs" / "ollama.md"


def get_weather(city: str) -> str:
    """Get the current weather in a city

    Args:
        city: the city
    """
    assert city == "Paris"
    return WEATHER


@pytest.fixture(scope="module")
def host(base_url: str) -> str:
    return base_url.removesuffix("/v1")


@pytest.fixture
def client(host: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=host) as client:
        yield client


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# Chats.


def test_a_chat_answers(client: ollama.Client) -> None:
    answer = client.chat(MODEL, say(QUESTION))
    assert ANSWER in answer.message.content
    assert (answer.model, answer.done, answer.done_reason) == (MODEL, True, "stop")
    assert answer.eval_count > 10
    assert answer.prompt_eval_count > 1
    took = answer.prompt_eval_duration + answer.eval_duration + answer.load_duration
    assert 0 < took <= answer.total_duration


def test_a_chat_streams_what_it_says_whole(client: ollama.Client) -> None:
    whole = client.chat(MODEL, say(QUESTION))
    *parts, last = client.chat(MODEL, say(QUESTION), stream=True)
    assert len(parts) > 1
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason, last.message.content) == (True, "stop", "")
    assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)


def test_the_async_client_does_the_same(client: ollama.Client, host: str) -> None:
    async def talk() -> str:
        async with ollama.AsyncClient(host=host) as other:
            parts = [part async for part in await other.chat(MODEL, say(QUESTION), stream=True)]
        return "".join(part.message.content for part in parts)

    assert asyncio.run(talk()) == client.chat(MODEL, say(QUESTION)).message.content


def test_options_are_honoured(client: ollama.Client) -> None:
    answer = client.chat(MODEL, say(QUESTION), options={"num_predict": 3, "temperature": 0})
    assert (answer.eval_count, answer.done_reason) == (3, "length")
    stopped = client.chat(MODEL, say(QUESTION), options=ollama.Options(stop=["ASGI"]))
    assert stopped.message.content.endswith("OpenAI-compatible ")
    drawn = [
        client.chat(MODEL, say(QUESTION), options={"temperature": 2, "seed": 7}).message.content
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


def test_thoughts_come_apart(client: ollama.Client) -> None:
    answer = client.chat(MODEL, say(GREETING), think=True)
    assert answer.message.thinking
    assert answer.message.content
    parts = list(client.chat(MODEL, say(GREETING), think="low", stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == answer.message.thinking
    assert client.chat(MODEL, say(GREETING), think=False).message.thinking is None


def test_log_probabilities_come_with_each_token(client: ollama.Client) -> None:
    answer = client.chat(MODEL, say(GREETING), logprobs=True, top_logprobs=2)
    tokens = "".join(each.token for each in answer.logprobs)
    assert tokens.startswith(answer.message.content)
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in answer.logprobs)


# Tools.


def test_a_tool_that_fits_is_called_and_its_result_used(client: ollama.Client) -> None:
    messages: list[Any] = say(WEATHER_QUESTION)
    answer = client.chat(MODEL, messages, tools=[get_weather])
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    result = get_weather(**call.function.arguments)
    messages += [answer.message, {"role": "tool", "content": result, "tool_name": "get_weather"}]
    assert WEATHER in client.chat(MODEL, messages, tools=[get_weather]).message.content


def test_a_tool_call_streams_as_a_whole(client: ollama.Client) -> None:
    parts = list(client.chat(MODEL, say(WEATHER_QUESTION), tools=[get_weather], stream=True))
    [call] = [call for part in parts for call in part.message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    assert parts[-1].done_reason == "stop"


# Formats.


def test_a_schema_shapes_the_answer(client: ollama.Client) -> None:
    answer = client.chat(MODEL, say(JSON_QUESTION), format=Card.model_json_schema())
    assert Card.model_validate_json(answer.message.content) == CARD
    shaped = client.chat(MODEL, say(GREETING), format=Mood.model_json_schema())
    assert Mood.model_validate_json(shaped.message.content)


def test_json_gives_an_object(client: ollama.Client) -> None:
    answer = client.chat(MODEL, say(JSON_QUESTION), format="json")
    assert Card.model_validate_json(answer.message.content) == CARD


# Texts.


def test_generate_answers_and_streams(client: ollama.Client) -> None:
    answer = client.generate(MODEL, QUESTION)
    assert ANSWER in answer.response
    parts = list(client.generate(MODEL, QUESTION, stream=True))
    assert "".join(part.response for part in parts) == answer.response
    assert parts[-1].done_reason == "stop"


def test_generate_continues_a_raw_text(client: ollama.Client) -> None:
    answer = client.generate(MODEL, "mlxsrv is", raw=True, options={"num_predict": 4})
    assert answer.response
    assert answer.done_reason == "length"


def test_generate_thinks(client: ollama.Client) -> None:
    answer = client.generate(MODEL, GREETING, think=True)
    assert answer.thinking
    assert answer.response


# Embeddings.


def test_texts_are_embedded_in_their_order(client: ollama.Client, base_url: str) -> None:
    answer = client.embed(MODEL, PASSAGES)
    assert [list(vector) for vector in answer.embeddings] == embed(base_url, PASSAGES)
    assert answer.prompt_eval_count > len(PASSAGES)
    assert list(client.embeddings(MODEL, PASSAGES[1]).embedding) == answer.embeddings[1]
    [short] = client.embed(MODEL, PASSAGES[0], dimensions=32).embeddings
    assert len(short) == 32


# Models.


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    [listed] = [each for each in client.list().models if each.model == f"{MODEL}:latest"]
    assert listed.size > 10**6
    assert listed.details.family == "qwen3"
    shown = client.show(listed.model)
    assert shown.modelinfo["qwen3.context_length"] == 4096
    assert {"completion", "tools"} <= {*shown.capabilities}
    assert "messages" in shown.template
    assert shown.modified_at == listed.modified_at


def test_a_model_is_loaded_kept_and_told(client: ollama.Client) -> None:
    assert client.generate(MODEL, keep_alive="5m").done_reason == "load"
    [running] = client.ps().models
    assert running.name == f"{MODEL}:latest"
    assert 280 < (running.expires_at - datetime.now(UTC)).total_seconds() <= 300
    assert running.size == running.size_vram > 10**6
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    assert client.chat(MODEL, [], keep_alive=-1).done_reason == "load"


def test_a_pull_of_what_is_here_succeeds(client: ollama.Client) -> None:
    assert client.pull(MODEL).status == "success"
    assert [each.status for each in client.pull(MODEL, stream=True)][-1] == "success"


# Errors.


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_response_errors(client: ollama.Client, stream: bool) -> None:
    def talk(model: str, text: str, **fields: Any) -> ollama.ResponseError:
        with pytest.raises(ollama.ResponseError) as caught:
            list(client.chat(model, say(text), stream=stream, **fields))
        return caught.value

    unknown = talk("nobody", GREETING)
    assert unknown.status_code == 404
    assert "nobody" in unknown.error
    long = talk(MODEL, QUESTION * TOO_MANY)
    assert long.status_code == 400
    assert "4096" in long.error
    wrong = talk(MODEL, GREETING, options={"temperature": -1})
    assert wrong.status_code == 400
    assert wrong.error.startswith("options.temperature")


REFUSED: dict[str, Callable[[ollama.Client], object]] = {
    "delete": lambda client: client.delete(MODEL),
    "copy": lambda client: client.copy(MODEL, "other"),
    "create": lambda client: client.create("other", from_=MODEL, system="Be brief."),
    "push": lambda client: client.push(MODEL),
    "download": lambda client: client.pull("org/name"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_so(client: ollama.Client, what: str) -> None:
    with pytest.raises(ollama.ResponseError, match=f"this server does not {what}") as caught:
        REFUSED[what](client)
    assert caught.value.status_code == 403


# The documentation.


def test_the_examples_of_the_docs_print_an_answer(host: str) -> None:
    blocks = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    examples = blocks.findall(DOCS.read_text("utf-8"))
    assert examples
    for example in examples:
        code = example.replace("http://127.0.0.1:11434", host)
        assert code != example
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert ANSWER in result.stdout
