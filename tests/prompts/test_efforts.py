"""Levels of effort, by the names that the model's template takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.prompts.planning import plan
from mlxsrv.prompts.tokenizer import Tokenizer
from mlxsrv.wire.anthropic.requests import MESSAGES_REQUESTS
from mlxsrv.wire.ollama.requests import OLLAMA_CHATS
from mlxsrv.wire.openai.requests import CHAT_REQUESTS
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS, Past
from tests.support.scripted import write_scripted

TOLD = "{{ reasoning_effort }}|{{ enable_thinking }}|"
LISTED = (
    "{% if reasoning_effort is defined and reasoning_effort not in LEVELS %}"
    "{{ raise_exception('unknown effort') }}{% endif %}"
)
ALWAYS = "{% if enable_thinking is false %}{{ raise_exception('always thinks') }}{% endif %}"
TEMPLATES = {
    "qwen3.8": LISTED.replace("LEVELS", "['xhigh', 'medium', 'low']") + TOLD,
    "qwen3.8, the largest": ALWAYS + LISTED.replace("LEVELS", "['xhigh', 'medium', 'low']") + TOLD,
    "mistral small 4": LISTED.replace("LEVELS", "['none', 'high']") + "{{ reasoning_effort }}||",
    "gpt-oss": "Reasoning: {{ reasoning_effort }}||",
    "deepseek v4": "{% if reasoning_effort == 'max' %}max{% endif %}||",
    "qwen3": "|{{ enable_thinking }}|",
    "qwen2": "||",
    "seed": "{{ 'at most ' ~ thinking_budget if thinking_budget is defined else '?' }}",
}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("efforts")
    return {
        name: Tokenizer(write_scripted(folder / name, ["Hi"], template=template))
        for name, template in TEMPLATES.items()
    }


HI = [{"role": "user", "content": "hi"}]
_NO_PAST = Past()


def chat(**fields: Any) -> GenerationSpec:
    return CHAT_REQUESTS.decode(json.dumps({"messages": HI, **fields}).encode())[0].spec()


def messages(effort: str) -> GenerationSpec:
    body = {"messages": HI, "output_config": {"effort": effort}, "thinking": {"type": "adaptive"}}
    return MESSAGES_REQUESTS.decode(json.dumps(body).encode())[0].spec()


def responses(effort: str) -> GenerationSpec:
    body = {"input": "hi", "reasoning": {"effort": effort}}
    return RESPONSES_REQUESTS.decode(json.dumps(body).encode())[0].spec(_NO_PAST)


def ollama(think: str) -> GenerationSpec:
    body = {"model": "m", "messages": HI, "think": think}
    return OLLAMA_CHATS.decode(json.dumps(body).encode())[0].spec()


def told(tokenizer: Tokenizer, spec: GenerationSpec) -> tuple[str, str, list[str]]:
    """The level and the switch that the template is told, and the fields that it does not take."""
    planned = plan(spec, tokenizer)
    level, switch, _ = planned.prompts[0].text.split("|")
    return level.removeprefix("Reasoning: "), switch, list(planned.ignored)


LEVELS = {
    ("qwen3.8", "none"): ("", "False"),
    ("qwen3.8", "minimal"): ("low", ""),
    ("qwen3.8", "medium"): ("medium", ""),
    ("qwen3.8", "high"): ("xhigh", ""),
    ("qwen3.8", "max"): ("xhigh", ""),
    ("qwen3.8, the largest", "none"): ("low", ""),
    ("mistral small 4", "none"): ("none", ""),
    ("mistral small 4", "low"): ("high", ""),
    ("gpt-oss", "minimal"): ("low", ""),
    ("gpt-oss", "none"): ("low", ""),
    ("gpt-oss", "max"): ("high", ""),
    ("deepseek v4", "max"): ("max", ""),
    ("deepseek v4", "xhigh"): ("max", ""),
    ("qwen3", "none"): ("", "False"),
}


@pytest.mark.parametrize(("name", "asked"), LEVELS)
def test_the_nearest_level_that_the_template_takes(
    known: dict[str, Tokenizer], name: str, asked: str
) -> None:
    level, switch = LEVELS[name, asked]
    assert told(known[name], chat(reasoning_effort=asked)) == (level, switch, [])


FIELDS = {
    "reasoning_effort": lambda level: chat(reasoning_effort=level),
    "think": lambda level: chat(think=level),
    "reasoning.effort": lambda level: chat(reasoning={"effort": level}),
    "output_config.effort": messages,
    "responses": responses,
    "ollama": ollama,
}
NAMES = {"responses": "reasoning.effort", "ollama": "think"}


@pytest.mark.parametrize("field", FIELDS)
def test_each_dialects_own_field_is_advice(known: dict[str, Tokenizer], field: str) -> None:
    for asked, level in (("max", "xhigh"), ("minimal", "low"), ("medium", "medium")):
        assert told(known["qwen3.8"], FIELDS[field](asked))[0] == level
        assert told(known["qwen3.8"], FIELDS[field](asked))[2] == []
    assert told(known["qwen3.8"], FIELDS[field]("none")) == ("", "False", [])
    assert told(known["qwen2"], FIELDS[field]("high"))[2] == [NAMES.get(field, field)]
    assert told(known["qwen2"], FIELDS[field]("none"))[2] == [NAMES.get(field, field)]


@pytest.mark.parametrize("field", FIELDS)
def test_a_level_that_nobody_knows_is_left_out_by_name(
    known: dict[str, Tokenizer], field: str
) -> None:
    for name in ("gpt-oss", "qwen2"):
        ignored = told(known[name], FIELDS[field]("a lot"))[2]
        assert ignored == [NAMES.get(field, field)]


def test_a_budget_is_told_to_the_template_that_takes_one(known: dict[str, Tokenizer]) -> None:
    """Seed-OSS notes in its thoughts how much of it is left."""
    [planned] = plan(chat(thinking_budget=600), known["seed"]).prompts
    assert planned.text == "at most 600"
    [planned] = plan(chat(thinking_budget=0), known["seed"]).prompts
    assert planned.text == "at most 0"
    [planned] = plan(chat(), known["seed"]).prompts
    assert planned.text == "?"


def test_a_level_of_no_letters_is_none(known: dict[str, Tokenizer]) -> None:
    for name in ("qwen3.8", "gpt-oss"):
        assert told(known[name], chat(reasoning_effort="")) == told(known[name], chat())


def test_a_switch_that_the_template_refuses_is_left_out_by_name(
    known: dict[str, Tokenizer],
) -> None:
    largest = known["qwen3.8, the largest"]
    assert told(largest, chat(enable_thinking=False)) == ("", "", ["enable_thinking"])
    assert told(largest, chat(enable_thinking=True)) == ("", "True", [])


def test_a_level_where_there_is_a_switch_only(known: dict[str, Tokenizer]) -> None:
    """A field that says both has had its effect; one that says the level only has not."""
    assert told(known["qwen3"], chat(think="high")) == ("", "True", [])
    assert told(known["qwen3"], responses("high")) == ("", "True", [])
    assert told(known["qwen3"], chat(reasoning_effort="high")) == ("", "", ["reasoning_effort"])
