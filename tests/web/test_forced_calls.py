"""Calls that are forced on models that would say something else, in formats that are not JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.text.call_formats.calls import WrittenCall
from mlxsrv.text.formats import CALLS, THOUGHTS
from tests.support.client import Body
from tests.support.effort import often
from tests.support.turns import write_turns

pytestmark = pytest.mark.usefixtures("near_sandbox")

THOUGHT = "It is 🙂🙂🙂 or perhaps not, so I think of it again and again."
ANSWER = "So it is, and so it was, and so it will be for ever."
MODELS = {
    "qwen_xml": "think",
    "glm": "think",
    "gemma4": "gemma4",
    "harmony": "harmony",
    "kimi_k3": "kimi_k3",
    "mistral_args": "mistral",
    "muse": "muse",
}
"""Formats of calls, each with a format of thoughts."""
ARGUMENTS: Body = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": ARGUMENTS}}
TOOL: Body = {"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}}
WRONG = WrittenCall("weather", {"days": 99999, "unit": "C", "more": [1, 2, 3]})
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ '' if tools }}"
QUESTION = [{"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("forced")
    models, calls, thoughts = [], [], []
    for name, thinking in MODELS.items():
        frame = THOUGHTS[thinking]
        (opened, closed), (before, behind) = frame.thought, frame.answer
        known = f"{{# {opened.strip()} #}}"  # the template knows of thoughts, and opens none
        (before_calls, behind_text) = frame.preamble if frame.preamble[0] else frame.answer
        called = f"{before_calls}I look.{behind_text}{CALLS[name].spell([WRONG])}"
        path = write_turns(
            folder / name,
            {
                "messages[0].content == 'Call it.'": called,
                "true": f"{opened}{THOUGHT}{closed}{before}{ANSWER}{behind}",
            },
            template=known + TEMPLATE,
            markers=[*CALLS[name].marks, *frame.marks],
        )
        models.append(f"{name}={path}")
        calls.append(f"{name}={name}")
        thoughts.append(f"{name}={thinking}")
    settings = mlxsrv.Settings(
        model=tuple(models),
        tool_format=tuple(calls),
        thinking_format=tuple(thoughts),
        hf_cache=False,
        trust_remote_code=True,
    )
    with TestClient(mlxsrv.create_app(settings)) as client:
        yield client


def ask(client: TestClient, model: str, **fields: Any) -> Body:
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 400, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def check(text: str) -> None:
    arguments = json.loads(text)
    assert arguments["unit"] in ("C", "F")
    assert arguments["days"] in range(10)
    assert len(arguments) == 2


def check_call(choice: Body) -> None:
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert not message["content"]
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    for call in message["tool_calls"]:
        check(call["function"]["arguments"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_is_required_is_made(client: TestClient, name: str, choice: Any) -> None:
    said = ask(client, name, tools=[TOOL], tool_choice=choice)
    check_call(said)
    assert said["message"]["reasoning_content"] == THOUGHT
    if choice != "required":
        assert len(said["message"]["tool_calls"]) == 1


BOUNDS = [(name, bound) for name in MODELS for bound in range(12, 16)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bound"), often(BOUNDS, [each for each in BOUNDS if "glm" in each or 13 in each])
)
def test_a_thought_at_its_bound_leaves_the_call_to_come(
    client: TestClient, name: str, bound: int
) -> None:
    """Also where the bound falls into a character of several tokens."""
    said = ask(client, name, thinking_budget=bound, tools=[TOOL], tool_choice="required")
    check_call(said)
    assert THOUGHT.startswith(said["message"].get("reasoning_content") or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["alone", "beside tools"])
def test_a_thought_at_its_bound_leaves_json_to_come(
    client: TestClient, name: str, tools: list[Body]
) -> None:
    for budget in (9, 13):
        said = ask(client, name, thinking_budget=budget, response_format=FORM, tools=tools)
        if said["message"].get("tool_calls"):
            check_call(said)
        else:
            check(said["message"]["content"])
        assert THOUGHT.startswith(said["message"].get("reasoning_content") or "")


def strict(asked: bool) -> Body:
    return {"type": "function", "function": {**TOOL["function"], "strict": asked}}


@pytest.mark.parametrize("name", MODELS)
def test_a_strict_tool_leaves_text_to_the_model(client: TestClient, name: str) -> None:
    said = ask(client, name, tools=[strict(True)])
    assert (said["message"]["reasoning_content"], said["message"]["content"]) == (THOUGHT, ANSWER)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_call_of_a_strict_tool_follows_its_schema(client: TestClient, name: str) -> None:
    asked: Body = {"messages": [{"role": "user", "content": "Call it."}]}
    said = ask(client, name, tools=[strict(False)], **asked)
    assert json.loads(said["message"]["tool_calls"][0]["function"]["arguments"])["days"] == 99999
    said = ask(client, name, tools=[strict(True)], parallel_tool_calls=False, **asked)
    assert said["message"]["content"].startswith("I look.")
    check(said["message"]["tool_calls"][0]["function"]["arguments"])
    assert said["finish_reason"] == "tool_calls"
