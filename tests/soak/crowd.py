"""The crowd: what its members do, and how each of that may end.

A deed makes one visit, says how it ended, and raises Strange where that is wrong. Its outcomes are
those of its row in DEEDS, no others; a queue that is full is one that all must live with.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import msgspec

from tests.soak.town import ENCODER, FEATURES, JUDGE, SAE, STEERED, WRITERS
from tests.soak.visit import Body, HangUp, Heard, Strange
from tests.soak.world import FULL, PATIENCE, PROMPTS, Deed, Failure, World, told

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
"""Seconds that one deed may take: a crowd waits for its turns at two of six models."""

_MANY = 900  # tokens: more than most wait for


# Those who listen to the end.


def greedy(model: str, prompt: str, **fields: Any) -> Body:
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0} | fields


def text_of(heard: Heard, *, stream: bool) -> str:
    if not stream:
        return str(heard.json["choices"][0]["message"]["content"])
    choices = [choice for chunk in heard.chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def ask_what_is_known(world: World, *, stream: bool) -> str:
    model, prompt = world.writer(), world.dice.choice(PROMPTS)
    heard = await world.ask("POST", CHAT, greedy(model, prompt, stream=stream))
    if heard.status != 200:
        return told(heard)
    said = text_of(heard, stream=stream)
    if said != world.known[f"{model}/{prompt}"]:
        raise Strange(f"{model} said {said!r}, and {world.known[f'{model}/{prompt}']!r} before")
    return "the same as ever"


async def ask_as_ollama(world: World) -> str:
    """The same in Ollama's API, which may also say how long the model stays."""
    model, prompt = world.writer(), world.dice.choice(PROMPTS)
    body: Body = {
        "model": f"{model}:latest",
        "messages": [{"role": "user", "content": prompt}],
        "options": {"num_predict": 24, "temperature": 0},
        "keep_alive": world.dice.choice([None, None, 0, 0.5, -1]),
    }
    heard = await world.ask("POST", "/api/chat", body)
    if heard.status == 503:
        return FULL
    lines = [json.loads(line) for line in heard.body.splitlines()]
    if not lines[-1].get("done"):
        raise Strange(f"a stream ends with {lines[-1]}")
    said = "".join(line["message"]["content"] for line in lines)
    if said != world.known[f"{model}/{prompt}"]:
        raise Strange(f"{model} said {said!r}, and {world.known[f'{model}/{prompt}']!r} before")
    return "the same as ever"


async def ask_for_several(world: World) -> str:
    fields: Body = {"n": world.dice.randint(2, 4), "stream": world.dice.random() < 0.5}
    fields |= {"temperature": 1.2, "seed": world.dice.randrange(100), "stop": ["e", "the"]}
    heard = await world.ask("POST", CHAT, world.chat(**fields, logprobs=True, top_logprobs=3))
    if heard.status != 200:
        return told(heard)
    chunks = heard.chunks if fields["stream"] else [heard.json]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = sorted(c["index"] for c in choices if c["finish_reason"] in ("stop", "length"))
    if ends != list(range(fields["n"])):
        raise Strange(f"of {fields['n']} choices these have ended: {ends}")
    return "all choices"


async def complete_texts(world: World) -> str:
    prompts = world.dice.sample(PROMPTS, 2)
    body = {"model": world.writer(), "prompt": prompts, "echo": True, "presence_penalty": 0.5}
    heard = await world.ask("POST", TEXT, body)
    if heard.status == 200:
        texts = [choice["text"] for choice in heard.json["choices"]]
        if not all(text.startswith(p) for text, p in zip(texts, prompts, strict=True)):
            raise Strange(f"no echo of {prompts}: {texts}")
    return told(heard)


async def ask_for_json(world: World) -> str:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "ok": {"const": True}},
        "required": ["kind", "ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    heard = await world.ask("POST", CHAT, world.chat(response_format=form, max_tokens=60))
    if heard.status != 200:
        return told(heard)
    [choice] = heard.json["choices"]
    if choice["finish_reason"] == "stop":
        msgspec.json.decode(choice["message"]["content"])
        return "JSON"
    return "cut off"


async def ask_at_length(world: World) -> str:
    prompt = "".join(world.dice.choices(PROMPTS, k=_MANY // 20))
    messages = [{"role": "user", "content": prompt}]
    return told(await world.ask("POST", CHAT, world.chat(messages=messages, stream=True)))


async def embed(world: World) -> str:
    model = ENCODER if world.cares(ENCODER) else world.writer()
    texts = ["cat", "a dog", "zzz"][: world.dice.randint(1, 3)]
    form = world.dice.choice(("float", "base64"))
    body = {"model": model, "input": texts, "encoding_format": form}
    heard = await world.ask("POST", "/v1/embeddings", body)
    if heard.status == 200 and len(heard.json["data"]) != len(texts):
        raise Strange(f"{len(heard.json['data'])} vectors of {len(texts)} texts")
    return told(heard)


async def rerank(world: World) -> str:
    body = {"model": JUDGE, "query": "a cat", "documents": ["the cat sat", "a dog", "zzz"]}
    return told(await world.ask("POST", "/v1/rerank", body))


async def count_tokens(world: World) -> str:
    model, text = world.writer(), world.dice.choice(PROMPTS)
    async with world.visit() as visit:
        heard = world.note(await visit.ask("POST", "/tokenize", {"model": model, "content": text}))
        if heard.status != 200:
            return told(heard)
        body = {"model": model, "tokens": heard.json["tokens"]}
        back = world.note(await visit.ask("POST", "/detokenize", body))
    if back.status == 200 and back.json["content"] != text:
        raise Strange(f"{text!r} came back as {back.json['content']!r}")
    return told(back)


async def look_around(world: World) -> str:
    async with world.visit() as visit:
        for path in ("/health?verbose=1", "/v1/models", "/v1/models/plain", "/openapi.json"):
            heard = world.note(await visit.ask("GET", path))
            if heard.status != 200:
                raise Strange(f"{path}: {heard.status}")
    return "seen"


# Those who are wrong.

_WRONG: tuple[tuple[str, str, Body | bytes | None, str], ...] = (
    ("POST", CHAT, b"{", "400 invalid_json"),
    ("POST", CHAT, b"\xff\xfe", "400 invalid_json"),
    ("POST", CHAT, {}, "400 missing_required_parameter"),
    ("POST", CHAT, {"messages": []}, "400 invalid_value"),
    ("POST", CHAT, greedy("plain", "x", temperature="hot"), "400 invalid_value"),
    ("POST", CHAT, greedy("plain", "x", stream=True, top_p=7), "400 invalid_value"),
    ("POST", CHAT, greedy("plain", "x y " * 100_000), "400 context_length_exceeded"),
    ("POST", CHAT, greedy("nobody", "x"), "404 model_not_found"),
    ("POST", CHAT, greedy("nobody", "x", stream=True), "404 model_not_found"),
    ("POST", CHAT, greedy(ENCODER, "x"), "400 unsupported_parameter"),
    ("POST", CHAT, greedy("plain", "x", steering={"3": 4}), "400 sae_not_attached"),
    ("POST", CHAT, greedy("plain", "x", profile="none"), "404 profile_not_found"),
    ("POST", CHAT, greedy("plain", "x" * 2_000_000), "413 request_too_large"),
    ("POST", "/v1/embeddings", {"model": ENCODER, "input": []}, "400 invalid_value"),
    ("POST", "/v1/embeddings", {"model": JUDGE, "input": "x"}, "400 unsupported_parameter"),
    ("POST", "/v1/rerank", {"model": ENCODER, "query": "x"}, "400 missing_required_parameter"),
    ("GET", CHAT, None, "405 method_not_allowed"),
    ("GET", "/nowhere", None, "404 not_found"),
    ("GET", "/api/saes/none", None, "404 sae_not_found"),
    ("GET", "/api/profiles/none", None, "404 profile_not_found"),
    ("POST", "/api/saes/steering", {"feature_idx": "x"}, "400 invalid_value"),
    ("POST", "/v1/models", {}, "405 method_not_allowed"),
)


async def be_wrong(world: World) -> str:
    return await _be_wrong(world, *world.dice.choice(_WRONG))


async def be_wrong_in_every_way(world: World) -> str:
    for wrong in _WRONG:
        await _be_wrong(world, *wrong)
    return "refused"


async def _be_wrong(
    world: World, method: str, path: str, body: Body | bytes | None, expected: str
) -> str:
    async with world.visit() as visit:
        data = visit.written(method, path, body)
        try:
            await visit.send(data)
            heard = world.note(await visit.hear())
        except ConnectionError:
            # A body that is too large is answered before all of it was sent.
            if "too_large" not in expected:
                raise
            return "refused"
    got = told(heard)
    if got == FULL:
        return got
    if got != expected:
        raise Strange(f"{method} {path}: {got}, and not {expected}")
    return "refused"


async def speak_no_http(world: World) -> str:
    async with world.visit() as visit:
        await visit.send(
            world.dice.choice((b"hello\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\r\n\r\n"))
        )
        heard = await visit.hear()
        if heard.status != 400:
            raise Strange(f"no HTTP at all, and the answer is {heard.status}")
    return "refused"


# Those who leave.


def _how(world: World) -> HangUp:
    return "rst" if world.dice.random() < 0.5 else "fin"


async def leave_before_asking(world: World) -> str:
    async with world.visit() as visit:
        data = visit.written("POST", CHAT, world.chat())
        await visit.send(data[: world.dice.randrange(len(data))])
        await asyncio.sleep(world.dice.random() / 20)
        visit.leave(_how(world))
    return "left"


async def leave_while_waiting(world: World) -> str:
    """At once, queued, while its model loads, or just as the answer comes."""
    async with world.visit() as visit:
        long = world.dice.random() < 0.5
        body = world.chat(stream=long, max_tokens=_MANY)
        await visit.send(visit.written("POST", CHAT, body))
        await asyncio.sleep(world.dice.random() / 4)
        visit.leave(_how(world))
    return "left"


async def leave_mid_stream(world: World) -> str:
    async with world.visit() as visit:
        body = world.chat(stream=True, max_tokens=_MANY)
        await visit.send(visit.written("POST", CHAT, body))
        if not (await visit.until(rb"\r\n\r\n")).startswith(b"HTTP/1.1 200 "):
            return told(world.note(await visit.hear()))
        for _ in range(world.dice.randrange(20)):
            if visit.ended:  # a slow client gets it all in a few reads
                break
            await visit.some()
        visit.leave(_how(world))
    return "left"


async def leave_an_embedding(world: World) -> str:
    async with world.visit() as visit:
        body = {"model": world.writer(), "input": ["a text of some length"] * 200}
        await visit.send(visit.written("POST", "/v1/embeddings", body))
        await asyncio.sleep(world.dice.random() / 5)
        visit.leave(_how(world))
    return "left"


# Those who are slow.


async def read_slowly(world: World) -> str:
    """A few bytes at a time, then the rest."""
    async with world.visit(buffer=2048) as visit:
        body = world.chat(stream=True, max_tokens=100)
        await visit.send(visit.written("POST", CHAT, body))
        for _ in range(200):
            data = await visit.some(1)
            await asyncio.sleep(0.005 if data else 0)
        heard = world.note(await visit.hear(512))
    if heard.status == 200:
        assert heard.chunks
    return told(heard)


async def read_nothing(world: World) -> str:
    """For seconds; then all of it, or nothing ever."""
    async with world.visit(buffer=2048) as visit:
        body = world.chat(stream=True, max_tokens=_MANY, logprobs=True, top_logprobs=20)
        await visit.send(visit.written("POST", CHAT, body))
        await asyncio.sleep(1 + 2 * world.dice.random())
        if world.dice.random() < 0.7:
            visit.leave(_how(world))
            return "left"
        heard = world.note(await visit.hear())
    if heard.status == 200:
        assert heard.chunks
    return told(heard)


# Those who steer.


async def attach(world: World) -> str:
    return told(await world.ask("POST", f"/api/saes/{SAE}/attach", {"model": STEERED}), "done")


async def detach(world: World) -> str:
    return told(await world.ask("POST", f"/api/saes/{SAE}/detach", {"model": STEERED}), "done")


async def steer(world: World) -> str:
    steering = {str(world.dice.randrange(FEATURES)): world.dice.uniform(-50, 50)}
    body = greedy(STEERED, world.dice.choice(PROMPTS), steering=steering, stream=True)
    return told(await world.ask("POST", CHAT, body))


async def follow_a_profile(world: World) -> str:
    """Make one, ask with it, make it the default, forget it."""
    world.profiles += 1
    name = f"profile {world.profiles}"
    where = {"model_id": STEERED, "sae_id": SAE, "layer": 1}
    body = {"name": name, "steering": {"7": 30.0}, **where}
    async with world.visit() as visit:
        made = world.note(await visit.ask("POST", "/api/profiles", body))
        if made.status != 201:
            raise Strange(f"a profile was not made: {made.body!r}")
        id = made.json["data"]["id"]
        said = world.note(await visit.ask("POST", CHAT, greedy(STEERED, "x", profile=name)))
        on = world.note(await visit.ask("POST", f"/api/profiles/{id}/activate", {}))
        gone = world.note(await visit.ask("DELETE", f"/api/profiles/{id}"))
    if gone.status != 200:
        raise Strange(f"a profile was not removed: {gone.body!r}")
    return told(on) if said.status == 200 else told(said)


async def watch_features(world: World) -> str:
    body = {"model": STEERED, "enabled": world.dice.random() < 0.7, "features": [1, 7], "top_k": 3}
    heard = await world.ask("POST", "/api/monitoring/configure", body)
    if heard.status == 200:
        heard = await world.ask("GET", f"/api/monitoring/history?model={STEERED}&limit=20")
    return told(heard)


class Row(msgspec.Struct, frozen=True):
    """A deed: how often it is done, and how it may end."""

    weight: int
    do: Deed
    outcomes: tuple[str, ...]
    model: str | None = None
    """Whom it is all about."""


_LOOSE = "400 sae_not_attached"
DEEDS = {
    "known stream": Row(20, partial(ask_what_is_known, stream=True), ("the same as ever", FULL)),
    "known answer": Row(14, partial(ask_what_is_known, stream=False), ("the same as ever", FULL)),
    "as Ollama": Row(6, ask_as_ollama, ("the same as ever", FULL)),
    "several": Row(6, ask_for_several, ("all choices", FULL)),
    "completions": Row(5, complete_texts, ("answered", FULL)),
    "structured": Row(4, ask_for_json, ("JSON", "cut off", FULL)),
    "long prompt": Row(3, ask_at_length, ("answered", FULL)),
    "embeddings": Row(6, embed, ("answered", FULL)),
    "rerank": Row(6, rerank, ("answered", FULL), JUDGE),
    "tokens": Row(4, count_tokens, ("answered", FULL)),
    "catalogue": Row(3, look_around, ("seen",)),
    "wrong": Row(10, be_wrong, ("refused", FULL)),
    "all wrong": Row(0, be_wrong_in_every_way, ("refused",)),
    "no HTTP": Row(2, speak_no_http, ("refused",)),
    "leaves while asking": Row(5, leave_before_asking, ("left",)),
    "leaves waiting": Row(9, leave_while_waiting, ("left",)),
    "leaves a stream": Row(9, leave_mid_stream, ("left", FULL)),
    "leaves embeddings": Row(3, leave_an_embedding, ("left",)),
    "reads slowly": Row(4, read_slowly, ("answered", FULL)),
    "reads nothing": Row(4, read_nothing, ("answered", "left", FULL)),
    "attaches": Row(4, attach, ("done", "409 sae_attached", FULL), STEERED),
    "detaches": Row(2, detach, ("done", _LOOSE), STEERED),
    "steers": Row(14, steer, ("answered", _LOOSE, FULL), STEERED),
    "profiles": Row(6, follow_a_profile, ("answered", _LOOSE, FULL), STEERED),
    "monitors": Row(4, watch_features, ("answered", _LOOSE), STEERED),
}


async def do(world: World, name: str) -> None:
    """One deed, entered into the table."""
    row = DEEDS[name]
    try:
        async with asyncio.timeout(PATIENCE):
            outcome = await row.do(world)
    except TimeoutError:
        outcome = "no answer in time"
    except (Strange, OSError, ValueError, LookupError) as error:
        outcome = f"{type(error).__name__}: {error}"
    if outcome not in row.outcomes:
        world.failures.append(Failure(name, outcome))
        outcome = "FAILED"
    world.table[name, outcome] += 1


async def live(world: World, until: float) -> None:
    """One member: deed after deed, until this time of the loop."""
    names, weights = list(DEEDS), [row.weight for row in DEEDS.values()]
    loop = asyncio.get_running_loop()
    while loop.time() < until and len(world.failures) < 20:
        [name] = world.dice.choices(names, weights)
        if world.cares(DEEDS[name].model):
            await do(world, name)
        await asyncio.sleep(world.dice.random() / 10)


async def gather(world: World, members: int, seconds: float) -> None:
    """A crowd for so many seconds, and until the last of it has done."""
    until = asyncio.get_running_loop().time() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(members):
            group.create_task(live(world, until))


async def learn(world: World) -> dict[str, str]:
    """Ask every model of text, in one order, while nobody else is there."""
    said = {}
    for model in (*WRITERS, STEERED):
        for prompt in PROMPTS:
            heard = await world.ask("POST", CHAT, greedy(model, prompt))
            if heard.status != 200:
                raise Strange(f"{model} says nothing: {heard.body!r}")
            said[f"{model}/{prompt}"] = text_of(heard, stream=False)
    return said


async def make_peace(world: World) -> None:
    """Take the SAE off, whoever put it on last, and have what was held for it looked for."""
    await detach(world)
    await watch_features(world)
