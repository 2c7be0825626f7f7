"""Tokens by their ids: of a text and back to it, favoured and forbidden."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlx_lm.utils import load_model
from starlette.applications import Starlette
from starlette.routing import Mount

import mlxsrv
from tests.support.client import (
    CHAT,
    COMPLETIONS,
    Body,
    answer,
    ask,
    chat,
    completion,
    refused,
    stream,
)
from tests.support.effort import often
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, hosted, serving
from tests.support.tiny import SPECIAL_TOKENS, Array, make_tokenizer, write_model

TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

TEXTS = [
    "The quick brown fox",
    "",
    " ",
    "  two  spaces\n\n\tand a tab \r\n",
    "Žluťoučký kůň 你好，世界。 👩‍👩‍👧‍👦 🇫🇷",
    "\x00\x01\u2028\u0085 control",
    "a<|im_start|>user\nb<|im_end|> <think>c</think>",
    "long " * 5000,
]

VOCABULARY = 512


def ids(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


def spelled(id: int) -> str:
    return str(make_tokenizer().decode([id]))


# Tokenize, detokenize.


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{text!r:.12}")
def test_a_text_is_what_its_tokens_say(client: httpx.Client, text: str) -> None:
    body = ask(client, {"content": text}, TOKENIZE)
    assert body == {"tokens": ids(text), "count": len(ids(text))}
    assert ask(client, {"tokens": body["tokens"]}, DETOKENIZE) == {
        "content": text,
        "prompt": text,
    }


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{text!r:.12}")
def test_pieces_are_the_text(client: httpx.Client, text: str) -> None:
    body = ask(client, {"content": text, "with_pieces": True}, TOKENIZE)
    assert [token["id"] for token in body["tokens"]] == ids(text)
    assert body["count"] == len(ids(text))
    data = b""
    for token in body["tokens"]:
        assert token.keys() == {"id", "piece"}
        piece = token["piece"]
        data += piece.encode() if isinstance(piece, str) else bytes(piece)
        assert isinstance(piece, str) or "\ufffd" in bytes(piece).decode(errors="replace")
    assert data.decode() == text


def test_a_text_costs_what_a_completion_of_it_counts(client: httpx.Client) -> None:
    for text in filter(None, TEXTS[:-1]):
        counted = ask(client, {"content": text}, TOKENIZE)["count"]
        usage = ask(client, completion(text), COMPLETIONS)["usage"]
        assert usage["prompt_tokens"] == counted


@pytest.fixture(scope="module")
def own(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server of a model that begins each text with a token of its own, and of one that
    discourages repetition."""
    folder = tmp_path_factory.mktemp("tokens")
    beginning = write_model(folder / "beginning", "qwen3", plain=True)
    _begin_texts(beginning)
    repeating = write_model(folder / "repeating", "qwen3", plain=True)
    (repeating / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.8}))
    with (
        serving(folder, "--model", f"b={beginning}", "--model", f"r={repeating}") as server,
        server.client() as client,
    ):
        yield client


def _begin_texts(folder: Path) -> None:
    """Have the tokenizer put `<|endoftext|>` before each text, as Llama's does with its own."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    start = SPECIAL_TOKENS[0]
    first = {"SpecialToken": {"id": start, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    number = make_tokenizer().token_to_id(start)
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text],
        "special_tokens": {start: {"id": start, "ids": [number], "tokens": [start]}},
    }
    path.write_text(json.dumps(tokenizer), "utf-8")


@pytest.mark.parametrize("special", [{}, {"add_special_tokens": None}])
def test_special_tokens_around_a_text_are_told(own: httpx.Client, special: Body) -> None:
    start = make_tokenizer().token_to_id(SPECIAL_TOKENS[0])
    body = ask(own, {"content": TEXTS[0], **special}, TOKENIZE)
    assert body["tokens"] == [start, *ids(TEXTS[0])]
    pieces = ask(own, {"content": TEXTS[0], "with_pieces": True, **special}, TOKENIZE)["tokens"]
    assert pieces[0] == {"id": start, "piece": SPECIAL_TOKENS[0]}


def test_special_tokens_around_a_text_may_be_left_out(own: httpx.Client) -> None:
    asked = {"content": TEXTS[0], "add_special_tokens": False}
    assert ask(own, asked, TOKENIZE)["tokens"] == ids(TEXTS[0])


@pytest.mark.parametrize("model", [None, "default", "t", "org/name", "demo"])
def test_any_model_tells_its_own_tokens(client: httpx.Client, model: str | None) -> None:
    tokens = ask(client, {"content": TEXTS[0], "model": model}, TOKENIZE)["tokens"]
    assert (tokens == ids(TEXTS[0])) == (model != "demo")
    asked = {"tokens": tokens, "model": model}
    assert ask(client, asked, DETOKENIZE)["content"] == TEXTS[0]


def test_no_tokens_are_no_text(client: httpx.Client) -> None:
    assert ask(client, {"tokens": []}, DETOKENIZE) == {"content": "", "prompt": ""}


def test_every_token_has_a_text(client: httpx.Client) -> None:
    content = ask(client, {"tokens": [*range(VOCABULARY)]}, DETOKENIZE)["content"]
    assert all(token in content for token in SPECIAL_TOKENS)


@pytest.mark.parametrize(
    ("path", "body"), [(TOKENIZE, {"content": "a"}), (DETOKENIZE, {"tokens": [1]})]
)
def test_what_is_not_read_is_named(client: httpx.Client, path: str, body: Body) -> None:
    response = client.post(path, json=body | {"store": True, "custom": 1, "user": None})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "custom, store"
    assert "x-ignored-params" not in client.post(path, json=body).headers
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        (TOKENIZE, {}, "missing_required_parameter", "content"),
        (TOKENIZE, {"content": None}, "missing_required_parameter", "content"),
        (TOKENIZE, {"content": "a", "prompt": "a"}, "invalid_value", "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": []}, "invalid_value", "messages"),
        (TOKENIZE, {"content": ["a"]}, "invalid_value", "content"),
        (TOKENIZE, {"content": "a", "with_pieces": 1}, "invalid_value", "with_pieces"),
        (TOKENIZE, {"content": "a", "add_special_tokens": "no"}, "invalid_value", None),
        (DETOKENIZE, {}, "missing_required_parameter", "tokens"),
        (DETOKENIZE, {"tokens": "1"}, "invalid_value", "tokens"),
        (DETOKENIZE, {"tokens": [1, "2"]}, "invalid_value", "tokens[1]"),
        (DETOKENIZE, {"tokens": [1, 2.5]}, "invalid_value", "tokens[1]"),
        (DETOKENIZE, {"tokens": [-1]}, "invalid_value", "tokens[0]"),
        (DETOKENIZE, {"tokens": [1, VOCABULARY]}, "invalid_value", "tokens[1]"),
        (DETOKENIZE, {"tokens": [1, 2, 2**31]}, "invalid_value", "tokens[2]"),
    ],
    ids=repr,
)
def test_a_wrong_request_is_refused_by_name(
    client: httpx.Client, path: str, body: Body, code: str, param: str | None
) -> None:
    response = client.post(path, json=body)
    found = response.json()["error"]["param"]
    refused(response, 400, code, param=param or "add_special_tokens")
    assert found in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE])
def test_refusals_have_the_one_shape(client: httpx.Client, path: str) -> None:
    fine = {"content": "a"} if path == TOKENIZE else {"tokens": [1]}
    unknown = client.post(path, json=fine | {"model": "nobody"})
    refused(unknown, 404, "model_not_found", param="model")
    refused(client.get(path), 405, "method_not_allowed")
    refused(client.post(path, content=b"{"), 400, "invalid_json")
    assert client.post(path, content=json.dumps(fine), headers={"Content-Type": "x/y"}).is_success


def test_tokens_are_told_under_a_mount(folders: Folders) -> None:
    app = mlxsrv.create_app(mlxsrv.Settings(model=(f"t={folders.plain}",)))
    parent = Starlette(routes=[Mount("/llm", app=app)])
    with (
        hosted(parent) as url,
        httpx.Client(base_url=f"{url}/llm", timeout=PATIENCE) as client,
    ):
        tokens = ask(client, {"content": TEXTS[0]}, TOKENIZE)["tokens"]
        assert tokens == ids(TEXTS[0])
        assert ask(client, {"tokens": tokens}, DETOKENIZE)["content"] == TEXTS[0]
        refused(client.post(f"{TOKENIZE}r", json={}), 404, "not_found")


# Favoured and forbidden tokens.

FORMS: dict[str, Callable[..., Body]] = {CHAT: chat, COMPLETIONS: completion}
both_forms = pytest.mark.parametrize("path", FORMS, ids=["chat", "text"])


def said(client: httpx.Client, path: str, /, *asked: Any, **fields: Any) -> str:
    return answer(ask(client, FORMS[path](*asked, **fields), path))


@both_forms
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 2}])
def test_a_bias_of_100_forces_a_token(client: httpx.Client, path: str, sampling: Body) -> None:
    [token] = ids(" fox")[-1:]
    body = FORMS[path](logit_bias={f"{token}": 100}, **sampling)
    assert answer(ask(client, body, path)) == spelled(token) * 8
    assert stream(client, body, path).content == spelled(token) * 8


@both_forms
def test_a_bias_of_minus_100_forbids_tokens(client: httpx.Client, path: str) -> None:
    free = said(client, path, max_tokens=24)
    used = {id for id in range(VOCABULARY) if (text := spelled(id)).strip() and text in free}
    text = said(client, path, max_tokens=24, logit_bias={f"{id}": -100 for id in used})
    assert text
    assert not any(spelled(id) == piece for id in used for piece in _pieces(client, text))


def _pieces(client: httpx.Client, text: str) -> list[str]:
    tokens = ask(client, {"content": text, "with_pieces": True}, TOKENIZE)["tokens"]
    return [token["piece"] for token in tokens]


def test_a_bias_may_force_the_end(client: httpx.Client) -> None:
    end = make_tokenizer().token_to_id("<|im_end|>")
    body = ask(client, chat(logit_bias={f"{end}": 100}, n=2))
    assert [choice["message"]["content"] for choice in body["choices"]] == ["", ""]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert body["usage"]["completion_tokens"] == 2


@both_forms
@pytest.mark.parametrize(
    "nothing",
    [
        pytest.param({"logit_bias": {}}, marks=pytest.mark.long),
        pytest.param({"logit_bias": None}, marks=pytest.mark.long),
        {"logit_bias": {"5": 0}},
        {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1},
        pytest.param(
            {"frequency_penalty": None, "presence_penalty": None, "repetition_penalty": None},
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_penalises_nothing_changes_nothing(
    client: httpx.Client, path: str, nothing: Body
) -> None:
    assert said(client, path, max_tokens=20, **nothing) == said(client, path, max_tokens=20)


@pytest.fixture(scope="module")
def model(folders: Folders) -> Any:
    model, _ = load_model(folders.plain)
    return model


PENALTIES: list[Body] = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2},
    {"presence_penalty": -2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 0.5, "presence_penalty": 1, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=repr)
def test_penalties_are_those_of_the_formulas(
    client: httpx.Client, model: Any, penalties: Body
) -> None:
    prompt = ids("again and again and again")
    text = said(client, COMPLETIONS, prompt, max_tokens=20, **penalties)
    tokens = [*prompt]
    for _ in range(20):
        tokens.append(int(_penalised(_logits(model, tokens), prompt, tokens, penalties).argmax()))
    assert text == make_tokenizer().decode(tokens[len(prompt) :])
    assert text != said(client, COMPLETIONS, prompt, max_tokens=20)


def _logits(model: Any, tokens: list[int]) -> Array:
    """The logits of the token after `tokens`, by mlx-lm alone; shape (vocabulary,)."""
    logits: Array = np.array(model(mx.array([tokens]))[0, -1].astype(mx.float32))
    return logits


def _penalised(logits: Array, prompt: list[int], tokens: list[int], penalties: Body) -> Array:
    """Repetition counts the prompt, too; frequency and presence what was drawn, as OpenAI says."""
    repetition = penalties.get("repetition_penalty", 1)
    for token in {*tokens}:
        logits[token] *= repetition if logits[token] < 0 else 1 / repetition
    drawn = tokens[len(prompt) :]
    for token in {*drawn}:
        logits[token] -= penalties.get("presence_penalty", 0)
        logits[token] -= penalties.get("frequency_penalty", 0) * drawn.count(token)
    return logits


@pytest.mark.parametrize("unset", [{}, {"repetition_penalty": None}])
def test_the_models_own_repetition_penalty_is_the_default(own: httpx.Client, unset: Body) -> None:
    by_default, asked, without = (
        said(own, CHAT, model="r", max_tokens=40, **fields)
        for fields in (unset, {"repetition_penalty": 1.8}, {"repetition_penalty": 1})
    )
    assert by_default == asked != without


def test_biases_and_penalties_are_each_requests_own(server: Server, client: httpx.Client) -> None:
    fields: list[Body] = [{}, *PENALTIES]
    fields += [{"logit_bias": {"40": 100}}, {"logit_bias": {"40": -100}}]
    bodies = [chat(max_tokens=40, **each) for each in fields]
    alone = [answer(ask(client, body)) for body in bodies]
    assert len({*alone}) > 4

    async def together() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as many:
            responses = await asyncio.gather(*(many.post(CHAT, json=body) for body in bodies))
            return [answer(response.json()) for response in responses]

    assert asyncio.run(together()) == alone


@both_forms
@pytest.mark.parametrize("temperature", often([5e-324, 1e-39, 1e-20], [5e-324, 1e-39]))
def test_next_to_no_temperature_is_none(
    client: httpx.Client, path: str, temperature: float
) -> None:
    greedy = said(client, path, max_tokens=20)
    assert said(client, path, max_tokens=20, temperature=temperature) == greedy
    assert said(client, path, max_tokens=20, temperature=temperature, top_p=0.5) == greedy


EXTREME: list[Body] = [
    {"temperature": 1e-39, "top_p": 0.5, "frequency_penalty": 1},
    {"temperature": 1e-38, "top_k": 3, "frequency_penalty": -2},
    {"temperature": 1e-300, "min_p": 0.5, "logprobs": 2},
    {"top_p": 5e-324, "presence_penalty": 2},
    {"repetition_penalty": 5e-324, "top_p": 0},
    {"repetition_penalty": 1e-39, "top_p": 0.5},
    {"repetition_penalty": 1e-30, "top_k": 5, "logit_bias": {"40": 100}},
    {"repetition_penalty": 10, "frequency_penalty": 2, "presence_penalty": 2},
]


def test_no_number_brings_the_server_down(server: Server, client: httpx.Client) -> None:
    before = said(client, COMPLETIONS, max_tokens=20)
    for fields in EXTREME:
        body = completion(**{"temperature": 1, "max_tokens": 20, **fields})
        assert client.post(COMPLETIONS, json=body).status_code in {200, 400}
        assert server.process.poll() is None
    assert said(client, COMPLETIONS, max_tokens=20) == before


# As vLLM has it.


def test_a_prompt_is_tokenized_as_vllm_tells_it(client: httpx.Client) -> None:
    asked = {"prompt": TEXTS[0], "return_token_strs": True}
    body = ask(client, asked, TOKENIZE)
    vocabulary = {number: token for token, number in make_tokenizer().get_vocab().items()}
    assert body == {
        "tokens": ids(TEXTS[0]),
        "count": len(ids(TEXTS[0])),
        "max_model_len": 4096,
        "token_strs": [vocabulary[id] for id in ids(TEXTS[0])],
    }


def test_a_chat_is_tokenized_as_it_is_answered(client: httpx.Client) -> None:
    asked = chat(return_token_ids=True, max_tokens=1)
    tokens = ask(client, asked)["prompt_token_ids"]
    body = ask(client, {"messages": asked["messages"]}, TOKENIZE)
    assert body == {"tokens": tokens, "count": len(tokens), "max_model_len": 4096}
    open_ended = {"messages": asked["messages"], "add_generation_prompt": False}
    assert ask(client, open_ended, TOKENIZE)["count"] < len(tokens)
    applied = ask(client, {"messages": asked["messages"]}, "/apply-template")
    assert applied == {"prompt": ask(client, {"tokens": tokens}, DETOKENIZE)["prompt"]}


def test_a_template_is_applied_with_all_that_a_chat_may_say(client: httpx.Client) -> None:
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    asked = chat("Hi", tools=tools, chat_template_kwargs={"enable_thinking": True}, store=True)
    response = client.post("/apply-template", json=asked)
    assert response.headers["x-ignored-params"] == "store"
    prompt = response.json()["prompt"]
    assert "get_weather" in prompt
    same = {name: asked[name] for name in ("messages", "tools", "chat_template_kwargs")}
    tokens = ask(client, same, TOKENIZE)["tokens"]
    assert ask(client, {"tokens": tokens}, DETOKENIZE)["prompt"] == prompt
    wrong = chat("Hi", tools=[{"type": "function"}])
    refused(
        client.post("/apply-template", json=wrong),
        400,
        "missing_required_parameter",
        param="tools[0].function",
    )


def test_the_tokenizer_tells_what_it_is(client: httpx.Client, folders: Folders) -> None:
    info = client.get("/tokenizer_info").json()
    settings = json.loads((folders.plain / "tokenizer_config.json").read_text("utf-8"))
    assert info["chat_template"] == settings["chat_template"]
    assert (info["eos_token"], info["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert info["bos_token"] is None
    assert (info["model_max_length"], info["vocab_size"]) == (4096, VOCABULARY)
    assert "Tokenizer" in info["tokenizer_class"]
    demo = client.get("/tokenizer_info", params={"model": "demo"}).json()
    assert demo["vocab_size"] != VOCABULARY
    unknown = client.get("/tokenizer_info", params={"model": "nobody"})
    refused(unknown, 404, "model_not_found", param="model")


def test_what_lm_evaluation_harness_asks_of_a_remote_tokenizer(client: httpx.Client) -> None:
    """The requests of its `RemoteTokenizer`, and what it reads of the answers."""
    info = client.get("/tokenizer_info").json()
    assert "eos_token" in info

    def encode(text: str) -> list[int]:
        asked = {"prompt": text, "add_special_tokens": False}
        return list(ask(client, asked, TOKENIZE)["tokens"])

    assert encode("test") == ids("test")
    assert encode(info["eos_token"]) == ids("<|im_end|>")
    assert ask(client, {"tokens": ids(TEXTS[4])}, DETOKENIZE)["prompt"] == TEXTS[4]
    history = [{"role": "user", "content": "Hi"}]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(info["chat_template"])
    prompt = template.render(messages=history, add_generation_prompt=True)
    assert prompt == ask(client, {"messages": history}, "/apply-template")["prompt"]


def test_a_template_of_the_clients_own_is_not_applied_either(client: httpx.Client) -> None:
    asked = chat("Hi", chat_template="{{ 7 * 7 }}")
    refused(
        client.post("/apply-template", json=asked),
        400,
        "unsupported_parameter",
        param="chat_template",
    )
    both = {"add_generation_prompt": True, "continue_final_message": True}
    response = client.post(TOKENIZE, json={"messages": asked["messages"], **both})
    refused(response, 400, "invalid_value", param="add_generation_prompt")
