"""Tools for models whose chat template has no place for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxsrv.prompts.templates.messages import Messages
from mlxsrv.text.call_formats.calls import CallFormat, WrittenCall

_TEXT = """\
You may call these tools:
<tools>
{tools}
</tools>

To call a tool, write nothing but a call in this form, with a tool's name and its parameters:
{example}
Its result is in the next message. If no tool helps, answer in words."""


def describe_tools(
    messages: Messages, tools: Sequence[Mapping[str, Any]], format: CallFormat
) -> Messages:
    """Return messages in which the system tells which tools there are, and how they are called.

    Args:
        tools: as chat templates take them.
        format: in which the answers' calls are read.
    """
    example = format.spell([WrittenCall("name", {"parameter": "value"}, "example01")])
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TEXT.format(tools=listed, example=example)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
