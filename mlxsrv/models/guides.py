"""What a request wants its answers to be bound to, as a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from mlxsrv.errors import UnsupportedParameter
from mlxsrv.text.tools import Dialect
from mlxsrv.wire.requests import (
    ChatRequest,
    GenerationRequest,
    JSONObjectFormat,
    JSONSchemaFormat,
    NamedTool,
)

if TYPE_CHECKING:
    from mlxsrv.engine.grammar import GrammarSpec


class Guide(msgspec.Struct, frozen=True):
    """A grammar, and the request's field that asks for it."""

    spec: GrammarSpec
    param: str


def guide_chat(request: ChatRequest, dialect: Dialect | None) -> Guide | None:
    """What a chat's answer must follow; `dialect` is how its tools are called.

    A tool that must be called leaves no room for anything else. With tools that may be called, a
    `response_format` binds the answer that is none.

    Raises:
        UnsupportedParameter: a call cannot be enforced in the model's dialect.
    """
    forced = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
    if forced:
        return _guide_calls(request, dialect, "tool_choice")
    schema = _schema(request)
    if dialect is not None and (schema is not None or request.constraints):
        [param] = request.constraints
        if schema is None:
            raise UnsupportedParameter(
                f"{param}: cannot be combined with tools that may be called; leave tools out, or "
                'set tool_choice to "none"',
                param=param,
            )
        return _guide_calls(request, dialect, param, otherwise=schema)
    return guide_text(request) if schema is None else _guide_json(request.constraints[0], schema)


def guide_text(request: GenerationRequest) -> Guide | None:
    """What any answer must follow by the `guided_*` fields."""
    from mlxsrv.engine.grammar import GrammarSpec  # with the engine: MLX is not imported before

    if request.guided_regex is not None:
        return Guide(GrammarSpec("regex", request.guided_regex), "guided_regex")
    if request.guided_grammar is not None:
        return Guide(GrammarSpec("lark", request.guided_grammar), "guided_grammar")
    if request.guided_choice is not None:
        choices = msgspec.json.encode(request.guided_choice).decode()
        return Guide(GrammarSpec("choice", choices), "guided_choice")
    schema = request.guided_schema
    return None if schema is None else _guide_json("guided_json", schema)


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema of the answer, if it is to be JSON."""
    match request.response_format:
        case JSONObjectFormat():
            return {"type": "object"}
        case JSONSchemaFormat(json_schema=named):
            return named.schema
    return request.guided_schema


def _guide_json(param: str, schema: dict[str, Any]) -> Guide:
    from mlxsrv.engine.grammar import GrammarSpec

    if schema == {"type": "object"}:
        return Guide(GrammarSpec("json_object"), param)
    return Guide(GrammarSpec("json_schema", msgspec.json.encode(schema).decode()), param)


def _guide_calls(
    request: ChatRequest,
    dialect: Dialect | None,
    param: str,
    otherwise: dict[str, Any] | None = None,
) -> Guide:
    from mlxsrv.engine.grammar import tool_grammar

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
    spec = tool_grammar(tools, dialect.start, dialect.end, many=many, otherwise=otherwise)
    return Guide(spec, param)
