"""The meaning of requests: which generation they ask for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mlxsrv.generation.spec import (
    ChatPrompt,
    ChoiceForm,
    Form,
    GrammarForm,
    JSONForm,
    RegexForm,
    ToolChoice,
)
from mlxsrv.wire.openai.requests import CHAT_REQUESTS, NamedTool
from mlxsrv.wire.openai.tokens import DETOKENIZE_REQUESTS, TOKENIZE_REQUESTS
from tests.support.bodies import KINDS, read_chat, read_completion, refusal
from tests.support.openai_bodies import JSON_SCHEMA, chat, tool
from tests.support.schemas import Body

# What is read.


def test_the_limit_of_a_chat() -> None:
    assert read_chat().limit is None
    assert read_chat(max_tokens=5).limit == 5
    assert read_chat(max_completion_tokens=5).limit == 5
    assert read_chat(n_predict=5).limit == 5
    assert read_chat(max_tokens=-1).limit is None
    assert read_chat(max_tokens=-1, n_predict=7).limit == 7


def test_the_limit_of_a_completion() -> None:
    assert read_completion().limit == 16
    assert read_completion(max_tokens=5).limit == 5
    assert read_completion(max_completion_tokens=7).limit == 7
    assert read_completion(n_predict=-1).limit == 16
    assert read_completion(max_tokens=0, echo=True).limit == 0


def test_a_penalty_has_two_names() -> None:
    assert read_chat().repetition is None
    assert read_chat(repetition_penalty=1.5).repetition == 1.5
    assert read_chat(repeat_penalty=1.5).repetition == 1.5


def test_two_spellings_that_differ_are_both_named() -> None:
    error = refusal(KINDS["chat"], chat(max_tokens=5, n_predict=7))
    assert "max_tokens" in error.message
    assert "n_predict" in error.message


def test_stop_strings_are_a_list() -> None:
    assert read_chat().spec().stops == []
    assert read_chat(stop="a").spec().stops == ["a"]
    assert read_chat(stop=["a", "b"]).spec().stops == ["a", "b"]


def test_choices_are_n() -> None:
    assert read_chat().choices == 1
    assert read_completion(n=5).choices == 5


def test_a_bias_is_by_token_id() -> None:
    assert read_chat(logit_bias={"5": 1, "70": -2.5}).logit_bias == {5: 1.0, 70: -2.5}


def test_how_many_tokens_to_score() -> None:
    assert read_chat().likeliest is None
    assert read_chat(logprobs=False).likeliest is None
    assert read_chat(logprobs=True).likeliest == 0
    assert read_chat(logprobs=True, top_logprobs=3).likeliest == 3
    assert read_completion().likeliest is None
    assert read_completion(logprobs=0).likeliest == 0
    assert read_completion(logprobs=3).likeliest == 3


WHATEVER = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_choice": ["a"]}, ChoiceForm("guided_choice", ["a"])),
        ({"guided_regex": "a+"}, RegexForm("guided_regex", "a+")),
        ({"guided_grammar": "g"}, GrammarForm("guided_grammar", "g")),
        ({"guided_json": JSON_SCHEMA}, JSONForm("guided_json", JSON_SCHEMA)),
        ({"guided_json": json.dumps(JSON_SCHEMA)}, JSONForm("guided_json", JSON_SCHEMA)),
        ({"grammar": "g"}, GrammarForm("grammar", "g")),
        ({"grammar": ""}, None),  # llama.cpp's default
        ({"json_schema": JSON_SCHEMA}, JSONForm("json_schema", JSON_SCHEMA)),
        ({"structured_outputs": None}, None),
        *(
            ({"structured_outputs": {name: value}}, kind(f"structured_outputs.{name}", read))
            for name, value, kind, read in [
                ("json", JSON_SCHEMA, JSONForm, JSON_SCHEMA),
                ("json", json.dumps(JSON_SCHEMA), JSONForm, JSON_SCHEMA),
                ("regex", "a+", RegexForm, "a+"),
                ("choice", ["a"], ChoiceForm, ["a"]),
                ("grammar", "g", GrammarForm, "g"),
                ("json_object", True, JSONForm, WHATEVER),
            ]
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            JSONForm("structured_outputs.json_object", WHATEVER, compact=True),
        ),
    ],
)
def test_what_an_answer_is_to_be(fields: Body, form: Form | None) -> None:
    expected = [] if form is None else [form]
    assert read_chat(**fields).forms == read_completion(**fields).forms == expected


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, WHATEVER),
        ({"type": "json_object", "schema": None}, WHATEVER),
        ({"type": "json_object", "schema": JSON_SCHEMA}, JSON_SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": JSON_SCHEMA}}, JSON_SCHEMA),
    ],
)
def test_a_response_format_may_have_a_schema(given: Body, schema: Body | None) -> None:
    expected = [] if schema is None else [JSONForm("response_format", schema)]
    assert read_chat(response_format=given).forms == expected


def test_tools_are_what_templates_take() -> None:
    given_tools = [
        tool("f"),
        tool("g", description="does", parameters=JSON_SCHEMA, strict=True),
    ]
    request = read_chat(tools=given_tools, tool_choice=tool("g"))
    assert isinstance(request.tool_choice, NamedTool)
    assert request.tool_choice.function.name == "g"
    read = msgspec.to_builtins(request.tools)
    assert json.dumps(read) == json.dumps(given_tools), "in the order of templates' examples"


def test_any_tool_is_required() -> None:
    assert read_chat(tools=[tool()], tool_choice="any").choice == ToolChoice("required")


def test_reasoning_says_whether_and_how_much_to_think() -> None:
    def asked(**reasoning: Any) -> tuple[bool | None, str | None]:
        prompt = read_chat(reasoning=reasoning).spec().prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt.thinking, prompt.effort

    assert asked() == (None, None)
    assert asked(effort="high") == (True, "high")
    assert asked(effort="none") == (False, "none")
    assert asked(enabled=True) == (True, None)
    assert asked(enabled=False, effort="low") == (False, "low")


def test_the_parts_of_reasoning_that_have_no_effect_are_named() -> None:
    reasoning = {"enabled": True, "max_tokens": 500, "exclude": True}
    _, ignored = CHAT_REQUESTS.decode(json.dumps(chat(reasoning=reasoning)).encode())
    assert ignored == ["reasoning.exclude"]


def test_a_prompt_has_four_forms() -> None:
    assert read_completion(prompt="a").prompts == ["a"]
    assert read_completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert read_completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert read_completion(prompt=[[1, 2], [3]]).prompts == [[1, 2], [3]]
    assert read_completion(prompt=[[]]).prompts == [[]]


def test_special_tokens_are_the_default() -> None:
    def special(**fields: Any) -> bool:
        body = json.dumps({"content": "x", **fields}).encode()
        return TOKENIZE_REQUESTS.decode(body)[0].spec().special

    assert special()
    assert special(add_special_tokens=None)
    assert special(add_special_tokens=True)
    assert not special(add_special_tokens=False)


def test_tokens_to_put_together() -> None:
    request, ignored = DETOKENIZE_REQUESTS.decode(b'{"tokens": [1, 2], "model": "m"}')
    assert (request.tokens, request.model, ignored) == ([1, 2], "m", [])
