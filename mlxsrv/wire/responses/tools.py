"""Tools of a request: functions, custom tools, and namespaces of both.

The model sees functions only. A custom tool, whose input is a free text, is a function with the one
parameter `input`. A tool of a namespace has the name of the namespace before its own. Calls are
given back as the client knows the tools. Tools that a host would run are left out, and named among
the ignored fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.spec import GrammarForm, RegexForm, ToolChoice, ToolSpec
from mlxsrv.wire.decoding import decode_part, missing
from mlxsrv.wire.openai.requests import Function, FunctionName, no_such_tool
from mlxsrv.wire.schema_rules import any_of
from mlxsrv.wire.tagged import TaggedKinds
from mlxsrv.wire.unknown import Search

# On the wire.


class FunctionTool(Function, frozen=True, omit_defaults=False, tag_field="type", tag="function"):
    pass


class InputFormat(Struct, frozen=True, kw_only=True):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    name: FunctionName
    description: str | None = None
    format: InputFormat | None = None


class NamespaceTool(Struct, frozen=True, kw_only=True, tag_field="type", tag="namespace"):
    name: FunctionName
    description: str | None = None
    tools: Annotated[
        list[Annotated[Raw, Meta(extra_json_schema=any_of((FunctionTool, CustomTool)))]],
        Meta(description="Tools of other types are left out."),
    ]


class AllowedTool(Struct, frozen=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class ToolChoiceObject(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tool, or several of which the model chooses."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


MOST_TOOLS = 1000

TOOL_KINDS: tuple[type[Struct], ...] = (FunctionTool, CustomTool, NamespaceTool)

RawTool = Annotated[Raw, Meta(extra_json_schema=any_of(TOOL_KINDS))]
"""A tool that is read by its type."""


class _Kind(Struct, frozen=True):
    type: str


_TOOLS: TaggedKinds[Any] = TaggedKinds(TOOL_KINDS, "tools[].")
_read_kind = msgspec.json.Decoder(_Kind).decode
_decode = msgspec.json.Decoder(dict[str, Any]).decode

# As the model sees them.


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class CallableTool(Struct, frozen=True, kw_only=True):
    """A tool that the model may call, as the client knows it."""

    spec: ToolSpec
    name: str
    namespace: str | UnsetType = UNSET
    custom: bool = False


class Toolbox(Struct, frozen=True):
    """The tools of a request, by the names that the model calls them.

    Attributes:
        shown: the tools as the response repeats them.
        hosted: whether tools that a host would run were left out.
    """

    tools: Mapping[str, CallableTool]
    shown: Sequence[dict[str, Any]] = ()
    hosted: bool = False

    def tool(self, name: str) -> CallableTool:
        """Return the tool that the model calls by this name, also if it made the name up."""
        return self.tools.get(name) or CallableTool(spec=ToolSpec(name=name), name=name)

    def named(self, name: str | None, namespace: str | None) -> list[str]:
        """Return the model's names for what a client calls so."""
        return [
            flat
            for flat, tool in self.tools.items()
            if name in (flat, tool.name) and namespace in (None, tool.namespace)
        ]


NO_TOOLS = Toolbox({})


def read_tools(tools: Sequence[Raw], search: Search) -> Toolbox:
    """Return the tools that the model may call.

    Args:
        search: notes tools that are left out, and unknown fields.

    Raises:
        InvalidRequest: a tool is wrong; the error has its path.
    """
    found: dict[str, CallableTool] = {}
    shown: list[dict[str, Any]] = []
    hosted = False
    count = len(tools)
    for i, raw in enumerate(tools):
        path = f"tools[{i}]"
        # Decoded, because a line end between two fields would break an event.
        plain = decode_part(_decode, raw, path)
        tool = _read_tool(raw, path, search)
        hosted = hosted or tool is None
        # OpenAI's types require all fields of a function.
        shown.append(msgspec.to_builtins(tool) if isinstance(tool, FunctionTool) else plain)
        if isinstance(tool, NamespaceTool):
            count += len(tool.tools)
            if count > MOST_TOOLS:
                raise InvalidRequest(
                    f"{path}.tools: a request has at most {MOST_TOOLS} tools, with those of "
                    "namespaces; leave some out",
                    param=f"{path}.tools",
                )
            for j, inner in enumerate(tool.tools):
                own = _read_tool(inner, f"{path}.tools[{j}]", search)
                if isinstance(own, FunctionTool | CustomTool):
                    _add(found, own, f"{path}.tools[{j}]", tool.name)
        elif tool is not None:
            _add(found, tool, path)
    return Toolbox(found, shown, hosted)


def _read_tool(
    raw: Raw, path: str, search: Search
) -> FunctionTool | CustomTool | NamespaceTool | None:
    tool: FunctionTool | CustomTool | NamespaceTool | None = _TOOLS.decode_new(
        decode_part(_read_kind, raw, path).type, raw, path, search
    )
    if tool is None:
        search.note("tools[]", path)
    return tool


def _add(
    found: dict[str, CallableTool],
    tool: FunctionTool | CustomTool,
    path: str,
    namespace: str | None = None,
) -> None:
    flat = flat_name(tool.name, namespace)
    found[flat] = CallableTool(
        spec=_custom_spec(tool, flat, path)
        if isinstance(tool, CustomTool)
        else tool.tool_spec(flat),
        name=tool.name,
        namespace=UNSET if namespace is None else namespace,
        custom=isinstance(tool, CustomTool),
    )


def _custom_spec(tool: CustomTool, flat: str, path: str) -> ToolSpec:
    form = _input_form(tool.format, f"{path}.format")
    what = "The input, as plain text."
    match form:
        case GrammarForm(text=text):
            what = f"The input, as plain text that this Lark grammar describes:\n{text}"
        case RegexForm(regex=regex):
            what = f"The input, as plain text that this regex matches:\n{regex}"
    return ToolSpec(
        name=flat,
        description=tool.description,
        parameters={
            "type": "object",
            "properties": {"input": {"type": "string", "description": what}},
            "required": ["input"],
            "additionalProperties": False,
        },
        input_form=form,
    )


def _input_form(form: InputFormat | None, path: str) -> RegexForm | GrammarForm | None:
    if form is None or form.type == "text":
        return None
    for name in ("syntax", "definition"):
        if not getattr(form, name):
            raise missing(f"{path}.{name}")
    assert form.definition is not None
    where = f"{path}.definition"
    if form.syntax == "regex":
        return RegexForm(where, form.definition)
    return GrammarForm(where, form.definition)


# The choice.

_NAMED = ("function", "custom")


def read_choice(
    asked: Literal["none", "auto", "required"] | ToolChoiceObject | None,
    toolbox: Toolbox,
    search: Search,
) -> ToolChoice:
    """Return whether the model must call a tool.

    Raises:
        InvalidRequest: there is no such tool.
    """
    if isinstance(asked, ToolChoiceObject):
        if asked.type == "allowed_tools":
            return _allowed(asked, toolbox)
        if asked.type in _NAMED:
            return ToolChoice("required", _one(asked, toolbox))
        search.note("tool_choice", "tool_choice")  # a tool that a host would run
        return ToolChoice()
    if asked == "required" and not toolbox.tools:
        if not toolbox.hosted:
            raise InvalidRequest("tool_choice: needs tools", param="tool_choice")
        search.note("tool_choice", "tool_choice")
        return ToolChoice()
    return ToolChoice() if asked is None else ToolChoice(asked)


def _one(asked: ToolChoiceObject, toolbox: Toolbox) -> tuple[str, ...]:
    names = toolbox.named(asked.name, asked.namespace)
    if not names:
        raise no_such_tool("tool_choice.name", toolbox.tools)
    return (names[0],)


def _allowed(asked: ToolChoiceObject, toolbox: Toolbox) -> ToolChoice:
    names = tuple(
        name
        for each in asked.tools or ()
        if each.type in _NAMED
        for name in toolbox.named(each.name, each.namespace)
    )
    if names:
        return ToolChoice(asked.mode or "auto", names)
    if asked.mode == "required":
        path = "tool_choice.tools"
        raise InvalidRequest(
            f"{path}: none of them is a tool that this server can offer; there are "
            f"{', '.join(toolbox.tools) or 'none'}",
            param=path,
        )
    return ToolChoice("none")
