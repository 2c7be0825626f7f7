"""Text between a prefix and a suffix, by models of each family that fills in the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from mlxsrv.formats.infill import FAMILIES
from tests.support.client import (
    COMPLETIONS,
    Body,
    answer,
    ask,
    check_schema,
    completion,
    refused,
    stream,
)
from tests.support.serving import Server, serving
from tests.support.tiny import make_tokenizer, write_model

INFILL = "/infill"
LLAMA = "/completion"
FIM = "/v1/fim/completions"
DETOKENIZE = "/detokenize"
PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
FILES = [{"filename": "a.py", "text": "A = 1\n"}, {"text": "B = 2\n"}]
SNIPPETS = "\n\n--- snippet ---\n\nA = 1\n\n\n--- snippet ---\n\nB = 2\n"

# What a model of each family is given: for prefix and suffix alone, and before that with FILES.
LAYOUTS = {
    "Qwen2.5-Coder, Qwen3-Coder": (
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        "<|repo_name|>myproject\n<|file_sep|>a.py\nA = 1\n<|file_sep|>tmp\nB = 2\n"
        "<|file_sep|>filename\n",
    ),
    "CodeGemma, Granite 4": (
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        SNIPPETS,
    ),
    "StarCoder2": (
        f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
        "<repo_name>myproject<file_sep>a.py\nA = 1\n<file_sep>tmp\nB = 2\n<file_sep>",
    ),
    "StarCoder, Granite Code": (
        f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
        SNIPPETS,
    ),
    "SantaCoder": (f"<fim-prefix>{PREFIX}<fim-suffix>{SUFFIX}<fim-middle>", SNIPPETS),
    "DeepSeek-Coder": (f"<｜fim▁begin｜>{PREFIX}<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>", SNIPPETS),
    "CodeLlama": (f"▁<PRE>{PREFIX}▁<SUF>{SUFFIX}▁<MID>", SNIPPETS),
    "Codestral": (f"[SUFFIX]{SUFFIX}[PREFIX]{PREFIX}", SNIPPETS),
}


def tokenizer_of(name: str) -> Tokenizer:
    """A tokenizer with the family's tokens."""
    family = FAMILIES[name]
    tokens = dict.fromkeys((*family.markers, *family.ends))
    tokenizer = Tokenizer.from_str(make_tokenizer().to_str())
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
    return tokenizer


def write_infiller(folder: Path, name: str) -> Path:
    """A model of the family."""
    tokenizer = tokenizer_of(name)
    write_model(folder, "qwen3", vocab_size=tokenizer.get_vocab_size(), plain=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def infilling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("infill")
    paths = {f"m{i}": write_infiller(folder / f"m{i}", name) for i, name in enumerate(FAMILIES)}
    models = [f"--model={name}={path}" for name, path in paths.items()]
    with serving(folder, *models) as server:
        yield server


@pytest.fixture
def client(infilling: Server) -> Iterator[httpx.Client]:
    with infilling.client() as client:
        yield client


def infilled(**fields: object) -> Body:
    return {"input_prefix": PREFIX, "input_suffix": SUFFIX, "temperature": 0} | fields


def given(client: httpx.Client, model: str, **fields: object) -> str:
    """The text that a model is given."""
    asked = {"suffix": SUFFIX, "model": model, "return_token_ids": True, "max_tokens": 1}
    [choice] = ask(client, completion(PREFIX, **asked, **fields), COMPLETIONS)["choices"]
    tokens = {"model": model, "tokens": choice["prompt_token_ids"]}
    return str(ask(client, tokens, DETOKENIZE)["content"])


def test_every_family_is_tried() -> None:
    assert list(LAYOUTS) == list(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefix_and_suffix_stand_where_the_family_has_them(client: httpx.Client, name: str) -> None:
    model = f"m{[*FAMILIES].index(name)}"
    assert given(client, model) == LAYOUTS[name][0]


@pytest.mark.parametrize("name", FAMILIES)
def test_infill_gives_what_a_completion_with_a_suffix_gives(
    client: httpx.Client, name: str
) -> None:
    model = f"m{[*FAMILIES].index(name)}"
    same = ask(client, completion(PREFIX, suffix=SUFFIX, model=model), COMPLETIONS)
    body = ask(client, infilled(model=model, n_predict=8), INFILL)
    assert body["content"] == answer(same)
    assert body["tokens_evaluated"] == same["usage"]["prompt_tokens"]
    # Other files change it, as the same text would.
    around, files = LAYOUTS[name]
    with_files = ask(client, infilled(model=model, n_predict=8, input_extra=FILES), INFILL)
    ids = [
        id for part in _pieces(files + around, name) for id in tokenizer_of(name).encode(part).ids
    ]
    direct = ask(client, completion(ids, model=model), COMPLETIONS)
    assert with_files["content"] == answer(direct)
    assert with_files["tokens_evaluated"] == len(ids)


def _pieces(text: str, name: str) -> list[str]:
    """The texts that are tokenized one by one: markers, and what stands between them."""
    pieces = [text]
    marks = ("\n\n--- snippet ---\n\n",) if "snippet" in text else ()
    for mark in dict.fromkeys(FAMILIES[name].markers):
        pieces = [
            part
            for piece in pieces
            for i, between in enumerate(piece.split(mark))
            for part in ([mark, between] if i else [between])
        ]
    for mark in marks:
        pieces = [
            (mark if i else "") + between
            for piece in pieces
            for i, between in enumerate(piece.split(mark))
        ]
    return [piece for piece in pieces if piece]


def test_a_body_is_as_llama_cpp_has_it(client: httpx.Client) -> None:
    body = ask(client, infilled(n_predict=4, return_token_ids=True), INFILL)
    assert body["stop"] is True
    assert body["model"] == "m0"
    assert (body["stop_type"], body["stopping_word"]) == ("limit", "")
    assert body["tokens_predicted"] == len(body["tokens"]) == 4
    assert body["truncated"] is False
    timings = body["timings"]
    assert timings["predicted_n"] == 4
    assert timings["prompt_n"] + timings["cache_n"] == body["tokens_evaluated"]
    assert timings["prompt_ms"] > 0 < timings["predicted_ms"]


def test_a_stop_string_is_named(client: httpx.Client) -> None:
    whole = ask(client, infilled(n_predict=8), INFILL)["content"]
    body = ask(client, infilled(n_predict=8, stop=[whole[3:5]]), INFILL)
    assert (body["stop_type"], body["stopping_word"]) == ("word", whole[3:5])
    assert body["content"] == whole[: whole.index(whole[3:5])]


def test_a_stream_gives_the_same(client: httpx.Client) -> None:
    whole = ask(client, infilled(n_predict=8), INFILL)
    response = client.post(INFILL, json=infilled(n_predict=8, stream=True))
    events = response.text.removesuffix("\n\n").split("\n\n")
    pieces = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    last = pieces[-1]
    assert last["tokens_predicted"] == whole["tokens_predicted"]
    assert last["timings"]["predicted_n"] == 8


def test_what_is_written_already_is_part_of_the_prefix(client: httpx.Client) -> None:
    split = infilled(input_prefix=PREFIX[:9], prompt=PREFIX[9:], n_predict=8)
    assert (
        ask(client, split, INFILL)["content"]
        == (ask(client, infilled(n_predict=8), INFILL)["content"])
    )


def test_a_suffix_may_be_streamed_and_several(client: httpx.Client) -> None:
    asked = completion([PREFIX, "x = "], suffix=SUFFIX)
    texts = [choice["text"] for choice in ask(client, asked, COMPLETIONS)["choices"]]
    alone = [
        answer(ask(client, completion(p, suffix=SUFFIX), COMPLETIONS)) for p in (PREFIX, "x = ")
    ]
    assert texts == alone
    assert stream(client, completion(PREFIX, suffix=SUFFIX), COMPLETIONS).content == alone[0]


def test_an_empty_suffix_asks_for_nothing(client: httpx.Client) -> None:
    plain = ask(client, completion(PREFIX), COMPLETIONS)
    assert answer(ask(client, completion(PREFIX, suffix=""), COMPLETIONS)) == answer(plain)


def test_a_model_without_the_tokens_refuses(server: Server) -> None:
    with server.client() as client:
        for streamed in (False, True):
            body = completion(PREFIX, suffix=SUFFIX, stream=streamed)
            refused(
                client.post(COMPLETIONS, json=body), 400, "unsupported_parameter", param="suffix"
            )
            body = infilled(stream=streamed)
            error = refused(
                client.post(INFILL, json=body), 400, "unsupported_parameter", param="model"
            )
            assert "fill-in-the-middle" in error["message"]


def test_what_infill_has_no_place_for_is_refused(client: httpx.Client) -> None:
    for name, value in (("prompt_logprobs", 1), ("return_tokens_as_token_ids", True)):
        response = client.post(INFILL, json=infilled(**{name: value}))
        refused(response, 400, "unsupported_parameter", param=name)
    refused(client.post(INFILL, json=infilled(n=2)), 400, "invalid_value", param="n")


def test_models_that_fill_in_the_middle_say_so(client: httpx.Client, tmp_path: Path) -> None:
    """In Ollama's dialect also by words of its templates."""
    ask(client, infilled(model="m1", n_predict=1), INFILL)
    described = client.get("/v1/models/m1").json()
    assert described["capabilities"] == ["completion", "chat", "tools", "thinking", "insert"]
    shown = ask(client, {"model": "m1"}, "/api/show")
    assert {*shown["capabilities"]} == {"completion", "tools", "thinking", "insert"}
    assert shown["template"].endswith("{#- .Suffix .Tools -#}")
    # The words are a comment: the template writes the same with them.
    messages = [{"role": "user", "content": "Hello!"}]
    prompts = []
    with serving(tmp_path, "--allow-chat-template") as server, server.client() as other:
        for more in (
            {},
            {"chat_template": ask(other, {"model": "default"}, "/api/show")["template"]},
        ):
            prompts.append(ask(other, {"messages": messages, **more}, "/apply-template"))
    assert prompts[0] == prompts[1]


# A text as llama.cpp's server goes on with it.


def test_a_llama_completion_gives_what_a_completion_gives(client: httpx.Client) -> None:
    same = ask(client, completion(PREFIX), COMPLETIONS)
    for prompt in (PREFIX, tokenizer_of("CodeLlama").encode(PREFIX).ids):
        # What llama.cpp's clients send unasked asks for nothing.
        unasked = {"seed": -1, "logit_bias": [], "n_probs": 0, "grammar": "", "cache_prompt": True}
        body = ask(client, {"prompt": prompt, "temperature": 0, "n_predict": 8, **unasked}, LLAMA)
        assert body["content"] == answer(same)
        assert (body["stop"], body["stop_type"], body["tokens_predicted"]) == (True, "limit", 8)


def test_a_llama_completion_streams_the_same(client: httpx.Client) -> None:
    asked = {"prompt": PREFIX, "temperature": 0, "n_predict": 8}
    response = client.post(LLAMA, json=asked | {"stream": True})
    events = response.text.removesuffix("\n\n").split("\n\n")
    pieces = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(piece["content"] for piece in pieces) == ask(client, asked, LLAMA)["content"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_bias_may_be_a_pair(client: httpx.Client) -> None:
    asked = {"prompt": PREFIX, "temperature": 0, "n_predict": 4, "return_token_ids": True}
    [first, *_] = ask(client, asked, LLAMA)["tokens"]
    assert first not in ask(client, asked | {"logit_bias": [[first, False]]}, LLAMA)["tokens"]
    assert ask(client, asked | {"logit_bias": [[7, 100]]}, LLAMA)["tokens"] == [7] * 4


def test_any_seed_may_be_drawn(client: httpx.Client) -> None:
    asked = {"prompt": PREFIX, "temperature": 2, "n_predict": 16}
    texts = {ask(client, asked | {"seed": -1}, LLAMA)["content"] for _ in range(4)}
    assert len(texts) > 1
    seeded = {ask(client, asked | {"seed": 5}, LLAMA)["content"] for _ in range(2)}
    assert len(seeded) == 1


# The text between two others as Mistral's API gives it: in a chat's message.


def test_mistrals_infill_is_a_completion_with_a_suffix(client: httpx.Client) -> None:
    same = ask(client, completion(PREFIX, suffix=SUFFIX), COMPLETIONS)
    asked = {"prompt": PREFIX, "suffix": SUFFIX, "temperature": 0, "max_tokens": 8}
    body = ask(client, asked, FIM)
    check_schema(body, "CreateChatCompletionResponse")
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": answer(same), "refusal": None}
    assert body["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    assert answer(ask(client, asked, FIM.removeprefix("/v1"))) == answer(same)


def test_mistrals_infill_streams_a_chats_chunks(client: httpx.Client) -> None:
    asked = {"prompt": PREFIX, "suffix": SUFFIX, "temperature": 0, "max_tokens": 8}
    streamed = stream(client, asked, FIM)
    assert streamed.content == answer(ask(client, asked, FIM))
    assert {chunk["object"] for chunk in streamed.chunks} == {"chat.completion.chunk"}


def test_mistrals_infill_without_a_suffix_goes_on(client: httpx.Client) -> None:
    asked = {"prompt": PREFIX, "temperature": 0, "max_tokens": 8}
    assert answer(ask(client, asked, FIM)) == answer(ask(client, completion(PREFIX), COMPLETIONS))


def test_mistrals_seed_is_a_seed(client: httpx.Client) -> None:
    asked = {"prompt": PREFIX, "temperature": 2, "max_tokens": 16}
    one, other = (ask(client, asked | {"random_seed": 5}, FIM) for _ in range(2))
    assert answer(one) == answer(other) == answer(ask(client, asked | {"seed": 5}, FIM))


def test_mistrals_infill_refuses_a_model_without_the_tokens(server: Server) -> None:
    with server.client() as client:
        for streamed in (False, True):
            body = {"prompt": PREFIX, "suffix": SUFFIX, "stream": streamed}
            refused(client.post(FIM, json=body), 400, "unsupported_parameter", param="suffix")
