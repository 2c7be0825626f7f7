"""OpenAI's client for Python: the Responses API."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

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
    Mood,
)

GET_WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": GetWeather.__doc__,
    "parameters": {**GetWeather.model_json_schema(), "additionalProperties": False},
    "strict": True,
}
CODE: Any = {
    "type": "custom",
    "name": "run_code",
    "description": "Run a calculation",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{1,3}[+*][0-9]{1,3}"},
}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def the_call(response: Response) -> Any:
    [call] = [item for item in response.output if item.type.endswith("call")]
    return call


def test_a_response_answers(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert ANSWER in response.output_text
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert response.output_text == chat.choices[0].message.content


def test_the_stream_helper_gives_what_create_gives(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=QUESTION)
    with client.responses.stream(model=MODEL, input=QUESTION) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(deltas) > 1
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(final.id).output_text == whole.output_text


def test_the_async_client_streams_a_response(base_url: str) -> None:
    async def talk() -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            stream = await client.responses.create(model=MODEL, input=QUESTION, stream=True)
            texts = [
                event.delta async for event in stream if event.type == "response.output_text.delta"
            ]
            return "".join(texts)

    assert ANSWER in asyncio.run(talk())


def test_a_response_calls_a_function_and_goes_on_from_it(client: openai.OpenAI) -> None:
    """By `previous_response_id`, and with all items."""
    first = client.responses.create(model=MODEL, input=WEATHER_QUESTION, tools=[GET_WEATHER])
    call = the_call(first)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    chained = client.responses.create(
        model=MODEL, previous_response_id=first.id, input=[result], tools=[GET_WEATHER]
    )
    items: Any = [{"role": "user", "content": WEATHER_QUESTION}, *first.output, result]
    whole = client.responses.create(model=MODEL, input=items, tools=[GET_WEATHER], store=False)
    assert WEATHER in chained.output_text
    assert chained.output_text == whole.output_text


def test_a_functions_arguments_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input=WEATHER_QUESTION, tools=[GET_WEATHER]
    ) as stream:
        events = list(stream)
        call = the_call(stream.get_final_response())
    kind = "response.function_call_arguments.delta"
    parts = [event.delta for event in events if event.type == kind]
    assert json.loads("".join(parts)) == {"city": "Paris"}
    assert call.parsed_arguments == {"city": "Paris"}


def test_a_custom_tool_gets_plain_text(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "input": GREETING,
        "tools": [CODE],
        "tool_choice": {"type": "custom", "name": "run_code"},
        "max_output_tokens": 100,
    }
    call = the_call(client.responses.create(**asked))
    assert (call.type, call.name) == ("custom_tool_call", "run_code")
    assert re.fullmatch(r"[0-9]{1,3}[+*][0-9]{1,3}", call.input)
    with client.responses.stream(**asked) as stream:
        deltas = [
            event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"
        ]
    assert "".join(deltas) == call.input


def test_parse_gives_a_model(client: openai.OpenAI) -> None:
    limits: Any = {"model": MODEL, "max_output_tokens": 100}
    card = client.responses.parse(input=JSON_QUESTION, text_format=Card, **limits)
    assert card.output_parsed == CARD
    mood = client.responses.parse(input=GREETING, text_format=Mood, **limits)
    assert isinstance(mood.output_parsed, Mood)
    with client.responses.stream(input=JSON_QUESTION, text_format=Card, **limits) as stream:
        assert stream.get_final_response().output_parsed == CARD


def test_log_probabilities_come_with_the_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2
    )
    [message] = response.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs
    assert "".join(each.token for each in part.logprobs).startswith(part.text)
    assert {len(each.top_logprobs) for each in part.logprobs} == {2}


def test_the_thoughts_are_a_reasoning_item(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": QUESTION, "reasoning": {"effort": "low"}}
    reasoning, _ = client.responses.create(**asked).output
    assert reasoning.type == "reasoning"
    assert reasoning.content
    asked["reasoning"] |= {"summary": "auto"}
    with client.responses.stream(**asked) as stream:
        told = [
            event.delta for event in stream if event.type == "response.reasoning_summary_text.delta"
        ]
    assert "".join(told) == reasoning.content[0].text


def test_a_response_is_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=GREETING)
    assert [item.type for item in client.responses.input_items.list(made.id)] == ["message"]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError, match="Previous response with id") as error:
        client.responses.create(model=MODEL, input=GREETING, previous_response_id=made.id)
    assert error.value.code == "previous_response_not_found"


def test_a_limit_makes_a_response_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_that_does_not_fit_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=MODEL, input=QUESTION * TOO_MANY)
    assert error.value.code == "context_length_exceeded"
