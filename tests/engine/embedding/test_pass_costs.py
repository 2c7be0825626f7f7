"""The estimate of what a pass over texts needs is not too low, nor far too high; so texts stay
within a budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.embedding.embedder import Embedder
from mlxsrv.engine.embedding.embedding_models import (
    EmbeddingDecoder,
    EmbeddingEncoder,
    EmbeddingModel,
)
from mlxsrv.engine.embedding.encoders.bert import Bert
from mlxsrv.engine.embedding.encoders.layers import Encoder
from mlxsrv.engine.embedding.encoders.modernbert import ModernBert
from mlxsrv.engine.events import Embedded, Event
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.formats.pooling import Pooling
from tests.support.effort import per_cache
from tests.support.embedding import make_schedule, run_slice
from tests.support.encoders import CONFIGS
from tests.support.fixtures import ModelFolder
from tests.support.heavy import write_heavy
from tests.support.tiny import FAMILIES, write_model

LENGTH = 256
CHUNK = 64


def measure(run: Callable[[], object]) -> int:
    """Bytes that MLX has in use at most beside those that it has before."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    mx.synchronize()
    return mx.get_peak_memory() - before


def measure_pass(model: EmbeddingModel, rows: int) -> int:
    """Bytes that a pass takes over so many texts of LENGTH, with vectors."""
    tokens = mx.ones((rows, LENGTH), mx.int32)
    mask = mx.ones((rows, LENGTH), mx.bool_)
    mx.eval(tokens, mask)
    firsts = [1] * rows if model.labels else None
    return measure(lambda: mx.eval(model.run(tokens, mask, firsts).astype(mx.float32).mean(axis=1)))


def check(model: EmbeddingModel) -> None:
    measure_pass(model, 1)  # weights are read, and parts of the model are compiled
    facts = model.find_facts()
    found = measure_pass(model, 4) - measure_pass(model, 2)
    reported = facts.pass_bytes(2 * LENGTH, LENGTH)
    assert found <= reported
    assert reported <= 8 * found


@pytest.mark.parametrize("family", per_cache(name for name in FAMILIES if name != "qwen3-46m"))
def test_a_pass_of_a_decoder(model_folder: ModelFolder, family: str) -> None:
    model: Any = load_model(model_folder(family))[0]
    check(EmbeddingDecoder(model))


ENCODERS = [("bert-classifier", Bert), ("modernbert-classifier", ModernBert)]
SIZES = {"hidden_size": 64, "intermediate_size": 192, "max_position_embeddings": 2048}


@pytest.mark.parametrize(("name", "kind"), ENCODERS)
def test_a_pass_of_an_encoder(name: str, kind: type[Encoder]) -> None:
    check(EmbeddingEncoder(kind(CONFIGS[name] | SIZES)))


def measure_texts(embedder: Embedder, lengths: Sequence[int], budget: int) -> int:
    """Embed texts within a budget, twice. Returns the bytes that MLX has in use at most the second
    time. By the clock each work takes a millisecond, so slices are as large as may be."""
    clock = partial(next, count(0.0, 0.001))
    schedule = make_schedule(embedder.facts, Pace(CHUNK, 1.0))
    schedule.budget.set(budget)
    texts = tuple((5,) * length for length in lengths)
    events: list[Event] = []

    def embed() -> None:
        firsts = (1,) * len(texts) if embedder.facts.labels else ()
        schedule.submit(Job(len(events), "m", texts=texts, firsts=firsts))
        while not schedule.idle:
            events.extend(run_slice(schedule, embedder, clock=clock))

    embed()
    taken = measure(embed)
    assert all(isinstance(event, Embedded) for event in events), events
    assert len(events) == 2
    return taken


def check_budget(model: EmbeddingModel, folder: Path, lengths: Sequence[int], slots: int) -> None:
    embedder = Embedder(model, folder, "m")
    step = embedder.facts.pass_bytes(CHUNK, max(lengths))
    budget = slots * step
    taken = measure_texts(embedder, lengths, budget)
    assert taken <= budget + step
    assert budget <= 4 * taken, "the budget is used"


@pytest.mark.parametrize(("name", "kind"), ENCODERS)
def test_texts_of_an_encoder_stay_within_the_budget(
    tmp_path: Path, name: str, kind: type[Encoder]
) -> None:
    model = EmbeddingEncoder(kind(CONFIGS[name] | SIZES))
    check_budget(model, tmp_path, (*[20] * 200, 1000), slots=18)


def test_texts_of_a_decoder_stay_within_the_budget(tmp_path: Path) -> None:
    model: Any = load_model(write_heavy(tmp_path))[0]
    check_budget(EmbeddingDecoder(model), tmp_path, (*[20] * 200, 1000), slots=8)


@pytest.mark.slow
def test_a_long_text_of_a_decoder_stays_within_the_budget(tmp_path: Path) -> None:
    """Most of the budget is for attention, which is wide where the text ends."""
    small: Any = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}
    model: Any = load_model(write_model(tmp_path, "qwen3", **small))[0]
    check_budget(EmbeddingDecoder(model), tmp_path, (*[20] * 200, 5000), slots=8)


@pytest.mark.parametrize("type", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("pooling", ["last", "max", "weightedmean"])
def test_a_vector_is_made_within_the_memory_of_its_text(
    tmp_path: Path, type: mx.Dtype, pooling: Pooling
) -> None:
    """The hidden states of a text that was read in parts take more than its KV cache, and several
    copies of them are there when its vector is made."""
    wide: Any = {"num_hidden_layers": 1, "num_key_value_heads": 1, "hidden_size": 1024}
    model: Any = load_model(write_model(tmp_path, "qwen3", intermediate_size=64, **wide))[0]
    model.set_dtype(type)
    (tmp_path / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 1024, "pooling_mode": pooling}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    embedder = Embedder(EmbeddingDecoder(model), tmp_path, "m")
    memory = make_schedule(embedder.facts, Pace(CHUNK, 1.0)).memory
    budget = memory.measure_embedded(tokens := 600)
    taken = measure_texts(embedder, [tokens], budget)
    assert taken <= budget <= 6 * taken
