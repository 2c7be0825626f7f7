"""OpenAI's client for Python: tools, and answers of a given structure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from openai import pydantic_function_tool
from openai.types.chat import (
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionToolChoiceOptionParam,
)

from tests.clients.talk import (
    ANSWER,
    CARD,
    GREETING,
    JSON_QUESTION,
    MODEL,
    QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    Add,
    Card,
    GetWeather,
    Mood,
    SetLight,
)

GET_WEATHER = pydantic_function_tool(GetWeather, name="get_weather")
ADD = pydantic_function_tool(Add, name="add")
SET_LIGHT = pydantic_function_tool(SetLight, name="set_light")

Messages = list[ChatCompletionMessageParam]


def say(text: str) -> Messages:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


# Tools.


def test_a_tool_that_fits_is_called(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(
        model=MODEL, messages=say(WEATHER_QUESTION), tools=[GET_WEATHER, ADD]
    ).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    [call] = choice.message.tool_calls
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_no_tool_is_called_where_none_fits(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(
        model=MODEL, messages=say(QUESTION), tools=[GET_WEATHER, ADD], tool_choice="auto"
    ).choices
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    assert ANSWER in (choice.message.content or "")


def test_a_tool_call_streams_its_name_then_its_arguments(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=say(WEATHER_QUESTION), tools=[GET_WEATHER], stream=True
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert not any(choice.delta.content for choice in choices)
    assert [choice.finish_reason for choice in choices[-2:]] == ["tool_calls", None]
    pieces = [piece for choice in choices for piece in choice.delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0}
    first, *rest = pieces
    assert first.id
    assert first.id.startswith("call_")
    assert first.function is not None
    assert first.function.name == "get_weather"
    assert not any(piece.id or (piece.function and piece.function.name) for piece in rest)
    arguments = "".join((piece.function and piece.function.arguments) or "" for piece in pieces)
    assert json.loads(arguments) == {"city": "Paris"}


def test_the_stream_helper_parses_a_tool_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=say(WEATHER_QUESTION), tools=[GET_WEATHER]
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.name for event in done] == ["get_weather"]
    assert [event.parsed_arguments for event in done] == [GetWeather(city="Paris")]
    assert final.choices[0].finish_reason == "tool_calls"


def test_parse_gives_a_calls_arguments_as_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=say("What is 12 plus 30?"), tools=[GET_WEATHER, ADD]
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Add(a=12, b=30)


def test_a_tools_result_is_used(client: openai.OpenAI) -> None:
    messages = say(WEATHER_QUESTION)
    asked = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[GET_WEATHER], parallel_tool_calls=False
    )
    message = asked.choices[0].message
    [call] = message.tool_calls or []
    turn: ChatCompletionMessageParam = message.to_dict()
    result: ChatCompletionMessageParam = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": WEATHER,
    }
    answer = client.chat.completions.create(
        model=MODEL, messages=[*messages, turn, result], tools=[GET_WEATHER]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert WEATHER in (answer.choices[0].message.content or "")


NAMED: ChatCompletionToolChoiceOptionParam = {"type": "function", "function": {"name": "set_light"}}


@pytest.mark.parametrize("streaming", [False, True])
def test_tool_choice_required_makes_it_call(client: openai.OpenAI, streaming: bool) -> None:
    """The model would just greet: its call can only come from the grammar."""
    messages, tools = say(GREETING), [SET_LIGHT]
    if streaming:
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=tools, tool_choice="required", max_tokens=100
        ) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = (
            client.chat.completions.parse(
                model=MODEL, messages=messages, tools=tools, tool_choice="required", max_tokens=100
            )
            .choices[0]
            .message
        )
    [call] = message.tool_calls or []
    assert call.function.name == "set_light"
    assert isinstance(call.function.parsed_arguments, SetLight)


def test_tool_choice_by_name_calls_that_tool(client: openai.OpenAI) -> None:
    """The model would rather ask for the weather."""
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=say(WEATHER_QUESTION),
        tools=[GET_WEATHER, SET_LIGHT],
        tool_choice=NAMED,
        max_tokens=100,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.name == "set_light"
    assert isinstance(call.function.parsed_arguments, SetLight)


def test_tool_choice_none_calls_nothing(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(
        model=MODEL, messages=say(WEATHER_QUESTION), tools=[GET_WEATHER], tool_choice="none"
    ).choices
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    assert "tool_call" not in (choice.message.content or "")


def test_arguments_of_an_earlier_call_that_are_not_json_end_no_conversation(
    client: openai.OpenAI,
) -> None:
    messages: Messages = [
        *say(WEATHER_QUESTION),
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": '},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": WEATHER},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[GET_WEATHER], max_tokens=20
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


# Structure.


def test_parse_gives_the_answer_as_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=say(JSON_QUESTION), response_format=Card, max_tokens=100
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.parsed == CARD


def test_a_schema_rules_what_the_model_would_not_write(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=say(GREETING), response_format=Mood, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Mood)


def test_the_stream_helper_parses_an_answer_as_it_grows(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=say(JSON_QUESTION), response_format=Card, max_tokens=100
    ) as stream:
        parsed = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == CARD
    assert {"name": "mlxsrv"} in parsed
    assert parsed[-1] == CARD.model_dump()


def test_the_async_client_parses(base_url: str) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            answer = await client.chat.completions.parse(
                model=MODEL, messages=say(JSON_QUESTION), response_format=Card, max_tokens=100
            )
            assert answer.choices[0].message.parsed == CARD

            called = await client.chat.completions.parse(
                model=MODEL, messages=say(WEATHER_QUESTION), tools=[GET_WEATHER]
            )
            [call] = called.choices[0].message.tool_calls or []
            assert call.function.parsed_arguments == GetWeather(city="Paris")

    asyncio.run(talk())


def test_a_structured_answer_that_is_cut_raises_the_clients_length_error(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=say(JSON_QUESTION), response_format=Card, max_tokens=3
        )


def test_json_object_gives_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=say(JSON_QUESTION),
        response_format={"type": "json_object"},
        max_tokens=100,
    )
    assert json.loads(answer.choices[0].message.content or "") == CARD.model_dump()


def test_a_schema_that_is_none_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(
            model=MODEL,
            messages=say(JSON_QUESTION),
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "wrong", "schema": {"type": "wrong"}},
            },
        )
    assert (wrong.value.param or "").startswith("response_format")
