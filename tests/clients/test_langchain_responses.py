"""LangChain's ChatOpenAI with `use_responses_api=True`."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.clients.talk import (
    ANSWER,
    CARD,
    JSON_QUESTION,
    MODEL,
    QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    Card,
    GetWeather,
)


class get_weather(GetWeather):
    """Get the current weather in a city"""  # and the name that LangChain gives the tool


@pytest.fixture(params=[False, True], ids=["all items", "previous_response_id"])
def model(base_url: str, request: pytest.FixtureRequest) -> ChatOpenAI:
    """Once sending all items, and once going on from stored responses."""
    return ChatOpenAI(
        base_url=base_url,
        api_key="none",
        model=MODEL,
        max_retries=0,
        use_responses_api=True,
        use_previous_response_id=request.param,
    )


def whole(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


def test_responses_invoke_and_stream_answer(model: ChatOpenAI) -> None:
    answer = model.invoke(QUESTION)
    assert ANSWER in answer.text
    chunks = list(model.stream(QUESTION))
    assert sum(bool(chunk.text) for chunk in chunks) > 1
    streamed = whole(chunks)
    assert streamed.text == answer.text
    assert streamed.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]


def test_responses_call_tools_and_use_their_results(model: ChatOpenAI) -> None:
    agent = model.bind_tools([get_weather])
    question = HumanMessage(WEATHER_QUESTION)
    asked: AIMessage = agent.invoke([question])
    [call] = asked.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = ToolMessage(WEATHER, tool_call_id=call["id"])
    assert WEATHER in agent.invoke([question, asked, result]).text


def test_responses_stream_a_call(model: ChatOpenAI) -> None:
    streamed = whole(list(model.bind_tools([get_weather]).stream(WEATHER_QUESTION)))
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    assert streamed.invalid_tool_calls == []


def test_responses_have_structured_output(model: ChatOpenAI) -> None:
    structured: Any = model.with_structured_output(Card)
    assert structured.invoke(JSON_QUESTION, max_tokens=100) == CARD


def test_thoughts_come_as_reasoning_blocks(base_url: str) -> None:
    model = ChatOpenAI(
        base_url=base_url,
        api_key="none",
        model=MODEL,
        use_responses_api=True,
        reasoning={"effort": "low", "summary": "auto"},
    )
    answer = model.invoke(QUESTION)
    [thoughts] = [block for block in answer.content_blocks if block["type"] == "reasoning"]
    assert thoughts["reasoning"]
    assert ANSWER in answer.text
