"""The same conversation in each dialect: requests of one meaning, and their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.wire.anthropic.requests import MESSAGES_REQUESTS
from mlxsrv.wire.ollama.requests import OLLAMA_CHATS
from mlxsrv.wire.openai.requests import CHAT_REQUESTS
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS, Past
from tests.support.anthropic_streams import hear
from tests.support.client import Body, read_stream
from tests.support.ollama import read_lines
from tests.web.dialects.spoken import (
    Asked,
    Call,
    Counts,
    Response,
    Said,
    Spoken,
    Turn,
    present,
    whole_calls,
)
from tests.wire.responses.asking import read_events


class ChatCompletions(Spoken):
    name = "chat"
    path = "/v1/chat/completions"
    keepalive = b": keep-alive\n\n"

    def body(self, asked: Asked) -> Body:
        messages = [{"role": "system", "content": asked.system}] if asked.system else []
        messages += [self._message(turn) for turn in asked.turns]
        schema = asked.schema and {"name": "form", "schema": asked.schema}
        return present(
            model=asked.model,
            messages=messages,
            tools=[
                {"type": "function", "function": msgspec.structs.asdict(tool)}
                for tool in asked.tools
            ],
            tool_choice=self._choice(asked.choice),
            response_format=schema and {"type": "json_schema", "json_schema": schema},
            stop=asked.stop,
            max_tokens=asked.limit,
            temperature=asked.temperature,
            seed=asked.seed,
            enable_thinking=asked.thinks,
        )

    def _choice(self, choice: str | None) -> Any:
        if choice in (None, "required", "none"):
            return choice
        return {"type": "function", "function": {"name": choice}}

    def _message(self, turn: Turn) -> Body:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in turn.calls
        ]
        content = None if calls and not turn.text else turn.text
        return {"content": content} | present(
            role=turn.role,
            tool_calls=calls,
            reasoning_content=turn.thoughts,
            tool_call_id=turn.answers,
        )

    def spec(self, body: Body) -> GenerationSpec:
        return CHAT_REQUESTS.decode(json.dumps(body).encode())[0].spec()

    def read(self, body: Body) -> Said:
        [choice] = body["choices"]
        return self._said(choice["message"], choice["finish_reason"], body["usage"])

    def _said(self, message: Body, reason: str, usage: Body) -> Said:
        return Said(
            text=message["content"] or "",
            thoughts=message.get("reasoning_content") or "",
            calls=whole_calls(
                (call["function"]["name"], call["function"]["arguments"], call["id"])
                for call in message.get("tool_calls", ())
            ),
            finish=reason,
            usage=Counts(
                usage["prompt_tokens"],
                usage["completion_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"],
                usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0),
            ),
        )

    def hear(self, response: Response) -> Said:
        streamed = read_stream(response)
        calls: list[Body] = []
        for chunk in streamed.chunks:
            for choice in chunk["choices"]:
                for part in choice["delta"].get("tool_calls", ()):
                    if part["index"] == len(calls):
                        calls.append({"id": part["id"], "function": {**part["function"]}})
                    else:
                        given = part["function"]["arguments"]
                        calls[part["index"]]["function"]["arguments"] += given
        message: Body = {"content": streamed.content, "reasoning_content": streamed.reasoning}
        message |= {"tool_calls": calls}
        return self._said(message, streamed.finish_reason, streamed.usage)


class Messages(Spoken):
    name = "messages"
    path = "/v1/messages"
    lacks = frozenset(["seed"])
    keepalive = b"event: ping\n"

    def body(self, asked: Asked) -> Body:
        turns: list[Body] = []
        for turn in asked.turns:
            message = self._message(turn)
            if turns and turns[-1]["role"] == message["role"]:
                turns[-1]["content"] += message["content"]
            else:
                turns.append(message)
        form = asked.schema and {"format": {"type": "json_schema", "schema": asked.schema}}
        thinking = {True: {"type": "enabled", "budget_tokens": 1024}, False: {"type": "disabled"}}
        return present(
            model=asked.model,
            system=asked.system,
            messages=turns,
            tools=[
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.parameters,
                }
                for tool in asked.tools
            ],
            tool_choice=self._choice(asked.choice),
            output_config=form,
            stop_sequences=asked.stop and [asked.stop],
            max_tokens=asked.limit,
            temperature=asked.temperature,
            thinking=None if asked.thinks is None else thinking[asked.thinks],
        )

    def _choice(self, choice: str | None) -> Any:
        match choice:
            case None:
                return None
            case "required":
                return {"type": "any"}
            case "none":
                return {"type": "none"}
        return {"type": "tool", "name": choice}

    def _message(self, turn: Turn) -> Body:
        blocks: list[Body] = []
        if turn.answers:
            result = {"tool_use_id": turn.answers, "content": turn.text}
            return {"role": "user", "content": [{"type": "tool_result", **result}]}
        if turn.thoughts:
            blocks.append({"type": "thinking", "thinking": turn.thoughts, "signature": "any"})
        if turn.text:
            blocks.append({"type": "text", "text": turn.text})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
            for call in turn.calls
        ]
        return {"role": turn.role, "content": blocks}

    def spec(self, body: Body) -> GenerationSpec:
        return MESSAGES_REQUESTS.decode(json.dumps(body).encode())[0].spec()

    def read(self, body: Body) -> Said:
        return self._said(body, [json.dumps(block.get("input")) for block in body["content"]])

    def _said(self, message: Body, inputs: list[str]) -> Said:
        reasons = {"end_turn": "stop", "stop_sequence": "stop"}
        reasons |= {"tool_use": "tool_calls", "max_tokens": "length"}
        blocks, usage = message["content"], message["usage"]
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return Said(
            text="".join(block.get("text", "") for block in blocks),
            thoughts="".join(block.get("thinking", "") for block in blocks),
            calls=whole_calls(
                (block["name"], given, block["id"])
                for block, given in zip(blocks, inputs, strict=True)
                if block["type"] == "tool_use"
            ),
            finish=reasons[message["stop_reason"]],
            usage=Counts(
                sum(usage[part] for part in parts),
                usage["output_tokens"],
                usage["cache_read_input_tokens"],
                usage.get("output_tokens_details", {}).get("thinking_tokens", 0),
            ),
        )

    def hear(self, response: Response) -> Said:
        heard = hear(response.content)
        assert heard.state == "over", heard.error
        blocks = heard.message["content"]
        return self._said(heard.message, [block.get("partial", "") for block in blocks])


class Responses(Spoken):
    name = "responses"
    path = "/v1/responses"
    keepalive = b"event: response.created\n"

    def body(self, asked: Asked) -> Body:
        format = asked.schema and {"type": "json_schema", "name": "form", "schema": asked.schema}
        efforts = {None: None, True: {"effort": "high"}, False: {"effort": "none"}}
        return present(
            model=asked.model,
            instructions=asked.system,
            input=[item for turn in asked.turns for item in self._items(turn)],
            tools=[{"type": "function", **msgspec.structs.asdict(tool)} for tool in asked.tools],
            tool_choice=self._choice(asked.choice),
            text=format and {"format": format},
            stop=asked.stop,
            max_output_tokens=asked.limit,
            temperature=asked.temperature,
            seed=asked.seed,
            reasoning=efforts[asked.thinks],
        )

    def _choice(self, choice: str | None) -> Any:
        if choice in (None, "required", "none"):
            return choice
        return {"type": "function", "name": choice}

    def _items(self, turn: Turn) -> list[Body]:
        if turn.answers:
            output = {"call_id": turn.answers, "output": turn.text}
            return [{"type": "function_call_output", **output}]
        items: list[Body] = []
        if turn.thoughts:
            thoughts = [{"type": "reasoning_text", "text": turn.thoughts}]
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": thoughts})
        if turn.text:
            kind = "output_text" if turn.role == "assistant" else "input_text"
            content = [{"type": kind, "text": turn.text}]
            items.append({"type": "message", "role": turn.role, "content": content})
        items += [
            {
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments),
            }
            for call in turn.calls
        ]
        return items

    def spec(self, body: Body) -> GenerationSpec:
        return RESPONSES_REQUESTS.decode(json.dumps(body).encode())[0].spec(Past())

    def read(self, body: Body) -> Said:
        calls = whole_calls(
            (item["name"], item["arguments"], item["call_id"])
            for item in body["output"]
            if item["type"] == "function_call" and item["status"] == "completed"
        )
        usage = body["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        return Said(
            text=self._text(body["output"], "message"),
            thoughts=self._text(body["output"], "reasoning"),
            calls=calls,
            finish=self._finish(body, calls),
            usage=Counts(
                usage["input_tokens"],
                usage["output_tokens"],
                usage["input_tokens_details"]["cached_tokens"],
                usage["output_tokens_details"]["reasoning_tokens"],
            ),
        )

    def _text(self, items: list[Body], kind: str) -> str:
        parts = [part for item in items if item["type"] == kind for part in item["content"]]
        return "".join(part["text"] for part in parts)

    def _finish(self, body: Body, calls: list[Call]) -> str:
        if body["status"] == "incomplete":
            assert body["incomplete_details"] == {"reason": "max_output_tokens"}
            return "length"
        assert body["status"] == "completed"
        return "tool_calls" if calls else "stop"

    def hear(self, response: Response) -> Said:
        events = read_events(response.content)
        said = self.read(events[-1]["response"])
        parts = {"text": "output_text", "thoughts": "reasoning_text"}
        for name, part in parts.items():
            deltas = [e["delta"] for e in events if e["type"] == f"response.{part}.delta"]
            assert "".join(deltas) == getattr(said, name)
        return said


class Ollama(Spoken):
    name = "ollama"
    path = "/api/chat"
    lacks = frozenset(["choice"])
    stream_type = "application/x-ndjson"
    keepalive = b'{"model":'

    def body(self, asked: Asked) -> Body:
        messages = [{"role": "system", "content": asked.system}] if asked.system else []
        options = present(
            num_predict=asked.limit,
            temperature=asked.temperature,
            seed=asked.seed,
            stop=asked.stop and [asked.stop],
        )
        return present(
            model=asked.model,
            messages=messages + [self._message(turn) for turn in asked.turns],
            tools=[
                {"type": "function", "function": msgspec.structs.asdict(tool)}
                for tool in asked.tools
            ],
            format=asked.schema,
            options=options,
            think=asked.thinks,
        )

    def _message(self, turn: Turn) -> Body:
        calls = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
        return {"content": turn.text} | present(
            role=turn.role, thinking=turn.thoughts, tool_calls=calls, tool_call_id=turn.answers
        )

    def spec(self, body: Body) -> GenerationSpec:
        return OLLAMA_CHATS.decode(json.dumps(body).encode())[0].spec()

    def read(self, body: Body) -> Said:
        return self._said([body])

    def _said(self, lines: list[Body]) -> Said:
        messages, last = [line["message"] for line in lines], lines[-1]
        assert [line["done"] for line in lines] == [line is last for line in lines]
        calls = [
            Call(call["function"]["name"], call["function"]["arguments"], call["id"])
            for message in messages
            for call in message.get("tool_calls", ())
        ]
        reason = last["done_reason"]
        return Said(
            text="".join(message["content"] for message in messages),
            thoughts="".join(message.get("thinking", "") for message in messages),
            calls=calls,
            finish="tool_calls" if calls and reason == "stop" else reason,
            usage=Counts(last["prompt_eval_count"], last["eval_count"], None, None),
        )

    def hear(self, response: Response) -> Said:
        return self._said(read_lines(response.content))


DIALECTS: Mapping[str, Spoken] = {
    each.name: each for each in (ChatCompletions(), Messages(), Responses(), Ollama())
}
