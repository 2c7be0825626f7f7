"""OpenAI's client for Python: chats, completions, streams, log-probabilities, errors."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionTokenLogprob

from tests.clients.talk import ANSWER, CONTEXT_AND_MORE, MODEL, QUESTION

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
PROMPT = "mlxsrv is"


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


# Answers.


def test_a_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    [choice] = answer.choices
    assert ANSWER in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_streams_what_it_says_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len({chunk.id for chunk in chunks}) == 1
    streamed = chunks[-1].usage
    assert streamed is not None
    assert whole.usage is not None
    assert streamed.completion_tokens == whole.usage.completion_tokens
    assert streamed.prompt_tokens == whole.usage.prompt_tokens


def test_the_stream_helper_puts_the_answer_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert ANSWER in said
    assert final.choices[0].message.content == said
    assert final.choices[0].finish_reason == "stop"


def test_the_async_client_streams_what_it_says_whole(base_url: str) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True
            )
            said = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(said) == whole.choices[0].message.content

    asyncio.run(talk())


def test_async_chats_at_once_each_get_their_own_answer(base_url: str) -> None:
    questions = {QUESTION: ANSWER, "Which port does it use?": "port is 8000", "Hello!": "demo"}

    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": question}]
                    )
                    for question in questions
                )
            )
        for answer, expected in zip(answers, questions.values(), strict=True):
            assert expected in (answer.choices[0].message.content or "")

    asyncio.run(talk())


def test_earlier_turns_and_content_parts_are_read(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "You are a helpful assistant."},
            {"role": "user", "content": [{"type": "text", "text": "My name is Anna."}]},
            {"role": "assistant", "content": "Nice to meet you, Anna."},
            {"role": "user", "content": "What is my name?"},
        ],
    )
    assert "Anna" in (answer.choices[0].message.content or "")


def test_a_cut_answer_says_length_and_a_stop_string_is_not_in_the_text(
    client: openai.OpenAI,
) -> None:
    cut = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=5)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 5

    stopped = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=["ASGI"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == "mlxsrv is a lean, streaming-first, " + (
        "OpenAI-compatible "
    )


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=2, seed=seed, max_tokens=20
        )
        text: str | None = answer.choices[0].message.content
        return text

    assert draw(1) == draw(1) != draw(2)


def test_thoughts_come_as_reasoning_content(client: openai.OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = (
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=thinking)
        .choices[0]
        .message
    )
    assert ANSWER in (message.content or "")
    assert message.model_extra is not None
    thoughts = message.model_extra["reasoning_content"]
    assert thoughts
    assert thoughts not in (message.content or "")

    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body=thinking, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    thought = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert "".join(thought) == thoughts
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_a_text_completion_streams_what_it_says_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40)
    assert "server for MLX language models" in whole.choices[0].text
    streamed = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_the_catalogue_lists_and_retrieves_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


# Several answers.


def test_n_gives_as_many_choices_as_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, temperature=2, seed=1, max_tokens=20
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None
    one = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1).usage
    assert one is not None
    assert answer.usage.prompt_tokens == one.prompt_tokens
    assert answer.usage.completion_tokens > 20


def test_n_choices_stream_what_they_say_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, temperature=1.5, seed=1, max_tokens=20
    )
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, temperature=1.5, seed=1, max_tokens=20, stream=True
    )
    said: defaultdict[int, str] = defaultdict(str)
    ends = {}
    for chunk in stream:
        for choice in chunk.choices:
            # Behind the ends comes one empty choice more, with the usage.
            assert choice.index not in ends or (chunk.usage and not choice.delta.content)
            said[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert said == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_list_of_prompts_is_completed_in_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "The default port"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=20, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=20).choices[0].text
        for prompt in prompts
    ]
    texts = [choice.text for choice in answer.choices]
    assert texts == [alone[0], alone[0], alone[1], alone[1]]


# Log-probabilities.


def text_of(scores: list[ChatCompletionTokenLogprob]) -> str:
    return b"".join(bytes(score.bytes or []) for score in scores).decode()


def test_log_probabilities_come_with_each_token(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3
    ).choices
    assert choice.logprobs is not None
    scores = choice.logprobs.content
    assert scores
    assert text_of(scores) == choice.message.content
    for score in scores:
        assert score.logprob <= 0
        top = score.top_logprobs
        assert len(top) == 3
        assert [other.logprob for other in top] == sorted((t.logprob for t in top), reverse=True)
        assert top[0].token == score.token, "the model is greedy"


def test_log_probabilities_stream_with_the_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, stream=True
    )
    said = ""
    scores: list[Any] = []
    for chunk in stream:
        [choice] = chunk.choices
        said += choice.delta.content or ""
        if choice.logprobs is not None:
            scores += choice.logprobs.content or []
    assert text_of(scores) == said
    assert whole.choices[0].logprobs is not None
    expected = whole.choices[0].logprobs.content or []
    assert [score.token for score in scores] == [score.token for score in expected]
    assert [score.logprob for score in scores] == pytest.approx(
        [score.logprob for score in expected], abs=1e-3
    )


def test_a_text_completion_has_the_older_log_probabilities(client: openai.OpenAI) -> None:
    [choice] = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=2
    ).choices
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens
    assert scores.token_logprobs
    assert scores.top_logprobs
    assert scores.text_offset
    assert "".join(scores.tokens) == choice.text
    assert len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.tokens) == 8
    for token, logprob, top in zip(
        scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True
    ):
        assert top[token] == pytest.approx(logprob)
        assert len(top) == 2
    lengths = [len(token) for token in scores.tokens]
    steps = [b - a for a, b in zip(scores.text_offset, scores.text_offset[1:], strict=False)]
    assert steps == lengths[:-1]


# Errors.


@pytest.mark.parametrize("streaming", [False, True])
def test_a_wrong_value_is_a_bad_request_error(client: openai.OpenAI, streaming: bool) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=5, stream=streaming
        )
    error = wrong.value
    assert (error.code, error.param) == ("invalid_value", "temperature")
    assert error.type == "invalid_request_error"
    assert error.request_id
    assert "temperature" in error.message


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unknown_model_is_a_not_found_error(client: openai.OpenAI, streaming: bool) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=MESSAGES, stream=streaming)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_too_long_a_request_says_context_length_exceeded(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * CONTEXT_AND_MORE)
    assert long.value.code == "context_length_exceeded"


def test_an_endpoint_that_is_not_there_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.moderations.create(input="Hello!")
    assert missing.value.code == "not_found"
    assert missing.value.type == "invalid_request_error"


def test_async_errors_are_the_same_classes(base_url: str) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES, top_p=2)
            assert wrong.value.param == "top_p"
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nobody", messages=MESSAGES)

    asyncio.run(talk())
