"""Changes of a chat's messages, each for chat templates that would refuse or lose them.

None of them loses what a message says. They take and return messages as templates take them; those
that need no change come back equal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from mlxsrv.prompts.templates.messages import Messages, PlainMessage
from mlxsrv.text.call_formats.calls import CallFormat, WrittenCall

MessageChange = Callable[[Messages], Messages]

_BETWEEN = "\n\n"

# Templates read it as none. A plain None never reaches them, because transformers drops keys whose
# value is None. But of numpy's scalars it takes the value, and that of NaT is None.
_NULL = np.datetime64("NaT")


# Tool calls.


def _calls(message: PlainMessage) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


def _each_call(messages: Messages, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Messages:
    return [
        {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}
        if _calls(message)
        else message
        for message in messages
    ]


def with_arguments(change: Callable[[Any], Any]) -> MessageChange:
    def change_call(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return lambda messages: _each_call(messages, change_call)


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


arguments_as_json = with_arguments(_as_json)


def in_object(arguments: Any) -> Any:
    """Put the text that a model wrote in place of an object into an object."""
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def plain_values(arguments: Any) -> Any:
    """Give values that Python does not write as JSON the text that they have in JSON."""
    if not isinstance(arguments, dict):
        return arguments
    return {key: _plain_value(value) for key, value in arguments.items()}


def _plain_value(value: Any) -> Any:
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if plain else json.dumps(value, ensure_ascii=False)


def _turns(messages: Messages) -> Iterator[tuple[PlainMessage, Messages]]:
    """Yield each message that is no result of a tool, with the results that follow it."""
    turn: Messages = []
    for message in messages:
        if turn and message["role"] != "tool":
            yield turn[0], turn[1:]
            turn = []
        turn.append(message)
    if turn:
        yield turn[0], turn[1:]


def _answers(calls: Sequence[dict[str, Any]], results: Messages) -> list[int | None]:
    """Return which of the results is each call's: by its id or, without ids, by its place. Of calls
    that have one id, each has one of the results of that id, in their order."""
    ids = [result.get("tool_call_id") for result in results]
    if not any(ids):
        return [place if place < len(results) else None for place in range(len(calls))]
    waiting: dict[str | None, list[int]] = {}
    for place in reversed(range(len(ids))):
        waiting.setdefault(ids[place], []).append(place)
    found = (waiting.get(call["id"]) for call in calls)
    return [places.pop() if places else None for places in found]


def with_ids(make: Callable[[dict[str, Any], int], str]) -> MessageChange:
    """Return a change of the ids of calls and of their results.

    Args:
        make: returns the id of a call, of which so many came before it.
    """

    def change(messages: Messages) -> Messages:
        changed: Messages = []
        number = 0
        for first, results in _turns(messages):
            calls = []
            for call, place in zip(_calls(first), _answers(_calls(first), results), strict=True):
                id = make(call, number)
                number += 1
                if place is not None:
                    results[place] = {**results[place], "tool_call_id": id}
                calls.append({**call, "id": id})
            changed.append({**first, "tool_calls": calls} if calls else first)
            changed += results
        return changed

    return change


_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}\Z")


def short_id(call: dict[str, Any], number: int) -> str:
    """An id of nine letters and digits, as Mistral's templates demand."""
    id = str(call.get("id") or number)
    return id if _SHORT_ID.match(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


_NAMED_ID = re.compile(r"functions\..+:\d+\Z")


def named_id(call: dict[str, Any], number: int) -> str:
    """The id in which Kimi's templates look for the name of the function."""
    id = str(call.get("id"))
    return id if _NAMED_ID.match(id) else f"functions.{call['function']['name']}:{number}"


def numbered_id(call: dict[str, Any], number: int) -> str:
    """The place of the call in the chat, as Command's templates count."""
    return str(number)


def without_content(messages: Messages) -> Messages:
    return [
        {**message, "content": _NULL} if _calls(message) and not _text(message) else message
        for message in messages
    ]


def text_as_thoughts(messages: Messages) -> Messages:
    """Move the text beside calls to the thoughts before it."""
    return [
        {**message, "content": "", "reasoning_content": _joined_text([thoughts, text])}
        if _calls(message)
        and (text := _text(message))
        and (thoughts := message.get("reasoning_content"))
        else message
        for message in messages
    ]


def text_apart(messages: Messages) -> Messages:
    """Give the text beside calls a message of its own before them."""
    changed: Messages = []
    for message in messages:
        if _calls(message) and _text(message):
            changed.append({name: message[name] for name in message if name != "tool_calls"})
            message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        changed.append(message)
    return changed


def text_in_result(messages: Messages) -> Messages:
    """Put the text beside calls into the result of the first."""
    changed: Messages = []
    for first, results in _turns(messages):
        if _calls(first) and _text(first) and results:
            said = f"<assistant-message>\n{_text(first)}\n</assistant-message>"
            first = {**first, "content": ""}
            text = _joined_text([said, _text(results[0])])
            results = [{**results[0], "content": text}, *results[1:]]
        changed += [first, *results]
    return changed


def one_call_each(messages: Messages) -> Messages:
    """Give each call a message of its own, and put its result behind it."""
    changed: Messages = []
    for first, results in _turns(messages):
        calls = _calls(first)
        if len(calls) < 2:
            changed += [first, *results]
            continue
        places = _answers(calls, results)
        taken = {*places}
        empty = {**first, "content": _NULL if first["content"] is _NULL else ""}
        empty.pop("reasoning_content", None)
        for number, (call, place) in enumerate(zip(calls, places, strict=True)):
            changed.append({**(empty if number else first), "tool_calls": [call]})
            changed += [] if place is None else [results[place]]
        changed += [result for place, result in enumerate(results) if place not in taken]
    return changed


def calls_as_text(calls: CallFormat) -> MessageChange:
    """Return a change that writes calls into the text beside them, as the model writes them."""

    def change(messages: Messages) -> Messages:
        changed: Messages = []
        for message in messages:
            if written := _calls(message):
                spelled = calls.spell([*map(_written, written)])
                message = {name: message[name] for name in message if name != "tool_calls"}
                message["content"] = _joined_text([_text(message), spelled])
            changed.append(message)
        return changed

    return change


def _written(call: dict[str, Any]) -> WrittenCall:
    function = call["function"]
    return WrittenCall(function["name"], in_object(function["arguments"]), str(call.get("id", "")))


def tools_as_text(calls: CallFormat) -> MessageChange:
    """Return a change that writes calls and results as text."""
    spelled = calls_as_text(calls)
    return lambda messages: [
        _result_as_text(message) if message["role"] == "tool" else message
        for message in spelled(messages)
    ]


def _result_as_text(result: PlainMessage) -> PlainMessage:
    text = f"<tool_response>\n{result['content']}\n</tool_response>"
    return {"role": "user", "content": text}


def orphans_as_text(messages: Messages) -> Messages:
    """Write results as text that no call comes before."""
    changed: Messages = []
    for first, results in _turns(messages):
        if first["role"] == "tool":
            first = _result_as_text(first)
        if not _calls(first):
            results = [*map(_result_as_text, results)]
        changed += [first, *results]
    return changed


def thoughts_in_blocks(messages: Messages) -> Messages:
    """Put the thoughts before a text and the text into blocks."""
    changed: Messages = []
    for message in messages:
        if message["role"] == "assistant" and (thoughts := message.get("reasoning_content")):
            text = _text(message)
            blocks = [{"type": "thinking", "thinking": thoughts}]
            blocks += [{"type": "text", "text": text}] if text else []
            message = {**message, "content": blocks}
            del message["reasoning_content"]
        changed.append(message)
    return changed


# Roles.


def _text(message: PlainMessage) -> str:
    content = message["content"]
    return "" if content is _NULL else str(content)


def _joined_text(texts: Sequence[str | None]) -> str:
    return _BETWEEN.join(text for text in texts if text)


def _joined(messages: Sequence[PlainMessage]) -> PlainMessage:
    """Return messages of one role as one. Texts are joined once, however many there are."""
    if len(messages) == 1:
        return messages[0]
    joined = {**messages[0], "content": _joined_text([*map(_text, messages)])}
    if thoughts := _joined_text([each.get("reasoning_content") for each in messages]):
        joined["reasoning_content"] = thoughts
    if calls := [call for message in messages for call in _calls(message)]:
        joined["tool_calls"] = calls
    return joined


def neighbours_joined(role: str) -> MessageChange:
    def change(messages: Messages) -> Messages:
        changed: Messages = []
        for same, group in groupby(messages, key=lambda message: str(message["role"])):
            neighbours = [*group]
            changed += [_joined(neighbours)] if same == role else neighbours
        return changed

    return change


users_joined = neighbours_joined("user")


def _head(messages: Messages) -> int:
    """The number of system messages at the beginning."""
    others = (place for place, each in enumerate(messages) if each["role"] != "system")
    return next(others, len(messages))


def heads_joined(messages: Messages) -> Messages:
    head = _head(messages)
    if head < 2:
        return messages
    text = _joined_text([message["content"] for message in messages[:head]])
    return [{**messages[0], "content": text}, *messages[head:]]


def with_head(messages: Messages) -> Messages:
    """Begin with a system message."""
    return messages if _head(messages) else [{"role": "system", "content": ""}, *messages]


def head_to_user(messages: Messages) -> Messages:
    """Move the system messages at the beginning into the user's first message."""
    head = _head(messages)
    if head == 0:
        return messages
    texts = [message["content"] for message in messages[:head]]
    first: PlainMessage = {"role": "user", "content": _joined_text(texts)}
    rest = messages[head:]
    if rest and rest[0]["role"] == "user":
        return [_joined([first, rest[0]]), *rest[1:]]
    return [first, *rest]


def reminded(messages: Messages) -> Messages:
    """Turn each system message behind the beginning into a reminder by the user.

    It is joined with the user's messages beside it, because many templates want the roles to
    alternate. No message changes its place.
    """
    head = _head(messages)
    groups: list[Messages] = []
    reminded = False  # the last message is a reminder
    for message in messages[head:]:
        late = message["role"] == "system"
        if late:
            text = f"<system-reminder>\n{message['content']}\n</system-reminder>"
            message = {"role": "user", "content": text}
        if groups and message["role"] == groups[-1][0]["role"] == "user" and (late or reminded):
            groups[-1].append(message)
        else:
            groups.append([message])
        reminded = late
    return [*messages[:head], *map(_joined, groups)]


def empty_answers_dropped(messages: Messages) -> Messages:
    """Leave out answers of nothing, also one at the end, where some clients put the next answer."""
    kept = [
        message
        for message in messages
        if message["role"] != "assistant" or message["content"] or _calls(message)
    ]
    return messages if len(kept) in (0, len(messages)) else users_joined(kept)


_NOTHING: PlainMessage = {"role": "user", "content": ""}


def with_user(messages: Messages) -> Messages:
    """Add an empty message of the user's to a chat that has none."""
    if any(message["role"] == "user" for message in messages):
        return messages
    return user_first(messages)


def user_first(messages: Messages) -> Messages:
    """Begin with an empty message of the user's if another's comes before the user's first."""
    head = _head(messages)
    if messages[head:] and messages[head]["role"] == "user":
        return messages
    return [*messages[:head], _NOTHING, *messages[head:]]


def user_in_result(messages: Messages) -> Messages:
    """Put what the user says directly behind the result of a tool into that result."""
    groups: list[Messages] = []
    for message in messages:
        if groups and message["role"] == "user" and groups[-1][0]["role"] == "tool":
            text = f"<user-message>\n{message['content']}\n</user-message>"
            groups[-1].append({"role": "user", "content": text})
        else:
            groups.append([message])
    return [*map(_joined, groups)]
