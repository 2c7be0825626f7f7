"""Constraints: the grammar that a request asks its answers to follow."""

from __future__ import annotations

import re

import msgspec

from mlxsrv.errors import UnsupportedParameter
from mlxsrv.prompts.grammars.specs import GrammarSpec, tool_grammar
from mlxsrv.text.tools import ToolDialect
from mlxsrv.wire.constraints import ChoiceForm, Form, GrammarForm, JSONForm, RegexForm
from mlxsrv.wire.generation_request import GenerationRequest
from mlxsrv.wire.requests import ChatRequest, NamedTool

# Every grammar of llama.cpp has this, and no Lark grammar can.
_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


class ConstraintSpec(msgspec.Struct, frozen=True):
    """A grammar that answers must follow, and the request's field that asks for it."""

    spec: GrammarSpec
    param: str


def chat_constraint(request: ChatRequest, dialect: ToolDialect | None) -> ConstraintSpec | None:
    """Return what a chat's answer must follow, or None.

    If a tool must be called, the answer is calls and nothing else. If tools may be called, a
    `response_format` binds an answer that calls none.

    Args:
        dialect: how the model calls the request's tools; None without tools.

    Raises:
        UnsupportedParameter: a call cannot be enforced in the model's dialect.
    """
    forced = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
    if forced:
        return _calls(request, dialect, "tool_choice")
    form = next(iter(request.forms), None)
    if form is None or dialect is None:
        return _answer(form)
    if not isinstance(form, JSONForm):
        raise UnsupportedParameter(
            f"{form.param}: cannot be combined with tools that may be called; leave tools out, or "
            'set tool_choice to "none"',
            param=form.param,
        )
    return _calls(request, dialect, form.param, otherwise=form)


def text_constraint(request: GenerationRequest) -> ConstraintSpec | None:
    """Return what an answer must follow, tools aside, or None."""
    return _answer(next(iter(request.forms), None))


def _answer(form: Form | None) -> ConstraintSpec | None:
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
            return ConstraintSpec(GrammarSpec("json_object"), param)
        case JSONForm(param=param, schema=schema, compact=compact):
            text = msgspec.json.encode(schema).decode()
            return ConstraintSpec(GrammarSpec("json_schema", text, compact), param)


def _calls(
    request: ChatRequest,
    dialect: ToolDialect | None,
    param: str,
    otherwise: JSONForm | None = None,
) -> ConstraintSpec:
    if dialect is None or not dialect.json or not dialect.end:
        raise UnsupportedParameter(
            f"{param}: this model does not call tools in JSON, so what it calls cannot be enforced",
            param=param,
        )
    choice = request.tool_choice
    only = choice.function.name if isinstance(choice, NamedTool) else None
    tools = [
        (tool.function.name, tool.function.parameters or {})
        for tool in request.tools or ()
        if only in (None, tool.function.name)
    ]
    many = only is None and request.parallel_tool_calls is not False
    spec = tool_grammar(
        tools,
        dialect.start,
        dialect.end,
        many=many,
        otherwise=None if otherwise is None else otherwise.schema,
        compact=otherwise is not None and otherwise.compact,
    )
    return ConstraintSpec(spec, param)
