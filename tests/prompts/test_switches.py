"""Switches of thinking, found in what a template writes. The templates have the families' rules."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsrv.prompts.templates.messages import Messages
from mlxsrv.prompts.templates.switches import Switches
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.scripted import write_scripted

_MODE = "{% if thinking_mode == 'OFF' %}</think>{% elif thinking_mode == 'ON' %}<think>{% endif %}"
TEMPLATES = {
    "qwen3": "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}",
    "deepseek v3.1": "{{ '<think>' if thinking is defined and thinking else '</think>' }}",
    "kimi k2.5": "{{ '<think></think>' if thinking is defined and not thinking else '<think>' }}",
    "minimax m3": _MODE.replace("ON", "enabled").replace("OFF", "disabled"),
    "deepseek v3.2": _MODE.replace("ON", "thinking").replace("OFF", "chat"),
    "seed": "{% if thinking_budget is defined and thinking_budget == 0 %}<think></think>"
    "{% elif thinking_budget is defined %}at most {{ thinking_budget }}{% endif %}",
    "kimi k3": "{% if thinking_effort is defined and thinking_effort not in "
    "['low', 'medium', 'high', 'max'] %}{{ raise_exception('no') }}{% endif %}"
    "{{ thinking_effort }}",
    "glm 5.2": "{{ 'High' if reasoning_effort == 'high' else 'Max' }}",
    "deepseek v4": "{% if reasoning_effort == 'max' %}think hard{% endif %}",
    "r1": "<think>{# thinking enable_thinking reasoning_effort #}",
}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Switches]:
    folder = tmp_path_factory.mktemp("switches")
    return {
        name: Tokenizer(write_scripted(folder / name, ["Hi"], template=text)).chat_template.switches
        for name, text in TEMPLATES.items()
    }


TURNS = {
    "qwen3": ("enable_thinking", True, False),
    "deepseek v3.1": ("thinking", True, False),
    "kimi k2.5": ("thinking", True, False),
    "minimax m3": ("thinking_mode", "enabled", "disabled"),
    "deepseek v3.2": ("thinking_mode", "thinking", "chat"),
    "seed": ("thinking_budget", -1, 0),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_thinking_is_turned_by_the_variable_that_makes_a_difference(
    known: dict[str, Switches], name: str
) -> None:
    switches = known[name]
    assert switches.can_turn == (name in TURNS)
    for on in (True, False):
        variable, *values = TURNS.get(name, ("",))
        assert switches.turn(on) == ({variable: values[not on]} if values else None)


def test_a_budget_that_the_template_refuses_is_left_out() -> None:
    def write(messages: Messages, /, **variables: Any) -> str | None:
        budget = variables.get("thinking_budget", 0)
        return None if budget > 16_384 else f"at most {budget}"

    switches = Switches(write)
    assert switches.set_budget(600) == {"thinking_budget": 600}
    assert switches.set_budget(20_000) is None


def test_a_budget_goes_to_the_template_that_takes_one(known: dict[str, Switches]) -> None:
    budgets = {name: switches.set_budget(600) for name, switches in known.items()}
    assert budgets == dict.fromkeys(TEMPLATES) | {"seed": {"thinking_budget": 600}}


@pytest.mark.parametrize(
    ("name", "asked", "level"),
    [
        ("kimi k3", "max", {"thinking_effort": "max"}),
        ("kimi k3", "xhigh", {"thinking_effort": "max"}),
        ("kimi k3", "minimal", {"thinking_effort": "low"}),
        ("glm 5.2", "high", {"reasoning_effort": "high"}),
        ("glm 5.2", "low", {"reasoning_effort": "low"}),  # as the template's default
        ("glm 5.2", "max", {"reasoning_effort": "max"}),
        ("deepseek v4", "max", {"reasoning_effort": "max"}),
        ("deepseek v4", "low", {"reasoning_effort": "low"}),
        ("deepseek v4", "xhigh", {"reasoning_effort": "max"}),
        ("r1", "high", None),
        ("qwen3", "high", None),
    ],
)
def test_the_level_next_to_what_is_asked(
    known: dict[str, Switches], name: str, asked: str, level: dict[str, str] | None
) -> None:
    assert known[name].set_effort(asked) == level
