"""Settings go into a file of any of the formats, and what else is there stays."""

from __future__ import annotations

import json
import sys
import tomllib
from typing import Any

import pytest
import yaml

from mlxsrv.connect.formats import CannotMerge, Owned, merged_text, new_text

TREE: dict[str, Any] = {
    "model": "a/b",
    "size": 3,
    "providers": {"mlxsrv": Owned(url="http://x/v1", on=True)},
}
PLAIN = {"model": "a/b", "size": 3, "providers": {"mlxsrv": {"url": "http://x/v1", "on": True}}}


def test_a_new_file_has_the_settings_alone() -> None:
    assert json.loads(new_text("json", TREE)) == PLAIN
    assert tomllib.loads(new_text("toml", TREE)) == PLAIN
    assert merged_text("toml", " \n", TREE) == new_text("toml", TREE)
    assert new_text("yaml", {"a": "x: y", "models": [{"n": 1, "o": {"p": True}}]}) == (
        "a: 'x: y'\nmodels:\n- n: 1\n  o:\n    p: true\n"
    )


@pytest.mark.parametrize("format", ["json", "toml"])
def test_what_is_written_twice_is_written_once(format: str) -> None:
    once = new_text(format, TREE)
    assert merged_text(format, once, TREE) == once


@pytest.mark.parametrize(
    ("format", "text", "content"),
    [
        ("json", '{\r\n  "a": 1\r\n}\r\n', TREE),
        ("toml", "a = 1\r\n[t]\r\nb = 2\r\n", TREE),
        ("yaml", "# a\r\na: 1\r\n", {"model": "x"}),
    ],
)
def test_lines_end_as_they_did(format: str, text: str, content: dict[str, Any]) -> None:
    merged = merged_text(format, text, content)
    assert merged.replace("\r\n", "\n") == merged_text(format, text.replace("\r", ""), content)
    assert merged.count("\r\n") == merged.count("\n") > text.count("\n")
    assert merged_text(format, merged, content) == merged


@pytest.mark.parametrize(
    ("format", "text"),
    [("json", '{"a": %s}' % ("[" * 100_000 + "]" * 100_000)), ("toml", "a = " + "[" * 100_000)],
)
def test_what_is_nested_too_deeply_is_left_alone(format: str, text: str) -> None:
    with pytest.raises(CannotMerge, match="nested too deeply"):
        merged_text(format, text, TREE)


# JSON.


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_what_cannot_be_written_as_json_again_is_left_alone(value: str) -> None:
    with pytest.raises(CannotMerge, match="a value that JSON has not"):
        merged_text("json", f'{{"a": {value}}}', TREE)


def test_json_keeps_other_settings_their_order_and_its_indent() -> None:
    providers = '{"mlxsrv": {"old": 1}, "other": {"é": 2}}'
    text = f'{{\n\t"z": [1],\n\t"providers": {providers},\n\t"gone": 1\n}}'
    merged = merged_text("json", text, {**TREE, "gone": None})
    assert list(json.loads(merged).items()) == [
        ("z", [1]),
        ("providers", {"mlxsrv": {"url": "http://x/v1", "on": True}, "other": {"é": 2}}),
        ("model", "a/b"),
        ("size", 3),
    ]
    assert '\n\t"z"' in merged
    assert "é" in merged


@pytest.mark.parametrize("text", ['{"a": 1, // why\n}', "[]", '"x"', "{", '{"a": 1,}'])
def test_what_is_no_json_object_is_left_alone(text: str) -> None:
    with pytest.raises(CannotMerge):
        merged_text("json", text, TREE)


# TOML.

CONFIG = """\
# mine
approval = "never"
model  =  "old" # a word

[providers.other]
url = "y"

[providers.mlxsrv]
url = "z"
key = "k"

# of the next
[tools]
model = "stays"
"""


def test_toml_keeps_comments_and_other_tables() -> None:
    merged = merged_text("toml", CONFIG, TREE)
    assert tomllib.loads(merged) == {
        "approval": "never",
        **PLAIN,
        "providers": {"other": {"url": "y"}, **PLAIN["providers"]},  # type: ignore[dict-item]
        "tools": {"model": "stays"},
    }
    for line in ("# mine", "# of the next", 'approval = "never"'):
        assert line in merged.splitlines()
    assert merged_text("toml", merged, TREE) == merged


def test_toml_loses_what_is_to_go() -> None:
    assert merged_text("toml", "a = 1\nmodel = 2\n[t]\nmodel = 3\n", {"model": None}) == (
        "a = 1\n[t]\nmodel = 3\n"
    )


def test_toml_without_such_a_table_gets_it_at_its_end() -> None:
    merged = merged_text("toml", "[tools]\nmodel = 1", TREE)
    assert tomllib.loads(merged) == {**PLAIN, "tools": {"model": 1}}
    assert merged.startswith('model = "a/b"')


@pytest.mark.parametrize(
    "text",
    [
        "providers = {other = {url = 1}} # c",
        '"model" = "old" # c',
        'x = """\nmodel = 1\n""" # c',
        "[providers.mlxsrv] # c\n[providers.mlxsrv.headers]\na = 1",
        "[providers]\nmlxsrv.url = 1 # c",
    ],
)
def test_toml_that_says_it_in_another_way_is_changed_too(text: str) -> None:
    there = tomllib.loads(text)
    providers = there.get("providers", {}) | PLAIN["providers"]
    merged = merged_text("toml", text, TREE)
    assert tomllib.loads(merged) == {**there, **PLAIN, "providers": providers}
    assert "# c" in merged


@pytest.mark.parametrize(
    "text", ["= 1", "providers.other.url = 1\n[tools]\na = 1", "model = 1\nmodel = 2"]
)
def test_toml_that_would_say_something_else_is_left_alone(text: str) -> None:
    with pytest.raises(CannotMerge):
        merged_text("toml", text, TREE)


# YAML.


def test_yaml_of_plain_settings_is_changed_line_by_line() -> None:
    text = "# mine\nmodel: old\nread:\n  - a.md\ndark-mode: true\n"
    merged = merged_text("yaml", text, {"model": "openai/a", "timeout": 5, "dark-mode": None})
    assert merged == "# mine\nmodel: openai/a\nread:\n  - a.md\ntimeout: 5\n"
    assert merged_text("yaml", text.replace("  -", "-"), {"model": "x"}).count("\n- a.md\n") == 1


def test_yaml_of_every_plain_form_is_changed() -> None:
    lines = ["---", "# c", "", "a: true # b", "b: 'it''s'", 'c: "x # y" # z', "d: [a.md, b]", "e:"]
    lines += ["  - f", "  # c", "  - g", "h: ~/x-1:2#3", "i: yes", "j: 0o17", "model: old"]
    merged = merged_text("yaml", "\n".join(lines), {"model": "x"})
    assert merged.splitlines() == [*lines[:-1], "model: x"]


@pytest.mark.parametrize(
    "old",
    ["\n\n  a: b", "\n# c\n  a: b", "\n- b", " |\n\n  b", ' "a\n\n  b"', " &m a", " {a: b}", ""],
)
def test_yaml_may_have_any_value_in_its_place(old: str) -> None:
    text = f"# mine\nmodel:{old}\nother: {'*m' if '&' in old else 'a'} # c\n"
    merged = merged_text("yaml", text, {"model": "x"})
    assert yaml.safe_load(merged) == {"model": "x", "other": "a"}
    assert merged.startswith("# mine\n")
    assert merged.endswith(" # c\n")


def test_without_the_library_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for format, name, text in (("toml", "tomlkit", "a = 1"), ("yaml", "ruamel.yaml", "a: 1")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(CannotMerge, match=r"pip install 'mlxsrv\[connect\]'"):
            merged_text(format, text, {"model": "x"})
        assert new_text(format, {"model": "x"})


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a: b\n---\nmodel: c", {"model": "x"}),
        ("a: [b", {"model": "x"}),
        ("a: b: c", {"model": "x"}),
        ("models:\n  - name: x", {"models": [{"name": "y"}]}),
        ("model: a\nmodel: b", {"model": "x"}),
        ("- model", {"model": "x"}),
    ],
)
def test_what_is_no_yaml_mapping_is_left_alone(text: str, content: dict[str, Any]) -> None:
    with pytest.raises(CannotMerge):
        merged_text("yaml", text, content)
