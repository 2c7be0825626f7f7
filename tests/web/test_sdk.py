"""OpenAI's own client, as most users meet the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.fixtures import CONTEXT
from tests.support.serving import PATIENCE, Server

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the sea."}]


def connect(server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0
    )


def connect_async(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0
    )


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with connect(server) as sdk:
        yield sdk


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="t", messages=MESSAGES, max_completion_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_chat_streams_what_it_says_whole(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model="t", messages=MESSAGES, max_tokens=20, seed=1)
    chunks = list(
        sdk.chat.completions.create(
            model="t",
            messages=MESSAGES,
            max_tokens=20,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_stream_helper_puts_the_answer_together(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model="t", messages=MESSAGES, max_tokens=12) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == said
    assert final.choices[0].finish_reason == "length"


def test_completions(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(model="t", prompt="Once", max_tokens=8, temperature=0)
    streamed = sdk.completions.create(
        model="t", prompt="Once", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    assert whole.choices[0].text


def test_models(sdk: openai.OpenAI) -> None:
    assert "org/name" in {model.id for model in sdk.models.list()}
    assert sdk.models.retrieve("org/name").id == "org/name"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_refusal_is_an_exception_with_its_fields(sdk: openai.OpenAI, streaming: bool) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.chat.completions.create(model="t", messages=MESSAGES, temperature=5, stream=streaming)
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "temperature")
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.request_id

    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="nobody", messages=MESSAGES, stream=streaming)
    assert unknown.value.code == "model_not_found"

    with pytest.raises(openai.BadRequestError) as too_long:
        sdk.chat.completions.create(
            model="t", messages=[{"role": "user", "content": "ä " * CONTEXT}], stream=streaming
        )
    assert too_long.value.code == "context_length_exceeded"


def test_a_streaming_response_can_be_read_by_lines(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.with_streaming_response.create(
        model="t", messages=MESSAGES, max_tokens=4, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_a_stream_closed_early_frees_its_row(narrow: Server) -> None:
    with connect(narrow) as sdk:
        stream = sdk.chat.completions.create(
            model="t", messages=MESSAGES, max_tokens=500_000, stream=True
        )
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        stream.close()
        answer = sdk.chat.completions.create(model="t", messages=MESSAGES, max_tokens=2)
    assert answer.choices[0].message.content


def test_the_async_client_does_the_same(server: Server) -> None:
    async def talk() -> None:
        async with connect_async(server) as sdk:
            whole = await sdk.chat.completions.create(
                model="t", messages=MESSAGES, max_tokens=12, seed=3
            )
            stream = await sdk.chat.completions.create(
                model="t", messages=MESSAGES, max_tokens=12, seed=3, stream=True
            )
            said = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(said) == whole.choices[0].message.content
            assert "t" in [model.id async for model in sdk.models.list()]
            with pytest.raises(openai.BadRequestError):
                await sdk.chat.completions.create(model="t", messages=MESSAGES, top_p=2)

    asyncio.run(talk())


def test_an_async_stream_closed_early_frees_its_row(narrow: Server) -> None:
    async def talk() -> str | None:
        async with connect_async(narrow) as sdk:
            async with await sdk.chat.completions.create(
                model="t", messages=MESSAGES, max_tokens=500_000, stream=True
            ) as stream:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break
            answer = await sdk.chat.completions.create(model="t", messages=MESSAGES, max_tokens=2)
            text: str | None = answer.choices[0].message.content
            return text

    assert asyncio.run(talk())
