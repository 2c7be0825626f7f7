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
"""Bytes of the beginning that are told apart."""

_PROMPT = 1024
"""Characters of a prompt without messages: of these, nobody can tell where the first turn ends."""

_KEY = 16  # hexadecimal digits
_RESPONSE = re.compile(rf"resp_([0-9a-f]{{{_KEY}}})[0-9a-f]+")


class _Body(msgspec.Struct):
    """The fields of requests that make a beginning, in all dialects. Others are skipped."""

    model: Any = None
    system: Any = None
    instructions: Any = None
    messages: Any = None
    input: Any = None
    prompt: Any = None
    previous_response_id: Any = None


_BODY = msgspec.json.Decoder(_Body)
_canonical = msgspec.json.Encoder(order="deterministic").encode


def conversation_key(body: bytes) -> str | None:
    """Return the key of the conversation that a body is a turn of.

    None if it has none: it is no JSON object, too long, or has neither messages nor a prompt. It is
    not refused here, for the replica knows how to.
    """
    if len(body) > MOST_BODY:
        return None
    try:
        asked = _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(asked.previous_response_id, str):
        return key_of_response(asked.previous_response_id)
    beginning = _beginning(asked)
    if beginning is None:
        return None
    text = _canonical([asked.model, asked.system, asked.instructions, beginning])
    return hashlib.blake2b(text[:MOST_TEXT], digest_size=_KEY // 2).hexdigest()


def key_of_response(id: str) -> str | None:
    """Return the key in the id of a stored response; None if it is not one of these ids."""
    found = _RESPONSE.fullmatch(id)
    return found and found[1]


def _beginning(asked: _Body) -> object:
    for turns in (asked.messages, asked.input):
        if isinstance(turns, list):
            return _up_to_user(turns)
    if isinstance(asked.input, str):
        return [["user", asked.input]]  # as a list of one message has it
    return asked.prompt[:_PROMPT] if isinstance(asked.prompt, str) else None


def _up_to_user(turns: list[Any]) -> list[Any] | None:
    """Roles and contents up to the first message of the user, without what clients move along from
    turn to turn, such as marks of what to cache."""
    found: list[Any] = []
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        role, content = turn.get("role"), turn.get("content")
        found.append([role, _text(content)])
        if role == "user":
            return found
    return found or None


def _text(content: object) -> object:
    """A content's texts: a part of text is the same as its text."""
    if isinstance(content, list):
        parts = [part.get("text", "") if isinstance(part, dict) else part for part in content]
        return parts[0] if len(parts) == 1 else parts
    return content
