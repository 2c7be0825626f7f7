"""Checkpoints of a chat: how much of its prompt later prompts will share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.prompts.templates.messages import Chat, PlainMessage
from mlxsrv.prompts.tokenizer import Prompt, Tokenizer
from tests.prompts.test_tokenizer import change
from tests.support.fixtures import ModelFolder

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

THINKING = """\
{%- set last = namespace(at=0) -%}
{%- for m in messages if m.role == 'user' %}{% set last.at = loop.index0 %}{% endfor -%}
{%- set ns = namespace(users=0, all=messages|selectattr('role', 'equalto', 'user')|list|length) -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and ns.users == ns.all -%}
<think>
{{ m.reasoning_content or '' }}
</think>
{% endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
<think>
{% endif -%}
"""
"""As Qwen3's thinking models have it: thoughts since the last question stay, older ones go."""

LLAMA = """\
{{ '<|endoftext|>' }}{% for m in messages %}\
{{ '<|im_start|>' + m.role + '\n\n' + m.content | trim + '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"""
INSTRUCT = """\
{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"""
MOODY = """\
{% if messages|length > 4 %}{{ raise_exception('no') }}{% endif %}\
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"""


@pytest.fixture
def folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder("mamba2"), tmp_path / "m"))


def make(folder: Path, template: str | None = None) -> Tokenizer:
    if template is not None:
        change(folder / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer(folder)
    tokenizer.marks_checkpoints = True
    return tokenizer


def say(role: str, content: str, **more: Any) -> PlainMessage:
    return {"role": role, "content": content, **more}


def beginnings(tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    return [tokenizer.decode(prompt.tokens[:place]) for place in prompt.checkpoints]


def test_chats_are_marked_for_models_that_ask(folder: Path) -> None:
    chat = Chat(messages=[SYSTEM, say("user", "hello")])
    tokenizer = make(folder)
    tokenizer.marks_checkpoints = False
    assert tokenizer.render(chat).checkpoints == ()
    tokenizer.marks_checkpoints = True
    system = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    turn = "<|im_start|>system\nBe brief.<|im_end|>"
    whole = f"{system}hello<|im_end|>\n<|im_start|>assistant\n"
    assert beginnings(tokenizer, tokenizer.render(chat)) == [turn, system, whole]


def test_a_block_of_thoughts_that_the_template_opens_is_not_shared(folder: Path) -> None:
    tokenizer = make(folder)
    chat = Chat(messages=[say("user", "hello")], variables={"enable_thinking": True})
    prompt = tokenizer.render(chat)
    assert prompt.thinking
    assert beginnings(tokenizer, prompt)[-1] == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thoughts_that_the_next_question_drops_are_not_shared(folder: Path) -> None:
    """In a loop of calls both matter: the next call goes on behind them, the next question where
    they began."""
    tokenizer = make(folder, THINKING)
    loop = [
        say("user", "hello"),
        say("assistant", "I look", reasoning_content="hm"),
        say("tool", "nothing"),
    ]
    found = beginnings(tokenizer, tokenizer.render(Chat(messages=loop, tools=TOOLS)))
    question = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert question in found
    assert found[-1].endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("template", [None, THINKING, LLAMA, INSTRUCT])
@pytest.mark.parametrize("system", [True, False])
def test_each_turn_begins_with_a_checkpoint_of_the_turn_before(
    folder: Path, template: str | None, system: bool
) -> None:
    """The last one, which is all that they share, or a token less."""
    tokenizer = make(folder, template)
    messages = [SYSTEM] if system and template is not INSTRUCT else []
    before: Prompt | None = None
    for turn in range(6):
        messages = [*messages, say("user", f"question {turn}, in some words: {turn * 'so '}é")]
        prompt = tokenizer.render(Chat(messages=messages))
        if before is not None:
            shared = len(before.tokens)
            while before.tokens[:shared] != prompt.tokens[:shared]:
                shared -= 1
            assert before.checkpoints[-1] in (shared, shared - 1)
        before = prompt
        thoughts = {"reasoning_content": "I think so"}
        messages.append(say("assistant", f"answer {turn}\nin two lines", **thoughts))


def test_chats_with_the_same_beginning_share_a_checkpoint(folder: Path) -> None:
    tokenizer = make(folder)
    cases: list[tuple[list[PlainMessage], dict[str, Any]]] = [
        ([SYSTEM], {}),
        ([], {"tools": TOOLS}),
        ([SYSTEM], {"tools": TOOLS}),
    ]
    for first, more in cases:
        chats = [
            Chat(messages=[*first, say("user", question)], **more)
            for question in ("hello", "mlx?", "§", "\n\n1")
        ]
        places = [set(tokenizer.render(chat).checkpoints) for chat in chats]
        assert set.intersection(*places)


def test_a_template_that_refuses_leaves_out_what_it_refuses(folder: Path) -> None:
    tokenizer = make(folder, MOODY)
    messages = [say(role, "hello") for role in ("user", "assistant", "user", "assistant")]
    assert tokenizer.render(Chat(messages=messages)).checkpoints
    assert tokenizer.render(Chat(messages=messages, template=MOODY)).checkpoints == ()


def test_checkpoints_of_a_long_chat_are_within_it(folder: Path) -> None:
    """Also where finding one would take as long as encoding all of it again."""
    tokenizer = make(folder, THINKING)
    loop = [SYSTEM, say("user", "hello")]
    for step in range(30):
        loop += [say("assistant", "I look", reasoning_content="hm"), say("tool", f"{step} " * 900)]
    prompt = tokenizer.render(Chat(messages=loop, tools=TOOLS))
    assert list(prompt.checkpoints) == sorted({*prompt.checkpoints})
    assert 0 < prompt.checkpoints[0] < prompt.checkpoints[-1] <= len(prompt.tokens)
