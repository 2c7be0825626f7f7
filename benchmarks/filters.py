"""The measures of `benchmarks.ratios` with a vocabulary of real size, 151,936 tokens.

With it the sampler takes more time than a tiny model, so the cost of each kind of request shows.
Qwen's own sampling parameters are compared with `mlx_lm.server`, and each kind of request with
greedy ones on the same server. Turns are short, so that changes of the machine's speed affect both.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.hosts import Place, Reading, Take
from benchmarks.load import Load
from benchmarks.probes import measure, warm_up

MODEL = "large"
QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
"""Qwen3's generation_config.json."""

_GREEDY: dict[str, Any] = {"temperature": 0.0}
_ARRAY = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
KINDS: dict[str, dict[str, Any]] = {
    "qwen": QWEN,
    "top-k-1024": QWEN | {"top_k": 1024},
    "temperature": {"temperature": 0.6},
    "top-p": {"temperature": 0.6, "top_p": 0.95},
    "min-p": {"temperature": 0.6, "min_p": 0.05},
    "logit-bias": _GREEDY | {"logit_bias": {str(7 * i): 1 for i in range(20)}},
    "repetition": _GREEDY | {"repetition_penalty": 1.1},
    "frequency": _GREEDY | {"frequency_penalty": 0.5},
    "json": _GREEDY
    | {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "strings", "schema": _ARRAY},
        }
    },
    "regex": _GREEDY | {"guided_regex": "[a-z ]*"},
    "logprobs": _GREEDY | {"logprobs": True, "top_logprobs": 20},
}
"""The fields of each kind of request. The model draws no end token, so every answer has
`max_tokens`."""


def take_kind(kind: str, streams: int) -> Take:
    """Measure the tokens per second of `streams` concurrent requests."""

    def take(place: Place) -> Reading:
        load = _make_load(place, KINDS[kind], streams, kind)
        warm_up(place, load)
        report = measure(load)
        return Reading({"tokens/s": report.tokens_per_second}, (report,))

    return take


def take_over_greedy(kind: str, streams: int) -> Take:
    """Measure the tokens per second of requests of the kind, and of greedy ones."""

    def take(place: Place) -> Reading:
        fields = {kind: KINDS[kind], "greedy": _GREEDY}
        for name in fields:
            warm_up(place, _make_load(place, fields[name], streams, name))
        rates: dict[str, list[float]] = {}
        turns = ("greedy", kind, kind, "greedy") * place.bench.choose(3, 1)
        for turn, name in enumerate(turns):
            load = _make_load(place, fields[name], streams, f"{name}, turn {turn}")
            rates.setdefault(name, []).append(measure(load).tokens_per_second)
        return Reading({name: statistics.median(taken) for name, taken in rates.items()})

    return take


def _make_load(place: Place, fields: dict[str, Any], streams: int, name: str) -> Load:
    chats = place.write_chats(f"{json.dumps(fields)}-{streams}-{name}", streams)
    return place.make_load(
        concurrency=streams,
        requests=streams,
        max_tokens=place.bench.choose(40, 20),
        bodies=tuple({"messages": chat} | fields for chat in chats),
    )
