"""Checks clients' grammars in the sandbox's process, and may hang or crash.

This file is run, not imported. It reads a JSON list of llguidance's grammars, compiles each, then
writes random texts of it. The answer is a list of `[index, reason]` for grammars that are refused
or lead to where nothing may follow.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable, Iterator

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_NOTHING = "nothing can satisfy it"
_LONGEST_REASON = 4096
_WALKS = 12
_STEPS = 300
_WALKING_SECONDS = 1.0
_HURRY = 60  # steps after which a walk goes for the end
_CLOSERS = b'"]}'

_BYTES = LLTokenizer("byte")
_END = int(_BYTES.eos_token)
_SET_BITS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]


def failures(grammars: Iterable[str]) -> Iterator[tuple[int, str]]:
    until = time.monotonic() + _WALKING_SECONDS
    limits = LLParserLimits(verbose_errors=False)
    for i, grammar in enumerate(grammars):
        failed, reasons = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
        if failed:
            yield i, reasons[0][:_LONGEST_REASON]
        elif (text := _dead_end(grammar, until)) is not None:
            yield i, f"nothing may follow {json.dumps(text[-80:])}" if text else _NOTHING


def _dead_end(grammar: str, until: float) -> str | None:
    """A text after which nothing may come, though it is not complete, if a few random ones lead to
    it. Grammars that name a model's tokens are left alone."""
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(_BYTES, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return None
    for seed in range(_WALKS):
        dice = random.Random(seed)
        walker, text = matcher.deep_copy(), bytearray()
        for step in range(_STEPS):
            allowed = _allowed(walker)
            if walker.get_error().startswith("NoExtension"):
                return text.decode(errors="replace")
            if not allowed or time.monotonic() > until:
                break
            if allowed[-1] == _END:
                allowed.pop()
                if not allowed or step > _HURRY or dice.random() < 0.3:
                    break
            hurry = dice.random() < (0.9 if step > _HURRY else 0.3)
            wanted = [token for token in _CLOSERS if token in allowed] if hurry else []
            token = dice.choice(wanted or allowed)
            if not walker.consume_token(token):
                break
            text.append(token)
    return None


def _allowed(matcher: LLMatcher) -> list[int]:
    """Return the tokens that may follow, in order. The end is the last of all."""
    mask = matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_error():
        return [_END]
    return [8 * i + bit for i, byte in enumerate(mask) if byte for bit in _SET_BITS[byte]]


if __name__ == "__main__":
    print(json.dumps([*failures(json.load(sys.stdin))]))
