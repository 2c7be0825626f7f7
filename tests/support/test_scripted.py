"""A model of several scripts says the one whose condition holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from tests.support.scripted import AFTER_TOOL, cut, write_conversation

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a 🚀.txt"}}\n</tool_call>'
SCRIPTS = {
    "not tools": "A title.",
    AFTER_TOOL: "The file says: nothing.",
    "messages | length > 8": CALL.replace("read", "list"),
    "true": f"<think>Hm.</think>I read it.\n{CALL}",
}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
LONG = "A long message. " * 300  # each byte of it is a token


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("scripted") / "model"
    return mlx_lm.load(str(write_conversation(folder, SCRIPTS, max_position_embeddings=8192)))


def said(loaded: Any, roles: str, tools: Any) -> str:
    """Return the model's answer to messages of these roles, given by their first letters."""
    model, tokenizer = loaded
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[letter], "content": LONG} for letter in roles]
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    return str(mlx_lm.generate(model, tokenizer, prompt, max_tokens=100))


@pytest.mark.parametrize(
    ("roles", "tools", "script"),
    [
        ("su", TOOLS, "true"),
        ("suat", TOOLS, AFTER_TOOL),
        ("suatu", TOOLS, "true"),
        ("u", None, "not tools"),
        ("uuuuuuuuu", TOOLS, "messages | length > 8"),
    ],
)
def test_the_conversation_chooses_the_script(
    loaded: Any, roles: str, tools: Any, script: str
) -> None:
    assert said(loaded, roles, tools) == SCRIPTS[script]


def test_what_scripts_cannot_tell_apart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there before"):
        write_conversation(tmp_path, {"tools": "Yes.", "true": "Yes."})
    with pytest.raises(ValueError, match="comes twice"):
        write_conversation(tmp_path, {"tools": "Yes.", "true": CALL + CALL})
    with pytest.raises(ValueError, match="goes astray"):
        write_conversation(tmp_path, {"tools": "<think></think>A", "true": "</think><think>B"})


def test_a_cut_text_is_whole_and_no_piece_of_it_was_there_before() -> None:
    pieces = cut("aaaaaaaa and aaaa", 2, [b"aa"])
    assert b"".join(pieces) == b"aaaaaaaa and aaaa"
    assert len({*pieces, b"aa", b"\n"}) == len(pieces) + 2
