"""OpenAI's agents SDK, which speaks Responses: runs with tools, handoffs and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
)
from agents.extensions.handoff_filters import remove_all_tools
from openai import AsyncOpenAI

from tests.clients.talk import (
    ANSWER,
    CARD,
    JSON_QUESTION,
    MODEL,
    QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    Card,
)

QUIET = RunConfig(tracing_disabled=True)

Talk = Callable[[OpenAIResponsesModel], Coroutine[Any, Any, None]]


@function_tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    assert city == "Paris"
    return WEATHER


@pytest.fixture
def talk(base_url: str) -> Callable[[Talk], None]:
    """Runs a talk with a model; the client's loop is the talk's own."""

    async def run(talk: Talk) -> None:
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            await talk(OpenAIResponsesModel(MODEL, openai_client=client))

    return lambda talk: asyncio.run(run(talk))


def test_an_agent_answers(talk: Callable[[Talk], None]) -> None:
    async def ask(model: OpenAIResponsesModel) -> None:
        result = await Runner.run(Agent("a", model=model), QUESTION, run_config=QUIET)
        assert ANSWER in result.final_output
        streamed = Runner.run_streamed(Agent("a", model=model), QUESTION, run_config=QUIET)
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == streamed.final_output == result.final_output
        assert streamed.context_wrapper.usage.output_tokens > 10

    talk(ask)


def test_an_agent_uses_a_tool(talk: Callable[[Talk], None]) -> None:
    async def ask(model: OpenAIResponsesModel) -> None:
        agent = Agent("a", model=model, tools=[get_weather])
        result = await Runner.run(agent, WEATHER_QUESTION, run_config=QUIET)
        assert WEATHER in result.final_output
        assert [item.type for item in result.new_items] == [
            *("tool_call_item", "tool_call_output_item", "message_output_item")
        ]

    talk(ask)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_hands_over_to_another(talk: Callable[[Talk], None], streamed: bool) -> None:
    async def ask(model: OpenAIResponsesModel) -> None:
        weather = Agent("weather", model=model, tools=[get_weather])
        settings = ModelSettings(tool_choice="transfer_to_weather")
        # The demo model has learned of no tool but those that it is offered.
        over = handoff(weather, input_filter=remove_all_tools)
        desk = Agent("desk", model=model, handoffs=[over], model_settings=settings)
        if streamed:
            run = Runner.run_streamed(desk, WEATHER_QUESTION, run_config=QUIET)
            names = [
                event.new_agent.name
                async for event in run.stream_events()
                if event.type == "agent_updated_stream_event"
            ]
            assert names == ["desk", "weather"]
        else:
            run = await Runner.run(desk, WEATHER_QUESTION, run_config=QUIET)
        assert run.last_agent.name == "weather"
        assert WEATHER in run.final_output

    talk(ask)


def test_an_agent_goes_on_by_session_and_by_previous_response(
    talk: Callable[[Talk], None],
) -> None:
    async def ask(model: OpenAIResponsesModel) -> None:
        agent = Agent("a", model=model, tools=[get_weather])
        session = SQLiteSession("s")
        await Runner.run(agent, WEATHER_QUESTION, session=session, run_config=QUIET)
        again = await Runner.run(agent, QUESTION, session=session, run_config=QUIET)
        assert ANSWER in again.final_output
        first = await Runner.run(
            agent, WEATHER_QUESTION, run_config=QUIET, auto_previous_response_id=True
        )
        assert WEATHER in first.final_output
        id = first.last_response_id
        then = await Runner.run(agent, QUESTION, previous_response_id=id, run_config=QUIET)
        assert ANSWER in then.final_output

    talk(ask)


def test_an_agents_output_has_a_type(talk: Callable[[Talk], None]) -> None:
    async def ask(model: OpenAIResponsesModel) -> None:
        agent = Agent("a", model=model, output_type=Card)
        result = await Runner.run(agent, JSON_QUESTION, run_config=QUIET)
        assert result.final_output == CARD

    talk(ask)
