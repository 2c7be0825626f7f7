"""Structured output as clients get it, mostly of random weights: what a model may say, it says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.support.client import (
    CHAT,
    COMPLETIONS,
    FIRST_CONTENT,
    Body,
    RawClient,
    Streamed,
    answer,
    ask,
    by_choice,
    chat,
    completion,
    put_together,
    refused,
    stream,
)
from tests.support.crowds import states
from tests.support.effort import examples, often
from tests.support.fixtures import Folders
from tests.support.grammars import CITY, SCHEMAS, TOOLS, Schema, chain, strict_json
from tests.support.leaving import endless, left, started
from tests.support.serving import Server, serving, serving_faulty, wait_for
from tests.support.sleepy_sandbox import ASLEEP
from tests.support.tiny import END_TOKENS, VOCABULARY, make_tokenizer

FORMS: dict[str, Callable[..., Body]] = {CHAT: chat, COMPLETIONS: completion}
JSON = {"Accept": "application/json"}
STREAM = {"stream": True}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
REGEX = "[a-c]{4,9}( ж+)?"
GBNF = 'root ::= num ([ ] "+ " root)?  # a sum\nnum ::= [1-9] [0-9]{2,4}'
LARK = 'start: NUMBER | NUMBER " + " start\nNUMBER: /[1-9][0-9]{2,4}/'
SUM = r"[1-9][0-9]{2,4}( \+ [1-9][0-9]{2,4})*"
CHOICES = ["yes", "yesterday", "größer 🚀"]
NEVER_COMPILED = {"allOf": [{"type": "string", "pattern": f".{a}"} for a in ascii_lowercase]}


def token(text: str) -> str:
    """The id of a token of the tiny models, as `logit_bias` has it."""
    return str(make_tokenizer().token_to_id(text))


def hurry(*, close: float, end: float = 100) -> dict[str, float]:
    """Biases to what closes something, and to the end: random text hardly ever gets there."""
    written = {str(id): make_tokenizer().decode([id]) for id in range(VOCABULARY)}
    closers = {id: close for id, text in written.items() if text[:1] in {*'"}]'}}
    return closers | {token(text): end for text in END_TOKENS}


def schema_format(schema: Schema, **fields: Any) -> Body:
    given = {"name": "x", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": given}}


def tool(name: str, schema: Schema) -> Body:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def only(name: str) -> Body:
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


def fits(schema: Schema) -> Callable[[str], Any]:
    return lambda text: Draft202012Validator(schema).is_valid(strict_json(text))


KINDS: dict[str, tuple[Body, Callable[[str], Any]]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, fits({"type": "object"})),
    "strict": (schema_format(CITY, strict=True), fits(CITY)),
    "not strict": (schema_format(CITY, strict=False), fits(CITY)),
    "guided_json": ({"guided_json": CITY}, fits(CITY)),
    "guided_json text": ({"guided_json": json.dumps(CITY)}, fits(CITY)),
    "guided_regex": ({"guided_regex": REGEX}, re.compile(REGEX).fullmatch),
    "guided_choice": ({"guided_choice": CHOICES}, CHOICES.__contains__),
    "guided_grammar": ({"guided_grammar": LARK}, re.compile(SUM).fullmatch),
    "json_object schema": (
        {"response_format": {"type": "json_object", "schema": CITY}},
        fits(CITY),
    ),
    "grammar": ({"grammar": GBNF}, re.compile(SUM).fullmatch),
    "json_schema": ({"json_schema": CITY}, fits(CITY)),
    "structured json": ({"structured_outputs": {"json": CITY}}, fits(CITY)),
    "structured regex": ({"structured_outputs": {"regex": REGEX}}, re.compile(REGEX).fullmatch),
    "structured grammar": ({"structured_outputs": {"grammar": GBNF}}, re.compile(SUM).fullmatch),
}
"""The fields that ask for each kind of text, and a test whether a text is of that kind."""

CASES = [
    (path, kind)
    for path in FORMS
    for kind, (fields, _) in KINDS.items()
    if path == CHAT or "response_format" not in fields
]
each_case = pytest.mark.parametrize(("path", "kind"), CASES)
ALIASES = {"not strict", "guided_json text", "json_object schema", "json_schema"} | {
    kind for kind in KINDS if kind.startswith("structured ")
}
"""Other fields for a form that one of the rest asks for."""
FEW = [(path, kind) for path, kind in CASES if kind not in ALIASES][::2]
each_form = pytest.mark.parametrize(("path", "kind"), often(CASES, FEW))


def sampled(path: str, kind: str = "", /, **fields: Any) -> Body:
    """A request to the tiny model that may end, which soon does."""
    usual = {"model": "thinking", "temperature": 1, "seed": 5, "max_tokens": 800}
    asked = {**usual, "logit_bias": hurry(close=8), **(KINDS[kind][0] if kind else {})}
    return FORMS[path](**{**asked, **fields})


class Said(msgspec.Struct, frozen=True):
    """One choice of an answer, whole or put together from a stream."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    reason: str


def says(message: Body, reason: str) -> Said:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    named = [(call["name"], call["arguments"]) for call in calls]
    return Said(message["content"] or "", message.get("reasoning", ""), named, reason)


def answers(client: httpx.Client, body: Body, path: str = CHAT) -> list[Said]:
    """The texts of the choices; a stream with the same seed must have the same."""
    whole, streamed = ask(client, body, path), stream(client, body, path)
    said = [
        says(choice.get("message") or {"content": choice["text"]}, choice["finish_reason"])
        for choice in whole["choices"]
    ]
    assert said == [put_one(Streamed(200, {}, chunks, 0), path) for chunks in by_choice(streamed)]
    assert streamed.usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    return said


def put_one(streamed: Streamed, path: str) -> Said:
    if path == COMPLETIONS:
        return says({"content": streamed.content}, streamed.finish_reason)
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed.chunks[1:-1]]
    thoughts = ["reasoning" in delta for delta in deltas]
    assert thoughts == sorted(thoughts, reverse=True), "thoughts come first"
    return says(put_together(streamed), streamed.finish_reason)


def texts(client: httpx.Client, body: Body, path: str) -> list[str]:
    return [answer({"choices": [choice]}) for choice in ask(client, body, path)["choices"]]


def test_what_ends_by_itself_is_json_of_its_schema(client: httpx.Client) -> None:
    reasons: list[str] = []

    @settings(max_examples=examples(15, usual=4))  # each starts a process of the server
    @given(path=st.sampled_from([*FORMS]), schema=SCHEMAS, seed=st.integers(0, 2**40))
    def check(path: str, schema: Schema, seed: int) -> None:
        asked = schema_format(schema) if path == CHAT else {"guided_json": json.dumps(schema)}
        body = sampled(path, seed=seed, logit_bias=hurry(close=seed % 6 + 4), **asked)
        response = client.post(path, json=body | {"max_tokens": 1})
        # what random bounds make impossible together, say a pattern in fewer characters
        assume(response.status_code == 200 or "nsatisfiable" not in response.text)
        for said in answers(client, body | {"n": 2, "max_tokens": 120}, path):
            reasons.append(said.reason)
            if said.reason == "stop":  # of what is cut off nothing is claimed
                Draft202012Validator(schema).validate(strict_json(said.content))

    check()
    assert "stop" in reasons  # else nothing was claimed


# Each kind, with all else that a request may ask for.


@each_form
def test_all_choices_obey(client: httpx.Client, path: str, kind: str) -> None:
    said = answers(client, sampled(path, kind, n=3), path)
    assert said == [Said(choice.content, "", [], "stop") for choice in said]
    assert [choice for choice in said if KINDS[kind][1](choice.content)] == said
    others = texts(client, sampled(path, kind, n=8, seed=99, max_tokens=40), path)
    assert len({*others}) > 1, "each has luck of its own"


@each_form
def test_a_stop_string_ends_it(client: httpx.Client, path: str, kind: str) -> None:
    full = texts(client, sampled(path, kind, n=3), path)
    stop = full[1][len(full[1]) // 2 :][:2]
    said = answers(client, sampled(path, kind, n=3, stop=[stop]), path)
    assert [choice.content for choice in said] == [text.partition(stop)[0] for text in full]
    assert {choice.reason for choice in said} == {"stop"}


@each_form
def test_its_tokens_are_scored(client: httpx.Client, path: str, kind: str) -> None:
    logprobs = True if path == CHAT else 4
    choices = ask(client, sampled(path, kind, n=2, logprobs=logprobs), path)["choices"]
    scored = [
        told["content"] if path == CHAT else told["tokens"]
        for told in (choice["logprobs"] for choice in choices)
    ]
    if path == COMPLETIONS:  # the end is scored, and is not of the text
        assert {tokens.pop() for tokens in scored} <= {*END_TOKENS}
    written = [b"".join(map(token_bytes, tokens)).decode() for tokens in scored]
    assert written == texts(client, sampled(path, kind, n=2), path)


def token_bytes(told: Any) -> bytes:
    """The bytes of a token, from either form of log-probabilities."""
    if isinstance(told, dict):
        return bytes(told["bytes"])
    data = re.fullmatch(r"bytes:((\\x..)+)", told)
    return bytes.fromhex(data[1].replace("\\x", "")) if data else str(told).encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 4},
        {"frequency_penalty": -2, "presence_penalty": -2, "repetition_penalty": 0.3},
        {"temperature": 2, "top_k": 1, "top_p": 0.01, "min_p": 1},
        {"temperature": 0},
        {"logit_bias": hurry(close=9) | {token(text): -100 for text in 'abcyn1{"'}},
    ],
    ids=["penalties", "rewards", "filters", "greedy", "what it needs is banned"],
)
@pytest.mark.parametrize(
    "kind",
    often(
        ["strict", "guided_regex", "guided_choice", "guided_grammar"], ["strict", "guided_regex"]
    ),
)
def test_no_sampling_leads_out_of_it(client: httpx.Client, kind: str, fields: Body) -> None:
    [said] = answers(client, sampled(CHAT, kind, **fields))
    assert said.reason == "stop"
    assert KINDS[kind][1](said.content)


def test_rows_with_and_without_do_not_disturb_each_other(
    server: Server, client: httpx.Client
) -> None:
    free = [(CHAT, chat(max_tokens=40)), (COMPLETIONS, completion(max_tokens=40))]
    bound = [(path, sampled(path, kind, n=2)) for path, kind in FEW]
    together = [(path, body | {"model": "endless"}) for path, body in (*free, *bound, *free)]
    alone = [ask(client, body, path)["choices"] for path, body in together]
    long = endless(model="endless", guided_regex="(?s:.*)")
    with RawClient(server, long) as running, ThreadPoolExecutor(len(together)) as threads:
        running.until(FIRST_CONTENT)
        asked = [threads.submit(ask, client, body, path) for path, body in together]
        assert [each.result()["choices"] for each in asked] == alone
        running.hang_up()
    assert left(server, running), "it ran beside all of them"


# Thoughts.


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *often([("thinking", kind) for kind in KINDS], [("thinking", "guided_regex")]),
        ("demo", "strict"),
    ],
)
def test_thoughts_come_first_and_are_free(client: httpx.Client, model: str, kind: str) -> None:
    bias = hurry(close=8) | {token("</think>"): 7} if model == "thinking" else {}
    body = sampled(CHAT, kind, model=model, logit_bias=bias, n=2, **THINK)
    for said in answers(client, body):
        assert (said.reason, bool(said.reasoning)) == ("stop", True)
        assert KINDS[kind][1](said.content), said.content
    whole = ask(client, body | {"n": 1, "logprobs": True})
    thoughts = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    spoken = whole["usage"]["completion_tokens"] - thoughts
    # Besides what is scored there are the end and perhaps a newline after the thoughts.
    assert spoken - len(whole["choices"][0]["logprobs"]["content"]) in (1, 2)


# Tools.

OFFERED = [tool(name, schema) for name, schema in TOOLS.items()]
LIVELY = hurry(close=8, end=0) | {token("Ċ"): 5, token("_"): 9, token("{"): 3}
"""Biases by which random weights make any call, often several, and also say other things."""


def calling(**fields: Any) -> Body:
    return sampled(CHAT, **{"tools": OFFERED, "logit_bias": LIVELY, "n": 6, **fields})


def check_calls(said: Said) -> list[str]:
    """The names of what is called, which is all that is said."""
    assert (said.reason, said.content) == ("tool_calls", "")
    assert said.calls
    for name, arguments in said.calls:
        Draft202012Validator(TOOLS[name] | {"type": "object"}).validate(strict_json(arguments))
    return [name for name, _ in said.calls]


@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_that_is_required_is_made(client: httpx.Client, thinking: bool) -> None:
    bias = LIVELY | {token("</think>"): 7}
    more = {"n": 8, "seed": 50} | (THINK if thinking else {})
    said = answers(client, calling(tool_choice="required", logit_bias=bias, **more))
    names = [check_calls(choice) for choice in said]
    assert {len(each) > 1 for each in names} == {True, False}, "one call or several"
    assert thinking or {name for each in names for name in each} == {*TOOLS}
    assert all(bool(choice.reasoning) == thinking for choice in said)


@pytest.mark.parametrize("choice", often(["required", *TOOLS], ["required", "get_weather"]))
def test_one_call_where_there_is_to_be_one(client: httpx.Client, choice: str) -> None:
    one = {"tool_choice": choice, "parallel_tool_calls": False}
    for said in answers(client, calling(**(only(choice) if choice in TOOLS else one))):
        [name] = check_calls(said)
        assert choice in ("required", name)


@pytest.mark.parametrize("kind", often(["json_object", "strict", "guided_json"], ["strict"]))
def test_beside_tools_json_or_a_call_comes(client: httpx.Client, kind: str) -> None:
    fields, obeys = KINDS[kind]
    reasons = set()
    for said in answers(client, calling(tool_choice="auto", **fields)):
        reasons.add(said.reason)
        if said.reason == "stop":
            assert not said.calls
            assert obeys(said.content)
        else:
            check_calls(said)
    assert reasons == {"stop", "tool_calls"}
    for said in answers(client, calling(tool_choice="none", **fields)):
        assert (said.reason, said.calls) == ("stop", [])
        assert obeys(said.content)


@pytest.mark.parametrize(
    "text",
    [
        *("<tool_call>a", "a<|im_end|>b"),
        pytest.param("a <think> b", marks=pytest.mark.long),
        pytest.param("a </think> b", marks=pytest.mark.long),
        pytest.param("a </tool_call> b", marks=pytest.mark.long),
    ],
)
def test_what_a_schema_spells_like_a_marker_is_text(client: httpx.Client, text: str) -> None:
    properties = {"forced": {"const": text}, "drawn": {"enum": [text, "zz"]}}
    closed = {"required": [*properties], "additionalProperties": False}
    schema = {"type": "object", "properties": properties, **closed}
    bias = hurry(close=8) | {token(unwanted): -100 for unwanted in ("z", "<tool_call>")}
    expected, offered = dict.fromkeys(properties, text), [tool("f", schema)]
    for tools in (None, offered):
        body = sampled(CHAT, logit_bias=bias, tools=tools)
        [said] = answers(client, body | schema_format(schema))
        assert (said.reason, said.reasoning, said.calls) == ("stop", "", [])
        assert json.loads(said.content) == expected
    [said] = answers(client, sampled(CHAT, logit_bias=bias, tools=offered, **only("f")))
    assert [json.loads(arguments) for _, arguments in said.calls] == [expected]


# Refusals.

DEEP = '{"items":' * 65 + "{}" + "}" * 65
OBJECT = KINDS["json_object"][0]
FORCED = {"tools": [tool("fine", {}), tool("bad", {"not": {}})], "tool_choice": "required"}
REFUSED: list[tuple[str, Body, str, str]] = [
    (CHAT, schema_format({"type": "objectx"}), "response_format", "Invalid type: objectx"),
    (CHAT, schema_format({"not": {}}, strict=False), "response_format", 'keys: ["not"]'),
    (CHAT, {"guided_json": chain(2000, lambda ref: ref)}, "guided_json", "too much for the compil"),
    (COMPLETIONS, {"guided_json": {"$ref": "#"}}, "guided_json", "nothing can satisfy it"),
    (COMPLETIONS, {"guided_json": DEEP}, "guided_json", "more than 64 levels"),
    (COMPLETIONS, {"guided_json": {"const": "x" * 2**18}}, "guided_json", "at most 262144"),
    (CHAT, {"guided_regex": "a("}, "guided_regex", "unclosed group"),
    (COMPLETIONS, {"guided_regex": "a" * 40_000}, "guided_regex", "at most 32768"),
    (COMPLETIONS, {"guided_grammar": 'start: "a" b'}, "guided_grammar", 'unknown name: "b"'),
    (CHAT, {"grammar": 'root ::= "a" b'}, "grammar", "not a GBNF grammar: there is no rule b"),
    (CHAT, {"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed group"),
    (CHAT, {"guided_regex": "a", **OBJECT}, "response_format", "cannot be combined"),
    (COMPLETIONS, {"guided_json": {}, "guided_choice": ["a"]}, "guided_json", "be combined with"),
    (CHAT, FORCED, "tool_choice", 'bad: Unimplemented keys: ["not"]'),
]


@pytest.mark.parametrize(("path", "fields", "param", "reason"), REFUSED)
def test_what_cannot_be_followed_is_refused(
    client: httpx.Client, path: str, fields: Body, param: str, reason: str
) -> None:
    for streaming in (False, True):
        response = client.post(path, json=FORMS[path](stream=streaming, **fields), headers=JSON)
        message = refused(response, 400, "invalid_value", param=param)["message"]
        assert message.startswith(f"{param}: ")
        assert reason in message
        assert "\n" not in message
    assert answer(ask(client, FORMS[path](), path))


@pytest.mark.long
def test_a_grammar_that_never_compiles_is_refused(narrow: Server) -> None:
    with RawClient(narrow, chat(guided_json=NEVER_COMPILED)) as stays:
        # Seconds of a processor, which a busy machine gives in many more.
        refusal = stays.until(rb"guided_json: takes more than 5 s of processor time", seconds=120)
        assert refusal.startswith(b"HTTP/1.1 400 ")
    assert started(narrow, stays) == []


def test_nobody_waits_for_a_grammar_that_is_compiled(folders: Folders, tmp_path: Path) -> None:
    """Clients that leave meanwhile leave nothing behind."""
    stuck = chat(guided_json={"const": ASLEEP})
    options = [f"--model=t={folders.plain}", "--max-concurrency=1", "--log-level=debug"]
    with serving_faulty(tmp_path, *options) as server, server.client() as client:
        with RawClient(server, stuck) as whole, RawClient(server, stuck | STREAM) as streamed:
            wait_for(lambda: states(server)["t"]["requests"] == 2, why="both are compiled")
            assert answer(ask(client, chat()))
            assert answer(ask(client, chat(guided_regex="[ab]{3}")))
            whole.hang_up("fin")
            streamed.hang_up("rst")
            assert all(left(server, leaver) for leaver in (whole, streamed))
        assert started(server, whole, streamed) == []


@pytest.mark.parametrize("streaming", [False, True])
def test_leaving_while_it_is_generated_frees_the_row(narrow: Server, streaming: bool) -> None:
    with RawClient(narrow, endless(guided_regex="(?s:.*)", stream=streaming)) as leaver:
        wait_for(lambda: started(narrow, leaver), why="the request gets its row")
        leaver.hang_up()
    assert left(narrow, leaver)
    with narrow.client() as client:
        assert answer(ask(client, chat(guided_regex="[ab]{3}")))


# Without the library.


@pytest.fixture(scope="module")
def bare(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server that cannot import llguidance: what hides it runs before all else there."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['llguidance'] = None\n")
    models = [f"--model=t={folders.plain}", f"--model=thinking={folders.thinking}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with serving(folder, *models) as server, server.client() as client:
            yield client


def asking(fields: Body) -> str:
    """The path of the field that asks for a form."""
    [[name, value], *_] = fields.items()
    return f"{name}.{next(iter(value))}" if name == "structured_outputs" else str(name)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, KINDS[kind][0]) for path, kind in FEW),
        *((CHAT, {**asked, "tools": OFFERED}) for asked in (OBJECT, only("ping"))),
    ],
)
@pytest.mark.parametrize("streaming", often([False, True], [True]))
def test_without_the_library_it_is_refused(
    bare: httpx.Client, path: str, fields: Body, streaming: bool
) -> None:
    response = bare.post(path, json=FORMS[path](stream=streaming, **fields), headers=JSON)
    error = refused(response, 400, "unsupported_parameter", param=asking(fields))
    assert "pip install 'mlxsrv[structured]'" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, sampled(CHAT, n=2, stop="a", logprobs=True, **THINK)),
        (CHAT, chat(response_format={"type": "text"}, guided_json=None)),
        (CHAT, chat("What is 1 plus 2?", model="demo", tools=OFFERED, max_tokens=200)),
        (COMPLETIONS, sampled(COMPLETIONS, prompt=["Once", "Twice"], logprobs=3)),
    ],
)
def test_without_the_library_all_else_is_the_same(
    bare: httpx.Client, client: httpx.Client, path: str, body: Body
) -> None:
    assert answers(bare, body, path) == answers(client, body, path)
