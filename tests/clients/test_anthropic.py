"""Anthropic's SDK with `base_url` set, and nothing else about it changed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import anthropic
import pytest
from anthropic import beta_tool
from anthropic.types import MessageParam, ToolParam

from tests.clients.serving import ROOT, serving
from tests.clients.talk import (
    ANSWER,
    CARD,
    GREETING,
    JSON_QUESTION,
    MODEL,
    QUESTION,
    TOO_MANY,
    WEATHER,
    WEATHER_QUESTION,
    Card,
    GetWeather,
)

URL = "http://127.0.0.1:8000"
LIMIT = 100
THINKING = {"type": "enabled", "budget_tokens": 1024}
GET_WEATHER: ToolParam = {
    "name": "get_weather",
    "description": GetWeather.__doc__ or "",
    "input_schema": GetWeather.model_json_schema(),
}


def say(text: str) -> list[MessageParam]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def url(base_url: str) -> str:
    return base_url.removesuffix("/v1")


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, text: str = QUESTION, **fields: Any) -> Any:
    given = {"model": MODEL, "max_tokens": LIMIT, "messages": say(text), **fields}
    return client.messages.create(**given)


def helped(client: anthropic.Anthropic, text: str = QUESTION, **fields: Any) -> Any:
    """The stream helper's manager."""
    given = {"model": MODEL, "max_tokens": LIMIT, "messages": say(text), **fields}
    return client.messages.stream(**given)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def blocks_of(message: Any) -> list[Any]:
    return [{**block.to_dict(), "citations": None} for block in message.content]


def prompt_tokens(usage: Any) -> int:
    cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    return int(usage.input_tokens + cached)


# Answers.


def test_a_message_answers(client: anthropic.Anthropic) -> None:
    message = ask(client)
    assert ANSWER in text_of(message)
    assert (message.stop_reason, message.model, message.role) == ("end_turn", MODEL, "assistant")
    assert message.usage.output_tokens > 10
    assert message._request_id


def test_a_message_streams_what_it_says_whole(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == text_of(whole)


def test_the_stream_helper_adds_up_the_message(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    with helped(client) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        message = stream.get_final_message()
    assert blocks_of(message) == blocks_of(whole)
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(message.usage) == prompt_tokens(whole.usage)


def test_the_async_client_does_the_same(url: str) -> None:
    async def talk() -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            given: Any = {"model": MODEL, "max_tokens": LIMIT, "messages": say(QUESTION)}
            whole = await client.messages.create(**given)
            async with client.messages.stream(**given) as stream:
                texts = [text async for text in stream.text_stream]
            assert "".join(texts) == text_of(whole)

    asyncio.run(talk())


def test_a_begun_message_is_continued(client: anthropic.Anthropic) -> None:
    begun = "mlxsrv is a lean, streaming-first, OpenAI-"
    message = ask(client, messages=[*say(QUESTION), {"role": "assistant", "content": begun}])
    assert text_of(message).startswith("compatible")


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    message = ask(client, stop_sequences=["server"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "server")
    assert "server" not in text_of(message)


def test_the_second_turn_reads_only_what_is_new(client: anthropic.Anthropic) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "You are kind. " * 50, **mark}]
    first = ask(client, system=system)
    turns = [*say(QUESTION), {"role": "assistant", "content": first.content}, *say("Thank you!")]
    usage = ask(client, system=system, messages=turns).usage
    assert usage.cache_read_input_tokens > prompt_tokens(first.usage)


# Tools.


def test_a_tool_that_fits_is_called_and_its_result_used(client: anthropic.Anthropic) -> None:
    message = ask(client, WEATHER_QUESTION, tools=[GET_WEATHER])
    [use] = message.content
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": WEATHER}
    turns = [
        *say(WEATHER_QUESTION),
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert WEATHER in text_of(ask(client, messages=turns, tools=[GET_WEATHER]))


def test_a_tool_call_streams_its_input(client: anthropic.Anthropic) -> None:
    with helped(client, WEATHER_QUESTION, tools=[GET_WEATHER]) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert json.loads("".join(parts)) == {"city": "Paris"}
    assert [block.input for block in message.content] == [{"city": "Paris"}]
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_choice_forces_a_call(client: anthropic.Anthropic, choice: Any) -> None:
    message = ask(client, GREETING, tools=[GET_WEATHER], tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]


@pytest.mark.parametrize("streamed", [False, True])
def test_the_tool_runner_runs_to_the_end(client: anthropic.Anthropic, streamed: bool) -> None:
    """Recent ones continue a thread, are told that there is none, and send everything again."""

    def get_weather(city: str) -> str:
        """Get the current weather in a city"""
        assert city == "Paris"
        return WEATHER

    given: Any = {"model": MODEL, "max_tokens": LIMIT, "tools": [beta_tool(get_weather)]}
    runner: Any = client.beta.messages.tool_runner(
        messages=say(WEATHER_QUESTION), stream=streamed, **given
    )
    messages = [each.get_final_message() if streamed else each for each in runner]
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert WEATHER in text_of(messages[-1])


# Thoughts, forms, counts.


def test_thoughts_are_blocks_that_may_be_given_back(client: anthropic.Anthropic) -> None:
    whole = ask(client, thinking=THINKING, max_tokens=2048)
    thought, text = whole.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert thought.thinking
    assert thought.signature
    with helped(client, thinking=THINKING, max_tokens=2048) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert {"thinking", "signature", "text"} <= kinds
    assert blocks_of(message) == blocks_of(whole)
    turns = [*say(QUESTION), {"role": "assistant", "content": whole.content}, *say(GREETING)]
    assert text_of(ask(client, messages=turns, thinking=THINKING, max_tokens=2048))


def test_parse_gives_the_answer_as_a_model(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(
        model=MODEL, max_tokens=LIMIT, messages=say(JSON_QUESTION), output_format=Card
    )
    assert parsed.parsed_output == CARD


@pytest.mark.parametrize("fields", [{}, {"tools": [GET_WEATHER]}, {"system": "Be kind."}])
def test_count_tokens_is_what_the_usage_says(client: anthropic.Anthropic, fields: Any) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=say(QUESTION), **fields)
    assert count.input_tokens == prompt_tokens(ask(client, **fields).usage)


def test_the_models_are_listed(client: anthropic.Anthropic) -> None:
    models = {model.id: model for model in client.models.list()}
    assert models[MODEL].display_name == MODEL
    assert client.models.retrieve(MODEL) == models[MODEL]


# Errors.


def test_errors_are_the_sdks_own_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nobody") as missing:
        ask(client, model="nobody")
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(client, extra_body={"temperature": 3})
    with pytest.raises(anthropic.NotFoundError, match="no POST"):
        client.messages.batches.create(requests=[])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_long_prompt_is_refused_in_the_words_that_agents_know(
    client: anthropic.Anthropic, streamed: bool
) -> None:
    told = r"prompt is too long: \d+ tokens > 4096 maximum"
    with pytest.raises(anthropic.BadRequestError, match=told):
        ask(client, QUESTION * TOO_MANY, stream=streamed)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path / "log", "--max-concurrency", "1", "--max-queue", "0") as url:
        yield url


def occupy(url: str, body: Any) -> HTTPResponse:
    """The answer to a chat that has the only row. The one before may just have been answered."""
    while True:
        try:
            answer: HTTPResponse = urlopen(f"{url}/v1/chat/completions", json.dumps(body).encode())
            return answer
        except HTTPError as error:
            if error.code != 503:
                raise


def test_an_overload_is_tried_again(busy: str) -> None:
    long = {"messages": say(QUESTION), "stream": True, "ignore_eos": True, "max_tokens": 4000}
    with (
        anthropic.Anthropic(base_url=busy, api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=busy, api_key="none", max_retries=20) as patient,
        ThreadPoolExecutor() as threads,
    ):
        ask(patient)  # there is no place for it either while the model is loaded
        with occupy(busy, long) as occupant:
            occupant.readline()
            with pytest.raises(anthropic.APIStatusError) as error:
                ask(client)
            assert error.value.status_code == 529
            again = threads.submit(ask, patient)
        assert ANSWER in text_of(again.result())


def test_a_wrong_key_is_an_authentication_error(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--api-key", "right") as url:
        for key, given in (("right", None), (None, "right")):
            with anthropic.Anthropic(base_url=url, api_key=key, auth_token=given) as client:
                assert client.models.retrieve(MODEL).id == MODEL
        with (
            anthropic.Anthropic(base_url=url, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            ask(client)


# The documents.


def test_the_example_of_the_documents_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "messages.md").read_text("utf-8")
    [example] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(example.replace(URL, url), {})
    assert ANSWER in capsys.readouterr().out
    assert urlopen(f"{url}/health").status == 200
