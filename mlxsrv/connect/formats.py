"""Put settings into the text of a configuration file and leave the rest of it as it is.

Libraries that keep comments change TOML and YAML; the extra `connect` installs them. A new file and
the lines that are printed need neither. JSON with comments is for the user to change.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final

import yaml

from mlxsrv.options import SettingsError


class Owned(dict[str, Any]):
    """A table of settings that belongs to mlxsrv alone: it replaces the one that is there."""


class CannotMerge(SettingsError):
    """The file cannot be changed safely; the message says why."""


def new_text(format: str, content: Mapping[str, Any]) -> str:
    """A file that has this content alone."""
    merged: dict[str, Any] = {}
    _merge(merged, content)
    return _FORMATS[format][0](merged)


def merged_text(format: str, text: str, content: Mapping[str, Any]) -> str:
    """The file's text with this content in it.

    Lines end as they do in `text`.

    Raises:
        CannotMerge: the text is not of this format, cannot be changed safely, or needs a library
            that is not installed.
    """
    if "\r\n" in text and text.count("\r\n") == text.count("\n"):
        merged = merged_text(format, text.replace("\r\n", "\n"), content)
        return merged.replace("\n", "\r\n")
    new = new_text(format, content)
    if text == new or not text.strip():
        return new
    try:
        return _FORMATS[format][1](text, content)
    except RecursionError:
        raise CannotMerge("it is nested too deeply") from None
    except ImportError as error:
        raise CannotMerge(
            f"to change it takes {error.name}, which pip install 'mlxsrv[connect]' installs"
        ) from None


def _merge(
    there: MutableMapping[str, Any], content: Mapping[str, Any], *, owned: bool = False
) -> None:
    """Change the settings that are there; if they are `owned`, no other stays.

    A table is changed and not replaced: comments that stand before the next one are part of it.
    """
    for key in [key for key in there if owned and key not in content]:
        del there[key]
    for key, value in content.items():
        if value is None:
            there.pop(key, None)
        elif isinstance(value, Mapping):
            if not isinstance(there.get(key), MutableMapping):
                there[key] = {}
            _merge(there[key], value, owned=owned or isinstance(value, Owned))
        elif there.get(key) != value:
            there[key] = value


def _check(before: Any, content: Mapping[str, Any], after: Any) -> None:
    """Raises CannotMerge if the changed text says something else than it should."""
    _merge(before, content)
    if after != before:
        raise CannotMerge("these settings are written there in another way")


def _write_json(content: Mapping[str, Any], indent: str = "  ") -> str:
    return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def _merge_json(text: str, content: Mapping[str, Any]) -> str:
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise CannotMerge(f"it has comments or is not JSON ({error})") from None
    if not isinstance(settings, dict):
        raise CannotMerge("it is not a JSON object")
    indent = re.search(r"^[ \t]+", text, re.MULTILINE)
    _merge(settings, content)
    try:
        merged = _write_json(settings, indent[0] if indent else "  ")
        merged.encode()
    except ValueError as error:
        raise CannotMerge(f"it has a value that JSON has not ({error})") from None
    return merged


def _write_toml(content: Mapping[str, Any]) -> str:
    return "\n\n".join("\n".join(lines) for lines in _toml_tables(content, ())) + "\n"


def _toml_tables(content: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[list[str]]:
    """The lines of each table that has settings of its own, with its header.

    The keys are bare ones, and JSON writes strings, numbers, booleans and lists as TOML does.
    """
    values = {key: value for key, value in content.items() if not isinstance(value, Mapping)}
    if values:
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
        ]
        yield [f"[{'.'.join(path)}]", *lines] if path else lines
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _toml_tables(value, (*path, key))


def _merge_toml(text: str, content: Mapping[str, Any]) -> str:
    import tomlkit

    try:
        before = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CannotMerge(f"it is not TOML ({error})") from None
    document = tomlkit.parse(text)
    _merge(document, content)
    merged = str(tomlkit.dumps(document))
    _check(before, content, tomllib.loads(merged))
    return merged


def write_yaml(content: object) -> str:
    """A list or a mapping as YAML, in lines."""
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return str(text)


def _merge_yaml(text: str, content: Mapping[str, Any]) -> str:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if any(isinstance(value, list) for value in content.values()):
        raise CannotMerge("it has settings already, and lists in YAML are not changed here")
    library = YAML()
    library.preserve_quotes = True
    library.width = sys.maxsize
    library.explicit_start = text.startswith("---")
    library.indent(sequence=4, offset=2)
    if re.search(r"^-[ \n]", text, re.MULTILINE):
        library.indent(sequence=2, offset=0)
    try:
        before, document = yaml.safe_load(text), library.load(text)
    except (YAMLError, yaml.YAMLError) as error:
        raise CannotMerge(f"it is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(document, dict):
        raise CannotMerge("it is not a YAML mapping")
    _merge(document, content)
    merged = io.StringIO()
    library.dump(document, merged)
    _check(before, content, yaml.safe_load(merged.getvalue()))
    return merged.getvalue()


_Writer = Callable[[Mapping[str, Any]], str]
_Merger = Callable[[str, Mapping[str, Any]], str]
_FORMATS: Final[Mapping[str, tuple[_Writer, _Merger]]] = MappingProxyType(
    {
        "json": (_write_json, _merge_json),
        "toml": (_write_toml, _merge_toml),
        "yaml": (write_yaml, _merge_yaml),
    }
)
