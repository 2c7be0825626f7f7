"""LiteLLM, which is told `openai/MODEL` and where that is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
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
    GetWeather,
    Mood,
    SetLight,
)

# LiteLLM has filters of its own for what its types warn of, which pytest puts aside.
pytestmark = pytest.mark.filterwarnings("ignore")


def tool(name: str, model: type[GetWeather] | type[SetLight]) -> dict[str, Any]:
    parameters = model.model_json_schema()
    description = parameters.pop("description")
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


GET_WEATHER = tool("get_weather", GetWeather)
SET_LIGHT = tool("set_light", SetLight)


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def server(base_url: str) -> dict[str, Any]:
    """The arguments of every call: where, and how."""
    return {
        "model": f"openai/{MODEL}",
        "api_base": base_url,
        "api_key": "none",
        "max_retries": 0,
    }


# Answers.


def test_completion_answers(server: dict[str, Any]) -> None:
    answer = litellm.completion(messages=say(QUESTION), **server)
    assert ANSWER in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion_streams_what_it_says_whole(server: dict[str, Any]) -> None:
    messages = say(QUESTION)
    whole = litellm.completion(messages=messages, **server)
    chunks = list(
        litellm.completion(
            messages=messages, stream=True, stream_options={"include_usage": True}, **server
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks, messages=messages)
    assert built.choices[0].message.content == said
    assert built.choices[0].finish_reason == "stop"
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens


def test_acompletion_answers_and_streams(server: dict[str, Any]) -> None:
    async def talk() -> None:
        whole = await litellm.acompletion(messages=say(QUESTION), **server)
        assert ANSWER in whole.choices[0].message.content
        stream = await litellm.acompletion(messages=say(QUESTION), stream=True, **server)
        said = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(said) == whole.choices[0].message.content

    asyncio.run(talk())


def test_text_completion_continues_a_text(server: dict[str, Any]) -> None:
    server["model"] = f"text-completion-openai/{MODEL}"
    answer = litellm.text_completion(prompt="mlxsrv is", max_tokens=40, **server)
    assert "server for MLX language models" in answer.choices[0].text


def test_thoughts_come_as_reasoning_content(server: dict[str, Any]) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = (
        litellm.completion(messages=say(QUESTION), extra_body=thinking, **server).choices[0].message
    )
    assert message.reasoning_content
    assert ANSWER in message.content

    stream = litellm.completion(messages=say(QUESTION), extra_body=thinking, stream=True, **server)
    deltas = [chunk.choices[0].delta for chunk in stream]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == message.reasoning_content


def test_n_and_log_probabilities_come_through(server: dict[str, Any]) -> None:
    answer = litellm.completion(
        messages=say(QUESTION), n=2, logprobs=True, top_logprobs=2, **server
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        scores = choice.logprobs.content
        text = b"".join(bytes(score.bytes) for score in scores).decode()
        assert text == choice.message.content
        assert {len(score.top_logprobs) for score in scores} == {2}


# Tools.


def test_a_tool_that_fits_is_called_and_its_result_used(server: dict[str, Any]) -> None:
    messages = say(WEATHER_QUESTION)
    asked = litellm.completion(messages=messages, tools=[GET_WEATHER], **server)
    assert asked.choices[0].finish_reason == "tool_calls"
    message = asked.choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}

    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER}
    answer = litellm.completion(
        messages=[*messages, message, result], tools=[GET_WEATHER], **server
    )
    assert WEATHER in answer.choices[0].message.content


def test_a_tool_call_streams(server: dict[str, Any]) -> None:
    messages = say(WEATHER_QUESTION)
    chunks = list(litellm.completion(messages=messages, tools=[GET_WEATHER], stream=True, **server))
    built = litellm.stream_chunk_builder(chunks, messages=messages)
    [call] = built.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert built.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "set_light"}}]
)
def test_a_tool_choice_forces_a_call(server: dict[str, Any], choice: Any) -> None:
    answer = litellm.completion(
        messages=say(GREETING), tools=[SET_LIGHT], tool_choice=choice, max_tokens=100, **server
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "set_light"
    SetLight.model_validate_json(call.function.arguments)


# Structure.


def test_a_response_format_shapes_the_answer(server: dict[str, Any]) -> None:
    def ask(question: str, shape: type[Card] | type[Mood] | dict[str, str]) -> str:
        answer = litellm.completion(
            messages=say(question), response_format=shape, max_tokens=100, **server
        )
        return str(answer.choices[0].message.content)

    assert Card.model_validate_json(ask(JSON_QUESTION, Card)) == CARD
    Mood.model_validate_json(ask(GREETING, Mood))
    assert json.loads(ask(JSON_QUESTION, {"type": "json_object"})) == CARD.model_dump()


# Embeddings.


def test_embedding_gives_the_vectors_of_plain_http(server: dict[str, Any], base_url: str) -> None:
    for encoding in (None, "float"):
        answer = litellm.embedding(input=PASSAGES, encoding_format=encoding, **server)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(PASSAGES)
        assert [one["index"] for one in answer.data] == list(range(len(PASSAGES)))
        for one, expected in zip(answer.data, embed(base_url, PASSAGES), strict=True):
            assert one["embedding"] == pytest.approx(expected, abs=1e-6)


def test_embedding_takes_dimensions_where_they_are_let_through(
    server: dict[str, Any], base_url: str
) -> None:
    """LiteLLM refuses them itself, but for models of OpenAI's own, unless told."""
    text = PASSAGES[0]
    let_through = ["dimensions"]
    answer = litellm.embedding(
        input=[text], dimensions=8, allowed_openai_params=let_through, **server
    )
    assert [answer.data[0]["embedding"]] == embed(base_url, text, dimensions=8)


# Errors.


def test_errors_are_litellms_own_classes(server: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=say(QUESTION), temperature=5, **server)
    server["model"] = "openai/nobody"
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=say(QUESTION), **server)


def test_too_long_a_request_is_a_context_window_error(server: dict[str, Any]) -> None:
    """LiteLLM goes by the words of OpenAI's own message, and falls back to other models on it."""
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=say(QUESTION * TOO_MANY), **server)
