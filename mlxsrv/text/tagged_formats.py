"""The table of formats of calls with tagged arguments."""

from __future__ import annotations

from collections.abc import Sequence

from mlxsrv.text.calls import CallFormat
from mlxsrv.text.tagged_calls import TaggedCalls
from mlxsrv.text.tagged_layout import TagLayout

_QWEN = TagLayout(
    before="<tool_call>\n",
    head="<function={name}>\n",
    argument="<parameter={key}>\n{value}\n</parameter>\n",
    tail="</function>\n",
    after="</tool_call>",
    heads=["< function{text}>?"],
    keys=["< parameter{text}>?"],
    closers=["< / parameter >"],
    tails=["< / function >"],
    ends=["</tool_call>"],
    skipped=["< / parameter >"],
    named=["name"],
    lines=True,
)
QWEN_XML = TaggedCalls(
    "qwen_xml",
    _QWEN,
    marks=("<tool_call>", "</tool_call>"),
    openers=["<tool_call>"],
    bare=["<function="],
)

TAGGED_FORMATS: Sequence[CallFormat] = (QWEN_XML,)
"""All of them."""
