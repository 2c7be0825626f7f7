"""Every format of calls, over HTTP: all dialects say the same, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.text.call_formats.calls import WrittenCall
from mlxsrv.text.formats import CALLS, THOUGHTS
from tests.support.effort import often
from tests.support.tiny import CHAT_TEMPLATE
from tests.support.turns import write_turns
from tests.web.dialects.asking import DIALECTS
from tests.web.dialects.spoken import Spoken, Tool, asking

WRITE = Tool(
    "write",
    "Write a file",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object", "properties": {"deep": {"type": "boolean"}}},
        },
        "required": ["path", "text"],
    },
)
NOW = Tool("now", "The time", {"type": "object", "properties": {}})
ARGUMENTS: dict[str, Any] = {
    "path": "a b/ü.py",
    "text": "a = \"x\" if b < 1 else 'y'\n  007\n",
    "mode": 420,
    "tags": ["x", "é"],
    "more": {"deep": True},
}
CALLED = [WrittenCall("write", ARGUMENTS), WrittenCall("now", {})]

BEFORE = {
    "harmony": "<|channel|>commentary<|message|>I write.<|end|><|start|>assistant",
    "kimi_k3": "<|open|>response<|sep|>I write.<|close|>response<|sep|>",
    "muse": " to=user<|message|>I write.<|eom|><|start|>assistant",
}
"""The text before calls, where it is a message or a channel of its own."""

NO_TOOLS = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
TOLD = """messages[0].role == 'system' and '"name": "now"' in messages[0].content"""
"""The template that knows no tools; its model calls them if the system message tells of them."""

NO_TEXT = {"llama4_pythonic", "llama_json", "mistral_list", "pythonic", "xlam"}
"""Formats in which an answer is text or calls."""

ONE = {"harmony", "llama_json", "granite", "gigachat"}
"""Formats in which an answer makes one call, or has no word for several."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("formats")
    models, calls, thoughts = [], [], []
    for name, format in CALLS.items():
        frame = THOUGHTS.get(name, THOUGHTS["none"])
        said = "" if name in NO_TEXT else BEFORE.get(name, "I write.")
        called = CALLED[:1] if name in ONE else CALLED
        path = write_turns(
            folder / name,
            {"true" if name != "prompted" else TOLD: said + format.spell(called)},
            template=NO_TOOLS if name == "prompted" else CHAT_TEMPLATE,
            markers=[*format.marks, *frame.marks],
            merges=150,
        )
        models.append(f"{name}={path}")
        calls.append(f"{name}={name}")
        thoughts.append(f"{name}={frame.name}")
    settings = mlxsrv.Settings(
        model=tuple(models),
        tool_format=tuple(calls),
        thinking_format=tuple(thoughts),
        hf_cache=False,
        trust_remote_code=True,
    )
    with TestClient(mlxsrv.create_app(settings)) as client:
        yield client


EVERYWHERE = ("hermes", "qwen_xml", "gemma4", "harmony", "kimi_k2", "prompted")
"""Formats that are spoken in all dialects in every run: of each kind one."""


def check(client: TestClient, name: str, dialects: Sequence[tuple[Spoken, Spoken]]) -> None:
    """Fails unless the first of each two says the call whole, and the other streamed."""
    called = CALLED[:1] if name in ONE else CALLED
    asked = asking("Write it.", model=name, tools=[WRITE, NOW], limit=1000)
    asks = [ask for whole, streamed in dialects for ask in (whole.ask, streamed.stream)]
    with ThreadPoolExecutor(len(asks)) as pool:
        answers = list(pool.map(lambda ask: ask(client, asked), asks))
    for said in answers:
        assert said.text == ("" if name in NO_TEXT else "I write.")
        calls = [(call.name, call.arguments) for call in said.calls]
        assert calls == [(call.name, call.arguments) for call in called]
        assert (said.finish, said.thoughts) == ("tool_calls", "")


@pytest.mark.parametrize("name", often(CALLS, EVERYWHERE))
def test_a_call_in_each_format_is_the_same_in_all_dialects(client: TestClient, name: str) -> None:
    check(client, name, [(spoken, spoken) for spoken in DIALECTS.values()])


@pytest.mark.parametrize("name", [name for name in CALLS if name not in EVERYWHERE])
def test_a_call_in_each_format_is_read(client: TestClient, name: str) -> None:
    """Whole in one dialect, and streamed in the next."""
    place, dialects = list(CALLS).index(name), list(DIALECTS.values())
    check(client, name, [(dialects[place % 4], dialects[(place + 1) % 4])])
