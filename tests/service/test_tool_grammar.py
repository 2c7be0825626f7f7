"""`--tool-grammar`: random weights say anything, and every call that they start is a good one."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mlxsrv.generation.outputs import Answer, AnswerBuilder, Usage
from mlxsrv.generation.spec import (
    ChatMessage,
    ChatPrompt,
    GenerationSpec,
    GrammarForm,
    RegexForm,
    SamplingWishes,
    ToolChoice,
    ToolSpec,
)
from mlxsrv.models.pool.clients import Client
from mlxsrv.options import SettingsError
from mlxsrv.service.service import Service, check_models
from mlxsrv.settings import Settings
from tests.support.effort import examples, often
from tests.support.fixtures import ModelFolder
from tests.support.scripted import cut, write_scripted
from tests.support.tiny import VOCABULARY, make_tokenizer

pytestmark = [pytest.mark.served, pytest.mark.slow]  # a process of its own checks each grammar

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = ToolSpec(name="get_weather", parameters=CITY)
NOW = ToolSpec(name="now", parameters={"type": "object", "properties": {}})
SCHEMAS = {"get_weather": CITY, "now": {"type": "object", "maxProperties": 0}}


def closers() -> dict[int, float]:
    """Random text hardly ever closes what it opens."""
    texts = {token: make_tokenizer().decode([token]) for token in range(VOCABULARY)}
    return {token: 7.0 for token, text in texts.items() if text[:1] in {'"', "}"}}


def opener() -> int:
    token = make_tokenizer().token_to_id("<tool_call>")
    assert token is not None
    return token


def asking(**fields: Any) -> GenerationSpec:
    tools = fields.pop("tools", [WEATHER, NOW])
    chat = {name: fields.pop(name) for name in ("tool_choice", "thinking") if name in fields}
    prompt = ChatPrompt(messages=[ChatMessage(role="user", content="x")], tools=tools, **chat)
    return GenerationSpec(prompt=prompt, **fields)


async def answer(service: Service, spec: GenerationSpec) -> tuple[list[Answer], Usage]:
    reply = await service.generate(spec, "r", "id", Client("c"))
    builder = AnswerBuilder(spec.choices, scored=False)
    await reply.admit()
    try:
        while builder.usage is None:
            for output in await reply.outputs():
                builder.add(output)
    finally:
        reply.release()
    return builder.make(), builder.usage


def serve(test: Callable[[Service], Awaitable[None]], folder: Path, **options: Any) -> None:
    async def run() -> None:
        service = Service(Settings(**{"model": (f"m={folder}",), "tool_grammar": True, **options}))
        await test(service)
        await service.close()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_every_call_of_random_weights_is_valid(model_folder: ModelFolder) -> None:
    made: list[str] = []

    async def test(service: Service) -> None:
        for seed in range(examples(8)):
            bias = {**closers(), opener(): 7.0}
            sampling = SamplingWishes(temperature=1, seed=seed, logit_bias=bias)
            spec = asking(sampling=sampling, limit=150, choices=3, thinking=seed % 2 == 1)
            for one in (await answer(service, spec))[0]:
                for call in one.tools:
                    assert call.name in SCHEMAS
                    assert call.complete or (call is one.tools[-1] and one.reason == "length")
                    if call.complete:
                        arguments = json.loads(call.arguments)
                        Draft202012Validator(SCHEMAS[call.name]).validate(arguments)
                        made.append(call.name)

    serve(test, model_folder("qwen3"))
    assert {*made} == {*SCHEMAS}


def test_without_the_extra_the_server_does_not_start(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    settings = Settings(model=(str(model_folder("qwen3")),), tool_grammar=True)
    with pytest.raises(SettingsError, match=r"--tool-grammar needs .*'mlxsrv\[structured\]'"):
        check_models(settings)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "get_weather", "arguments": {"days": "many", "x": 2}}\n</tool_call>'


@pytest.mark.parametrize("on", [True, False])
def test_a_model_that_would_call_wrongly_calls_rightly(tmp_path: Path, on: bool) -> None:
    folder = write_scripted(tmp_path / "m", cut("Let me. " + WRONG, 1))

    async def test(service: Service) -> None:
        [one], _ = await answer(service, asking(limit=200, sampling=SamplingWishes(temperature=0)))
        assert one.content.startswith("Let me.")
        [call] = one.tools
        good = Draft202012Validator(CITY).is_valid(json.loads(call.arguments or "{}"))
        assert (call.complete and good) == on

    serve(test, folder, tool_grammar=on)


def custom(form: RegexForm | GrammarForm) -> ToolSpec:
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return ToolSpec(name="edit", parameters=text, input_form=form)


LINES = re.compile('([+-][a-z"\\\\]{1,5}\n)+')


@pytest.mark.parametrize("required", often([True, False], [True]))
def test_the_input_of_a_custom_tool_follows_its_regex(
    model_folder: ModelFolder, required: bool
) -> None:
    found: list[str] = []
    choice = ToolChoice("required", ("edit",)) if required else ToolChoice()

    async def test(service: Service) -> None:
        for seed in range(3):
            bias = {**closers(), opener(): 7.0}
            sampling = SamplingWishes(temperature=1, seed=seed, logit_bias=bias)
            tools = [custom(RegexForm("tools[0].format.definition", LINES.pattern))]
            spec = asking(tools=tools, tool_choice=choice, sampling=sampling, limit=150, choices=2)
            for one in (await answer(service, spec))[0]:
                found.extend(
                    json.loads(call.arguments)["input"]
                    for call in one.tools
                    if call.complete and call.name == "edit"
                )

    serve(test, model_folder("qwen3"), tool_grammar=not required)
    assert found
    assert [text for text in found if not LINES.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("form", "on", "unenforced"),
    [
        (GrammarForm("p", 'start: "a"'), True, True),
        (GrammarForm("p", 'start: "a"'), False, True),
        (RegexForm("p", "a"), True, False),
        (RegexForm("p", "a"), False, True),
    ],
)
def test_a_grammar_that_is_not_enforced_is_logged_once(
    model_folder: ModelFolder,
    caplog: pytest.LogCaptureFixture,
    form: RegexForm | GrammarForm,
    on: bool,
    unenforced: bool,
) -> None:
    """It is no error, also where a call is required: the model knows it from the definition."""

    async def test(service: Service) -> None:
        await answer(service, asking(tools=[custom(form)], limit=5))
        required = ToolChoice("required")
        await answer(service, asking(tools=[custom(form)], limit=5, tool_choice=required))

    with caplog.at_level(logging.WARNING, "mlxsrv"):
        serve(test, model_folder("qwen3"), tool_grammar=on)
    assert caplog.messages == ["grammars of custom tools not enforced"] * unenforced


def test_a_choice_of_some_tools_leaves_the_prompt_as_it_is_where_it_is_enforced(
    tmp_path: Path,
) -> None:
    folder = write_scripted(tmp_path / "m", cut("Well: " + CALL, 3))

    async def prompts(service: Service) -> tuple[Answer, int, int, int]:
        whole = (await answer(service, asking(limit=200)))[1].prompt_tokens
        only = ToolChoice("auto", ("now",))
        [one], usage = await answer(service, asking(limit=60, tool_choice=only))
        alone = (await answer(service, asking(limit=200, tools=[NOW])))[1].prompt_tokens
        return one, usage.prompt_tokens, whole, alone

    async def enforced(service: Service) -> None:
        one, tokens, whole, alone = await prompts(service)
        assert tokens == whole > alone
        assert {call.name for call in one.tools} <= {"now"}

    async def offered(service: Service) -> None:
        _, tokens, whole, alone = await prompts(service)
        assert tokens == alone < whole

    serve(enforced, folder)
    serve(offered, folder, tool_grammar=False)
