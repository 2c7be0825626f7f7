"""Calls in every format, forced on a model that draws at random, and read again by the format."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxsrv.prompts.grammars.specs import each_call, tool_grammar
from mlxsrv.text.call_formats.calls import Tools, WrittenCall
from mlxsrv.text.formats import CALLS, THOUGHTS
from mlxsrv.text.frames import FrameFormat
from mlxsrv.text.marks import Marks
from mlxsrv.text.reader import AnswerReader, OfferedCalls, ToolArguments, ToolOpened
from tests.support.grammars import Model

pytestmark = pytest.mark.usefixtures("near_sandbox")

END = "<|end of turn|>"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOLS: dict[str, dict[str, Any]] = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "maxLength": 8},
            "mode": {"type": "integer", "minimum": 0, "maximum": 9},
            "kind": {"enum": ["a", "ab", "b c"]},
            "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "who": {"$ref": "#/$defs/person"},
            "team": {"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 2},
            "code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]$"},
        },
        "required": ["path", "kind"],
        "additionalProperties": False,
        "$defs": {"person": PERSON},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


def frame_of(name: str) -> FrameFormat:
    """The format of thoughts that goes with a format of calls."""
    return THOUGHTS.get(name, THOUGHTS["think"])


@cache
def model(name: str) -> tuple[Model, Marks]:
    """A tokenizer of single bytes, of some pieces of markers, and of the format's own tokens."""
    names = list(dict.fromkeys((*frame_of(name).marks, *CALLS[name].marks)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["ab", "</", '":', ">\u010a", "\u010a<", '"}', "},"]
    vocabulary = {spelling: number for number, spelling in enumerate([*alphabet, *merged])}
    merges = [(piece[0], piece[1]) for piece in merged]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(each, special=False) for each in (*names, END)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    drawn = Model(fast, tokenizer.get_vocab_size(), [tokenizer.get_vocab()[END]])
    marks = Marks(names, tokenizer.get_vocab())
    texts = ((i, drawn.decode([i])) for i in range(drawn.vocabulary))
    drawn.closers |= {*marks.tokens, *(i for i, text in texts if text[:1] in {*"<\n')`", "◁"})}
    return drawn, marks


def read(name: str, tokens: list[int]) -> tuple[list[tuple[str, Any]], str, AnswerReader]:
    """The calls of an answer, its content, and the reader."""
    drawn, marks = model(name)
    # Bytes of one character may be in several tokens: they are decoded together.
    plain: list[int] = []
    parts: list[str] = []
    for token in tokens:
        if token in marks.tokens:
            parts += [drawn.decode(plain), marks.tokens[token]]
            plain = []
        else:
            plain.append(token)
    parts.append(drawn.decode(plain))
    calls = OfferedCalls(CALLS[name], Tools(TOOLS))
    reader = AnswerReader(frame_of(name).frame(marks, thinking=False), marks, calls)
    found: list[tuple[str, str]] = []
    content = ""
    for part in [*reader.feed("".join(parts)), *reader.flush()]:
        if isinstance(part, ToolOpened):
            found.append((part.name, ""))
        elif isinstance(part, ToolArguments):
            found[-1] = (found[-1][0], found[-1][1] + part.text)
        elif part[0] == "content":
            content += part[1]
    return [(called, json.loads(arguments)) for called, arguments in found], content, reader


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.long
def test_what_is_forced_is_read_again_often(name: str) -> None:
    force(name, 200)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow
def test_what_is_forced_is_read_again(name: str) -> None:
    force(name, 6)


def force(name: str, seeds: int) -> None:
    """Calls that a random model is held to are whole, and follow the schemas of their tools."""
    drawn, _ = model(name)
    spec = tool_grammar(list(TOOLS.items()), name, many=True, thoughts=frame_of(name).name)
    template = drawn.compile(spec)
    seen = set()
    for seed in range(seeds):
        tokens = drawn.draw(template.constraint(), seed)
        calls, content, reader = read(name, tokens)
        told = (seed, drawn.decode(tokens))
        assert calls, told
        assert content == "", told
        assert reader.broken == [], told
        for called, arguments in calls:
            Draft202012Validator(TOOLS[called]).validate(arguments)
            seen.add(called)
    assert seen == TOOLS.keys() or seeds < 20


@pytest.mark.parametrize("name", CALLS)
def test_each_call_that_a_model_may_make_has_a_grammar(name: str) -> None:
    """It begins behind the opener, also where tokens are part of that, as in DeepSeek's and Kimi
    K3's."""
    drawn, _ = model(name)
    spec = each_call(list(TOOLS.items()), name, frame_of(name).name)
    compiled = drawn.grammars.compile_call(spec, param="tools")
    assert compiled is not None
    written = CALLS[name].spell([WrittenCall("now", {})])
    for opener in compiled.grammar.openers:
        if written.startswith(opener):
            assert compiled.begin_within(opener, "") is not None


@pytest.mark.parametrize(
    "thought", ["", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"]
)
def test_a_call_that_a_model_may_make_follows_a_preamble(thought: str) -> None:
    """Harmony has no opener, so its grammar is that of the whole answer."""
    drawn, _ = model("harmony")
    compiled = drawn.grammars.compile_call(
        each_call(list(TOOLS.items()), "harmony", "harmony"), param="tools"
    )
    assert compiled is not None
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    for before in ("", preamble):
        constraint = compiled.constraint()
        drawn.feed(constraint, drawn.encode(f"{thought}{before}{call}"))
        assert drawn.allowed(constraint) == drawn.ends
