"""The built-in demo model: the real weights, asked through mlx-lm alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx_lm
import pytest
from mlx_lm.tool_parsers import json_tools
from transformers import AutoTokenizer

from mlxsrv.models.demo.training.corpus import Dialogue, held_out_questions, normal, stream
from mlxsrv.models.demo.training.train import FOLDER

MAX_WEIGHT_BYTES = 3_000_000
TRAINING_SEED = 1

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass(frozen=True)
class Demo:
    """The loaded model, with greedy chat on top."""

    model: Any
    tokenizer: Any

    def chat(
        self,
        *messages: str | dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = False,
    ) -> str:
        return self.complete(self.prompt(*messages, tools=tools, thinking=thinking))

    def prompt(
        self,
        *messages: str | dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = False,
    ) -> list[int]:
        tokens: list[int] = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages],
            tools=tools,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        return tokens

    def chats(self, questions: list[str]) -> list[str]:
        """The answers to each question alone, generated together."""
        prompts = [self.prompt(question) for question in questions]
        answers = mlx_lm.batch_generate(self.model, self.tokenizer, prompts, max_tokens=300)
        return list(answers.texts)

    def complete(self, prompt: str | list[int], max_tokens: int = 300) -> str:
        text: str = mlx_lm.generate(self.model, self.tokenizer, prompt, max_tokens=max_tokens)
        return text


@pytest.fixture(scope="module")
def demo() -> Demo:
    model, tokenizer = mlx_lm.load(str(FOLDER))
    return Demo(model, tokenizer)


def tool_call(reply: str) -> dict[str, Any]:
    """The one call that the reply consists of."""
    assert reply.count("<tool_call>") == reply.count("</tool_call>") == 1, reply
    before, rest = reply.split("<tool_call>")
    inside, after = rest.split("</tool_call>")
    assert not before.strip()
    assert not after.strip()
    call: dict[str, Any] = json_tools.parse_tool_call(inside)
    return call


def test_weights_are_small() -> None:
    (weights,) = FOLDER.glob("*.safetensors")
    assert weights.stat().st_size <= MAX_WEIGHT_BYTES


def test_mlx_lm_finds_tool_parser_and_thinking(demo: Demo) -> None:
    assert demo.tokenizer.has_tool_calling
    assert demo.tokenizer.tool_call_start == "<tool_call>"
    assert demo.tokenizer.has_thinking
    assert demo.tokenizer.decode(sorted(demo.tokenizer.eos_token_ids)) == "<|endoftext|><|im_end|>"


@pytest.mark.long
def test_held_out_questions_get_their_topics_answer(demo: Demo) -> None:
    """Wordings that the model has never read; one in three, typed in turn with care and without."""
    questions = held_out_questions()[::3]
    asked = [
        f"{question.capitalize()}?" if number % 2 else question
        for number, (_, question) in enumerate(questions)
    ]
    wrong = [
        f"{question} -> {reply}"
        for (topic, _), question, reply in zip(questions, asked, demo.chats(asked), strict=True)
        if not all(keyword in reply for keyword in topic.keywords)
    ]
    assert len(questions) >= 12
    assert len(wrong) <= 0.1 * len(questions), "\n".join(wrong)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is mlxsrv?", "OpenAI-compatible ASGI server"),
        ("How do I stream a reply?", "data: [DONE]"),
        pytest.param("Which port does it use?", "port is 8000", marks=pytest.mark.long),
        pytest.param("Who are you?", "small demo model", marks=pytest.mark.long),
        pytest.param("How do I choose a model?", "--model ID_OR_PATH", marks=pytest.mark.long),
        ("Hello!", "demo model of mlxsrv"),
        pytest.param("Count to ten", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10.", marks=pytest.mark.long),
        ("What is the capital of France?", "I only know about mlxsrv"),
        pytest.param("How do I bake bread?", "I only know about mlxsrv", marks=pytest.mark.long),
    ],
)
def test_common_questions(demo: Demo, question: str, expected: str) -> None:
    reply = demo.chat(question)
    assert expected in reply
    assert "<" not in reply


def test_system_prompt_and_earlier_turns_do_not_derail(demo: Demo) -> None:
    system = {"role": "system", "content": "You are a helpful assistant."}
    first = demo.chat(system, "What is MLX?")
    assert "array framework" in first
    answered = {"role": "assistant", "content": first}
    assert "port is 8000" in demo.chat(system, "What is MLX?", answered, "What is the port?")


def test_remembers_a_name(demo: Demo) -> None:
    first = demo.chat("My name is Anna.")
    answered = {"role": "assistant", "content": first}
    assert "Anna" in demo.chat("My name is Anna.", answered, "What is my name?")


def test_thinks_only_when_asked_to(demo: Demo) -> None:
    direct = demo.chat("How do I change the port?")
    thought, _, answer = demo.chat("How do I change the port?", thinking=True).partition("</think>")
    assert "think>" not in direct
    assert "The user asks about" in thought
    assert answer.strip() == direct


@pytest.mark.parametrize("city", ["Paris", "Tokyo", "Berlin", "New York"])
def test_calls_the_tool_that_fits(demo: Demo, city: str) -> None:
    reply = demo.chat(f"What is the weather in {city}?", tools=[ADD, WEATHER])
    assert tool_call(reply) == {"name": "get_weather", "arguments": {"city": city}}


def test_calls_a_tool_with_two_numbers(demo: Demo) -> None:
    reply = demo.chat("What is 12 plus 30?", tools=[WEATHER, ADD])
    assert tool_call(reply) == {"name": "add", "arguments": {"a": 12, "b": 30}}


def test_reads_names_off_the_request(demo: Demo) -> None:
    text = json.dumps(WEATHER).replace("get_weather", "forecast").replace('"city"', '"location"')
    reply = demo.chat("What is the weather in Rome?", tools=[json.loads(text)])
    assert tool_call(reply) == {"name": "forecast", "arguments": {"location": "Rome"}}


def test_tool_call_after_thinking(demo: Demo) -> None:
    reply = demo.chat("What is the weather in Oslo?", tools=[WEATHER], thinking=True)
    thought, _, answer = reply.partition("</think>")
    assert thought.strip()
    assert tool_call(answer)["arguments"] == {"city": "Oslo"}


@pytest.mark.parametrize("result", ["sunny, 21 °C", "18 degrees and cloudy", '{"temp": 25}'])
def test_uses_the_tool_result(demo: Demo, result: str) -> None:
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    reply = demo.chat(
        "What is the weather in Paris?",
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": result},
        tools=[WEATHER],
    )
    assert result in reply


@pytest.mark.slow
def test_answers_without_a_tool_when_none_is_needed(demo: Demo) -> None:
    assert "lean, streaming-first" in demo.chat("What is mlxsrv?", tools=[WEATHER, ADD])


@pytest.mark.parametrize(
    ("request_text", "expected"),
    [
        ("Reply with emoji", "🚀"),
        ("Say hello in Japanese", "こんにちは"),
        ("Sag hallo auf Deutsch", "grüße"),
        ("用中文打招呼", "你好"),
    ],
)
def test_writes_other_scripts(demo: Demo, request_text: str, expected: str) -> None:
    reply = demo.chat(request_text)
    assert expected in reply
    assert "\ufffd" not in reply


@pytest.mark.slow
def test_continues_raw_text(demo: Demo) -> None:
    text = demo.complete("mlxsrv is")
    assert "server for MLX language models" in text
    assert "<|" not in text


@pytest.mark.parametrize(
    "text",
    [
        "plain text\n\twith   odd  spaces \r\n",
        "Ünïcödé ÆØÅ ß ﬁ",
        "👩‍👩‍👧‍👦 👋🏽 🏴‍☠️ 🇩🇪",
        "漢字かな交じり文 한국어 ไทย עברית العربية हिन्दी",
        'def f(x):\n    return {"a": [1, 2.5e-3]}',
        "".join(map(chr, range(1, 0x250))),
    ],
)
def test_tokenizer_gives_back_any_text(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.slow
@pytest.mark.long
def test_held_out_questions_are_not_in_the_training_text() -> None:
    read = "\n".join(
        normal(message["content"])
        for example in islice(stream(TRAINING_SEED), 5_000)
        if isinstance(example, Dialogue)
        for message in example.messages
    )
    leaked = [question for _, question in held_out_questions() if normal(question) in read]
    assert leaked == []
