"""The formats of thoughts that are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mlxsrv.text.frames import (
    FrameFormat,
    HeadedThoughts,
    LabelledThoughts,
    MarkedThoughts,
    NoThoughts,
    WrappedAnswers,
)
from mlxsrv.text.message_frames import HeadedMessages, TaggedMessages

_THINK: Final = ("<think>", "</think>")
_CLOSE: Final = "\n</think>\n\n"

FRAME_FORMATS: Sequence[FrameFormat] = (
    NoThoughts(),
    MarkedThoughts("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    WrappedAnswers(
        "command",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        [
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            ("<|START_TEXT|>", "<|END_TEXT|>"),
        ],
        anywhere=True,
    ),
    LabelledThoughts(
        "gemma4",
        "<|channel>",
        "<channel|>",
        close="\n<channel|>",
        label="thought",
        turn="<turn|>",
    ),
    HeadedMessages(
        "harmony",
        "<|start|>",
        "<|message|>",
        ["<|end|>", "<|return|>", "<|call|>"],
        ["<|channel|>", "<|constrain|>"],
        thought="<|channel|>analysis<|message|>",
        close="<|end|><|start|>assistant<|channel|>final<|message|>",
        preamble="<|channel|>commentary<|message|>",
    ),
    WrappedAnswers("hunyuan", *_THINK, [("<answer>", "</answer>")], close="\n</think>\n"),
    MarkedThoughts("kimi", "◁think▷", "◁/think▷"),
    TaggedMessages("kimi_k3", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    MarkedThoughts("longcat", "<longcat_think>", "</longcat_think>", "\n</longcat_think>\n"),
    MarkedThoughts("minimax_m3", "<mm:think>", "</mm:think>"),
    MarkedThoughts("mistral", "[THINK]", "[/THINK]"),
    HeadedMessages(
        "muse",
        "<|start|>",
        "<|message|>",
        ["<|eom|>", "<|eot|>"],
        [],
        thought=" to=self<|message|>",
        close="<|eom|><|start|>assistant to=user<|message|>",
        preamble=" to=user<|message|>",
    ),
    WrappedAnswers("response", *_THINK, [("<response>", "</response>")], close=_CLOSE),
    MarkedThoughts("seed_oss", "<seed:think>", "</seed:think>", "</seed:think>\n"),
    MarkedThoughts("think", *_THINK, _CLOSE),
    MarkedThoughts("think_colon", "<|think:start|>", "<|think:end|>"),
    HeadedThoughts(
        "think_headings",
        ["Here is my thought process:", "Here's my thought process:"],
        ["Here is my response:", "Here's my response:"],
    ),
)
"""All of them. Each is the family's way as far as its name says nothing else."""
