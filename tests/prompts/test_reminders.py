"""System messages in the middle of a chat: read where they stand, or as reminders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.spec import ChatMessage, ChatPrompt, GenerationSpec
from mlxsrv.prompts.planning import plan
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.scripted import write_scripted

TURN = "[{{ message.role }}] {{ message.content }}\n"
IN_PLACE = "{% for message in messages %}" + TURN + "{% endfor %}"
REFUSING = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    + TURN
    + "{% endfor %}"
)
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
ALTERNATING = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    "{% for message in messages %}" + TURN + "{% endfor %}"
)
WITHOUT = [REFUSING, DROPPING, TO_THE_FRONT, ALTERNATING]

CHAT = [
    ChatMessage(role="system", content="be brief"),
    ChatMessage(role="user", content="one"),
    ChatMessage(role="assistant", content="two"),
    ChatMessage(role="user", content="three"),
    ChatMessage(role="system", content="hurry"),
]


def tokenizer(folder: Path, template: str) -> Tokenizer:
    return Tokenizer(write_scripted(folder / "m", ["Hi"], template=template))


def render(known: Tokenizer, messages: Sequence[ChatMessage], *, reminds: bool = True) -> str:
    prompt = ChatPrompt(messages=messages, reminds=reminds)
    [planned] = plan(GenerationSpec(prompt=prompt), known).prompts
    return planned.text


def test_a_template_that_can_reads_it_where_it_stands(tmp_path: Path) -> None:
    known = tokenizer(tmp_path, IN_PLACE)
    assert render(known, CHAT) == render(known, CHAT, reminds=False)
    assert render(known, CHAT).endswith("[user] three\n[system] hurry\n")


@pytest.mark.parametrize("template", WITHOUT)
def test_others_read_a_reminder_in_that_place(tmp_path: Path, template: str) -> None:
    known = tokenizer(tmp_path, template)
    text = render(known, CHAT)
    reminder = "<system-reminder>\nhurry\n</system-reminder>"
    assert text == (f"[system] be brief\n[user] one\n[assistant] two\n[user] three\n\n{reminder}\n")
    answered = [*CHAT, ChatMessage(role="assistant", content="four")]
    assert render(known, answered).startswith(text), "the next turn goes on with this prompt"


def test_a_reminder_joins_the_users_messages_beside_it(tmp_path: Path) -> None:
    known = tokenizer(tmp_path, ALTERNATING)
    late = ChatMessage(role="system", content="b")
    chat = [ChatMessage(role="user", content="a"), late, ChatMessage(role="user", content="c")]
    reminder = "<system-reminder>\nb\n</system-reminder>"
    assert render(known, chat) == f"[user] a\n\n{reminder}\n\nc\n"


def test_system_messages_at_the_beginning_are_one(tmp_path: Path) -> None:
    known = tokenizer(tmp_path, REFUSING)
    chat = [ChatMessage(role="system", content="and kind"), *CHAT[1:2]]
    assert render(known, [CHAT[0], *chat]) == "[system] be brief\n\nand kind\n[user] one\n"


def test_a_chat_that_does_not_ask_for_it_is_the_templates_matter(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="refused them: no"):
        render(tokenizer(tmp_path, REFUSING), CHAT, reminds=False)
