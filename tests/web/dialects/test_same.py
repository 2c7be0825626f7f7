"""The four dialects are views of one engine: what is asked in one is answered as in the others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.prompts.planning import plan
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.client import Body
from tests.support.effort import often
from tests.support.scripted import AFTER_TOOL, cut, write_conversation, write_scripted
from tests.support.tiny import CHAT_TEMPLATE, write_model
from tests.web.dialects.asking import DIALECTS
from tests.web.dialects.spoken import Asked, Call, Said, Tool, Turn, asking

WEATHER = Tool(
    "get_weather",
    "Weather of a city",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
DEMO = Path(mlxsrv.__file__).parent / "models" / "demo"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ODD = 'He said "no"\\: \u2028 \x85 <b>ä</b> 你好 👩‍👩‍👧 \u2029 fin'

ODD_ARGUMENTS = {"city": f"Zürich {ODD}", "big": 12**30, "days": [1.5, -0.0, None, {"": False}]}

# The thoughts and the ids of calls that a client gives back are in the prompt.
TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content or '' }}",
    "{{ message.reasoning_content or '' }}{{ message.tool_call_id or '' }}"
    "{{ message.content or '' }}",
).replace("{% set arguments =", "{{ call.id }}{% set arguments =")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dialects")
    agent = {
        AFTER_TOOL: "<think>\nSo it shines.\n</think>\n\nIt is sunny there.",
        "true": f"<think>\nParis, then.\n</think>\n\nI will look.\n\n{CALL}",
    }
    scripts = {"odd": ODD, "goes-on": f"So:\n{CALL}\nIs that so?"}
    odd_call = json.dumps({"name": "get_weather", "arguments": ODD_ARGUMENTS}, ensure_ascii=False)
    scripts["odd-call"] = f"<tool_call>{odd_call}</tool_call>"
    scripts["glm"] = "\n\n<think>\nIs it so?\n</think>\n\nSo it is."
    scripts["breaks"] = f"So: {CALL.replace('}}', '')}"
    return {
        "agent": write_conversation(
            folder / "agent", agent, template=TEMPLATE, max_position_embeddings=10**5
        ),
        "t": write_model(folder / "t", "qwen3", plain=True),
        **{name: write_scripted(folder / name, cut(text, 3)) for name, text in scripts.items()},
    }


@pytest.fixture(scope="module")
def client(models: dict[str, Path]) -> Iterator[TestClient]:
    named = tuple(f"{name}={path}" for name, path in models.items())
    settings = mlxsrv.Settings(model=("demo", *named), hf_cache=False, metrics=True)
    with TestClient(mlxsrv.create_app(settings)) as client:
        yield client


HISTORY = [
    Turn(text="What is the weather in Paris?"),
    Turn(
        role="assistant",
        text="I will look.",
        thoughts="Paris, then.",
        calls=[Call("get_weather", {"city": "Paris"}, "call_1")],
    ),
    Turn(role="tool", text="sunny", answers="call_1"),
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
SILENT = Turn(role="assistant", calls=[Call("get_weather", {"days": [1, None]}, "call_2")])

CASES = {
    "text": asking("What is mlxsrv?", model="demo", limit=12),
    "turns": Asked(
        model="demo",
        system="Be brief.",
        turns=[Turn(text="Hello"), Turn(role="assistant", text="Hello!"), Turn(text="Who is it?")],
        limit=12,
    ),
    "thoughts": asking("What is mlxsrv?", model="demo", thinks=True, limit=12),
    "no thoughts": asking("What is mlxsrv?", model="demo", thinks=False, limit=2),
    "call": asking(tools=[WEATHER], system="Be brief."),
    "result": Asked(turns=HISTORY, tools=[WEATHER], system="Be brief."),
    "two results": Asked(
        turns=[*HISTORY, SILENT, Turn(role="tool", text="rainy: 5", answers="call_2")],
        tools=[WEATHER],
    ),
    "text after a call": asking(model="goes-on", tools=[WEATHER]),
    "any call": asking(model="agent", tools=[WEATHER], choice="required"),
    "this call": asking("Hello", model="demo", tools=[WEATHER], choice="get_weather", limit=40),
    "no call": asking("Hello", model="demo", tools=[WEATHER], choice="none", limit=5),
    "form": asking("Hello", model="t", schema=SCHEMA),
    "stop": asking("What is mlxsrv?", model="demo", stop="server"),
    "limit in thoughts": asking(limit=4),
    "odd text": asking(ODD, model="odd", system=ODD),
    "odd call": asking(model="odd-call", tools=[WEATHER], limit=200),
    "long text": asking("Tell me of the sea.", model="t", limit=24),
    "seed": asking("Tell me of the sea.", model="t", limit=16, temperature=0.9, seed=7),
}


def test_what_stands_before_the_thoughts_that_open_an_answer_is_not_said(
    client: TestClient,
) -> None:
    asked = asking(model="glm")
    for spoken in DIALECTS.values():
        for said in (spoken.ask(client, asked), spoken.stream(client, asked)):
            assert (said.text, said.thoughts) == ("So it is.", "Is it so?"), spoken.name


REPEATED = {"turns", "no thoughts", "two results", "any call", "no call", "long text"}
"""Cases that differ from others in their prompts only."""


@pytest.mark.parametrize("name", often(CASES, CASES.keys() - REPEATED))
def test_all_say_the_same(client: TestClient, name: str) -> None:
    asked = CASES[name]
    spoken = [each for each in DIALECTS.values() if each.can(asked)]
    DIALECTS["chat"].ask(client, asked)  # so that all find the same in the prompt cache
    answers = {f"{each.name}, whole": each.ask(client, asked) for each in spoken}
    answers |= {f"{each.name}, streamed": each.stream(client, asked) for each in spoken}
    first = next(iter(answers.values()))
    assert {name: said.essence for name, said in answers.items()} == dict.fromkeys(
        answers, first.essence
    )
    for count in ("cached", "thoughts"):
        told = {getattr(said.usage, count) for said in answers.values()} - {None}
        assert len(told) == 1, (count, answers)


def test_the_cases_are_what_they_seem(client: TestClient) -> None:
    """A case without a call, for example, would compare nothing."""
    said = {name: DIALECTS["chat"].ask(client, asked) for name, asked in CASES.items()}

    def those(trait: Callable[[Said], object]) -> set[str]:
        return {name for name, each in said.items() if trait(each)}

    assert those(lambda each: each.calls) == {
        *("call", "text after a call", "any call", "this call", "odd call")
    }
    assert those(lambda each: each.finish == "tool_calls") == those(lambda each: each.calls)
    for name in ("call", "text after a call"):
        assert [(call.name, call.arguments) for call in said[name].calls] == [
            ("get_weather", {"city": "Paris"})
        ]
    assert those(lambda each: each.thoughts) == {
        *("thoughts", "call", "any call", "result", "two results", "limit in thoughts")
    }
    assert msgspec.json.decode(said["form"].text).keys() == {"city", "warm"}
    assert said["odd text"].text == ODD
    assert said["odd call"].calls[0].arguments == ODD_ARGUMENTS
    assert said["text after a call"].text == "So:Is that so?"
    assert said["stop"].finish == "stop"
    assert "server" in DIALECTS["chat"].ask(client, asking("What is mlxsrv?", model="demo")).text
    assert said["two results"].text == said["result"].text == "It is sunny there."


@pytest.mark.parametrize("asked", CASES.values(), ids=[*CASES])
def test_all_have_the_same_prompt(models: dict[str, Path], asked: Asked) -> None:
    tokenizer = tokenizer_of(models.get(asked.model, DEMO))
    prompts = {
        each.name: plan(each.spec(each.body(asked)), tokenizer).prompts[0].tokens
        for each in DIALECTS.values()
        if each.can(asked)
    }
    assert prompts == dict.fromkeys(prompts, prompts["chat"])


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=2)


@st.composite
def conversations(draw: st.DrawFn) -> Asked:
    """A user's turn, then answers of the model with their calls, results and more questions."""
    turns = [Turn(text=draw(WORDS))]
    for number in range(draw(st.integers(0, 3))):
        calls = [
            Call(draw(st.sampled_from(["get_weather", "other"])), arguments, f"call_{number}_{i}")
            for i, arguments in enumerate(draw(st.lists(OBJECTS, max_size=2)))
        ]
        text = draw(WORDS | st.just("") if calls else WORDS)
        thoughts = draw(st.just("") | WORDS)
        turns.append(Turn(role="assistant", text=text, thoughts=thoughts, calls=calls))
        turns += [Turn(role="tool", text=draw(WORDS), answers=call.id) for call in calls]
        if not calls or draw(st.booleans()):
            turns.append(Turn(text=draw(WORDS)))
    tools = [Tool(name, draw(WORDS), draw(OBJECTS)) for name in ("get_weather", "other")]
    return Asked(
        turns=turns, system=draw(st.just("") | WORDS), tools=draw(st.sampled_from([[], tools]))
    )


@given(conversations())
def test_any_conversation_has_the_same_prompt(models: dict[str, Path], asked: Asked) -> None:
    tokenizer = tokenizer_of(models["agent"])
    prompts = {
        each.name: plan(each.spec(each.body(asked)), tokenizer).prompts[0].tokens
        for each in DIALECTS.values()
    }
    assert prompts == dict.fromkeys(prompts, prompts["chat"])


@cache
def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def test_all_have_the_same_scores(client: TestClient) -> None:
    asked = asking("Tell me of the sea.", model="t", limit=10)
    wishes: dict[str, Body] = {
        "chat": {"logprobs": True, "top_logprobs": 2},
        "responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        "ollama": {"logprobs": True, "top_logprobs": 2},
    }
    bodies = {
        name: DIALECTS[name].post(client, asked, **wish).json() for name, wish in wishes.items()
    }
    [[choice], [item]] = bodies["chat"]["choices"], bodies["responses"]["output"]
    scores = choice["logprobs"]["content"]
    assert len(scores) == 10
    assert item["content"][0]["logprobs"] == scores
    assert bodies["ollama"]["logprobs"] == scores


def test_all_are_steered(client: TestClient) -> None:
    assert client.post("/api/saes/demo/attach", json={"model": "demo"}).json()["success"]
    asked = asking("Is it free software?", model="demo", limit=8)
    for spoken in DIALECTS.values():
        response = spoken.post(client, asked, steering={"86": 9})
        assert "x-ignored-params" not in response.headers
        assert spoken.read(response.json()).text.startswith("GET /health")
        assert spoken.ask(client, asked).text.startswith("mlxsrv is free")


# Conversations.


def test_a_conversation_goes_on_in_another_dialect(client: TestClient) -> None:
    """Each turn is asked in the next dialect, which finds in the prompt cache what was read."""
    spoken = [DIALECTS[name] for name in ("chat", "messages", "ollama", "responses", "chat")]
    asked = asking(tools=[WEATHER], system="You are an agent. " * 30)
    known = 0
    for number, each in enumerate(spoken):
        said = (each.stream if number % 2 else each.ask)(client, asked)
        if said.usage.cached is not None:
            assert said.usage.cached >= known - 1
            assert said.usage.cached < said.usage.prompt
        known = said.usage.prompt
        turns = [*asked.turns, said.turn()]
        if said.calls:
            turns.append(Turn(role="tool", text="sunny", answers=said.calls[0].id))
        else:
            turns.append(Turn(text=f"And in city number {number}?"))
        asked = msgspec.structs.replace(asked, turns=turns)
    assert [turn.text for turn in asked.turns[1::2]] == [
        *("I will look.", "It is sunny there.") * 2,
        "I will look.",
    ]


def test_what_is_stored_is_what_others_send_again(client: TestClient) -> None:
    spoken, asked = DIALECTS["responses"], asking(tools=[WEATHER])
    first = spoken.post(client, asked).json()
    said = spoken.read(first)
    result = Turn(role="tool", text="sunny", answers=said.calls[0].id)
    new = msgspec.structs.replace(asked, turns=[result])
    second = spoken.post(client, new, previous_response_id=first["id"]).json()
    again = msgspec.structs.replace(asked, turns=[*asked.turns, said.turn(), result])
    assert spoken.read(second).essence == DIALECTS["chat"].ask(client, again).essence


@pytest.mark.parametrize("name", DIALECTS)
def test_the_second_turn_of_an_agent_reads_only_what_is_new(client: TestClient, name: str) -> None:
    """As agents ask: 20,000 tokens of instructions and tools. All dialects share them."""
    spoken = DIALECTS[name]
    tools = [
        Tool(f"tool_{i}", f"Tool {i}. " + "It does things. " * 45, WEATHER.parameters)
        for i in range(20)
    ]
    system = "You are an agent. Follow the rules of the house. " * 60
    asked = asking(f"What is said in {name}?", tools=[*tools, WEATHER], system=system, limit=32_000)
    first = spoken.ask(client, asked)
    assert first.usage.prompt > 20_000
    result = Turn(role="tool", text="sunny", answers=first.calls[0].id)
    asked = msgspec.structs.replace(asked, turns=[*asked.turns, first.turn(), result])
    before = cached(client)
    second = spoken.stream(client, asked)
    assert second.text == "It is sunny there."
    read = second.usage.prompt - (cached(client) - before)
    assert second.usage.cached in (None, cached(client) - before)
    assert read < 200
    assert first.usage.prompt - 1 <= second.usage.prompt - read


def cached(client: TestClient) -> int:
    """Return how many tokens were found in the prompt cache of the agent's model so far."""
    found = re.search(
        r'^mlxsrv:prefix_cache_hits_total\{model_name="agent"\} (\S+)$',
        client.get("/metrics").text,
        re.MULTILINE,
    )
    return 0 if found is None else int(float(found[1]))


# Calls that are not complete.


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_that_is_not_complete_is_none(client: TestClient, name: str) -> None:
    """In chat completions, a client sees that from its arguments, or from the finish."""
    spoken, asked = DIALECTS[name], asking(model="breaks", tools=[WEATHER])
    wrong, cut_off = (msgspec.structs.replace(asked, limit=limit) for limit in (100, 18))
    for said in (spoken.ask(client, cut_off), spoken.stream(client, cut_off)):
        assert (said.calls, said.finish) == ([], "length")
    for said in (spoken.ask(client, wrong), spoken.stream(client, wrong)):
        assert (said.calls, said.finish) == ([], "tool_calls" if name == "chat" else "stop")
        assert said.text.startswith("So:")
    if name in ("messages", "ollama"):
        assert '"get_weather"' in spoken.ask(client, wrong).text
        assert "<tool_call>" in spoken.ask(client, cut_off).text


# Mounted, and with a key.


@pytest.mark.parametrize("name", DIALECTS)
def test_all_work_under_a_prefix_and_with_either_header_of_a_key(
    client: TestClient, models: dict[str, Path], name: str
) -> None:
    spoken, asked = DIALECTS[name], asking(tools=[WEATHER])
    settings = mlxsrv.Settings(
        model=(f"agent={models['agent']}",), hf_cache=False, api_key=("one", "other")
    )
    app = mlxsrv.create_app(settings)
    expected = spoken.ask(client, asked).essence
    parent = Starlette(routes=[Mount("/llm", app=app)], lifespan=app.lifespan)
    with TestClient(parent, base_url="http://testserver/llm") as below:
        assert spoken.post(below, asked).status_code == 401
        assert spoken.post(below, asked, stream=True).status_code == 401
        for header in ({"x-api-key": "one"}, {"authorization": "Bearer other"}):
            below.headers = header
            assert spoken.ask(below, asked).essence == expected
            assert spoken.stream(below, asked).essence == expected
        below.headers = {"x-api-key": "none"}
        assert spoken.post(below, asked).status_code == 401
