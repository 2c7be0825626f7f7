"""The requests of the transcripts: recorded ones, each dialect's features, each field misused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.support.client import Body

RECORDED = Path(__file__).parents[1] / "support" / "recorded"
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Asked(msgspec.Struct, frozen=True):
    """One request. `{last}` in its path is the id of the last response that was stored."""

    label: str
    method: str
    path: str
    body: Any = None
    headers: dict[str, str] = {}
    raw: str | None = None


def recorded() -> Iterator[Asked]:
    """Requests of real clients, with names of the models here and short answers."""
    for path in sorted(RECORDED.glob("*.jsonl")):
        for number, line in enumerate(path.read_text("utf-8").splitlines()):
            request = json.loads(re.sub(r"<text of (\d+) characters>", _stand_in, line))
            body = request.get("body")
            if isinstance(body, dict):
                body |= {name: min(body[name], 6) for name in _LIMITS if name in body}
                if "model" in body:
                    named = "fim" if "/fim/" in request["path"] else body["model"].split(":")[0]
                    body["model"] = named if named in ("embed", "rerank", "fim") else "says"
                if isinstance(body.get("prompt"), list):
                    body["prompt"] = [
                        [token % 200 for token in ids] if isinstance(ids, list) else ids
                        for ids in body["prompt"]
                    ]
                if "logit_bias" in body:
                    body["logit_bias"] = {"5": 1}
                body |= _greedy(request["path"], body)
            headers = {
                name: text
                for name, text in request["headers"].items()
                if text != "..." and name.lower() not in ("host", "content-length")
            }
            yield Asked(f"{path.stem} {number}", request["method"], request["path"], body, headers)


def _greedy(path: str, body: Body) -> Body:
    """The fields that have a request answered without chance."""
    if path in ("/api/chat", "/api/generate"):
        return {"options": {**body.get("options", {}), "temperature": 0}}
    answering = path.endswith(("completions", "completion", "infill", "messages", "responses"))
    return {"temperature": 0} if answering else {}


def _stand_in(match: re.Match[str]) -> str:
    return ("word " * 400)[: min(int(match[1]), 400)]


_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
_FORM = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer", "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_CALL = {"name": "weather", "arguments": '{"city":"Oslo","days":2}'}


def features() -> Iterator[Asked]:
    """Each dialect's ways to ask, whole and streamed."""
    for streamed in (False, True):
        yield from _chats(streamed)
        yield from _texts(streamed)
        yield from _messages(streamed)
        yield from _responses(streamed)
        yield from _ollama(streamed)
    yield from _others()


def _chats(streamed: bool) -> Iterator[Asked]:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": _PARAMETERS}}]
    custom = [{"type": "custom", "custom": {"name": "run", "description": "Run code."}}]
    user = {"role": "user", "content": "What is the weather in Oslo?"}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": _CALL}],
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": _FORM}}
    bodies: dict[str, Body] = {
        "plain": {"messages": [user]},
        "system": {"messages": [{"role": "system", "content": "Be short."}, user]},
        "tools": {"messages": [user], "tools": tools},
        "tool required": {"messages": [user], "tools": tools, "tool_choice": "required"},
        "tool none": {"messages": [user], "tools": tools, "tool_choice": "none"},
        "tool answered": {"messages": [user, called, result], "tools": tools},
        "custom tool": {"messages": [user], "tools": custom},
        "thinking": {"messages": [user], "enable_thinking": True},
        "effort": {"messages": [user], "reasoning_effort": "low"},
        "developer": {"messages": [{"role": "developer", "content": "Be short."}, user]},
        "prefill": {"messages": [user, {"role": "assistant", "content": "It is"}]},
    }
    for name, body in bodies.items():
        asked = {"model": "says", "temperature": 0, **body}
        yield _asked(f"chat {name}", "/v1/chat/completions", asked, streamed)
    random: dict[str, Body] = {
        "greedy": {"temperature": 0},
        "seeded": {"seed": 7, "temperature": 1.1, "top_p": 0.9},
        "several": {"n": 3, "seed": 3},
        "logprobs": {"logprobs": True, "top_logprobs": 2, "temperature": 0},
        "ids": {"return_token_ids": True, "temperature": 0},
        "stop": {"stop": ["e", "a"], "temperature": 0},
        "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "temperature": 0},
        "bias": {"logit_bias": {"40": 30}, "temperature": 0},
        "form": {"response_format": form, "seed": 1, "max_tokens": 60},
        "object": {"response_format": {"type": "json_object"}, "seed": 1, "max_tokens": 40},
        "regex": {"structured_outputs": {"regex": "[a-c]{3}"}, "seed": 2},
        "choice": {"structured_outputs": {"choice": ["yes", "no"]}, "seed": 2},
        "grammar": {"grammar": 'root ::= "a" [b-d]+ "e"', "seed": 2},
        "usage": {"stream_options": {"include_usage": True}} if streamed else {"seed": 1},
        "continuous": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if streamed
        else {"seed": 2, "n": 2},
    }
    for name, body in random.items():
        asked = {"model": "plain", "messages": [user], "max_tokens": 12, "seed": 5, **body}
        yield _asked(f"chat {name}", "/v1/chat/completions", asked, streamed)


def _texts(streamed: bool) -> Iterator[Asked]:
    bodies: dict[str, Body] = {
        "greedy": {"prompt": "The quick", "temperature": 0},
        "seeded": {"prompt": "The quick", "seed": 4},
        "two": {"prompt": ["The quick", "A slow"], "temperature": 0},
        "ids": {"prompt": [1, 2, 3, 40], "temperature": 0, "return_token_ids": True},
        "echo": {"prompt": "The quick", "echo": True, "temperature": 0},
        "logprobs": {"prompt": "The quick", "logprobs": 2, "temperature": 0},
        "echo scored": {"prompt": "The quick", "echo": True, "logprobs": 1, "max_tokens": 0},
        "prompt scored": {"prompt": "The quick", "prompt_logprobs": 1, "temperature": 0},
    }
    for name, body in bodies.items():
        asked = {"model": "plain", "max_tokens": 8, **body}
        yield _asked(f"text {name}", "/v1/completions", asked, streamed)
    llama = {"model": "plain", "prompt": "The quick", "n_predict": 8, "temperature": 0}
    yield _asked("llama", "/completion", llama, streamed)
    infill = {"model": "fim", "input_prefix": "def f(", "input_suffix": "return 1", "n_predict": 6}
    yield _asked("infill", "/infill", {**infill, "temperature": 0}, streamed)
    fim = {"model": "fim", "prompt": "def f(", "suffix": "return 1", "max_tokens": 6}
    yield _asked("fim", "/v1/fim/completions", {**fim, "temperature": 0}, streamed)


def _messages(streamed: bool) -> Iterator[Asked]:
    tools = [{"name": "weather", "description": "Of a city.", "input_schema": _PARAMETERS}]
    user = {"role": "user", "content": "What is the weather in Oslo?"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    bodies: dict[str, Body] = {
        "plain": {"messages": [user]},
        "system": {"messages": [user], "system": [{"type": "text", "text": "Be short."}]},
        "tools": {"messages": [user], "tools": tools},
        "tool any": {"messages": [user], "tools": tools, "tool_choice": {"type": "any"}},
        "answered": {
            "messages": [
                user,
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ],
            "tools": tools,
        },
        "thinking": {"messages": [user], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        "short": {"messages": [user], "max_tokens": 2},
        "stop": {"messages": [user], "stop_sequences": ["he"]},
    }
    for name, body in bodies.items():
        asked = {"model": "says", "max_tokens": 2000, "temperature": 0, **body}
        yield _asked(f"messages {name}", "/v1/messages", asked, streamed)
    if not streamed:
        count = {"model": "says", "messages": [user], "tools": tools}
        yield _asked("messages count", "/v1/messages/count_tokens", count)


def _responses(streamed: bool) -> Iterator[Asked]:
    tools = [{"type": "function", "name": "weather", "parameters": _PARAMETERS}]
    custom = [{"type": "custom", "name": "run", "description": "Run code."}]
    form = {"format": {"type": "json_schema", "name": "form", "schema": _FORM}}
    bodies: dict[str, Body] = {
        "plain": {"input": "What is the weather?"},
        "instructions": {"input": "Hello", "instructions": "Be short."},
        "tools": {"input": "What is the weather?", "tools": tools},
        "tool required": {"input": "Weather?", "tools": tools, "tool_choice": "required"},
        "custom": {"input": "Run it.", "tools": custom},
        "reasoning": {"input": "Think.", "reasoning": {"effort": "high", "summary": "auto"}},
        "short": {"input": "Hello", "max_output_tokens": 2},
        "form": {"model": "plain", "input": "Who?", "text": form, "max_output_tokens": 60},
        "unstored": {"input": "Hello", "store": False, "metadata": {"a": "b"}},
    }
    for name, body in bodies.items():
        asked = {"model": "says", "temperature": 0, **body}
        yield _asked(f"responses {name}", "/v1/responses", asked, streamed)
    first = {"model": "says", "input": "Hello", "temperature": 0}
    yield _asked("responses first", "/v1/responses", first, streamed)
    yield Asked("responses get", "GET", "/v1/responses/{last}")
    yield Asked("responses get streamed", "GET", "/v1/responses/{last}?stream=true")
    yield Asked("responses items", "GET", "/v1/responses/{last}/input_items?order=asc&limit=1")
    more = {"model": "says", "input": "And?", "previous_response_id": "{last}", "temperature": 0}
    yield _asked("responses more", "/v1/responses", more, streamed)
    yield Asked("responses delete", "DELETE", "/v1/responses/{last}")
    yield Asked("responses deleted", "GET", "/v1/responses/{last}")
    if not streamed:
        yield _asked("responses count", "/v1/responses/input_tokens", first)


def _ollama(streamed: bool) -> Iterator[Asked]:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": _PARAMETERS}}]
    user = {"role": "user", "content": "What is the weather in Oslo?"}
    chats: dict[str, Body] = {
        "plain": {"messages": [user]},
        "tools": {"messages": [user], "tools": tools},
        "think": {"messages": [user], "think": True},
        "form": {"model": "plain", "messages": [user], "format": _FORM},
        "load": {"messages": []},
    }
    options = {"temperature": 0, "num_predict": 60, "seed": 1}
    for name, body in chats.items():
        asked = {"model": "says", "options": options, "stream": streamed, **body}
        yield _asked(f"ollama {name}", "/api/chat", asked)
    texts: dict[str, Body] = {
        "text": {"prompt": "Hello"},
        "raw": {"prompt": "Hello", "raw": True, "model": "plain"},
        "suffix": {"model": "fim", "prompt": "def f(", "suffix": "return 1"},
    }
    for name, body in texts.items():
        asked = {"model": "says", "options": options, "stream": streamed, **body}
        yield _asked(f"ollama {name}", "/api/generate", asked)


def _others() -> Iterator[Asked]:
    for path, body in (
        ("/v1/embeddings", {"model": "embed", "input": ["one", "two words"]}),
        ("/v1/embeddings", {"model": "embed", "input": "one", "encoding_format": "base64"}),
        ("/v1/embeddings", {"model": "plain", "input": "one", "dimensions": 8}),
        ("/v1/rerank", {"model": "rerank", "query": "a", "documents": ["b", "c d"]}),
        ("/v2/rerank", {"model": "rerank", "query": "a", "documents": ["b", "c d"], "top_n": 1}),
        ("/v1/score", {"model": "rerank", "text_1": "a", "text_2": ["b", "c d"]}),
        ("/tokenize", {"model": "plain", "prompt": "The quick", "return_token_strs": True}),
        ("/tokenize", {"model": "plain", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/detokenize", {"model": "plain", "tokens": [1, 2, 3, 40]}),
        ("/apply-template", {"model": "plain", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/embed", {"model": "embed", "input": ["one", "two words"]}),
        ("/api/embeddings", {"model": "embed", "prompt": "one"}),
        ("/api/show", {"model": "plain"}),
        ("/api/pull", {"model": "plain"}),
    ):
        yield _asked(f"{path}", path, body)
    for path in (
        "/v1/models",
        "/v1/models/plain",
        "/v1/models/nothing",
        "/models",
        "/tokenizer_info?model=plain",
        "/health",
        "/health?verbose=1",
        "/health/live",
        "/api/tags",
        "/api/version",
        "/api/ps",
        "/api/saes",
        "/api/profiles",
        "/api/monitoring",
        "/nothing",
        "/",
    ):
        yield Asked(f"GET {path}", "GET", path)
        yield Asked(f"GET {path}", "GET", path, headers={"anthropic-version": "2023-06-01"})
    yield Asked("wrong method", "PUT", "/v1/chat/completions")
    yield from _steering()


def _steering() -> Iterator[Asked]:
    """The management, with the demo's SAE."""
    base = "/api/saes"
    yield Asked("attach", "POST", f"{base}/demo/attach", {"model": "demo"})
    yield Asked("attachment", "GET", f"{base}/attachment?model=demo")
    yield Asked("compatible", "GET", f"{base}/demo/compatibility?model=demo")
    yield Asked("set", "POST", f"{base}/steering", {"model": "demo", "feature_idx": 3, "value": 2})
    yield Asked("batch", "POST", f"{base}/steering/batch", {"model": "demo", "steering": {"5": 1}})
    yield Asked("steering", "GET", f"{base}/steering?model=demo")
    yield Asked("disable", "POST", f"{base}/steering/disable", {"model": "demo"})
    yield Asked("enable", "POST", f"{base}/steering/enable", {"model": "demo"})
    watch = {"model": "demo", "enabled": True}
    yield Asked("watch", "POST", "/api/monitoring/configure", watch)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    yield _asked("steered", "/v1/chat/completions", {**body, "temperature": 0})
    for path in ("monitoring", "monitoring/history", "monitoring/statistics"):
        yield Asked(path, "GET", f"/api/{path}?model=demo")
    yield Asked("highest", "POST", "/api/monitoring/statistics/top", {"model": "demo", "k": 3})
    profile = {
        "name": "sea",
        "model_id": "demo",
        "sae_id": "demo",
        "layer": 2,
        "steering": {"3": 1.5},
    }
    yield Asked("profile", "POST", "/api/profiles", profile)
    yield Asked("profiles", "GET", "/api/profiles")
    for action in ("activate", "export", "deactivate", ""):
        method = "GET" if action in ("export", "") else "POST"
        path = f"/api/profiles/{{last}}/{action}".rstrip("/")
        yield Asked(f"profile {action}", method, path)
    yield Asked("rename", "PATCH", "/api/profiles/{last}", {"name": "lake"})
    yield Asked("delete", "DELETE", "/api/profiles/{last}")
    yield Asked("detach", "POST", f"{base}/demo/detach", {"model": "demo"})


def _asked(label: str, path: str, body: Body, streamed: bool = False) -> Asked:
    return Asked(
        f"{label}{' streamed' if streamed else ''}",
        "POST",
        path,
        {**body, "stream": True} if streamed else body,
    )


_WRONG: tuple[Any, ...] = (None, "x", -1, 10**10, 0.5, True, [], {}, ["x"], {"x": 1})
_LEAST: dict[str, Body] = {
    "ChatRequest": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "CompletionRequest": {"prompt": "Hi", "max_tokens": 2},
    "FIMRequest": {"model": "fim", "prompt": "Hi", "max_tokens": 2},
    "MessagesRequest": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "ResponsesRequest": {"input": "Hi", "max_output_tokens": 2},
    "EmbeddingRequest": {"model": "embed", "input": "Hi"},
    "RerankRequest": {"model": "rerank", "query": "a", "documents": ["b"]},
    "CohereRerankRequest": {"model": "rerank", "query": "a", "documents": ["b"]},
    "ScoreRequest": {"model": "rerank", "text_1": "a", "text_2": "b"},
    "InfillRequest": {"model": "fim", "input_prefix": "a", "input_suffix": "b", "n_predict": 2},
    "LlamaCompletionRequest": {"prompt": "Hi", "n_predict": 2},
    "TokenizeRequest": {"prompt": "Hi"},
    "DetokenizeRequest": {"tokens": [1]},
    "OllamaChatRequest": {
        "messages": [{"role": "user", "content": "Hi"}],
        "options": {"num_predict": 2, "temperature": 0},
        "stream": False,
    },
    "OllamaGenerateRequest": {
        "prompt": "Hi",
        "options": {"num_predict": 2, "temperature": 0},
        "stream": False,
    },
    "OllamaEmbedRequest": {"model": "embed", "input": "Hi"},
    "OllamaEmbeddingsRequest": {"model": "embed", "prompt": "Hi"},
}
_ANY_OPTIONS: tuple[Any, ...] = (None, {}, {"x": 1})
_SAMPLED = {"ChatRequest", "CompletionRequest", "FIMRequest", "MessagesRequest", "ResponsesRequest"}
_SAMPLED |= {"InfillRequest", "LlamaCompletionRequest"}


def misuses(description: Body) -> Iterator[Asked]:
    """Each field of each body with values of each type; and bodies that are none."""
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" not in content:
                continue
            where = path.replace("{id}", "nothing").replace("{idx}", "1")
            for raw in ("", "{", "[]", "null", '{"a":1}', "{}", '"x"', '{"model":1}'):
                yield Asked(f"{path} {raw}", method.upper(), where, raw=raw)
            name = content["application/json"]["schema"].get("$ref", "").rpartition("/")[2]
            schema = description["components"]["schemas"].get(name, {})
            least = {"model": "plain", **_LEAST.get(name, {})}
            if name in _SAMPLED:
                least |= {"temperature": 0, "top_k": 1}
            for field in sorted(_fields(schema)):
                for wrong in _WRONG:
                    if name.startswith("Ollama") and field == "options" and wrong in _ANY_OPTIONS:
                        continue  # a long answer by chance
                    body = {**least, field: wrong}
                    label = f"{path} {field} {json.dumps(wrong)}"
                    yield Asked(label, method.upper(), where, body)


def _fields(schema: Body) -> set[str]:
    found = set(schema.get("properties", {}))
    for each in (*schema.get("allOf", ()), *schema.get("anyOf", ())):
        found |= _fields(each)
    return found
