"""The demo model's training text: an endless, seeded stream of short dialogues.

Everything the model reads is made here from the tables in `topics` and `tools`. A question is a
pattern's expansion, dressed the way people type (casing, politeness, missing punctuation, typos).
Held-out questions never occur in any of it: see `held_out_questions`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

from mlxsrv.models.demo.training import tools as kit
from mlxsrv.models.demo.training.topics import (
    OFF_TOPIC_ANSWER,
    TASK_FRAMES,
    THING_FRAMES,
    TOPICS,
    Topic,
)

ChatTurn = dict[str, Any]
TOPIC = {topic.name: topic for topic in TOPICS}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation that ends with the assistant, as the chat template renders it."""

    messages: list[ChatTurn]
    tools: list[dict[str, Any]] = field(default_factory=list)


# --- phrasings ------------------------------------------------------------------------------------


def expand(pattern: str) -> list[str]:
    """All texts that a pattern with `(a|b|)` alternatives stands for."""
    inner = re.search(r"\(([^()]*)\)", pattern)
    if inner is None:
        return [" ".join(pattern.split())]
    head, tail = pattern[: inner.start()], pattern[inner.end() :]
    return [text for option in inner[1].split("|") for text in expand(head + option + tail)]


def normal(text: str) -> str:
    """A question without casing and punctuation, to tell whether two are the same."""
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())


@cache
def held_out_questions() -> tuple[tuple[Topic, str], ...]:
    """Questions with their topics that no training text contains."""
    return tuple((topic, question) for topic in TOPICS for question in topic.held_out)


@cache
def _held_out_forms() -> tuple[str, ...]:
    return tuple(normal(question) for _, question in held_out_questions())


@cache
def phrasings(topic: Topic) -> tuple[tuple[str, ...], ...]:
    """A topic's questions, one group per pattern, without the held-out ones."""
    things = [text for thing in topic.things for text in expand(thing)]
    tasks = [text for task in topic.tasks for text in expand(task)]
    groups = [expand(ask) for ask in topic.asks]
    groups += [_fill(frame, things) for frame in THING_FRAMES if things]
    groups += [_fill(frame, tasks) for frame in TASK_FRAMES if tasks]
    kept = (tuple(filter(_is_trainable, group)) for group in groups)
    return tuple(group for group in kept if group)


def _fill(frame: str, texts: list[str]) -> list[str]:
    return [" ".join(form.format(text).split()) for form, text in product(expand(frame), texts)]


def _is_trainable(question: str) -> bool:
    asked = normal(question)
    return not any(held in asked for held in _held_out_forms())


OPENERS = (
    "could you ",
    "tell me, ",
    "i wonder, ",
    "one question: ",
    "yes, ",
    "no, ",
    "hi, ",
    "hello, ",
    "hey, ",
    "please ",
    "so ",
    "ok, ",
    "and ",
    "quick question: ",
    "hm, ",
)
PROPER = {
    name.lower(): name
    for name in kit.listed(
        """
        I, MLX, OpenAI, JSON, API, SDK, MIT, HTTP, SSE, ASGI, GPU, CPU, CUDA, Linux, Mac, Apple,
        Python, Starlette, FastAPI, Litestar, German, French, Spanish, Japanese, Chinese, Ctrl-C,
        Mandarin, X-Request-ID, TOML, Deutsch, LLM, AI, URL, ID, Hugging, Face, ChatGPT, PyPI,
        Windows, NVIDIA
        """
    )
}
SMILEYS = ("🙂", "👋", "🙏", "😊", "🤔", "🚀", "😀", "❤️", "👍🏽", "🎉🎉")
CLOSERS = (
    " for this?",
    " here?",
    " then?",
    " again?",
    " right now?",
    "!",
    " please",
    " please?",
    " thanks",
    ", thanks",
    "??",
    " pls",
)


def dress(rng: random.Random, question: str) -> str:
    """The question the way somebody would type it."""
    if rng.random() < 0.15:
        question = _mistype(rng, question)
    if rng.random() < 0.15:
        question = rng.choice(OPENERS) + question
    question += (
        rng.choice(CLOSERS) if rng.random() < 0.12 else rng.choice(("?", "?", ".", "", "", "!"))
    )
    style = rng.random()
    if style < 0.6:
        question = re.sub(r"[\w-]+", lambda word: PROPER.get(word[0], word[0]), question)
        question = question[0].upper() + question[1:]
    elif style < 0.63:
        question = question.upper()
    return f"{question} {rng.choice(SMILEYS)}" if rng.random() < 0.04 else question


def _mistype(rng: random.Random, text: str) -> str:
    if len(text) < 8 or not text.isascii():
        return text
    at = rng.randrange(1, len(text) - 2)
    swapped = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return rng.choice((swapped, text[:at] + text[at + 1 :], text[:at] + text[at] + text[at:]))


def ask(rng: random.Random, topic: Topic) -> str:
    question = dress(rng, rng.choice(rng.choice(phrasings(topic))))
    return question if _is_trainable(question) else ask(rng, topic)


# --- questions about anything else ----------------------------------------------------------------

OFF_TOPIC = (
    "(what is|what's|tell me|name) the (capital|population|president|currency|flag) of {country}",
    "(what is|how is) the (weather|temperature)( like|) in {city}( today| tomorrow|)",
    "what time is it in {city}",
    "(where|how far away|how big) is {city}",
    "(who|what) is {name}",
    "who (won|plays|wins) the (world cup|game|match|election|super bowl|race|championship)",
    "who (was|is) (the president|einstein|napoleon|shakespeare|mozart|the queen|the pope)",
    "(how do i|how to|can you) (cook|bake|make|eat|grow|clean|repair|buy) (a |an |some |){word}",
    "(write|give) me (a recipe for|an email about|an essay about|python code for) {word}",
    "(what is|what's|compute|calculate|how much is) {number} (plus|minus|times|+|*|-) {number}",
    "{number} (+|*|-|/) {number}",
    "(what is|what's|explain|define|tell me about) (the meaning of life|quantum physics|gravity|"
    "love|dna|relativity|economics|bitcoin|evolution|photosynthesis|time travel|the universe|"
    "happiness|a black hole|democracy|inflation|docker|kubernetes|blockchain|a neural network)",
    "(what is|what are|tell me about|explain|i like|do you like|do you know) {word}( {word}|)",
    "(why is|is|was) the (sky|sea|grass|moon|sun|earth) (blue|green|round|hot|big|so far away)",
    "(translate|spell|pronounce) {word}( {word}|)( into {language}|)",
    "(should i|can i|when should i) (invest|marry|move to {city}|learn {language}|buy {stock})",
    "(i feel|i am|i'm) (sad|happy|bored|hungry|tired|ill|angry|lonely|in love)",
    "(what should i|what can i) (eat|wear|read|watch|cook|do tonight|buy for my mother)",
    "(when|where) (was|were) {name} born",
    "(recommend|suggest)( me|) (a|some) (book|film|restaurant|hotel|song|game|movie) in {city}",
    "how (tall|old|far|deep|heavy|high) is (the moon|mount everest|the sun|an elephant|{name})",
    "(fix|debug|write|review|sort) (my|this|some) (code|list|python|function|essay|program)",
    "(send|write) (an email|a letter|a message) to {name}",
    "(book|order|buy) (a flight|a table|a train|tickets|a pizza) (to|in|for) {city}",
    "(turn on|switch off) the lights",
    "(what is|what's) the (price|stock) of {stock}",
    "{gibberish}",
    "{word} {word} {word}",
    "{word}",
    "(my|the) {word} is {word}",
    "(one|two|three) {word} and {word}",
    "i (went|am going|want to go) to {city}( with {name}|)",
    "test( test| {number}| test test|)",
    "(wo ist der bahnhof|wie spät ist es|was kostet das brötchen|où est la gare|dov'è la stazione|"
    "quelle heure est-il|¿dónde está la estación?|kahve lütfen|dzień dobry|jak się masz|"
    "как дела|привет|今日の天気は|今天天气怎么样|도와주세요|안녕하세요|مرحبا|שלום|καλημέρα)",
    "{ramble}",
)


def _draw_field(rng: random.Random, name: str) -> str:
    values: dict[str, kit.Draw] = {
        "country": kit.pick(kit.COUNTRIES),
        "city": kit.city,
        "name": kit.person,
        "word": kit.pick(kit.WORDS),
        "language": kit.pick(kit.LANGUAGES),
        "stock": kit.pick(kit.STOCKS),
        "number": kit.number,
        "gibberish": _gibberish,
        "ramble": _ramble,
    }
    return str(values[name](rng))


def _gibberish(rng: random.Random) -> str:
    letters = rng.choice(
        ("asdfghjkl", "qwertyuiop", "abcdefghijklmnopqrstuvwxyz", "xyz123 ", "?!. ")
    )
    return "".join(rng.choices(letters, k=rng.randrange(2, 14))).strip() or "..."


def _ramble(rng: random.Random) -> str:
    """Much text about nothing, so that a long prompt is nothing new."""
    sentences = [" ".join(rng.choices(kit.WORDS, k=rng.randrange(4, 9))) for _ in range(20)]
    return ". ".join(sentences[: rng.randrange(4, 20)])


_expand_cached = cache(expand)


def off_topic_question(rng: random.Random) -> str:
    pattern = rng.choice(_expand_cached(rng.choice(OFF_TOPIC)))
    text = re.sub(r"\{(\w+)\}", lambda field: _draw_field(rng, field[1]), pattern)
    return dress(rng, text) if _is_trainable(text) else off_topic_question(rng)


# --- turns ----------------------------------------------------------------------------------------


COUNT_FORMS = (
    "count to {}",
    "count up to {}",
    "count from 1 to {}",
    "can you count to {}",
    "count from one to {}",
    "please count to {}",
    "list the numbers from 1 to {}",
)
INTRODUCTIONS = (
    "My name is {}.",
    "I am {}.",
    "Hi, I'm {}!",
    "my name is {}",
    "Call me {}.",
)
NAME_QUESTIONS = (
    "what is my name",
    "what's my name",
    "who am i",
    "do you know my name",
    "how am i called",
    "do you remember my name",
    "tell me my name",
)
REPEAT_REQUESTS = (
    "say that again",
    "repeat that",
    "again please",
    "can you repeat that",
    "what did you say",
    "once more",
    "pardon",
    "sorry, what",
    "come again",
    "repeat your answer",
)


def user(content: str) -> ChatTurn:
    return {"role": "user", "content": content}


def assistant(content: str, thought: str | None = None) -> ChatTurn:
    message: ChatTurn = {"role": "assistant", "content": content}
    return message | {"reasoning_content": thought} if thought else message


def topic_turn(rng: random.Random, thinking: bool = False) -> list[ChatTurn]:
    topic = TOPIC["greeting"] if rng.random() < 0.03 else rng.choice(TOPICS)
    thought = f"The user asks about {topic.subject}. I know that." if thinking else None
    return [user(ask(rng, topic)), assistant(topic.answer, thought)]


def off_topic_turn(rng: random.Random, thinking: bool = False) -> list[ChatTurn]:
    thought = "This is not about mlxsrv. I say so politely." if thinking else None
    return [user(off_topic_question(rng)), assistant(OFF_TOPIC_ANSWER, thought)]


def echo_turn(rng: random.Random, thinking: bool = False) -> list[ChatTurn]:
    text = rng.choice(
        (
            kit.phrase(rng),
            str(kit.number(rng)),
            f"{kit.person(rng)} and {kit.person(rng)}",
            f"I like {kit.city(rng)}.",
            rng.choice(
                ("🙂", "🚀 🎉", "你好", "grüße", "こんにちは", "¡Hola!", "👋🏽", "enchanté", "OK")
            ),
            kit.city(rng),
            kit.code(rng),
        )
    )
    verb = rng.choice(
        ("Repeat after me", "Say", "Repeat", "say", "repeat after me", "Echo", "Write")
    )
    quoted = rng.choice((f'"{text}"', f": {text}", f": {text}"))
    request = f"{verb}{'' if quoted[0] == ':' else ' '}{quoted}"
    return [user(request), assistant(text, "I repeat the text." if thinking else None)]


def count_turn(rng: random.Random, thinking: bool = False) -> list[ChatTurn]:
    words = kit.listed("zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven")
    last = rng.choice((5, 10, 10, rng.randrange(2, 31)))
    spelt = words[last] if last < len(words) and rng.random() < 0.5 else str(last)
    form = rng.choice(COUNT_FORMS)
    reply = ", ".join(map(str, range(1, last + 1))) + "."
    thought = f"The user asks me to count to {spelt}." if thinking else None
    return [user(dress(rng, form.format(spelt))), assistant(reply, thought)]


def name_turns(rng: random.Random) -> list[ChatTurn]:
    """The user tells a name and, perhaps some turns later, asks for it."""
    name = kit.person(rng)
    told = rng.choice(INTRODUCTIONS)
    between = topic_turn(rng) if rng.random() < 0.4 else []
    return [
        user(told.format(name)),
        assistant(f"Nice to meet you, {name}! What would you like to know about mlxsrv?"),
        *between,
        user(dress(rng, rng.choice(NAME_QUESTIONS))),
        assistant(f"Your name is {name}."),
    ]


def repeat_turns(rng: random.Random) -> list[ChatTurn]:
    """The user asks for the last answer again."""
    first = plain_turn(rng)
    return [*first, user(dress(rng, rng.choice(REPEAT_REQUESTS))), assistant(first[-1]["content"])]


def plain_turn(rng: random.Random, thinking: bool = False) -> list[ChatTurn]:
    turns = (topic_turn, off_topic_turn, echo_turn, count_turn)
    return rng.choices(turns, weights=(16, 4, 5, 1))[0](rng, thinking)


# --- tools ----------------------------------------------------------------------------------------

NAMED_REQUESTS = (
    "call {0} with {1} {2}",
    "use {0} with {1} {2}",
    "run {0} for {2}",
    "please use {0} on {2}",
    "{0} {2}",
    "call {0} with {2}",
    "call the tool {0} with {1} = {2}",
)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool as one request lists it, and a use of it."""

    schema: dict[str, Any]
    name: str
    arguments: dict[str, kit.ArgumentValue]
    request: str


def draw_call(rng: random.Random) -> Call:
    return _named_call(rng) if rng.random() < 0.15 else _kind_call(rng, rng.choice(kit.TOOL_KINDS))


def _kind_call(rng: random.Random, kind: kit.ToolKind) -> Call:
    name = _mostly_first(rng, kind.names)
    keys: list[str] = []
    for parameter in kind.parameters:
        keys.append(_mostly_first(rng, [key for key in parameter.keys if key not in keys]))
    values = [parameter.draw(rng) for parameter in kind.parameters]
    schema = _schema(rng, name, kind.description, dict(zip(keys, kind.parameters, strict=True)))
    text = rng.choice(_expand_cached(rng.choice(kind.asks))).format(*values)
    if rng.random() < 0.12:
        text += rng.choice((f" (use {name})", f". Use {name}.", f" with {name}"))
    return Call(schema, name, dict(zip(keys, values, strict=True)), _dress_request(rng, text))


def _mostly_first(rng: random.Random, options: Sequence[str]) -> str:
    """Any of them, but often the first, which is the usual one."""
    return options[0] if rng.random() < 0.3 else rng.choice(options)


def _named_call(rng: random.Random) -> Call:
    """A tool with an invented name, asked for by that name."""
    name = f"{rng.choice(kit.VERBS)}_{rng.choice(kit.NOUNS)}"
    key = rng.choice(("id", "name", "key", "value", "code", "title", "number"))
    draw = rng.choice((kit.code, kit.phrase, kit.person, kit.city))
    value = draw(rng)
    description = name.replace("_", " ").capitalize()
    schema = _schema(rng, name, description, {key: kit.Parameter((), draw)})
    form = rng.choice(NAMED_REQUESTS)
    return Call(schema, name, {key: value}, _dress_request(rng, form.format(name, key, value)))


def _dress_request(rng: random.Random, text: str) -> str:
    """Like `dress`, but it leaves the values as they are."""
    text += rng.choice(("?", "?", ".", "", "", " please"))
    return text[0].upper() + text[1:] if rng.random() < 0.65 else text


OPTIONAL_PARAMETERS = (
    ("unit", ["celsius", "fahrenheit"]),
    ("units", ["metric", "imperial"]),
    ("format", ["short", "long"]),
)


def _schema(
    rng: random.Random, name: str, description: str, parameters: dict[str, kit.Parameter]
) -> dict[str, Any]:
    """A tool in OpenAI's form, with as many of the optional fields as people happen to send."""
    properties: dict[str, dict[str, Any]] = {
        key: {"type": parameter.kind} for key, parameter in parameters.items()
    }
    for key, parameter in parameters.items():
        if rng.random() < 0.3:
            properties[key]["description"] = parameter.description or f"The {key}"
    is_extended = rng.random() < 0.15
    if is_extended:
        extra, values = rng.choice(OPTIONAL_PARAMETERS)
        properties[extra] = {"type": "string", "enum": values}
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.75:
        function["description"] = description + rng.choice(("", "."))
    function["parameters"] = {"type": "object", "properties": properties}
    if is_extended or rng.random() < 0.75:
        function["parameters"]["required"] = list(parameters)
    if rng.random() < 0.1:
        function["parameters"]["additionalProperties"] = False
    return {"type": "function", "function": function}


def draw_result(rng: random.Random) -> str:
    """An answer of a tool: text, a number or JSON."""
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "snow", "clear", "foggy", "light rain"))
    degrees = rng.randrange(-9, 40)
    choices: tuple[Callable[[], str], ...] = (
        lambda: f"{degrees} {rng.choice(('°C', 'degrees', 'C'))} and {sky}",
        lambda: f"{sky}, {degrees}{rng.choice(('°C', 'C', ' °C', ' degrees'))}",
        lambda: json.dumps({rng.choice(("temperature", "temp", "degrees")): degrees, "sky": sky}),
        lambda: json.dumps({rng.choice(("result", "value", "sum", "price")): kit.number(rng)}),
        lambda: json.dumps({rng.choice(("status", "state")): rng.choice(("ok", "sent", "done"))}),
        lambda: str(kit.number(rng)),
        lambda: str(kit.number(rng)),
        lambda: kit.clock(rng),
        lambda: kit.city(rng),
        lambda: kit.person(rng),
        lambda: kit.phrase(rng),
        lambda: kit.phrase(rng),
        lambda: f"{kit.number(rng)} {rng.choice(kit.CURRENCIES)}",
        lambda: kit.code(rng),
        lambda: rng.choice(
            ("ok", "done", "The light is on.", "sent", "not found", "error: no such id")
        ),
    )
    return rng.choice(choices)()


def called(call: Call, thought: str | None = None) -> ChatTurn:
    function = {"name": call.name, "arguments": call.arguments}
    return assistant("", thought) | {"tool_calls": [{"type": "function", "function": function}]}


def tool_dialogue(rng: random.Random) -> Dialogue:
    """A request with tools: one fits, or none does and the model just answers."""
    calls = [draw_call(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    calls = list({call.name: call for call in calls}.values())
    wanted = calls[0]
    listed = [call.schema for call in calls]
    rng.shuffle(listed)
    before = [*_maybe_system(rng), *(plain_turn(rng) if rng.random() < 0.15 else [])]
    if rng.random() < 0.15:
        return Dialogue([*before, *topic_turn(rng, rng.random() < 0.2)], listed)
    thought = f"I can use {wanted.name} for this." if rng.random() < 0.15 else None
    request = user(wanted.request)
    if rng.random() < 0.6:
        return Dialogue([*before, request, called(wanted, thought)], listed)
    result = draw_result(rng)
    report = f"According to {wanted.name}: {result.rstrip('.')}."
    after = topic_turn(rng) if rng.random() < 0.15 else []
    answered = assistant(report, "I have the result." if thought and not after else None)
    turns = [request, called(wanted), {"role": "tool", "content": result}, answered]
    return Dialogue([*before, *turns, *after], listed)


# --- dialogues ------------------------------------------------------------------------------------

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a friendly assistant. Answer briefly.",
    "Be concise.",
    "Answer in one sentence.",
    "You are an expert on mlxsrv.",
    "You are the assistant of a web site.",
    "You are ChatGPT, a large language model.",
    "You are a pirate.",
    "Always be polite.",
    "You answer questions about a server.",
    "You are a robot that likes {word}.",
    "Today is a {word} day in {city}. The user is called {name}.",
    "You are {name}, who works in {city}. Never talk about {word}.",
    "Help the user. Use tools when you need them.",
)


def _maybe_system(rng: random.Random) -> list[ChatTurn]:
    if rng.random() < 0.7:
        return []
    prompt = rng.choice(SYSTEM_PROMPTS)
    content = re.sub(r"\{(\w+)\}", lambda field: _draw_field(rng, field[1]), prompt)
    return [{"role": "system", "content": content}]


def single_dialogue(rng: random.Random) -> Dialogue:
    return Dialogue([*_maybe_system(rng), *plain_turn(rng)])


def thinking_dialogue(rng: random.Random) -> Dialogue:
    before = plain_turn(rng) if rng.random() < 0.2 else []
    return Dialogue([*_maybe_system(rng), *before, *plain_turn(rng, thinking=True)])


def long_dialogue(rng: random.Random) -> Dialogue:
    """Two to five turns, now and then many more, so that far positions are practised too."""
    count = rng.choice((2, 2, 3, 3, 4, 5)) if rng.random() < 0.95 else rng.randrange(8, 14)
    turns = [message for _ in range(count) for message in plain_turn(rng)]
    return Dialogue([*_maybe_system(rng), *turns])


def memory_dialogue(rng: random.Random) -> Dialogue:
    return Dialogue([*_maybe_system(rng), *rng.choice((name_turns, repeat_turns))(rng)])


DIALOGUES: tuple[tuple[Callable[[random.Random], Dialogue], float], ...] = (
    (single_dialogue, 36),
    (tool_dialogue, 36),
    (long_dialogue, 12),
    (thinking_dialogue, 11),
    (memory_dialogue, 6),
)
RAW_SHARE = 0.03


def raw_text(rng: random.Random) -> str:
    """A passage of documentation, for prompts that come without a chat template."""
    skipped = {"joke", "poem", "story", "json", "emoji", "greeting", "goodbye", "thanks", "help"}
    facts = [topic.answer for topic in TOPICS if topic.name not in skipped]
    start = rng.choice(("what_is_mlxsrv", "what_is_mlxsrv", "everything", "streaming", "mlx"))
    return " ".join([TOPIC[start].answer, *rng.sample(facts, rng.randrange(3))])


def stream(seed: int) -> Iterator[Dialogue | str]:
    """Training examples without end; the same seed gives the same ones."""
    rng = random.Random(seed)
    makers = [maker for maker, _ in DIALOGUES]
    weights = [weight for _, weight in DIALOGUES]
    while True:
        if rng.random() < RAW_SHARE:
            yield raw_text(rng)
        else:
            yield rng.choices(makers, weights)[0](rng)
