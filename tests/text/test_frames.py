"""Frames of all families: thoughts and content, whatever is between them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.text.formats import THOUGHTS
from mlxsrv.text.frames import FrameFormat
from mlxsrv.text.marks import SPELLED, Marks
from mlxsrv.text.reader import AnswerReader
from tests.support.cuts import cut, joined
from tests.support.reading import pieces, splits, tokens

H_TURN = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
GEMMA_TURN = "<|turn>user\nHi <|channel><turn|>\n<|turn>model\n"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
THINK, RESPONSE = "<|open|>think<|sep|>", "<|open|>response<|sep|>"
END_THINK, END_RESPONSE = "<|close|>think<|sep|>", "<|close|>response<|sep|>"
END_MESSAGE = "<|close|>message<|sep|>"


OPEN = {
    "gemma4": "<|channel>thought\n",
    "think_headings": "Here is my thought process:\n",
    "harmony": f"{H_TURN}{ANALYSIS}",
    "kimi_k3": THINK,
    "muse": "<|start|>assistant to=self<|message|>",
}
"""Openings of a thought, where it is not the first mark."""


class Case(msgspec.Struct, frozen=True):
    """An answer behind a prompt."""

    format: str
    text: str
    reasoning: str
    content: str
    prompt: str = ""


CASES = [
    # Harmony.
    Case("harmony", f"{ANALYSIS}Hm.{NEXT}{FINAL}Hello!", "Hm.", "Hello!"),
    Case("harmony", f"{ANALYSIS}Hm.{NEXT}{FINAL}Hello!<|return|>", "Hm.", "Hello!", H_TURN),
    Case("harmony", f"{FINAL}Hello!\n", "", "Hello!\n"),
    Case("harmony", f"{ANALYSIS}a\n{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "ab", "c"),
    Case("harmony", "<|channel|>commentary<|message|>I look.<|end|>", "", "I look."),
    Case("harmony", f"<|start|>assistant{ANALYSIS}a{NEXT} to=user{FINAL}b", "a", "b"),
    Case("harmony", f"<|channel|>commentary{ANALYSIS}a{NEXT}{FINAL}b", "a", "b"),
    Case("harmony", f"{ANALYSIS}a<|end|>assistant{FINAL}b", "a", "b"),
    Case("harmony", f"{ANALYSIS}a<|end|>{FINAL}b", "a", "b"),
    Case("harmony", f"{ANALYSIS}a{FINAL}b", "a", "b"),
    Case("harmony", f"{ANALYSIS}a<|end|>and then{NEXT[7:]}{FINAL}b", "a", "and thenb"),
    Case("harmony", f"{ANALYSIS}a<|end|>final words{NEXT[7:]}{FINAL}b", "a", "final wordsb"),
    Case("harmony", "<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    Case("harmony", "<|channel|>commentary to=<|constrain|>json<|message|>{}", "", "{}"),
    Case("harmony", f"<|message|>a{NEXT}{FINAL}b", "", "ab"),
    Case("harmony", "final words, to=x", "", "final words, to=x"),
    Case("harmony", "assist", "", "assist"),
    Case("harmony", " to be", "", " to be"),
    Case("harmony", "<|channel|>final\nHello you", "", "Hello you"),
    Case("harmony", f"<|channel|>final\n{'Hello ' * 60}", "", "Hello " * 60),
    Case("harmony", "<|channel|>anal", "", ""),
    Case("harmony", f"{ANALYSIS}a{NEXT}<|channel|>commentary to=functions.f <|constr", "a", ""),
    Case("harmony", f"{ANALYSIS}a<|end|>assist", "a", ""),
    Case("harmony", f"{ANALYSIS}a<|message|>b<|constrain|>c", "abc", ""),
    Case("harmony", f"b{NEXT}{FINAL}c", "b", "c", f"{H_TURN}{ANALYSIS}a"),
    Case("harmony", f"b{NEXT}{FINAL}c", "", "bc", f"{H_TURN}{FINAL}a"),
    Case("harmony", f"analysis<|message|>b{NEXT}{FINAL}c", "b", "c", f"{H_TURN}<|channel|>"),
    Case("harmony", f"<|message|>b{NEXT}{FINAL}c", "b", "c", f"{H_TURN}<|channel|>analysis"),
    Case("harmony", f"{ANALYSIS}a{NEXT}{{1}} b", "a", "{1} b"),
    Case("harmony", f"{ANALYSIS}a{NEXT} b", "a", "b"),
    Case("harmony", f"{ANALYSIS}a<|end|><|start|>assist", "a", ""),
    Case("harmony", f"{ANALYSIS}a<|end|><|start|>functions.f to=", "a", ""),
    # Tools that nobody offered, and a result that the model made up.
    Case("harmony", "<|channel|>commentary to=python code<|message|>1 + 1<|call|>", "1 + 1", ""),
    Case("harmony", f"<|channel|>analysis to=browser.open<|message|>x{NEXT}{FINAL}y", "x", "y"),
    Case("harmony", "<|channel|>commentary to=functions.f json<|message|>{}<|call|>", "", "{}"),
    Case(
        "harmony",
        f"{FINAL}a<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>1<|end|>",
        "1",
        "a",
    ),
    # Muse.
    Case("muse", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>A", "Hm.", "A"),
    Case("muse", " to=commentary<|message|>I look.<|eom|><|start|>assistant", "", "I look."),
    Case("muse", "<|message|>A<|eot|>", "", "A"),
    Case("muse", "A", "", "A"),
    Case("muse", "b<|eom|><|start|>assistant to=user<|message|>c", "b", "c", OPEN["muse"]),
    # Kimi K3.
    Case("kimi_k3", f"a{END_THINK}{RESPONSE}b{END_RESPONSE}{END_MESSAGE}", "a", "b", THINK),
    Case("kimi_k3", f"{THINK}a\n{END_THINK}\n{RESPONSE}\nb\n{END_RESPONSE}\n", "a", "b\n"),
    Case("kimi_k3", f"{END_THINK}{RESPONSE}b", "", "b", THINK),
    Case("kimi_k3", f"b{END_RESPONSE}<|end_of_msg|>", "", "b", RESPONSE),
    Case("kimi_k3", f"b {END_RESPONSE}", "b", "b ", THINK),
    Case("kimi_k3", f"a{END_THINK}<|open|>respon", "a", "", THINK),
    Case("kimi_k3", "a b", "", "a b"),
    Case("kimi_k3", f"a{END_THINK} b c", "a", " b c", THINK),
    Case("kimi_k3", f"a{END_THINK}<|open|>is an open tag", "a", "is an open tag", THINK),
    Case("kimi_k3", '<|open|>call tool="f" index="1"<|sep|><|open|>x y="z"<|sep|>v w', "", "v w"),
    # Gemma 4.
    Case("gemma4", "<|channel>thought\na\n<channel|>b", "a", "b"),
    Case("gemma4", "<|channel> thought\na\n<channel|>b", "a", "b"),
    Case("gemma4", "<|channel>analysis\na<channel|>b", "a", "b"),
    Case("gemma4", "<|channel>thought\n<channel|>b", "", "b"),
    Case("gemma4", "<|channel>thought<channel|>b", "", "b"),
    Case("gemma4", "<|channel><channel|>b", "", "b"),
    Case("gemma4", "b<channel|>c", "", "bc"),
    Case("gemma4", "b<|channel>thought\na<channel|>c", "a", "bc"),
    Case("gemma4", "<|channel>A word\na<channel|>b", "A word\na", "b"),
    Case("gemma4", "<|channel>thoughtful words<channel|>b", "thoughtful words", "b"),
    Case("gemma4", "<|channel>thought words", "words", ""),
    Case("gemma4", "<|channel>tho", "", ""),
    Case("gemma4", "one\ntwo\n<channel|>b", "one\ntwo", "b", GEMMA_TURN + "<|channel>thought\n"),
    Case("gemma4", "thought\na\n<channel|>b", "a", "b", GEMMA_TURN + "<|channel>"),
    Case("gemma4", "b", "", "b", GEMMA_TURN + "<|channel>thought\n<channel|>"),
    Case("gemma4", "b", "", "b", GEMMA_TURN),
    # Wrappers.
    Case(
        "command",
        "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b \n<|END_RESPONSE|>",
        "a",
        "b",
    ),
    Case("command", "<|START_TEXT|>b<|END_TEXT|>", "", "b"),
    Case("command", "<|START_THINKING|>a<|START_TEXT|>b<|END_TEXT|>", "a", "b"),
    Case("command", "a<|END_THINKING|>b", "a", "b", "<|START_THINKING|>"),
    Case("hunyuan", "<think>\na\n</think>\n<answer>\nb\n</answer>", "a", "b"),
    Case("hunyuan", "<think>\n\n</think>\n<answer>\nb <answer>c</answer>\n</answer>\n", "",
         "b <answer>c</answer>"),
    Case("hunyuan", "<think>no <answer>\n</think>\n<answer>\nb", "no <answer>", "b"),
    Case("hunyuan", "In <answer> and </answer>\n", "", "In <answer> and </answer>\n"),
    Case("hunyuan", "\n b \n", "", "\n b \n"),
    Case("hunyuan", "<answer>b <think>a</think>c</answer>", "a", "b c"),
    Case("hunyuan", "b\n</answer>", "", "b", "<think>\n\n</think>\n<answer>\n"),
    Case("response", "a\n</think>\n\n<response>\nb\n</response>\n", "a", "b", "<think>\n"),
    Case("response", "<think>a</think><response>b</response>", "a", "b"),
    # Headings.
    Case(
        "think_headings",
        "Here is my thought process:\na\n\nHere is my response:\nb",
        "a",
        "b",
    ),
    Case(
        "think_headings",
        "\nHere's my thought process: a\nHere's my response: b. Here is my response: c",
        "a",
        "b. Here is my response: c",
    ),
    Case("think_headings", "Well. Here is my response: b", "", "Well. Here is my response: b"),
    Case("think_headings", "Here is my thought", "", "Here is my thought"),
    # Pairs.
    Case("mistral", "[THINK]a[/THINK]b", "a", "b"),
    Case("apertus", "<|inner_prefix|>a<|inner_suffix|>b", "a", "b"),
    Case("seed_oss", "<seed:think>\na\n</seed:think>\nb", "a", "b"),
    Case("minimax_m3", "</mm:think>b", "", "b"),
    Case("minimax_m3", "a</mm:think>b", "a", "b", "<mm:think>"),
    Case("longcat", "<longcat_think>\na\n</longcat_think>\nb", "a", "b"),
    Case("kimi", "◁think▷a◁/think▷b", "a", "b"),
    Case("think_colon", "<|think:start|>a<|think:end|>b", "a", "b"),
    Case("none", "<think>a</think>", "", "<think>a</think>"),
]  # fmt: skip


def run(format: FrameFormat, feeds: Iterable[str], marks: Marks, prompt: str) -> tuple[str, str]:
    """The reasoning and the content of a stream."""
    thinking = format.leaves_open(prompt)
    frame = format.frame(marks, thinking=thinking, prompt=prompt)
    stage = AnswerReader(frame, marks, thinking=thinking)
    said = pieces([*(part for text in feeds for part in stage.feed(text)), *stage.flush()])
    assert all(text for _, text in said)
    return joined(said, "reasoning"), joined(said, "content")


@pytest.mark.parametrize("name", sorted({case.format for case in CASES}))
def test_frames(name: str) -> None:
    format = THOUGHTS[name]
    for case in CASES:
        if case.format != name:
            continue
        for marks in (SPELLED, tokens(format)):
            ways = splits(marks.show(case.text))
            for feeds in islice(ways, 2 if len(case.text) > 200 else None):
                said = run(format, feeds, marks, case.prompt)
                assert said == (case.reasoning, case.content), (case, feeds)


def test_every_format_has_cases() -> None:
    assert {case.format for case in CASES} | {"think"} == set(THOUGHTS)


@pytest.mark.parametrize("name", sorted(set(THOUGHTS) - {"none"}))
def test_a_thought_is_closed_in_the_format_s_own_way(name: str) -> None:
    format = THOUGHTS[name]
    opened = OPEN.get(name) or format.marks[0]
    assert format.leaves_open(opened)
    assert format.leaves_open(f"Hi\n{opened}")
    assert not format.leaves_open("Hi")
    assert not format.leaves_open(f"{opened}a{format.close}")
    for marks in (SPELLED, tokens(format)):
        for thought in ("", "a", "a\n", "one two\nthree "):
            text = marks.show(f"{thought}{format.close}yes.")
            for feeds in splits(text):
                assert run(format, feeds, marks, opened) == (thought.strip(), "yes.")


def test_a_thought_may_be_open_though_the_prompt_is_not_known() -> None:
    for format in THOUGHTS.values():
        if format.thinks:
            frame = format.frame(SPELLED, thinking=True)
            assert frame.reasoning
            stage = AnswerReader(frame, SPELLED, thinking=True)
            assert pieces(stage.feed("Why not")) == [("reasoning", "Why not")]


WORDS = {
    "gemma4": ["thought\n", "thought", "analysis\n"],
    "harmony": ["analysis", "final", "commentary", " to=functions.f", " to=python", "assistant"],
    "kimi_k3": ["think", "response", "tools", 'call tool="f"'],
    "muse": [" to=self", " to=user", " to=f", "assistant"],
}
"""Words of frames, which may vanish. No other text does."""


BODY = {"harmony": "<|message|>", "kimi_k3": "<|sep|>", "muse": "<|message|>"}
"""The ends of headers. Text in headers may vanish."""


def texts(name: str) -> st.SearchStrategy[list[str]]:
    marks = THOUGHTS[name].marks
    plain = ["x. ", " y?", "Z!\n", "\n", " ", "<", "<|", "é 🙂."]
    return st.lists(st.sampled_from([*marks, *marks, *WORDS.get(name, []), *plain]), max_size=14)


@pytest.mark.parametrize("name", sorted(set(THOUGHTS) - {"none", "think_headings"}))
@given(data=st.data())
def test_any_text_in_any_pieces(name: str, data: st.DataObject) -> None:
    format = THOUGHTS[name]
    parts = data.draw(texts(name))
    marks = data.draw(st.sampled_from([SPELLED, tokens(format)]))
    text = marks.show("".join(parts))
    heard = run(format, [text], marks, "")
    assert run(format, cut(data, text), marks, "") == heard
    said = "".join(heard)
    assert not any(sign in said for sign in marks.tokens.values())
    if name not in ("hunyuan", "response"):  # there a marker may be text
        assert not any(mark in said for mark in format.marks)
    for before, part in pairwise([BODY.get(name, ""), *parts]):
        if part.strip(" \n<|") and part not in (*format.marks, *WORDS.get(name, [])):
            assert part.strip() in said or (name in BODY and before != BODY[name])


def test_content_that_follows_a_grammar_keeps_its_frame() -> None:
    for name, text, content in (
        ("kimi_k3", f"{THINK}a{END_THINK}{RESPONSE}{{}}{END_RESPONSE}", "{}"),
        ("harmony", f"{ANALYSIS}a{NEXT}{FINAL}{{}}<|return|>", "{}"),
        ("harmony", f"{ANALYSIS}a{NEXT}{{}}", "{}"),
        ("muse", " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>{}", "{}"),
        ("hunyuan", '<think>a</think>{"b": "<answer>"}', '{"b": "<answer>"}'),
    ):
        marks = tokens(THOUGHTS[name])
        frame = THOUGHTS[name].frame(marks, thinking=False)
        stage = AnswerReader(frame, marks, bound=True)
        said = pieces([*(part for sign in marks.show(text) for part in stage.feed(sign)),
                       *stage.flush()])  # fmt: skip
        assert (joined(said, "reasoning"), joined(said, "content")) == ("a", content), name
        assert said[-1][0] == "content"


def test_it_tells_when_a_message_is_a_thought() -> None:
    format = THOUGHTS["harmony"]
    marks = tokens(format)
    stage = AnswerReader(format.frame(marks, thinking=False), marks)
    states = []
    for text in [ANALYSIS, "a", "<|end|>", "<|start|>assistant", FINAL, "b", "<|return|>"]:
        stage.feed(marks.show(text))
        states.append(stage.reasoning)
    assert states == [True, True, False, False, False, False, False]
