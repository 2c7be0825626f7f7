"""Checkpoints of a chat: how much of its prompt later prompts will share.

KV caches that cannot be cut back are of use only to prompts that begin with all that they hold. So
they are kept where later prompts will leave this one. Only the template knows where that is: it may
drop the thoughts of old answers, or open a block of thoughts behind the last message. So it is
asked: what it writes for a chat that goes on is compared with what it writes for this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import lru_cache

from mlxsrv.prompts.encoding import PIECE_CHARACTERS, TextEncoder
from mlxsrv.prompts.templates.chat_template import ChatTemplate
from mlxsrv.prompts.templates.messages import Chat, PlainMessage

_MOST_HEADS = 16  # system messages whose tokens are remembered
_BESIDE = 256  # characters around the end of what two texts share: enough for a token's borders

_USER: PlainMessage = {"role": "user", "content": "§mlxsrv"}
_ANSWER: PlainMessage = {"role": "assistant", "content": "§mlxsrv"}


class CheckpointFinder:
    """Finds the checkpoints of chats. Any thread may use it.

    Args:
        template: writes the chats.
        encoder: makes tokens of texts.
        turn_ends: tokens that end a message.
    """

    def __init__(self, template: ChatTemplate, encoder: TextEncoder, turn_ends: Set[int]) -> None:
        self._template = template
        self._encoder = encoder
        self._turn_ends = turn_ends
        self._encode_head = lru_cache(_MOST_HEADS)(self._encode)

    def mark(self, chat: Chat, text: str, tokens: Sequence[int]) -> tuple[int, ...]:
        """The checkpoints of a chat, in order: so many of its first tokens later prompts share.

        They are: what chats with the same system message and tools have in common; the end of the
        turn before the last message; and what the chat's next prompt will have in common with
        this one, after an answer or after a tool's.

        Args:
            chat: as it was rendered.
            text: its text.
            tokens: those of the text.
        """
        found = {self._find_head(chat, text, tokens), self._find_turn(tokens)}
        if not chat.continue_final:
            more = (self._template.adapt(messages) for messages in _continue(chat))
            others = (self._template.render_other(chat, messages) for messages in more)
            found |= {self._find_shared(text, other, tokens) for other in others if other}
        return tuple(sorted(found - {0}))

    def _find_head(self, chat: Chat, text: str, tokens: Sequence[int]) -> int:
        """Return how many tokens all chats share that have this one's system message and tools."""
        system = [message for message in chat.messages[:1] if message["role"] == "system"]
        other = self._template.render_other(chat, [*system, _USER])
        shared = 0 if other is None else _common(text, other)
        if shared == 0:
            return 0
        # The last token may be another one where more text follows.
        return _common(self._encode_head(text[:shared]), tokens)

    def _encode(self, head: str) -> tuple[int, ...]:
        return tuple(self._encoder.encode(head, special=False))

    def _find_turn(self, tokens: Sequence[int]) -> int:
        """Return how many tokens the chat has up to the end of the last message but one."""
        ends = (at for at in range(len(tokens) - 1, -1, -1) if tokens[at] in self._turn_ends)
        next(ends, None)
        before = next(ends, None)
        return 0 if before is None else before + 1

    def _find_shared(self, text: str, other: str, tokens: Sequence[int]) -> int:
        """The number of tokens that both texts begin with; 0 if it takes long to find out."""
        shared = _common(text, other)
        begin = max(shared - _BESIDE, 0)
        if shared == 0 or len(text) - begin > PIECE_CHARACTERS:
            return 0
        own = self._encoder.encode(text[begin:], special=False)
        others = self._encoder.encode(other[begin : shared + _BESIDE], special=False)
        left = len(own) - _common(own, others)
        # A token that the beginning of the part has cut in two does not matter if all is in step
        # again where the texts part.
        if left >= len(own) or list(tokens[len(tokens) - left - 1 :]) != own[len(own) - left - 1 :]:
            return 0
        return len(tokens) - left


def _continue(chat: Chat) -> Iterator[list[PlainMessage]]:
    """The chat as it may go on: with an answer and a question, or with a call and its result."""
    yield [*chat.messages, _ANSWER, _USER]
    if chat.tools:
        name = chat.tools[0]["function"]["name"]
        call = {"id": "mlxsrv", "type": "function", "function": {"name": name, "arguments": {}}}
        yield [
            *chat.messages,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "mlxsrv", "tool_call_id": "mlxsrv", "name": name},
        ]


def _common(one: str | Sequence[int], other: str | Sequence[int]) -> int:
    """The length of the longest common prefix."""
    if one[: len(other)] == other:
        return len(other)
    low, high = 0, min(len(one), len(other))
    while low < high:  # those of strings are compared in C
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
