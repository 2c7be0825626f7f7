"""Earlier messages in the form that a chat template takes.

Clients send the whole conversation with each turn, so a template that refuses one old message would
end the conversation for good. Each `Adaptation` changes messages in one way that some families
need. Whether this model's template needs it is learned from the template: it is asked to write a
short chat as it is and changed. What it takes as it is stays as it is, to the byte.

Almost all changes are local: they depend on a message and its neighbours only. So the prompt of one
turn stays the beginning of the next turn's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mlxsrv.prompts.templates.history_changes import (
    MessageChange,
    arguments_as_json,
    calls_as_text,
    empty_answers_dropped,
    head_to_user,
    heads_joined,
    in_object,
    named_id,
    neighbours_joined,
    numbered_id,
    one_call_each,
    orphans_as_text,
    plain_values,
    reminded,
    short_id,
    text_apart,
    text_as_thoughts,
    text_in_result,
    thoughts_in_blocks,
    tools_as_text,
    user_first,
    user_in_result,
    users_joined,
    with_arguments,
    with_head,
    with_ids,
    with_user,
    without_content,
)
from mlxsrv.prompts.templates.messages import Messages, PlainMessage
from mlxsrv.text.call_formats.call_ids import NUMBERED
from mlxsrv.text.call_formats.json_calls import HERMES
from mlxsrv.text.formats import Formats

Writer = Callable[[Sequence[PlainMessage]], str | None]
"""Writes messages by a template; None if the template refuses them."""


class Adaptation(msgspec.Struct, frozen=True):
    """One change of messages, and how to learn whether a template needs it.

    Attributes:
        probe: messages that it changes.
        change: returns messages changed; those that need no change come back equal.
        kept: texts of the changed probe, in their order, without which it has not been written.
        shown: the same for the probe as it is; None if they are the same texts.
    """

    probe: Messages
    change: MessageChange
    kept: Sequence[str]
    shown: Sequence[str] | None = None


class Histories:
    """Adapts messages to one template. Any thread may use it.

    Args:
        write: writes messages by the template.
        formats: those of the model.
    """

    def __init__(self, write: Writer, formats: Formats) -> None:
        self._write = write
        self._roles = _roles(formats)
        self._adaptations = (*_calls(formats), *self._roles, *_thoughts(formats))
        self._needed: dict[int, bool] = {}

    def adapt(self, messages: Messages) -> Messages:
        """Return the messages as the template takes them, with no more changed than it needs."""
        return self._adapt(messages, len(self._adaptations))

    def force(self, messages: Messages, write: Writer) -> Messages | None:
        """Return messages that are refused nevertheless with one change after the other, until they
        are taken; None if they never are. Some rules hold for certain chats only, such as those in
        which a result's call is no longer there.

        Args:
            write: writes messages with all else that the chat has.
        """
        for roles in (self._roles[1:], self._roles):  # tools as text only if nothing else helps
            forced = messages
            for adaptation in roles:
                changed = adaptation.change(forced)
                if changed != forced:
                    forced = changed
                    if write(forced) is not None:
                        return forced
        return None

    def _adapt(self, messages: Messages, first: int) -> Messages:
        """Adapt messages by the `first` adaptations."""
        for number in range(first):
            changed = self._adaptations[number].change(messages)
            if changed != messages and self._needs(number):
                messages = changed
        return messages

    def _needs(self, number: int) -> bool:
        """Whether the template writes an adaptation's probe only when it is changed."""
        if number not in self._needed:
            tried = self._adaptations[number]
            probe = self._adapt(tried.probe, number)
            shown = tried.kept if tried.shown is None else tried.shown
            self._needed[number] = not self._writes(probe, shown) and self._writes(
                tried.change(probe), tried.kept
            )
        return self._needed[number]

    def _writes(self, messages: Messages, texts: Sequence[str]) -> bool:
        """Whether the template writes these texts, one behind the other."""
        written = self._write(messages)
        if written is None:
            return False
        place = 0
        for text in texts:
            found = written.find(text, place)
            if found < 0:
                return False
            place = found + len(text)
        return True


# The adaptations. A later one is given what the earlier ones have made.


def _said(role: str, text: str) -> PlainMessage:
    return {"role": role, "content": f"mlxsrv-{text}"}


def _called(*names: str, arguments: Any = None, **fields: Any) -> Messages:
    """Return an answer that calls tools, and their results."""
    calls = [
        {
            "id": f"call_mlxsrv{number:018}",
            "type": "function",
            "function": {"name": name, "arguments": arguments or {"mlxsrv-key": "mlxsrv-value"}},
        }
        for number, name in enumerate(names)
    ]
    results = [
        {**_said("tool", f"result-{number}"), "tool_call_id": call["id"], "name": call_name}
        for number, (call, call_name) in enumerate(zip(calls, names, strict=True))
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls, **fields}, *results]


_USER, _OTHER, _ANSWER = _said("user", "one"), _said("user", "two"), _said("assistant", "answer")
_SYSTEM, _LATE = _said("system", "first"), _said("system", "late")
_CALL = [_USER, *_called("mlxsrv_a")]
_TEXT = _called("mlxsrv_a", content="mlxsrv-answer", reasoning_content="mlxsrv-thought")
_TALK = [_USER, *_TEXT, _said("assistant", "second"), _OTHER]
_SPOKEN = ["mlxsrv-answer", "mlxsrv_a"]
_THOUGHT = ["mlxsrv-thought", "mlxsrv-answer", "mlxsrv_a"]


def _calls(formats: Formats) -> Sequence[Adaptation]:
    """Return what templates may need to write calls."""
    calls = formats.calls or HERMES
    return (
        *_CALLS,
        *(_NUMBERED if calls.ids == NUMBERED else ()),
        *(_PLAIN if calls.untyped else ()),
        # LFM2 and Granite 3 write results, and not the calls before them.
        Adaptation(
            _CALL,
            calls_as_text(calls),
            ["mlxsrv_a", "mlxsrv-value", "mlxsrv-result-0"],
            shown=["mlxsrv_a", "mlxsrv-value"],
        ),
    )


_CALLS: Sequence[Adaptation] = (
    # Kimi K2 writes the id of a call, and its name only in the id.
    Adaptation(_CALL, with_ids(named_id), ["mlxsrv_a"]),
    # Mistral refuses other ids.
    Adaptation(_CALL, with_ids(short_id), ["mlxsrv_a"], shown=()),
    # DeepSeek V3 writes calls only where there is no content, not even an empty one, and joins
    # their arguments, as JSON, to other text. Each of the two may be needed alone.
    Adaptation(_CALL, without_content, ["mlxsrv_a"]),
    Adaptation(_CALL, lambda messages: without_content(arguments_as_json(messages)), ["mlxsrv_a"]),
    Adaptation(_CALL, arguments_as_json, ["mlxsrv_a", "mlxsrv-key", "mlxsrv-value"], shown=()),
    # Qwen3.5, Kimi, MiniMax and others walk through the arguments, which must be an object.
    Adaptation(
        [_USER, *_called("mlxsrv_a", arguments="mlxsrv-text")],
        with_arguments(in_object),
        ["mlxsrv_a", "mlxsrv-text"],
        shown=["mlxsrv-text"],
    ),
    # gpt-oss takes one text beside a call.
    Adaptation([_USER, *_TEXT], text_as_thoughts, _THOUGHT, shown=()),
    # Llama 3 and Hermes write the call without the text beside it, Gemma 4 writes the text behind
    # the result.
    Adaptation(_TALK, text_apart, _SPOKEN),
    # DeepSeek V3 writes the text or the call.
    Adaptation(_TALK, lambda messages: without_content(text_apart(messages)), _SPOKEN),
    # Mistral leaves the text out, and wants no second answer in its place.
    Adaptation(_TALK, text_in_result, ["mlxsrv_a", "mlxsrv-answer"], shown=_SPOKEN),
    # Llama 3 refuses a second call in a message; gpt-oss leaves it out.
    Adaptation([_USER, *_called("mlxsrv_a", "mlxsrv_b")], one_call_each, ["mlxsrv_a", "mlxsrv_b"]),
)

_NUMBERED = (
    # Command R7B counts calls, and wants the numbers at results.
    Adaptation(_CALL, with_ids(numbered_id), ['"0"', "mlxsrv_a", '"0"']),
)

_PLAIN = (
    # Qwen3.5, Nemotron 3 and Step write True and None, and Seed-OSS all objects as Python does.
    Adaptation(
        [_USER, *_called("mlxsrv_a", arguments={"mlxsrv-a": True, "mlxsrv-b": None})],
        with_arguments(plain_values),
        ["mlxsrv-a", "true", "mlxsrv-b", "null"],
    ),
    Adaptation(
        [_USER, *_called("mlxsrv_a", arguments={"mlxsrv-a": {"mlxsrv-b": "mlxsrv-c"}})],
        with_arguments(plain_values),
        ['"mlxsrv-b"', '"mlxsrv-c"'],
    ),
)


def _roles(formats: Formats) -> Sequence[Adaptation]:
    """Return what templates may need to take the roles of messages."""
    # Gemma 3 knows no tools, and Phi 3.5 leaves out what it does not know.
    tools = Adaptation(
        [*_CALL, _ANSWER, _OTHER],
        tools_as_text(formats.calls or HERMES),
        ["mlxsrv_a", "mlxsrv-result-0"],
    )
    return (tools, *_ROLES)


_ROLES: Sequence[Adaptation] = (
    # Qwen3.5 takes one system message, at the beginning.
    Adaptation(
        [_SYSTEM, _LATE, _USER], heads_joined, ["mlxsrv-first", "mlxsrv-late", "mlxsrv-one"]
    ),
    # DeepSeek V3.2 writes tools into it.
    Adaptation([_USER], with_head, ["mlxsrv_tool"]),
    # Gemma 2 takes none, and Mistral Nemo moves it from one message of the user's to the next.
    Adaptation([_SYSTEM, _USER, _ANSWER, _OTHER], head_to_user, ["mlxsrv-first", "mlxsrv-one"]),
    # Gemma 4 writes results with their calls only.
    Adaptation([_said("tool", "lost"), _USER], orphans_as_text, ["mlxsrv-lost", "mlxsrv-one"]),
    # Some templates refuse late ones, some leave them out, and some move them to the front, which
    # changes the prompt of all turns before them.
    Adaptation(
        [_SYSTEM, _USER, _LATE, _ANSWER, _OTHER, _said("system", "last")],
        reminded,
        [f"mlxsrv-{text}" for text in ("first", "one", "late", "answer", "two", "last")],
    ),
    # Mistral Small 3.2 refuses answers of nothing.
    Adaptation(
        [_USER, {"role": "assistant", "content": ""}, _OTHER],
        empty_answers_dropped,
        ["mlxsrv-one", "mlxsrv-two"],
        shown=(),
    ),
    # Gemma, Mistral and Llama 2 want user and assistant to alternate, the user first.
    Adaptation([_USER, _OTHER], users_joined, ["mlxsrv-one", "mlxsrv-two"], shown=()),
    Adaptation(
        [_USER, _ANSWER, _ANSWER, _OTHER],
        neighbours_joined("assistant"),
        ["mlxsrv-one", "mlxsrv-answer", "mlxsrv-two"],
        shown=(),
    ),
    Adaptation([_ANSWER, _OTHER], user_first, ["mlxsrv-answer", "mlxsrv-two"], shown=()),
    # Qwen3.5 wants a user somewhere.
    Adaptation([_SYSTEM], with_user, ["mlxsrv-first"], shown=()),
    # Mistral wants an answer of the assistant's behind results.
    Adaptation([*_CALL, _OTHER], user_in_result, ["mlxsrv-result-0", "mlxsrv-two"], shown=()),
)


def _thoughts(formats: Formats) -> Sequence[Adaptation]:
    """Return what templates may need to write thoughts."""
    return _BLOCKS if formats.thoughts.name == "mistral" else ()


_BLOCKS = (
    # Ministral 3 takes thoughts among the blocks of the content.
    Adaptation([_USER, *_TEXT], thoughts_in_blocks, _THOUGHT),
)
