"""Constraints: the grammar that a request asks its answers to follow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from mlxsrv.errors import UnsupportedParameter
from mlxsrv.generation.spec import (
    ChatPrompt,
    ChoiceForm,
    Form,
    GenerationSpec,
    GrammarForm,
    JSONForm,
    RegexForm,
    ToolSpec,
)
from mlxsrv.prompts.grammars.specs import GrammarSpec, each_call, tool_grammar
from mlxsrv.text.reader import OfferedCalls

# Every grammar of llama.cpp has this, and no Lark grammar can.
_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


class ConstraintSpec(msgspec.Struct, frozen=True):
    """A grammar that answers must follow.

    Attributes:
        param: the request's field that asks for it.
        calls_only: it begins where the model opens a tool call and ends with that call; all other
            text is free.
    """

    spec: GrammarSpec
    param: str
    calls_only: bool = False


def chat_constraint(
    spec: GenerationSpec,
    asked: ChatPrompt,
    calls: OfferedCalls | None,
    *,
    enforces: bool = False,
    thoughts: str = "",
) -> ConstraintSpec | None:
    """Return what a chat's answer must follow, or None.

    If a tool must be called, the answer is calls and nothing else. If tools may be called, a
    `response_format` binds an answer that calls none. Thoughts may come before.

    Args:
        calls: those of the request's tools; None without tools.
        enforces: each call that the model may make is held to its tool's schema. A tool that is
            `strict` asks for that itself.
        thoughts: the name of the format of thoughts that the model opens itself, if it may.

    Raises:
        UnsupportedParameter: what is asked cannot be combined.
    """
    if asked.tool_choice.mode == "required":
        return _calls(asked, calls, spec.path("tool_choice"), thoughts)
    form = spec.form
    strict = enforces or any(tool.strict for tool in asked.tools)
    if form is None and calls is not None and strict:
        grammar = each_call(_callable(asked), calls.format.name, thoughts)
        return ConstraintSpec(grammar, spec.path("tools"), calls_only=True)
    if form is None or calls is None:
        return _answer(form, thoughts)
    if not isinstance(form, JSONForm):
        raise UnsupportedParameter(
            f"{form.param}: cannot be combined with tools that may be called; leave tools out, or "
            'set tool_choice to "none"',
            param=form.param,
        )
    return _calls(asked, calls, form.param, thoughts, otherwise=form)


def text_constraint(spec: GenerationSpec) -> ConstraintSpec | None:
    """Return what an answer must follow, tools aside, or None."""
    return _answer(spec.form)


def _answer(form: Form | None, thoughts: str = "") -> ConstraintSpec | None:
    match form:
        case None:
            return None
        case RegexForm(param=param, regex=regex):
            return ConstraintSpec(GrammarSpec("regex", regex), param)
        case GrammarForm(param=param, text=text):
            return ConstraintSpec(
                GrammarSpec("gbnf" if _GBNF.search(text) else "lark", text), param
            )
        case ChoiceForm(param=param, choices=choices):
            return ConstraintSpec(
                GrammarSpec("choice", msgspec.json.encode(choices).decode()), param
            )
        case JSONForm(param=param, schema={"type": "object", **rest}, compact=False) if not rest:
            return ConstraintSpec(GrammarSpec("json_object", thoughts=thoughts), param)
        case JSONForm(param=param, schema=schema, compact=compact):
            text = msgspec.json.encode(schema).decode()
            return ConstraintSpec(GrammarSpec("json_schema", text, compact, thoughts), param)


def _calls(
    asked: ChatPrompt,
    calls: OfferedCalls | None,
    param: str,
    thoughts: str,
    otherwise: JSONForm | None = None,
) -> ConstraintSpec:
    if calls is None:
        raise UnsupportedParameter(
            f"{param}: it is not known how this model calls tools, so no call can be enforced",
            param=param,
        )
    spec = tool_grammar(
        _callable(asked),
        calls.format.name,
        many=len(asked.tool_choice.only) != 1 and asked.parallel,
        otherwise=None if otherwise is None else otherwise.schema,
        compact=otherwise is not None and otherwise.compact,
        thoughts=thoughts,
    )
    return ConstraintSpec(spec, param)


def _callable(asked: ChatPrompt) -> list[tuple[str, Mapping[str, Any]]]:
    """Return names and schemas of the tools that may be called."""
    only = asked.tool_choice.only
    return [(tool.name, _schema(tool)) for tool in asked.tools if not only or tool.name in only]


def _schema(tool: ToolSpec) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments.

    A custom tool's input is a JSON string in it. A regex can bind that string, as a pattern. A Lark
    grammar cannot: it describes the text, not how JSON writes it.
    """
    match tool.input_form:
        case RegexForm(regex=regex):
            text = {"type": "string", "pattern": f"^(?:{regex})$"}
            return {"properties": {"input": text}, "required": ["input"]}
    return tool.parameters or {}
