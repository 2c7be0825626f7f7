"""Ollama's API, as its client for Python has it: requests that it sent, and what it reads.

`ollama_schemas.json` are the types of `ollama` 0.6.3 as pydantic describes them;
`ollama_requests.jsonl` is what that release sends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

_HERE = Path(__file__).parent
_SCHEMAS = json.loads((_HERE / "ollama_schemas.json").read_text("utf-8"))

Line = dict[str, Any]


class Recorded(msgspec.Struct, frozen=True):
    """A request of the client."""

    label: str
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any] | None


RECORDED = {
    each.label: each
    for each in (
        msgspec.json.decode(line, type=Recorded)
        for line in (_HERE / "ollama_requests.jsonl").read_bytes().splitlines()
    )
}


def check_type(body: object, name: str) -> None:
    """Fails unless the client's type `name` reads `body`, and knows all fields at its top."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": _SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(body)
    assert isinstance(body, dict)
    assert body.keys() <= _SCHEMAS["$defs"][name]["properties"].keys(), name


def read_lines(data: bytes) -> list[Line]:
    """The objects of a stream, to the letter of the format: one a line, whoever splits it."""
    text = data.decode("utf-8")
    assert text.endswith("\n")
    lines = text[:-1].split("\n")
    assert text.splitlines() == lines
    return [json.loads(line) for line in lines]
