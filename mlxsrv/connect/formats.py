"""Put settings into the text of a configuration file and leave the rest of it as it is.

No format is written in general. Each writer changes what it understands, and raises `CannotMerge`
for anything else: then the user puts the lines there.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from mlxsrv.options import SettingsError


class Owned(dict[str, Any]):
    """A table of settings that belongs to mlxsrv alone: it replaces the one that is there."""


class CannotMerge(SettingsError):
    """The file cannot be changed safely; the message says why."""


def new_text(format: str, content: Mapping[str, Any]) -> str:
    """A file that has this content alone."""
    return _WRITERS[format][0](_merged({}, content))


def merged_text(format: str, text: str, content: Mapping[str, Any]) -> str:
    """The file's text with this content in it.

    Lines end as they do in `text`.

    Raises:
        CannotMerge: the text is not of this format, or cannot be changed safely.
    """
    if "\r\n" in text and text.count("\r\n") == text.count("\n"):
        merged = merged_text(format, text.replace("\r\n", "\n"), content)
        return merged.replace("\n", "\r\n")
    new = new_text(format, content)
    if text == new or not text.strip():
        return new
    try:
        return _WRITERS[format][1](text, content)
    except RecursionError:
        raise CannotMerge("it is nested too deeply") from None


def _merged(there: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are there, changed by `content`."""
    result = dict(there)
    for key, value in content.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            before = {} if isinstance(value, Owned) else result.get(key)
            result[key] = _merged(before if isinstance(before, Mapping) else {}, value)
        else:
            result[key] = value
    return result


# JSON.


def _write_json(content: Mapping[str, Any], indent: str = "  ") -> str:
    return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def _merge_json(text: str, content: Mapping[str, Any]) -> str:
    try:
        there = json.loads(text)
    except ValueError as error:
        raise CannotMerge(f"it has comments or is not JSON ({error})") from None
    if not isinstance(there, dict):
        raise CannotMerge("it is not a JSON object")
    indent = re.search(r"^[ \t]+", text, re.MULTILINE)
    try:
        merged = _write_json(_merged(there, content), indent[0] if indent else "  ")
        merged.encode()
    except ValueError as error:
        raise CannotMerge(f"it has a value that JSON has not ({error})") from None
    return merged


# TOML. Comments stay: lines are changed, and then the result is compared with what was meant.

_TABLE = re.compile(r"\s*\[")


def _write_toml(content: Mapping[str, Any]) -> str:
    return "\n\n".join("\n".join(lines) for lines in _toml_tables(content, ())) + "\n"


def _toml_tables(content: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[list[str]]:
    """The lines of each table that has settings of its own, with its header."""
    values = {key: value for key, value in content.items() if not isinstance(value, Mapping)}
    if values:
        header = [f"[{'.'.join(map(_bare_or_quoted, path))}]"] if path else []
        yield header + [f"{_bare_or_quoted(key)} = {_json(value)}" for key, value in values.items()]
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _toml_tables(value, (*path, key))


def _bare_or_quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _json(key)


def _json(value: Any) -> str:
    """A string, number, boolean or list of them, which TOML and YAML write alike."""
    return json.dumps(value, ensure_ascii=False)


def _merge_toml(text: str, content: Mapping[str, Any]) -> str:
    try:
        there = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CannotMerge(f"it is not TOML ({error})") from None
    lines = text.rstrip("\n").split("\n")
    for key, value in reversed(list(content.items())):
        if not isinstance(value, Mapping):
            _replace_toml_value(lines, key, value)
    for table in _toml_tables(_merged({}, content), ()):
        if _TABLE.match(table[0]):
            _replace_toml_table(lines, table)
    result = "\n".join(lines) + "\n"
    try:
        same = tomllib.loads(result) == _merged(there, content)
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        raise CannotMerge("these settings are written there in another way")
    return result


def _replace_toml_value(lines: list[str], key: str, value: Any) -> None:
    """Put `key = value` above all tables: in the place of the same key, else first. With None,
    remove the key."""
    new = [] if value is None else [f"{_bare_or_quoted(key)} = {_json(value)}"]
    for number, line in enumerate(lines):
        if _TABLE.match(line):
            break
        if re.match(rf"\s*{re.escape(_bare_or_quoted(key))}\s*=", line):
            lines[number : number + 1] = new
            return
    lines[:0] = new


def _replace_toml_table(lines: list[str], table: list[str]) -> None:
    """Put a table in the place of the one with the same header, else last."""
    starts = [number for number, line in enumerate(lines) if line.strip() == table[0]]
    if not starts:
        lines += ["", *table]
        return
    [start, *_] = starts
    after = (n for n in range(start + 1, len(lines)) if _TABLE.match(lines[n]))
    end = next(after, len(lines))
    while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
        end -= 1  # what stands before the next table belongs to that one
    lines[start:end] = table


# YAML.

_COMMENT = re.compile(r"\s*(#.*)?")
_INNER = re.compile(r"\s.*|-( .*)?")
_SETTING = re.compile(
    r"""[\w-]+:                        # a key, and a value that ends on the same line:
    ([ ]+ (?: "(?:[^"\\]|\\.)*" | '(?:[^']|'')*'
            | \[[^][{}"'#]*\]
            | (?!.*:[ ]) [\w./~+-] (?:[^#]|(?<!\s)\#)* ) )?
    \s*([ ]\#.*)?""",
    re.VERBOSE,
)


def _write_yaml(content: Mapping[str, Any]) -> str:
    return "\n".join(_yaml_lines(content)) + "\n"


def _yaml_lines(content: Mapping[str, Any]) -> Iterator[str]:
    for name, value in content.items():
        key = _bare_or_quoted(name)
        if isinstance(value, list) and isinstance(value[0], Mapping):
            yield f"{key}:"
            for item in value:
                yield from (f"  {line}" for line in yaml_item(item))
        elif isinstance(value, Mapping):
            yield f"{key}:"
            yield from (f"  {line}" for line in _yaml_lines(value))
        else:
            yield f"{key}: {_json(value)}"


def yaml_item(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of these settings as one item of a list."""
    first, *rest = _yaml_lines(content)
    yield f"- {first}"
    yield from (f"  {line}" for line in rest)


def _merge_yaml(text: str, content: Mapping[str, Any]) -> str:
    """Replace or append lines `key: value`. Nested settings are for the user."""
    lines = text.rstrip("\n").split("\n")
    if any(isinstance(value, (Mapping, list)) for value in content.values()):
        raise CannotMerge("it has settings already, and lists in YAML are not changed here")
    written = [n for n, line in enumerate(lines) if not _COMMENT.fullmatch(line)]
    if written and lines[written[0]] == "---":
        del written[0]
    inner = {n for n in written if _INNER.fullmatch(lines[n])}
    if not all(n in inner or _SETTING.fullmatch(lines[n]) for n in written):
        raise CannotMerge("it is not a plain list of settings")
    nested = {n for n, after in pairwise(written) if after in inner}
    for key, value in content.items():
        found = [n for n, line in enumerate(lines) if line.startswith(f"{key}:")]
        if len(found) > 1 or nested.intersection(found):
            raise CannotMerge(f"{key} is written there in another way")
        if value is None:
            lines[:] = [line for n, line in enumerate(lines) if n not in found]
        elif found:
            lines[found[0]] = f"{key}: {_json(value)}"
        else:
            lines.append(f"{key}: {_json(value)}")
    return "\n".join(lines) + "\n"


_Writer = Callable[[Mapping[str, Any]], str]
_Merger = Callable[[str, Mapping[str, Any]], str]
_WRITERS: Final[Mapping[str, tuple[_Writer, _Merger]]] = MappingProxyType(
    {
        "json": (_write_json, _merge_json),
        "toml": (_write_toml, _merge_toml),
        "yaml": (_write_yaml, _merge_yaml),
    }
)
