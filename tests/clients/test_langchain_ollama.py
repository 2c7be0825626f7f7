"""LangChain's ChatOllama and OllamaEmbeddings, with `base_url` set."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings

from tests.clients.raw import embed
from tests.clients.talk import (
    ANSWER,
    CARD,
    GREETING,
    JSON_QUESTION,
    MODEL,
    PASSAGES,
    QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    Card,
    GetWeather,
)


class get_weather(GetWeather):
    """Get the current weather in a city"""  # and the name that LangChain gives the tool


@pytest.fixture
def host(base_url: str) -> str:
    return base_url.removesuffix("/v1")


@contextmanager
def opened(host: str, **options: Any) -> Iterator[ChatOllama]:
    """A model whose connections are closed at the end; it has no method for that."""
    model = ChatOllama(base_url=host, model=MODEL, **options)
    try:
        yield model
    finally:
        model._client.close()


@pytest.fixture
def model(host: str) -> Iterator[ChatOllama]:
    with opened(host, validate_model_on_init=True) as model:
        yield model


def whole(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


def test_chat_ollama_answers_and_streams(model: ChatOllama) -> None:
    answer = model.invoke(QUESTION)
    assert ANSWER in answer.content
    assert answer.response_metadata["done_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] > 10
    streamed = whole(list(model.stream(QUESTION)))
    assert streamed.content == answer.content
    assert streamed.usage_metadata == answer.usage_metadata

    async def talk() -> AIMessageChunk:
        async with model._async_client:
            return whole([chunk async for chunk in model.astream(QUESTION)])

    assert asyncio.run(talk()).content == answer.content


def test_chat_ollama_calls_the_tool_that_fits(model: ChatOllama) -> None:
    bound = model.bind_tools([get_weather])
    answer = bound.invoke(WEATHER_QUESTION)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = ToolMessage(WEATHER, tool_call_id=call["id"], name="get_weather")
    assert WEATHER in bound.invoke([HumanMessage(WEATHER_QUESTION), answer, result]).content
    [streamed] = whole(list(bound.stream(WEATHER_QUESTION))).tool_calls
    assert streamed["args"] == {"city": "Paris"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_chat_ollama_gives_a_model(model: ChatOllama, method: str) -> None:
    if method == "json_schema":
        shaped = model.with_structured_output(Card, method=method)
        assert shaped.invoke(JSON_QUESTION) == CARD
    else:
        shaped = model.with_structured_output(get_weather, method=method)
        assert shaped.invoke(WEATHER_QUESTION) == get_weather(city="Paris")


def test_chat_ollama_keeps_thoughts_apart(host: str) -> None:
    with opened(host, reasoning=True) as model:
        answer = model.invoke(GREETING)
    assert answer.additional_kwargs["reasoning_content"]
    assert "<think>" not in answer.content


def test_chat_ollama_has_log_probabilities(host: str) -> None:
    with opened(host, logprobs=True, top_logprobs=2) as model:
        answer = model.invoke(GREETING)
    tokens = "".join(each["token"] for each in answer.response_metadata["logprobs"])
    assert tokens.startswith(answer.content)


def test_ollama_embeddings_are_those_of_plain_http(host: str, base_url: str) -> None:
    embeddings = OllamaEmbeddings(base_url=host, model=MODEL)
    with embeddings._client:
        assert embeddings.embed_documents(PASSAGES) == embed(base_url, PASSAGES)
