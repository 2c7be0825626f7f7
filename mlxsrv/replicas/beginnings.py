"""Keys of conversations: the same for all turns of one, another for each other.

The key is a digest of the conversation's beginning: the model, the system prompt and all up to the
first message of the user. Later turns repeat it, and what is cached of a conversation begins with
it. A stored response's id contains its conversation's key, so `previous_response_id` leads to it.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

MOST_BODY = 4 * 1024 * 1024
"""Bytes of a body that are looked at; a longer one has no key."""

MOST_TEXT = 64 * 1024
"""Bytes of the beginning that make the key."""

_PROMPT = 1024
"""Characters of a prompt without messages: where the first turn ends is not known."""

_KEY = 16  # hexadecimal digits
_RESPONSE = re.compile(rf"resp_([0-9a-f]{{{_KEY}}})[0-9a-f]+")

_MOST_OBJECTS = 100_000
"""Objects in the messages of a body, and braces in their texts; one with more has no key. This runs
on the event loop of Serve's proxy before a key was checked, and every stream goes through there."""

_Raw = msgspec.Raw
_NULL = _Raw(b"null")


class _Body(msgspec.Struct):
    """The fields of requests that make a beginning, in all dialects. Others are skipped, and these
    are not decoded before it is known how long that takes."""

    model: str | None = None
    system: _Raw = _NULL
    instructions: _Raw = _NULL
    messages: _Raw = _NULL
    input: _Raw = _NULL
    prompt: str | None = None
    previous_response_id: str | None = None


class _Turn(msgspec.Struct):
    role: _Raw = _NULL
    content: _Raw = _NULL


class _Part(msgspec.Struct):
    text: str = ""


_BODY = msgspec.json.Decoder(_Body)
_TURNS = msgspec.json.Decoder(list[_Turn])
_CONTENT = msgspec.json.Decoder(str | list[_Part])
_encode = msgspec.json.Encoder().encode


def conversation_key(body: bytes) -> str | None:
    """Return the key of the conversation that a body is a turn of.

    None if it has none: it is no JSON object, too long, or has neither messages nor a prompt. It is
    not refused here, for the replica knows how to.
    """
    if len(body) > MOST_BODY:
        return None
    try:
        asked = _BODY.decode(body)
        if asked.previous_response_id is not None:
            return key_of_response(asked.previous_response_id)
        beginning = _beginning(asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if beginning is None:
        return None
    text = _encode([asked.model, asked.system, asked.instructions, beginning])
    return hashlib.blake2b(text[:MOST_TEXT], digest_size=_KEY // 2).hexdigest()


def key_of_response(id: str) -> str | None:
    """Return the key in the id of a stored response; None if it is not one of these ids."""
    found = _RESPONSE.fullmatch(id)
    return found and found[1]


def _beginning(asked: _Body) -> object:
    """Return the beginning; None if there is none. Raises DecodeError if a turn is no object."""
    for turns in map(bytes, (asked.messages, asked.input)):
        if turns.startswith(b"["):
            return None if turns.count(b"{") > _MOST_OBJECTS else _up_to_user(_TURNS.decode(turns))
    if bytes(asked.input).startswith(b'"'):
        return [["user", _text(asked.input)]]  # as a list of one message has it
    return None if asked.prompt is None else asked.prompt[:_PROMPT]


def _up_to_user(turns: list[_Turn]) -> list[Any] | None:
    """Roles and contents up to the first message of the user, without what clients move along from
    turn to turn, such as marks of what to cache."""
    found: list[Any] = []
    for turn in turns:
        found.append([turn.role, _text(turn.content)])
        if bytes(turn.role) == b'"user"':
            return found
    return found or None


def _text(content: _Raw) -> object:
    """A content's texts: a part of text is the same as its text."""
    try:
        decoded = _CONTENT.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return content
    if isinstance(decoded, str):
        return decoded
    parts = [part.text for part in decoded]
    return parts[0] if len(parts) == 1 else parts
