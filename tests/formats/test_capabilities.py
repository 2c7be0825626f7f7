"""Capabilities of models: what their files tell, against what the loaded tokenizer does."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_lm import tokenizer_utils

from mlxsrv.formats.capabilities import (
    _CALLS_IN_TEMPLATES,
    _CALLS_IN_VOCABULARIES,
    _XTML,
    reads_calls,
)
from mlxsrv.formats.infill import FAMILIES
from mlxsrv.formats.model_folder import describe_model
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.model_folders import change, folder, original
from tests.web.test_infill import write_infiller

__all__ = ["folder", "original"]

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_with_a_familys_tokens_fills_in_the_middle(name: str, tmp_path: Path) -> None:
    infiller = write_infiller(tmp_path, name)
    assert "insert" in describe_model(infiller).capabilities
    assert "insert" in Tokenizer(infiller).capabilities


def test_words_of_thoughts_in_a_template_are_not_enough(folder: Path) -> None:
    template = PLAIN + "{% if enable_thinking %}<think>{% endif %}{{ message.reasoning_content }}"
    change(folder / "tokenizer_config.json", chat_template=template, added_tokens_decoder={})
    change(folder / "tokenizer.json", added_tokens=[])
    assert describe_model(folder).capabilities == ("completion", "chat")
    assert Tokenizer(folder).capabilities == ()


def test_the_calls_that_can_be_read_are_those_of_mlx_lms_parsers() -> None:
    """Each text that its rules name is in one of ours, and ours are enough for it."""
    rules = ast.parse(inspect.getsource(tokenizer_utils._infer_tool_parser).strip())
    named = {
        compared.left.value
        for compared in ast.walk(rules)
        if isinstance(compared, ast.Compare) and isinstance(compared.left, ast.Constant)
    }
    ours = (*_CALLS_IN_TEMPLATES, *_CALLS_IN_VOCABULARIES)
    assert named == {text for texts in ours for text in texts if text not in _XTML}
    for template, tokens in (
        *(("".join(texts), frozenset[str]()) for texts in _CALLS_IN_TEMPLATES),
        *(("", frozenset(texts)) for texts in _CALLS_IN_VOCABULARIES),
        *((text, frozenset({text})) for texts in ours for text in texts),
        ("<tool_call>", frozenset[str]()),
    ):
        theirs = SimpleNamespace(chat_template=template, get_vocab=lambda tokens=tokens: tokens)
        known = tokenizer_utils._infer_tool_parser(theirs) is not None
        assert reads_calls(template, tokens, {}) == known, (template, tokens)
