"""Messages that clients replay, in the form that the rules of each family's template allow."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.spec import ChatMessage, ChatPrompt, GenerationSpec, PastCall, ToolSpec
from mlxsrv.prompts.planning import plan
from mlxsrv.prompts.templates.history_changes import reminded, short_id
from mlxsrv.prompts.templates.messages import plain_message
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.family_rules import FAMILY_RULES
from tests.support.growth import assert_linear
from tests.support.model_folders import change
from tests.support.scripted import write_scripted
from tests.web.dialects.asking import DIALECTS
from tests.web.dialects.spoken import Asked, Call, Turn

TURN = "[{{ message.role }}] {{ message.content }}\n"
DROPPING = (
    "{% for message in messages %}{% if loop.first or message.role != 'system' %}"
    + TURN
    + "{% endif %}{% endfor %}"
)
TO_THE_FRONT = (
    "{% for message in messages if message.role == 'system' %}"
    + TURN
    + "{% endfor %}{% for message in messages if message.role != 'system' %}"
    + TURN
    + "{% endfor %}"
)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A tokenizer for each template, by name."""
    templates = {**FAMILY_RULES, "dropping": DROPPING, "to the front": TO_THE_FRONT}
    folder = tmp_path_factory.mktemp("families")
    return {
        name: Tokenizer(write_scripted(folder / name, ["Hi"], template=template))
        for name, template in templates.items()
    }


def render(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> str:
    [planned] = plan(GenerationSpec(prompt=ChatPrompt(messages=messages)), tokenizer).prompts
    return planned.text


def said(role: str, content: str = "", **fields: object) -> ChatMessage:
    return ChatMessage(role=role, content=content, **fields)  # type: ignore[arg-type]


def called(*names: str, content: str = "", arguments: object = None) -> list[ChatMessage]:
    """An answer that calls these tools, and their results."""
    calls = [
        PastCall(name, arguments or {"key": f"of {name}"}, f"call_{name}")  # type: ignore[arg-type]
        for name in names
    ]
    thoughts = "hm" if content else None
    results = [said("tool", f"from {name}", call_id=f"call_{name}") for name in names]
    return [said("assistant", content, reasoning=thoughts, calls=calls), *results]


SYSTEM, USER, ANSWER = said("system", "brief"), said("user", "one"), said("assistant", "two")
HISTORIES = {
    "a question": [USER],
    "a system message": [SYSTEM, USER, ANSWER, said("user", "three")],
    "gptme": [SYSTEM, said("system", "and kind"), USER, ANSWER, said("system", "hurry")],
    "a title": [SYSTEM, said("user", "title it"), USER],
    "pi, after a compaction": [SYSTEM, said("user", "in short"), USER, *called("look")],
    "a greeting": [ANSWER, USER],
    "a system message alone": [SYSTEM],
    "two answers": [USER, ANSWER, said("assistant", "more"), said("user", "three")],
    "an empty answer": [USER, said("assistant"), said("user", "three")],
    "an empty answer at the end": [USER, said("assistant")],
    "a late system message": [SYSTEM, USER, said("system", "hurry"), ANSWER, said("user", "three")],
    "calls": [USER, *called("look", "find"), ANSWER, said("user", "three")],
    "text beside calls": [USER, *called("look", "find", content="I look."), ANSWER, USER],
    "a call after a call": [USER, *called("look", content="I look."), *called("find"), ANSWER],
    "an interjection": [USER, *called("look"), said("user", "stop"), ANSWER, said("user", "on")],
    "a reminder behind a result": [SYSTEM, USER, *called("look"), said("system", "hurry")],
    "no object": [USER, *called("look", arguments='{"city": "Os'), ANSWER, USER],
    "calls of one id": [
        USER,
        said("assistant", calls=[PastCall("look", {"key": each}, "call_1") for each in "ab"]),
        *[said("tool", f"from {each}", call_id="call_1") for each in "ab"],
    ],
    "a list": [USER, *called("look", arguments="[1]"), ANSWER, USER],
    "calls without ids": [
        USER,
        said("assistant", calls=[PastCall("look", {"key": "of look"})]),
        said("tool", "from look"),
    ],
    "a result without its call": [SYSTEM, said("tool", "from look", call_id="call_1"), USER],
}


def texts(message: ChatMessage) -> list[str]:
    """All that a message says."""
    calls = [
        part
        for call in message.calls
        for part in (
            call.name,
            *(
                [json.dumps(call.arguments).strip('"')]
                if isinstance(call.arguments, str)
                else map(str, call.arguments.values())
            ),
        )
    ]
    return [message.content, *calls]


@pytest.mark.parametrize("family", FAMILY_RULES)
def test_each_family_reads_every_history(known: dict[str, Tokenizer], family: str) -> None:
    for name, messages in HISTORIES.items():
        text = render(known[family], messages)
        plain = text.replace("\\", "")
        for message in messages:
            for part in texts(message):
                assert part.replace("\\", "") in plain, f"{name}: {part!r} is not in {text!r}"


@pytest.mark.parametrize("family", FAMILY_RULES)
def test_a_prompt_is_the_beginning_of_the_next_turns(
    known: dict[str, Tokenizer], family: str
) -> None:
    """Whatever the family's rules change: else the prompt would be read anew each turn."""
    joins = {"an empty answer", "a system message alone"}
    for name in HISTORIES.keys() - joins:
        messages = HISTORIES[name]
        text = render(known[family], messages).removesuffix("[assistant] ").rstrip()
        more = [*messages, said("assistant", "so"), said("user", "and then?")]
        assert render(known[family], more).startswith(text), name


def test_what_a_template_takes_stays_as_it_is(known: dict[str, Tokenizer]) -> None:
    for name, messages in HISTORIES.items():
        lines = [
            f"[{message.role}] {message.content}\n"
            + "".join(f"call {call.name} {json.dumps(call.arguments)}\n" for call in message.calls)
            for message in messages
        ]
        assert render(known["chatml"], messages) == "".join(lines) + "[assistant] ", name


CONVERSATIONS = {
    "turns": Asked(
        system="Be brief.",
        turns=[Turn(text="One"), Turn(role="assistant", text="Two"), Turn(text="Three")],
    ),
    "a result": Asked(
        system="Be brief.",
        turns=[
            Turn(text="One"),
            Turn(
                role="assistant",
                text="I look.",
                thoughts="Hm.",
                calls=[Call("look", {"key": "Oslo"}, "call_1"), Call("find", {"key": "x"}, "c2")],
            ),
            Turn(role="tool", text="sunny", answers="call_1"),
            Turn(role="tool", text="found", answers="c2"),
            Turn(text="Go on"),
        ],
    ),
}


@pytest.mark.parametrize("family", FAMILY_RULES)
def test_every_dialects_requests_are_read(known: dict[str, Tokenizer], family: str) -> None:
    for name, asked in CONVERSATIONS.items():
        prompts = {
            spoken.name: plan(spoken.spec(spoken.body(asked)), known[family]).prompts[0].text
            for spoken in DIALECTS.values()
        }
        # Messages of one role are one in Anthropic's API.
        assert len({*prompts.values()}) == 1, f"{name}: {prompts}"


def test_ids_have_the_form_that_the_family_reads(known: dict[str, Tokenizer]) -> None:
    messages = [USER, *called("look", "find"), *called("look")]
    text = render(known["kimi"], messages)
    assert re.findall(r"call (\S+)", text) == [
        "functions.look:0",
        "functions.find:1",
        "functions.look:2",
    ]


def test_an_id_of_more_than_nine_signs_is_none_of_mistrals() -> None:
    call = {"id": "abcdefghi"}
    assert short_id(call, 0) == "abcdefghi"
    assert len(short_id({"id": "abcdefghij"}, 0)) == 9


def test_a_reminder_is_joined_with_the_users_messages_around_it() -> None:
    texts = [("user", "one"), ("system", "late"), ("user", "two"), ("user", "three")]
    [first, second] = reminded([{"role": role, "content": text} for role, text in texts])
    late = "<system-reminder>\nlate\n</system-reminder>"
    assert first == {"role": "user", "content": f"one\n\n{late}\n\ntwo"}
    assert second == {"role": "user", "content": "three"}


def test_ids_that_have_the_form_stay(known: dict[str, Tokenizer]) -> None:
    """Also where the messages before them are gone."""
    call = PastCall("look", {"key": "x"}, "functions.look:7")
    messages = [USER, said("assistant", calls=[call]), said("tool", "y", call_id=call.id)]
    assert "call functions.look:7 " in render(known["kimi"], messages)
    call = PastCall("look", {"key": "x"}, "abcdefgh1")
    messages = [USER, said("assistant", calls=[call]), said("tool", "y", call_id=call.id)]
    assert (
        known["mistral"].chat_template.adapt([plain_message(each) for each in messages])[1][
            "tool_calls"
        ][0]["id"]
        == "abcdefgh1"
    )


def test_results_have_the_number_of_their_call_where_the_family_counts(
    known: dict[str, Tokenizer],
) -> None:
    text = render(known["command r7b"], [USER, *called("look", "find"), *called("look")])
    assert re.findall(r'call "(\d)": (\w+)', text) == [("0", "look"), ("1", "find"), ("2", "look")]
    assert re.findall(r'\[tool\] "(\d)": from (\w+)', text) == [
        ("0", "look"),
        ("1", "find"),
        ("2", "look"),
    ]


# Calls that a template would leave out, or write in another way than the model.


def test_calls_are_written_as_the_model_writes_them_where_its_template_does_not(
    known: dict[str, Tokenizer],
) -> None:
    text = render(known["lfm2"], [USER, *called("look", content="I look.")])
    assert text == (
        "[user] one\n[assistant] I look.\n\n"
        "<|tool_call_start|>[look(key='of look')]<|tool_call_end|>\n[tool] from look\n[assistant] "
    )
    text = render(known["phi 3.5"], [USER, *called("look")])
    assert '<tool_call>\n{"name": "look", "arguments": {"key": "of look"}}\n</tool_call>' in text
    assert "[user] <tool_response>\nfrom look\n</tool_response>" in text


def test_values_are_written_as_json_where_the_template_would_write_python(
    known: dict[str, Tokenizer],
) -> None:
    values = {"on": True, "none": None, "text": "True", "number": 1, "deep": {"a": [None, "x"]}}
    messages = [USER, *called("look", arguments=values), ANSWER, USER]
    for family in ("qwen3-coder", "seed"):
        lines = render(known[family], messages).split("\n")
        assert lines[3:8] == [
            "on: true",
            "none: null",
            "text: True",
            "number: 1",
            'deep: {"a": [null, "x"]}',
        ], family


def test_text_beside_calls_comes_before_them(known: dict[str, Tokenizer]) -> None:
    for family in ("hermes 3", "gemma4", "llama3", "deepseek v3"):
        text = render(known[family], [USER, *called("look", content="I look."), ANSWER, USER])
        assert text.index("I look.") < text.index("call look") < text.index("from look"), family
    text = render(known["mistral nemo"], [USER, *called("look", content="I look."), ANSWER, USER])
    assert "<assistant-message>\nI look.\n</assistant-message>\n\nfrom look" in text


def test_thoughts_are_blocks_where_the_template_reads_blocks(known: dict[str, Tokenizer]) -> None:
    text = render(known["ministral"], [USER, *called("look", content="I look.")])
    assert "[assistant] <hm>I look.call look" in text
    thought = said("assistant", reasoning="hm", calls=[PastCall("look", {"key": "x"}, "c1")])
    text = render(known["ministral"], [USER, thought, said("tool", "y", call_id="c1")])
    assert "[assistant] <hm>call look" in text


NAMED = [
    {"name": "default", "template": FAMILY_RULES["gemma3"]},
    {"name": "tool_use", "template": FAMILY_RULES["llama3"] + "{{ tools | length }}<tool_call>"},
]


def test_a_chat_with_tools_is_adapted_to_the_template_for_tools(tmp_path: Path) -> None:
    folder = write_scripted(tmp_path / "m", ["Hi"])
    change(folder / "tokenizer_config.json", chat_template=NAMED)
    tokenizer = Tokenizer(folder)
    assert tokenizer.capabilities[0] == "tools"
    messages = [USER, *called("look", "find")]
    asked = ChatPrompt(messages=messages, tools=[ToolSpec(name="look", parameters={})])
    [planned] = plan(GenerationSpec(prompt=asked), tokenizer).prompts
    assert "call look" in planned.text
    assert planned.text.endswith("[assistant] 1<tool_call>")
    assert "<tool_response>" in render(tokenizer, messages), "the other one knows no tools"


def test_tools_come_with_a_system_message_where_there_would_be_none(tmp_path: Path) -> None:
    """The code that mlx-lm has for DeepSeek V3.2 writes tools into that message."""
    folder = write_scripted(tmp_path / "m", ["Hi"])
    change(folder / "tokenizer_config.json", chat_template=..., chat_template_type="deepseek_v32")
    tokenizer = Tokenizer(folder)
    asked = ChatPrompt(messages=[USER], tools=[ToolSpec(name="look", parameters={})])
    [planned] = plan(GenerationSpec(prompt=asked), tokenizer).prompts
    assert '"name": "look"' in planned.text
    messages = [USER, *called("look", "find", content="I look."), ANSWER, USER]
    [planned] = plan(GenerationSpec(prompt=ChatPrompt(messages=messages)), tokenizer).prompts
    for part in ("I look.", 'invoke name="look"', "of find", "from look", "two"):
        assert part in planned.text


def test_calls_of_one_id_have_one_result_each(known: dict[str, Tokenizer]) -> None:
    messages = HISTORIES["calls of one id"]
    calls = ['call look {"key": "a"}', 'call look {"key": "b"}']
    results = ["[tool] from a", "[tool] from b"]
    apart = [line for pair in zip(calls, results, strict=True) for line in ("[assistant] ", *pair)]
    together = ["[assistant] ", *calls, *results]
    for family, lines in (("llama3", apart), ("mistral", together)):
        wanted = "\n".join(["[user] one", *lines, "[assistant] "])
        assert render(known[family], messages) == wanted


def test_an_empty_answer_at_the_end_is_the_one_that_is_asked_for(
    known: dict[str, Tokenizer],
) -> None:
    """Also where the request says that the last message goes on."""
    for continues in (False, True):
        asked = ChatPrompt(messages=[USER, said("assistant")], continues=continues)
        [planned] = plan(GenerationSpec(prompt=asked), known["mistral small"]).prompts
        assert planned.text == "[user] one\n[assistant] "


def test_null_content_beside_calls_is_nothing_where_the_family_wants_that(
    known: dict[str, Tokenizer],
) -> None:
    text = render(known["deepseek v3"], [USER, *called("look")])
    assert text == '[user] one\ncall look {"key": "of look"}\n[tool] from look\n[assistant] '
    text = render(known["deepseek v3"], [USER, *called("look", content="I look.")])
    assert text.startswith("[user] one\n[assistant] I look.\ncall look {")


# System messages in the middle of a chat.

LATE = [SYSTEM, USER, ANSWER, said("user", "three"), said("system", "hurry")]
REMINDER = "<system-reminder>\nhurry\n</system-reminder>"


@pytest.mark.parametrize("name", ["qwen3.5", "gemma3", "mistral", "dropping", "to the front"])
def test_a_late_system_message_becomes_a_reminder_in_its_place(
    known: dict[str, Tokenizer], name: str
) -> None:
    text = render(known[name], LATE).removesuffix("[assistant] ")
    wanted = f"[system] brief\n[user] one\n[assistant] two\n[user] three\n\n{REMINDER}\n"
    assert text == wanted
    answered = [*LATE, said("assistant", "four")]
    assert render(known[name], answered).startswith(text), "the next turn goes on with this prompt"


def test_a_reminder_joins_the_users_messages_beside_it(known: dict[str, Tokenizer]) -> None:
    chat = [said("user", "a"), said("system", "hurry"), said("user", "c")]
    assert render(known["gemma3"], chat) == f"[user] a\n\n{REMINDER}\n\nc\n[assistant] "


def test_a_chat_that_nothing_helps_is_refused_in_the_templates_words(tmp_path: Path) -> None:
    folder = write_scripted(tmp_path / "m", ["Hi"], template="{{ raise_exception('no') }}")
    with pytest.raises(InvalidRequest, match="refused them: no"):
        render(Tokenizer(folder), LATE)


@pytest.mark.slow
@pytest.mark.parametrize("roles", [("user", "user"), ("user", "system"), ("tool", "user")])
def test_many_turns_are_adapted_in_time(
    known: dict[str, Tokenizer], roles: tuple[str, str]
) -> None:
    """Texts are joined once."""
    template = known["mistral"].chat_template

    def adapt(count: int) -> None:
        messages = [{"role": roles[i % 2], "content": "x" * 2000} for i in range(count)]
        assert template.adapt(messages)

    adapt(1)
    assert_linear(adapt, 625)
