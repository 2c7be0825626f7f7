"""The form that a request wants its answers to have: JSON, a regex, choices or a grammar.

OpenAI, vLLM and llama.cpp have different fields for this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from mlxsrv.errors import InvalidRequest, UnsupportedParameter
from mlxsrv.generation.spec import ChoiceForm, Form, GrammarForm, JSONForm, RegexForm
from mlxsrv.wire.schema_rules import GIVEN, TEXT, Schema, having
from mlxsrv.wording import error_in_words

GrammarText = Annotated[str, Meta(min_length=1)]
Regex = Annotated[str, Meta(min_length=1, extra_json_schema={"format": "regex"})]
Choices = Annotated[list[str], Meta(min_length=1)]
SchemaText = Annotated[
    str,
    Meta(
        extra_json_schema={
            "contentMediaType": "application/json",
            "contentSchema": {"type": "object"},
        }
    ),
]
SchemaOrText = dict[str, Any] | SchemaText

# Fields.


class TextFormat(Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class JSONObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object, or with llama.cpp's `schema` JSON that it describes."""

    schema: dict[str, Any] | None = None


class NamedSchema(Struct, frozen=True):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JSONSchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | JSONObjectFormat | JSONSchemaFormat


_ASKS_BY: Mapping[str, Schema] = {
    "grammar": TEXT,
    "json_object": {"const": True},
    "response_format": {
        "type": "object",
        "properties": {"type": {"enum": ["json_object", "json_schema"]}},
    },
}
"""The values with which a field asks for a form, if not all do."""


def asking(*names: str) -> list[Schema]:
    """The schemas of requests in which these fields ask for a form."""
    return [having(name, _ASKS_BY.get(name, GIVEN)) for name in names]


FORMS = ("json", "regex", "choice", "grammar", "json_object")
REFUSED = ("whitespace_pattern", "structural_tag")
"""The fields of StructuredOutputs that are forms, and those that are refused."""


class StructuredOutputs(Struct, frozen=True):
    """vLLM's object for every form. One of the first five says which form it is.

    `disable_any_whitespace` asks for compact JSON. `disable_additional_properties` asks for what
    is done anyway. The last two are known, and refused.
    """

    schema_rules: ClassVar[Schema] = {
        "properties": {name: {"type": "null", "description": "Not supported."} for name in REFUSED},
        "oneOf": asking(*FORMS),
    }

    json: SchemaOrText | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None


def format_forms(given: ResponseFormat | None) -> list[Form]:
    """Return the form that a `response_format` asks for, if any."""
    match given:
        case JSONObjectFormat(schema=schema):
            return [JSONForm("response_format", {"type": "object"} if schema is None else schema)]
        case JSONSchemaFormat(json_schema=named):
            return [JSONForm("response_format", named.schema)]
    return []


def structured_forms(given: StructuredOutputs) -> list[Form]:
    """Return the forms that a `structured_outputs` asks for; the caller refuses more than one.

    Raises:
        UnsupportedParameter: an option is set that is not supported.
        InvalidRequest: no form is given, or `json` is not a schema.
    """
    place = "structured_outputs"
    for name in REFUSED:
        if getattr(given, name) is not None:
            path = f"{place}.{name}"
            raise UnsupportedParameter(f"{path} is not supported; leave it out", param=path)
    compact = bool(given.disable_any_whitespace)
    forms: list[Form] = []
    if given.json is not None:
        path = f"{place}.json"
        forms.append(JSONForm(path, read_schema(given.json, path), compact))
    if given.regex is not None:
        forms.append(RegexForm(f"{place}.regex", given.regex))
    if given.choice is not None:
        forms.append(ChoiceForm(f"{place}.choice", given.choice))
    if given.grammar is not None:
        forms.append(GrammarForm(f"{place}.grammar", given.grammar))
    if given.json_object:
        forms.append(JSONForm(f"{place}.json_object", {"type": "object"}, compact))
    if not forms:
        raise InvalidRequest(
            f"{place}: is empty; give json, regex, choice, grammar or json_object", param=place
        )
    return forms


def read_schema(given: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """A schema as an object, also if it is given as a string of JSON.

    Raises:
        InvalidRequest: the string is not JSON of an object.
    """
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        what = f"{param}: not a JSON schema: {error_in_words(str(error))}"
        raise InvalidRequest(what, param=param) from None
