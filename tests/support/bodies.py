"""Requests, right and wrong, one table for the decoder and for the schemas that describe it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from mlxsrv.errors import InvalidRequest
from mlxsrv.wire.anthropic.requests import MESSAGES_REQUESTS, MessagesRequest
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.openai import infill, requests, tokens
from mlxsrv.wire.openai.requests import (
    CHAT_REQUESTS,
    COMPLETION_REQUESTS,
    ChatRequest,
    CompletionRequest,
)
from tests.support.anthropic_bodies import (
    FINE_MESSAGES,
    MISSING_MESSAGES,
    UNSAID_MESSAGES,
    WRONG_MESSAGES,
    WRONG_WITHIN_MESSAGES,
)
from tests.support.openai_bodies import (
    FINE,
    FINE_ASKED,
    FINE_CHAT,
    FINE_COMPLETION,
    FINE_DETOKENIZE,
    FINE_TOGETHER,
    FINE_TOGETHER_CHAT,
    FINE_TOGETHER_COMPLETION,
    FINE_TOKENIZE,
    MISSING_CHAT,
    UNSUPPORTED,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_INFILL,
    WRONG,
    WRONG_CHAT,
    WRONG_COMPLETION,
    WRONG_DETOKENIZE,
    WRONG_INFILL,
    WRONG_TOKENIZE,
    WRONG_UNSAID,
    WRONG_UNSAID_ASKED,
    WRONG_UNSAID_CHAT,
    WRONG_UNSAID_COMPLETION,
    WRONG_WITHIN,
    WRONG_WITHIN_CHAT,
    WRONG_WITHIN_COMPLETION,
    WRONG_WITHIN_DETOKENIZE,
    WRONG_WITHIN_INFILL,
    Table,
    chat,
    completion,
)
from tests.support.schemas import Body


class Kind:
    """One kind of request and all that is known of its bodies."""

    def __init__(
        self,
        decoder: RequestDecoder[Any],
        struct: type[Any],
        base: Body,
        *,
        wrong: Table,
        fine: Table,
        within: Iterable[tuple[Body, str]] = (),
        unsaid: Iterable[tuple[Body, str]] = (),
        missing: Iterable[tuple[Body, str]] = (),
        unsupported: Table | None = None,
        together: Iterable[Body] = (),
    ) -> None:
        self.decode = decoder.decode
        self.struct = struct
        self.base = base
        self.wrong = [(base | body, param) for body, param in (*_each(wrong), *within)]
        self.unsaid = [(base | body, param) for body, param in unsaid]
        self.missing = [
            *[(base | body, param) for body, param in missing],
            *[({k: v for k, v in base.items() if k != name}, name) for name in base],
        ]
        self.unsupported = [(base | body, name) for body, name in _each(unsupported or {})]
        self.fine = [base, *(base | body for body, _ in _each(fine))]
        self.fine += [base | body for body in together]


def _each(table: Table) -> list[tuple[Body, str]]:
    return [({name: value}, name) for name, values in table.items() for value in values]


def _merge(one: Table, other: Table) -> Table:
    return {name: one.get(name, []) + other.get(name, []) for name in one | other}


KINDS = {
    "chat": Kind(
        requests.CHAT_REQUESTS,
        requests.ChatRequest,
        chat(),
        wrong=_merge(WRONG, WRONG_CHAT),
        within=WRONG_WITHIN + WRONG_WITHIN_CHAT,
        unsaid=WRONG_UNSAID + WRONG_UNSAID_ASKED + WRONG_UNSAID_CHAT,
        missing=MISSING_CHAT,
        unsupported=_merge(UNSUPPORTED, UNSUPPORTED_CHAT),
        fine=_merge(FINE, _merge(FINE_ASKED, FINE_CHAT)),
        together=FINE_TOGETHER + FINE_TOGETHER_CHAT,
    ),
    "completion": Kind(
        requests.COMPLETION_REQUESTS,
        requests.CompletionRequest,
        completion(),
        wrong=_merge(WRONG, WRONG_COMPLETION),
        within=WRONG_WITHIN + WRONG_WITHIN_COMPLETION,
        unsaid=WRONG_UNSAID + WRONG_UNSAID_ASKED + WRONG_UNSAID_COMPLETION,
        unsupported=_merge(UNSUPPORTED, UNSUPPORTED_COMPLETION),
        fine=_merge(FINE, _merge(FINE_ASKED, FINE_COMPLETION)),
        together=FINE_TOGETHER + FINE_TOGETHER_COMPLETION,
    ),
    "infill": Kind(
        infill.INFILL_REQUESTS,
        infill.InfillRequest,
        {"input_prefix": "a", "input_suffix": "b"},
        wrong=_merge({**WRONG, "prompt_logprobs": []}, WRONG_INFILL),
        within=WRONG_WITHIN + WRONG_WITHIN_INFILL,
        unsaid=WRONG_UNSAID,
        unsupported=UNSUPPORTED_INFILL,
        fine=_merge(FINE, {"input_extra": [[], [{"text": "x"}]], "prompt": ["", "x"], "n": [1]}),
        together=FINE_TOGETHER,
    ),
    "llama": Kind(
        infill.LLAMA_REQUESTS,
        infill.LlamaCompletionRequest,
        {"prompt": "a"},
        wrong={**WRONG, "prompt_logprobs": [], "prompt": [5, []], "n": [2]},
        within=[*WRONG_WITHIN, ({"prompt": ["x"]}, "prompt[0]")],
        unsaid=WRONG_UNSAID,
        unsupported=UNSUPPORTED_INFILL,
        fine=_merge(FINE, {"prompt": ["", [1, 2]], "n_probs": [0], "n": [1]}),
        together=FINE_TOGETHER,
    ),
    "fim": Kind(
        infill.FIM_REQUESTS,
        infill.FIMRequest,
        {"prompt": "a"},
        wrong={**WRONG, "prompt": [5, ["x"]], "suffix": [5], "random_seed": ["1", 1.5]},
        within=WRONG_WITHIN,
        unsaid=WRONG_UNSAID,
        fine=_merge(FINE, {"suffix": ["", "x"], "random_seed": [5]}),
        together=FINE_TOGETHER,
    ),
    "tokenize": Kind(
        tokens.TOKENIZE_REQUESTS,
        tokens.TokenizeRequest,
        {"content": "x"},
        wrong=WRONG_TOKENIZE,
        fine=FINE_TOKENIZE,
    ),
    "messages": Kind(
        MESSAGES_REQUESTS,
        MessagesRequest,
        chat(),
        wrong=WRONG_MESSAGES,
        within=WRONG_WITHIN_MESSAGES,
        unsaid=UNSAID_MESSAGES,
        missing=MISSING_MESSAGES,
        fine=FINE_MESSAGES,
        together=[{"steering": {"5": 1.5}, "steering_mode": "clamp"}],
    ),
    "detokenize": Kind(
        tokens.DETOKENIZE_REQUESTS,
        tokens.DetokenizeRequest,
        {"tokens": [1]},
        wrong=WRONG_DETOKENIZE,
        within=WRONG_WITHIN_DETOKENIZE,
        fine=FINE_DETOKENIZE,
    ),
}


def read_chat(**fields: Any) -> ChatRequest:
    return CHAT_REQUESTS.decode(json.dumps(chat(**fields)).encode())[0]


def read_completion(**fields: Any) -> CompletionRequest:
    return COMPLETION_REQUESTS.decode(json.dumps(completion(**fields)).encode())[0]


def refusal(kind: Kind, body: object) -> InvalidRequest:
    text = body if isinstance(body, str) else json.dumps(body)
    with pytest.raises(InvalidRequest) as caught:
        kind.decode(text.encode())
    return caught.value


def fields(kind: Kind, *, optional: bool) -> list[str]:
    """Every field of a kind, so that a new one is tried, too."""
    return [
        field.encode_name
        for field in msgspec.structs.fields(kind.struct)
        if not (optional and (field.required or field.encode_name in kind.base))
    ]
