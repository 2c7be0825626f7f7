"""Calls that a model may make: whatever it draws, each call that it starts is a good one."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mlxsrv.generation.parameters import Mask
from mlxsrv.prompts.grammars.calls import CallConstraint
from mlxsrv.prompts.grammars.grammar import CompiledGrammar
from mlxsrv.prompts.grammars.specs import each_call
from mlxsrv.prompts.tokenizer import Tokenizer
from mlxsrv.text.call_formats.calls import Tools
from mlxsrv.text.call_formats.json_calls import HERMES
from mlxsrv.text.reader import OfferedCalls, OutputPart, ToolArguments, ToolOpened
from tests.support.effort import examples
from tests.support.fixtures import ModelFolder
from tests.support.scripted import spell, write_scripted
from tests.support.tiny import END_TOKENS

pytestmark = pytest.mark.served  # a process of its own checks each grammar

START, END = "<tool_call>", "</tool_call>"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[tuple[str, dict[str, Any]]] = [("weather", CITY), ("now", {"properties": {}})]
SCHEMAS = {"weather": CITY, "now": {"type": "object", "maxProperties": 0}}


@pytest.fixture(scope="module")
def tokenizer(model_folder: ModelFolder) -> Tokenizer:
    return Tokenizer(model_folder("qwen3"))


@pytest.fixture(scope="module")
def grammar(tokenizer: Tokenizer) -> CompiledGrammar:
    compiled = tokenizer.grammars.compile_call(each_call(TOOLS, "hermes"), param="tools")
    assert compiled is not None
    return compiled


class Row:
    """One answer: its constraint, and the stages that make text of it."""

    def __init__(
        self, tokenizer: Tokenizer, grammar: CompiledGrammar, *, thinking: bool = False
    ) -> None:
        content = tokenizer.content_pipeline(thinking=thinking)
        self.constraint = CallConstraint(grammar, content, tokenizer.think_markers)
        calls = OfferedCalls(HERMES, Tools(SCHEMAS))
        self.pipeline = tokenizer.pipeline(stops=(), chat=True, thinking=thinking, calls=calls)
        self._width = tokenizer.vocabulary
        self._parts: list[OutputPart] = []

    def free(self) -> bool:
        return self.constraint.dormant

    def allowed(self) -> list[int]:
        mask: Mask = np.full(-(-self._width // 32), -1, dtype=np.int32)
        if not self.free():
            self.constraint.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._width]
        return [int(i) for i in np.flatnonzero(bits)]

    def draw(self, *tokens: int) -> None:
        for token in tokens:
            assert token in self.allowed()
            self.constraint.accept(token)
            self._parts += self.pipeline.feed([token])

    def end(self, *, cut: bool = False) -> list[tuple[str, str]]:
        """The calls of the answer."""
        calls: list[tuple[str, str]] = []
        for part in [*self._parts, *self.pipeline.flush(cut=cut)]:
            if isinstance(part, ToolOpened):
                calls.append((part.name, ""))
            elif isinstance(part, ToolArguments):
                calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
        return calls


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.token_ids(text, special=False)


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of single characters, so that no marker is a token."""
    return [token for character in text for token in ids(tokenizer, character)]


def test_every_call_that_is_started_is_a_good_one(
    tokenizer: Tokenizer, grammar: CompiledGrammar
) -> None:
    """Whatever is drawn of what the mask leaves, and however the marker is spelled."""
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocabulary)]
    ends = {texts.index(end) for end in END_TOKENS}
    openings = [ids(tokenizer, START), spelled(tokenizer, START)]
    complete: list[str] = []

    def draw_call(row: Row, dice: np.random.Generator) -> None:
        for _ in range(200):
            if row.free():
                return
            allowed = row.allowed()
            closers = [token for token in allowed if texts[token][:1] in {'"', "}", "]"}]
            row.draw(int(dice.choice(closers if closers and dice.random() < 0.7 else allowed)))

    @settings(max_examples=examples(40))
    @given(
        st.lists(st.sampled_from(openings) | st.lists(st.integers(0, len(texts) - 1), max_size=6)),
        st.integers(0, 2**32),
    )
    def check(pieces: list[list[int]], seed: int) -> None:
        row, dice = Row(tokenizer, grammar), np.random.default_rng(seed)
        for piece in pieces:
            for token in piece:
                if row.free() and token not in ends:
                    row.draw(token)
            draw_call(row, dice)
        calls = row.end(cut=True)
        assert set(row.pipeline.faults) <= {"cut off by a limit"}
        for number, (name, arguments) in enumerate(calls):
            assert name in SCHEMAS
            if number not in row.pipeline.broken:
                Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))
                complete.append(name)

    check()
    assert {*complete} == {*SCHEMAS}


CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


def test_a_row_is_free_outside_of_its_calls(tokenizer: Tokenizer, grammar: CompiledGrammar) -> None:
    row = Row(tokenizer, grammar)
    for text in ("I look. <tool", "_x> < ", START, f"\n{CALL}\n{END}", "\n", START, CALL):
        row.draw(*ids(tokenizer, text))
        assert row.free() == (text not in (START, CALL))
    assert row.constraint.failure is None
    row.draw(*ids(tokenizer, END), *ids(tokenizer, "and on"))
    assert row.end() == [("weather", '{"city": "Paris"}')] * 2


@pytest.mark.parametrize("thinking", [True, False])
def test_a_marker_in_a_think_block_opens_no_call(
    tokenizer: Tokenizer, grammar: CompiledGrammar, thinking: bool
) -> None:
    row = Row(tokenizer, grammar, thinking=thinking)
    block = f"I may say {START} here.</think>\n\n"
    for token in ids(tokenizer, block if thinking else f"<think>{block}"):
        row.draw(token)
        assert row.free()
    row.draw(*ids(tokenizer, START))
    assert not row.free()
    row.draw(*ids(tokenizer, CALL + END))
    assert row.end() == [("weather", '{"city": "Paris"}')]


def test_a_call_has_no_marker_of_thoughts_in_it(
    tokenizer: Tokenizer, grammar: CompiledGrammar
) -> None:
    row = Row(tokenizer, grammar)
    row.draw(*ids(tokenizer, START + '{"name": "weather", "arguments": {"city": "'))
    [think] = ids(tokenizer, "<think>")
    assert think not in row.allowed()
    assert len(row.allowed()) > 100


@pytest.fixture
def served_tokenizer(tmp_path: Path) -> tuple[Tokenizer, dict[str, int]]:
    """A tokenizer that has such tokens, and their numbers."""
    pieces = [">(", '>\n{"', ">x>"]
    tokenizer = Tokenizer(write_scripted(tmp_path / "m", pieces))
    names = tokenizer.ids_by_name
    return tokenizer, {piece: names[spell(piece.encode())] for piece in pieces}


def test_a_schema_that_cannot_be_used_leaves_its_tool_free(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    with caplog.at_level(logging.WARNING, "mlxsrv"):
        spec = each_call([("odd", odd), *TOOLS], "hermes")
        grammar = tokenizer.grammars.compile_call(spec, param="tools")
        assert tokenizer.grammars.compile_call(spec, param="tools") is grammar
    assert grammar is not None
    [line] = caplog.records
    assert line.message == "tool schema not enforced"
    assert vars(line)["mlxsrv_fields"]["tool"] == "odd"
    row = Row(tokenizer, grammar)
    row.draw(*ids(tokenizer, f'{START}{{"name": "odd", "arguments": {{"a": 5}}}}{END}'))
    assert row.end() == [("odd", '{"a": 5}')]
    row = Row(tokenizer, grammar)
    row.draw(*ids(tokenizer, f'{START}{{"name": "weather", "arguments": {{"city": '))
    assert ids(tokenizer, "5")[0] not in row.allowed()


def test_many_tools_are_tried_in_a_few_processes(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            started.append(arguments)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Process)
    word = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    keys = {"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": word}}
    tools = [(f"f{i}", {"properties": {"a": word, "b": keys}}) for i in range(20)]
    both = {"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}}
    with caplog.at_level(logging.WARNING, "mlxsrv"):
        spec = each_call([*tools[:5], ("both", both), *tools[5:]], "hermes")
        grammar = tokenizer.grammars.compile_call(spec, param="tools")
    assert 0 < len(started) <= 4
    assert [vars(line)["mlxsrv_fields"]["tool"] for line in caplog.records] == ["both"]
    assert grammar is not None
    row = Row(tokenizer, grammar)
    row.draw(*ids(tokenizer, f'{START}{{"name": "f19", "arguments": {{"a": '))
    allowed = row.allowed()
    assert ids(tokenizer, "5")[0] in allowed
    assert ids(tokenizer, "{")[0] not in allowed


def test_a_grammar_that_is_too_much_is_left_out(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    huge = each_call([("f", {"enum": ["x" * 2**20]})], "hermes")
    with caplog.at_level(logging.WARNING, "mlxsrv"):
        assert tokenizer.grammars.compile_call(huge, param="tools") is None
        assert tokenizer.grammars.compile_call(huge, param="tools") is None
    assert caplog.messages == ["tool calls not enforced"]
