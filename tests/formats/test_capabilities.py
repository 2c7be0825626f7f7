"""Capabilities of models: what their files tell, against what the loaded tokenizer does."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from mlx_lm import tokenizer_utils

from mlxsrv.formats.answer_formats import Evidence, FormatWords, detect
from mlxsrv.formats.format_names import NONE
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


def test_calls_are_known_wherever_mlx_lm_has_a_parser(folder: Path) -> None:
    """Each text that its rules name is enough."""
    rules = ast.parse(inspect.getsource(tokenizer_utils._infer_tool_parser).strip())
    named = {
        compared.left.value
        for compared in ast.walk(rules)
        if isinstance(compared, ast.Compare)
        and isinstance(compared.left, ast.Constant)
        and isinstance(compared.left.value, str)
    }
    assert len(named) > 10
    pairs = ("<|tool_call>", "<tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>")
    for text in named - {"tool_call.name", *pairs}:
        whole = '<function name="<param name="' if "name=" in text else text
        assert detect(Evidence((), [whole])).calls != NONE, text
    for one, other in (pairs[:2], pairs[2:]):
        assert detect(Evidence({one, other})).calls != NONE


def test_the_operators_word_makes_tools_possible(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=PLAIN)
    words = FormatWords("prompted", "none")
    assert "tools" not in describe_model(folder).capabilities
    assert describe_model(folder, words=words).capabilities == ("completion", "chat", "tools")
    assert Tokenizer(folder, words=words).capabilities == ("tools",)
    words = FormatWords("none", "none")
    assert describe_model(folder, words=words).capabilities == ("completion", "chat")
