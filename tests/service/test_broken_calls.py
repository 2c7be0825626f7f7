"""Tool calls that are cut off or nonsense: what the outputs say, and the log."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from mlxsrv.generation.outputs import Answer, AnswerBuilder, Ended
from mlxsrv.generation.spec import ChatMessage, ChatPrompt, GenerationSpec, ToolSpec
from mlxsrv.models.pool.clients import Client
from mlxsrv.service.service import Service
from mlxsrv.settings import Settings
from tests.support.scripted import cut, write_scripted

GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": "one"}}\n</tool_call>'
LIST = '<tool_call>\n{"name": "f", "arguments": ["b", 2]}\n</tool_call>'
LONG = '<tool_call>\n{"name": "f", "arguments": {"text": "as long as you like"}}\n</tool_call>'
NAMELESS = '<tool_call>\n{"call": "f", "with": 3}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "limit", "answer", "cause"),
    [
        pytest.param(
            GOOD, 99, ([("f", '{"a": "one"}', True)], "", "", "tool_calls"), None, id="good"
        ),
        pytest.param(
            GOOD + LIST,
            99,
            ([("f", '{"a": "one"}', True), ("f", '["b", 2]', False)], "", "", "tool_calls"),
            "its arguments are no JSON object",
            id="no object",
        ),
        pytest.param(
            LIST + GOOD,
            99,
            ([("f", '["b", 2]', False), ("f", '{"a": "one"}', True)], "", "", "tool_calls"),
            "its arguments are no JSON object",
            id="the first of two",
        ),
        pytest.param(
            LONG,
            9,
            ([("f", '{"text', False)], "", LONG[:45], "length"),
            "cut off by a limit",
            id="cut in its arguments",
        ),
        pytest.param(
            LONG, 3, ([], "", LONG[:15], "length"), "cut off by a limit", id="cut in its name"
        ),
        pytest.param(
            NAMELESS,
            99,
            ([], NAMELESS, "", "stop"),
            "no call could be read, so it is content",
            id="no call",
        ),
        pytest.param(
            OTHER,
            99,
            ([("h", "{}", True)], "", "", "tool_calls"),
            "the request has no tool of this name",
            id="another tool",
        ),
    ],
)
def test_a_broken_call_is_told_and_logged_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    text: str,
    limit: int,
    answer: tuple[list[tuple[str, str, bool]], str, str, str],
    cause: str | None,
) -> None:
    folder = write_scripted(tmp_path / "m", cut(text, 5))
    with caplog.at_level(logging.INFO, "mlxsrv"):
        got, ended = asyncio.run(asyncio.wait_for(_answer(folder, limit), 60))
    tools, content, fragment, reason = answer
    assert [(use.name, use.arguments, use.complete) for use in got.tools] == tools
    assert (got.content, got.fragment, got.reason) == (content, fragment, reason)
    assert ended.broken == tuple(i for i, (*_, complete) in enumerate(tools) if not complete)
    lines = [vars(r)["mlxsrv_fields"] for r in caplog.records if r.message == "tool call broken"]
    said = [(line["request"], line["cause"]) for line in lines]
    assert said == ([("r1", cause)] if cause else [])


async def _answer(folder: Path, limit: int) -> tuple[Answer, Ended]:
    tool = ToolSpec(name="f", parameters={"type": "object"})
    prompt = ChatPrompt(messages=[ChatMessage(role="user", content="x")], tools=[tool])
    service = Service(Settings(model=(f"m={folder}",)))
    spec = GenerationSpec(prompt=prompt, limit=limit)
    reply = await service.generate(spec, "r1", "id", Client("c"))
    builder = AnswerBuilder(1, scored=False)
    await reply.admit()
    ends: list[Ended] = []
    while not ends:
        for output in await reply.outputs():
            builder.add(output)
            if isinstance(output, Ended):
                ends.append(output)
    reply.release()
    await service.close()
    return builder.make()[0], ends[0]
