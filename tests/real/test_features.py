"""Real weights show more than random ones: answers that end, vectors with an effect, copies."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import mlx.core as mx
import numpy as np
import pytest

from tests.real.conftest import Load, real
from tests.real.greedy import Body, ask, assert_likeliest
from tests.support.ggufs import REPENG, write_gguf
from tests.support.serving import serving

LAYER = 15
GOOD = ("It was wonderful, I loved it", "What a great day, I am so happy", "Excellent, superb")
BAD = ("It was terrible, I hated it", "What an awful day, I am so sad", "Horrible, dreadful")
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": PLACE}


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory, mlx_lm: Load) -> Iterator[httpx.Client]:
    """A server of SmolLM2 with a vector from bad to good, and of the same with Qwen's template."""
    folder = tmp_path_factory.mktemp("features")
    smollm = real("smollm2-float32")
    vector = write_vector(folder / "mood.gguf", mlx_lm)
    models = [f"smollm2={smollm}", f"calling={write_calling(folder / 'calling', smollm)}"]
    options = [option for model in models for option in ("--model", model)]
    options += ["--control-vector", f"mood={vector}:0", "--draft-model", "ngram"]
    with (
        serving(folder, *options, cold=True) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        yield client


def write_vector(path: Path, mlx_lm: Load) -> Path:
    """The difference of the mean states of good and bad texts behind one layer."""
    model, tokenizer = mlx_lm("smollm2-float32")

    def state(text: str) -> Any:
        hidden = model.model.embed_tokens(mx.array(tokenizer.encode(text))[None])
        for layer in model.model.layers[: LAYER + 1]:
            hidden = layer(hidden, "causal", None)
        return hidden[0, -1]

    good, bad = (mx.mean(mx.stack([state(text) for text in texts]), 0) for texts in (GOOD, BAD))
    fields = {**REPENG, "controlvector.model_hint": "llama"}
    return write_gguf(path, [(f"direction.{LAYER}", np.array(good - bad, np.float32))], fields)


def write_calling(folder: Path, source: Path) -> Path:
    """The same model with a template that shows tools."""
    folder.mkdir()
    for each in ("model.safetensors", "config.json", "tokenizer.json"):
        (folder / each).symlink_to((source / each).resolve())
    config = json.loads((source / "tokenizer_config.json").read_text())
    theirs = json.loads((real("tokenizer-qwen3") / "tokenizer_config.json").read_text())
    config["chat_template"] = theirs["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chat(client: httpx.Client, model: str, content: str, **more: Any) -> Body:
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "temperature": 0, **more}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice: Body = response.json()["choices"][0]
    return choice


def random_schema(dice: random.Random, depth: int = 0) -> Body:
    """Small schemas of the kinds that clients send: objects, lists, choices, bounds, formats."""
    kinds = ["string", "integer", "enum", "boolean", "format", "anyOf"]
    kind = dice.choice(
        ["object", "array"] if depth == 0 else [*kinds, "object", "array"][: 9 - 2 * depth]
    )
    match kind:
        case "object":
            names = dice.sample(["name", "age", "tags", "ok", "größe", "a b"], dice.randint(1, 3))
            properties = {name: random_schema(dice, depth + 1) for name in names}
            return {"type": "object", "properties": properties, "required": names}
        case "array":
            bounds = {"minItems": dice.randint(0, 1), "maxItems": dice.randint(1, 3)}
            return {"type": "array", "items": random_schema(dice, depth + 1), **bounds}
        case "string":
            return {"type": "string", "maxLength": dice.randint(1, 12)}
        case "integer":
            return {
                "type": "integer",
                "minimum": dice.randint(-9, 0),
                "maximum": dice.randint(1, 999),
            }
        case "enum":
            return {"enum": dice.sample(["red", "green", 3, None, 'a "b"'], 2)}
        case "format":
            return {"type": "string", "format": "date"}
        case "anyOf":
            return {"anyOf": [{"type": "null"}, {"type": "string", "enum": ["x", "y"]}]}
        case _:
            return {"type": "boolean"}


def test_100_random_schemas(client: httpx.Client) -> None:
    """All are compiled with a real vocabulary, in rows of one batch; each answer is what its schema
    allows, if it ended."""
    real("smollm2-float32")
    dice = random.Random(35)
    schemas = [random_schema(dice) for _ in range(100)]

    def answer(schema: Body) -> Body:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        asked = {"response_format": form, "max_tokens": 60}
        return chat(client, "smollm2-float32", "Describe a person as JSON.", **asked)

    with ThreadPoolExecutor(16) as threads:
        answers = [*threads.map(answer, schemas)]
    ended = 0
    for schema, choice in zip(schemas, answers, strict=True):
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            ended += 1
    assert ended >= 90


def test_a_control_vector_changes_what_is_likely(steered: httpx.Client) -> None:
    """With it good words become likelier than bad ones; against it, the other way round."""
    prompt = "I watched the film yesterday. In my opinion it was"

    def preference(scale: float) -> float:
        """The score of a good word less that of a bad one, as the server tells them."""
        scores = []
        for word in (" great", " terrible"):
            body = {"model": "smollm2", "prompt": prompt + word, "max_tokens": 0, "echo": True}
            more = {"logprobs": 1, "control_vector": {"mood": scale}}
            answer = steered.post("/v1/completions", json=body | more)
            assert answer.status_code == 200, answer.text
            scores.append(answer.json()["choices"][0]["logprobs"]["token_logprobs"][-1])
        return float(scores[0] - scores[1])

    against, none, along = map(preference, (-1.0, 0.0, 1.0))
    assert against + 0.5 < none < along - 0.5
    plain = ask(steered, "smollm2", prompt, 12)
    texts = {
        ask(steered, "smollm2", prompt, 12, control_vector={"mood": s})["text"] for s in (-1, 1)
    }
    assert len(texts | {plain["text"]}) == 3


def test_prompt_lookup_on_a_copy(steered: httpx.Client, mlx_lm: Load) -> None:
    """Tokens of a text that repeats are proposed, most are accepted, and it is what mlx-lm writes.

    How many are proposed follows from measured times, so that is not asserted.
    """
    model, _ = mlx_lm("smollm2-float32")
    line = "The server reads what is new, and it keeps what it has read for the next turn.\n"
    found = ask(steered, "smollm2", line * 6, 64)
    assert_likeliest(model, found)
    assert found["text"].startswith(line * 2)
    told = steered.get("/health?verbose=1").json()
    [engine] = [each["engine"] for each in told["models"] if each["id"] == "smollm2"]
    assert engine["drafted"] > 0
    assert engine["accepted"] > engine["drafted"] / 2


def test_a_forced_call_is_one_that_its_schema_allows(steered: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        question = "What is the weather in Paris?"
        more = {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": choice,
            "max_tokens": 120,
        }
        answer = chat(steered, "calling", question, **more)
        calls = answer["message"]["tool_calls"]
        assert calls, answer
        for call in calls:
            assert call["function"]["name"] == "get_weather"
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, PLACE)
