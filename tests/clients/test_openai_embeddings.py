"""OpenAI's client for Python: embeddings, in each form of input and of encoding."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.clients.raw import embed, post
from tests.clients.talk import CONTEXT_AND_MORE, MODEL, PASSAGES

PASSAGE = PASSAGES[0]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ids(base_url: str) -> list[list[int]]:
    """The passages as the model's tokens."""
    url = base_url.removesuffix("/v1")
    return [post(f"{url}/tokenize", {"content": text})["tokens"] for text in PASSAGES]


def test_a_text_is_embedded_as_it_is_over_plain_http(client: openai.OpenAI, base_url: str) -> None:
    """In base64, which the client asks for unless told otherwise, and in floats."""
    [expected] = embed(base_url, PASSAGE)
    packed = client.embeddings.create(model=MODEL, input=PASSAGE)
    floats = client.embeddings.create(model=MODEL, input=PASSAGE, encoding_format="float")
    assert packed.data[0].embedding == floats.data[0].embedding == expected
    assert (packed.object, packed.model) == ("list", MODEL)
    assert sum(x * x for x in expected) == pytest.approx(1, abs=1e-5)


def test_texts_are_embedded_in_their_order(client: openai.OpenAI, base_url: str) -> None:
    answer = client.embeddings.create(model=MODEL, input=PASSAGES)
    assert [one.index for one in answer.data] == list(range(len(PASSAGES)))
    for one, text, together in zip(answer.data, PASSAGES, embed(base_url, PASSAGES), strict=True):
        assert one.embedding == pytest.approx(together, abs=1e-6)
        [alone] = embed(base_url, text)
        assert one.embedding == pytest.approx(alone, abs=1e-5)


def test_token_ids_are_embedded_as_their_text_is(
    client: openai.OpenAI, base_url: str, ids: list[list[int]]
) -> None:
    one = client.embeddings.create(model=MODEL, input=ids[0])
    assert [one.data[0].embedding] == embed(base_url, PASSAGE)
    many = client.embeddings.create(model=MODEL, input=ids)
    for found, expected in zip(many.data, embed(base_url, PASSAGES), strict=True):
        assert found.embedding == pytest.approx(expected, abs=1e-6)


def test_dimensions_cut_a_vector_and_give_it_its_length_again(
    client: openai.OpenAI, base_url: str
) -> None:
    [whole] = embed(base_url, PASSAGE)
    cut = client.embeddings.create(model=MODEL, input=PASSAGE, dimensions=8).data[0].embedding
    assert [cut] == embed(base_url, PASSAGE, dimensions=8)
    length = sum(x * x for x in whole[:8]) ** 0.5
    assert cut == pytest.approx([x / length for x in whole[:8]], abs=1e-6)


def test_the_usage_of_texts_adds_up(client: openai.OpenAI, ids: list[list[int]]) -> None:
    usage = client.embeddings.create(model=MODEL, input=PASSAGES).usage
    assert usage.prompt_tokens == usage.total_tokens == sum(map(len, ids))


def test_the_async_client_embeds_texts_at_once(base_url: str) -> None:
    async def talk() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            answers = await asyncio.gather(
                *(client.embeddings.create(model=MODEL, input=text) for text in PASSAGES)
            )
        return [one.embedding for answer in answers for one in answer.data]

    for found, text in zip(asyncio.run(talk()), PASSAGES, strict=True):
        [expected] = embed(base_url, text)
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_wrong_input_is_a_bad_request_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as empty:
        client.embeddings.create(model=MODEL, input=[PASSAGE, ""])
    assert empty.value.param == "input[1]"
    with pytest.raises(openai.BadRequestError) as wide:
        client.embeddings.create(model=MODEL, input=PASSAGE, dimensions=CONTEXT_AND_MORE)
    assert wide.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as long:
        client.embeddings.create(model=MODEL, input=[[1] * 100_000])
    assert long.value.code == "context_length_exceeded"
