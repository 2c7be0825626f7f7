"""LangChain's ChatOpenAI with `base_url` set, and nothing else about it changed."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

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


class get_weather(GetWeather):
    """Get the current weather in a city"""  # and the name that LangChain gives the tool


@pytest.fixture
def model(base_url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, max_retries=0)


def whole(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    """All chunks of a stream added up, as LangChain does it."""
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


# Answers.


def test_invoke_answers(model: ChatOpenAI) -> None:
    answer = model.invoke(QUESTION)
    assert ANSWER in answer.content
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata["output_tokens"] > 10
    assert answer.usage_metadata["input_tokens"] > 1


@pytest.mark.parametrize("stream_usage", [None, True])
def test_stream_gives_what_invoke_gives(model: ChatOpenAI, stream_usage: bool | None) -> None:
    invoked = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION, stream_usage=stream_usage))
    assert sum(bool(chunk.content) for chunk in chunks) > 1
    streamed = whole(chunks)
    assert streamed.content == invoked.content
    assert streamed.response_metadata["finish_reason"] == "stop"
    for name in ("input_tokens", "output_tokens"):
        assert streamed.usage_metadata[name] == invoked.usage_metadata[name]


def test_async_invoke_and_stream_do_the_same(model: ChatOpenAI) -> None:
    async def talk() -> None:
        invoked = await model.ainvoke(QUESTION)
        assert ANSWER in invoked.content
        chunks = [chunk async for chunk in model.astream(QUESTION)]
        assert whole(chunks).content == invoked.content

    asyncio.run(talk())


def test_batch_answers_each(model: ChatOpenAI) -> None:
    answers = model.batch([QUESTION, "Which port does it use?"])
    assert ANSWER in answers[0].content
    assert "port is 8000" in answers[1].content


def test_n_gives_as_many_generations(model: ChatOpenAI) -> None:
    result = model.generate([[HumanMessage(QUESTION)]], n=2)
    [generations] = result.generations
    assert len(generations) == 2
    assert all(ANSWER in generation.text for generation in generations)


def test_log_probabilities_are_in_the_response_metadata(model: ChatOpenAI) -> None:
    answer = model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    scores = answer.response_metadata["logprobs"]["content"]
    assert b"".join(bytes(score["bytes"]) for score in scores).decode() == answer.content
    assert {len(score["top_logprobs"]) for score in scores} == {2}


# Tools.


def test_bind_tools_calls_the_tool_that_fits(model: ChatOpenAI) -> None:
    answer = model.bind_tools([get_weather]).invoke(WEATHER_QUESTION)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert call["id"].startswith("call_")
    assert answer.invalid_tool_calls == []
    assert answer.response_metadata["finish_reason"] == "tool_calls"


def test_a_tool_call_streams_in_chunks(model: ChatOpenAI) -> None:
    chunks = list(model.bind_tools([get_weather]).stream(WEATHER_QUESTION))
    answer = whole(chunks)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    assert answer.invalid_tool_calls == []
    assert answer.content == ""


def test_a_tool_message_is_used(model: ChatOpenAI) -> None:
    agent = model.bind_tools([get_weather])
    question = HumanMessage(WEATHER_QUESTION)
    asked: AIMessage = agent.invoke([question])
    result = ToolMessage(WEATHER, tool_call_id=asked.tool_calls[0]["id"])
    assert WEATHER in agent.invoke([question, asked, result]).content


@pytest.mark.parametrize("choice", ["any", "SetLight"])
def test_bind_tools_with_a_tool_choice_forces_a_call(model: ChatOpenAI, choice: str) -> None:
    agent = model.bind_tools([SetLight], tool_choice=choice)
    [call] = agent.invoke(GREETING, max_tokens=100).tool_calls
    assert call["name"] == "SetLight"
    SetLight.model_validate(call["args"])


# Structure.


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_with_structured_output_gives_a_model(
    model: ChatOpenAI, method: Literal["json_schema", "function_calling"]
) -> None:
    structured = model.with_structured_output(Mood, method=method)
    assert isinstance(structured.invoke(GREETING, max_tokens=100), Mood)


def test_with_structured_output_lets_the_model_say_what_it_would(model: ChatOpenAI) -> None:
    """Also from a JSON Schema, and in JSON mode, which has none."""
    assert model.with_structured_output(Card).invoke(JSON_QUESTION, max_tokens=100) == CARD

    from_schema = model.with_structured_output(Card.model_json_schema())
    assert from_schema.invoke(JSON_QUESTION, max_tokens=100) == CARD.model_dump()

    json_mode = model.with_structured_output(Card, method="json_mode")
    assert json_mode.invoke(JSON_QUESTION, max_tokens=100) == CARD


def test_with_structured_output_streams(model: ChatOpenAI) -> None:
    structured = model.with_structured_output(Card.model_json_schema())
    parts: list[Any] = list(structured.stream(JSON_QUESTION, max_tokens=100))
    assert len(parts) > 1
    assert parts[-1] == CARD.model_dump()


# Embeddings.


@pytest.fixture
def embeddings(base_url: str) -> OpenAIEmbeddings:
    """Told to send texts: by default it sends the token ids that OpenAI's own models have."""
    return OpenAIEmbeddings(
        base_url=base_url,
        api_key="none",
        model=MODEL,
        max_retries=0,
        check_embedding_ctx_length=False,
    )


def test_embed_query_gives_the_vector_of_plain_http(
    embeddings: OpenAIEmbeddings, base_url: str
) -> None:
    for text in PASSAGES:
        assert [embeddings.embed_query(text)] == embed(base_url, text)
    narrow = embeddings.model_copy(update={"dimensions": 8})
    assert [narrow.embed_query(PASSAGES[0])] == embed(base_url, PASSAGES[0], dimensions=8)


@pytest.mark.parametrize("size", [1, 1000])
def test_embed_documents_gives_a_vector_of_each_in_order(
    embeddings: OpenAIEmbeddings, base_url: str, size: int
) -> None:
    """`size` is how many it sends in one request."""
    found = embeddings.embed_documents(PASSAGES, chunk_size=size)
    for vector, expected in zip(found, embed(base_url, PASSAGES), strict=True):
        assert vector == pytest.approx(expected, abs=1e-5)


def test_aembed_documents_does_the_same(embeddings: OpenAIEmbeddings, base_url: str) -> None:
    async def talk() -> list[list[float]]:
        found: list[list[float]] = await embeddings.aembed_documents(PASSAGES)
        await embeddings.async_client._client.close()  # which nobody else does
        return found

    for vector, expected in zip(asyncio.run(talk()), embed(base_url, PASSAGES), strict=True):
        assert vector == pytest.approx(expected, abs=1e-6)


# Errors.


def test_errors_are_the_openai_clients(model: ChatOpenAI, base_url: str) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        model.invoke(QUESTION, temperature=5)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(base_url=base_url, api_key="none", model="nobody").invoke(QUESTION)


def test_too_long_a_request_is_a_context_overflow(model: ChatOpenAI) -> None:
    with pytest.raises(ContextOverflowError):
        model.invoke(QUESTION * TOO_MANY)
