"""Where probes of `benchmarks.ratios` run, and the prompts that they send.

In one pair a probe of ours and its counterpart read the same prompts, drawn anew for each pair; no
prompt begins like another, so none is found in a cache unless that is what is measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from tokenizers import Tokenizer

from benchmarks import servers
from benchmarks.load import (
    Load,
    Report,
)
from tests.support.tiny import write_model

SamplingKind = Literal["greedy", "mixed", "seeded"]


Chat: TypeAlias = list[dict[str, str]]


_CONTEXT = 32768  # the tiny models' own would be too short for the longest prompts


_MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"family": "qwen3"},
    "5m": {
        "family": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    "46m": {"family": "qwen3-46m"},
    "large": {"family": "qwen3", "vocab_size": 151_936},
}


_WORDS = ("one", "token", "after", "another", "while", "the", "reader", "waits", "for", "more")


_PROMPT_TOKENS = 64


class LeftOut(Exception):
    """Not measured, and for no fault of anybody's: something is not installed or not offered."""


class Unusable(Exception):
    """The figures of a run mean nothing, because requests failed or ended early."""


class Model(msgspec.Struct, frozen=True):
    folder: Path
    tokenizer: Tokenizer


class Bench(msgspec.Struct):
    """The settings and hosts that all probes of a run share."""

    models: dict[str, Model]
    quick: bool
    pair: int = 0
    peer: servers.Side | None = None
    """A server that runs already, to be measured instead of `mlx_lm.server`."""
    peer_model: str | None = None
    openblas: bool = True
    """Whether ours may use it."""
    cpu_shares: dict[int, float] = {}
    """The share of a processor that the load generator took while ours was measured, by streams."""

    def choose(self, full: int, quick: int) -> int:
        """Return the number of repetitions."""
        return quick if self.quick else full


class Host(msgspec.Struct, frozen=True):
    """Where probes run. One that is not `running` gets its processes from the probe itself."""

    program: Literal["mlxsrv", "peer", "mlx-lm"]
    model: str
    options: tuple[str, ...] = ()
    """Names and values by turns."""
    running: bool = True

    def make_side(self, bench: Bench) -> servers.Side:
        folder = bench.models[self.model].folder
        if self.program == "mlxsrv":
            return servers.ours(folder, *self.options, openblas=bench.openblas)
        if self.program == "peer" and bench.peer is not None:
            return bench.peer
        if find_spec("mlx_lm") is None:
            raise LeftOut("mlx_lm.server is not installed")
        return servers.peer(folder)


class Place(msgspec.Struct, frozen=True):
    """The things that a probe gets to work with."""

    bench: Bench
    host: Host
    side: servers.Side
    running: servers.Running | None = None

    @property
    def model(self) -> Model:
        return self.bench.models[self.host.model]

    @property
    def is_ours(self) -> bool:
        return self.host.program == "mlxsrv"

    def make_load(self, **fields: Any) -> Load:
        url = self.running.url if self.running is not None else ""
        model = None if self.is_ours else self.bench.peer_model
        return Load(url=url, model=model, **fields)

    def write_chats(self, name: str, count: int, tokens: int = _PROMPT_TOKENS) -> list[Chat]:
        """Chats of about `tokens` tokens each, always the same for one name in one pair."""
        dice = random.Random(f"{name}/{self.bench.pair}")
        tokenizer = self.model.tokenizer
        return [[say("user", _write_text(tokenizer, tokens, dice))] for _ in range(count)]


class Reading(msgspec.Struct, frozen=True):
    """The figures that a probe took once."""

    figures: dict[str, float]
    reports: tuple[Report, ...] = ()


Take: TypeAlias = Callable[[Place], Reading]


def write_models(folder: Path, names: Sequence[str]) -> dict[str, Model]:
    models = {}
    for name in names:
        described = dict(_MODELS[name])
        family = described.pop("family")
        path = write_model(
            folder / name, family, plain=True, max_position_embeddings=_CONTEXT, **described
        )
        models[name] = Model(path, Tokenizer.from_file(str(path / "tokenizer.json")))
    return models


def write_bodies(
    chats: Sequence[Chat], kind: SamplingKind = "greedy"
) -> tuple[dict[str, Any], ...]:
    """The part that is the same in each request: its chat, and how to draw its tokens."""
    return tuple(
        {"messages": chat} | choose_sampling(kind, number) for number, chat in enumerate(chats)
    )


def choose_sampling(kind: SamplingKind, number: int) -> dict[str, float | int]:
    """The sampling fields of request `number`; no two of 32 that are mixed are the same."""
    if kind == "greedy":
        return {"temperature": 0.0}
    if kind == "seeded":
        return {"temperature": 0.7, "seed": number}  # at 1.0 once in a while even a muted end comes
    step = number % 32 / 31
    return {"temperature": 0.5 + 0.5 * step, "top_p": 0.95 - 0.15 * step}


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write_text(tokenizer: Tokenizer, tokens: int, dice: random.Random) -> str:
    """A text that begins like no other."""
    words = [f"{dice.getrandbits(32):08x}", *dice.choices(_WORDS, k=tokens)]
    ids = tokenizer.encode(" ".join(words)).ids
    text: str = tokenizer.decode(ids[:tokens])
    return text
