"""LangChain's ChatAnthropic with `base_url` set, and nothing else about it changed."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage

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
    SetLight,
)


class get_weather(GetWeather):
    """Get the current weather in a city"""  # and the name that LangChain gives the tool


def chat(base_url: str, **options: Any) -> ChatAnthropic:
    given = {"max_tokens": 100, "max_retries": 0, **options}
    url = base_url.removesuffix("/v1")
    return ChatAnthropic(base_url=url, api_key="none", model=MODEL, **given)


@pytest.fixture
def model(base_url: str) -> ChatAnthropic:
    return chat(base_url)


def whole(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    """All chunks of a stream added up, as LangChain does it."""
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


def test_anthropic_invoke_answers(model: ChatAnthropic) -> None:
    answer = model.invoke(QUESTION)
    assert ANSWER in answer.text
    assert answer.response_metadata["stop_reason"] == "end_turn"
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata["output_tokens"] > 10
    assert answer.usage_metadata["input_tokens"] > 1


def test_anthropic_stream_gives_what_invoke_gives(model: ChatAnthropic) -> None:
    invoked = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION))
    assert sum(bool(chunk.text) for chunk in chunks) > 1
    streamed = whole(chunks)
    assert streamed.text == invoked.text
    assert streamed.response_metadata["stop_reason"] == "end_turn"
    for name in ("input_tokens", "output_tokens"):
        assert streamed.usage_metadata[name] == invoked.usage_metadata[name]


def test_anthropic_async_invoke_and_stream_do_the_same(model: ChatAnthropic) -> None:
    async def talk() -> None:
        invoked = await model.ainvoke(QUESTION)
        assert ANSWER in invoked.text
        chunks = [chunk async for chunk in model.astream(QUESTION)]
        assert whole(chunks).text == invoked.text

    asyncio.run(talk())


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_bind_tools_calls_the_tool_that_fits(
    model: ChatAnthropic, streamed: bool
) -> None:
    agent = model.bind_tools([get_weather])
    question = HumanMessage(WEATHER_QUESTION)
    asked: AIMessage = (
        whole(list(agent.stream([question]))) if streamed else agent.invoke([question])
    )
    [call] = asked.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert asked.invalid_tool_calls == []
    assert asked.response_metadata["stop_reason"] == "tool_use"
    result = ToolMessage(WEATHER, tool_call_id=call["id"])
    assert WEATHER in agent.invoke([question, asked, result]).text


@pytest.mark.parametrize("choice", ["any", "SetLight"])
def test_anthropic_bind_tools_with_a_tool_choice_forces_a_call(
    model: ChatAnthropic, choice: str
) -> None:
    agent = model.bind_tools([SetLight], tool_choice=choice)
    [call] = agent.invoke(GREETING).tool_calls
    assert call["name"] == "SetLight"
    SetLight.model_validate(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_anthropic_with_structured_output_gives_a_model(model: ChatAnthropic, method: Any) -> None:
    structured = model.with_structured_output(Card, method=method)
    answer = structured.invoke(JSON_QUESTION)
    assert isinstance(answer, Card)
    assert method != "json_schema" or answer == CARD


def test_anthropic_thoughts_are_content_blocks(base_url: str) -> None:
    thinking = chat(base_url, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048)
    question = HumanMessage(QUESTION)
    answer = thinking.invoke([question])
    assert [block["type"] for block in answer.content] == ["thinking", "text"]
    streamed = whole(list(thinking.stream([question])))
    assert streamed.text == answer.text
    assert thinking.invoke([question, answer, HumanMessage(GREETING)]).text


def test_anthropic_tokens_are_counted(model: ChatAnthropic) -> None:
    question = [HumanMessage(QUESTION)]
    count = model.get_num_tokens_from_messages(question)
    assert count == model.invoke(question).usage_metadata["input_tokens"]


def test_anthropic_errors_are_the_sdks(model: ChatAnthropic, base_url: str) -> None:
    with pytest.raises(Exception, match="prompt is too long"):
        model.invoke(QUESTION * TOO_MANY)
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        ChatAnthropic(
            base_url=base_url.removesuffix("/v1"), api_key="none", model="nobody", max_tokens=5
        ).invoke(QUESTION)
