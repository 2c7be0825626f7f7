"""Vectors of texts: each as if alone, in order, in turn; and beside streams through the device."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.embedding.embedding_models import (
    find_inner,
)
from mlxsrv.engine.embedding.pooling import pool
from mlxsrv.engine.events import Failed
from mlxsrv.engine.plans import WorkItem
from mlxsrv.formats.pooling import Pooling
from tests.support.effort import per_cache
from tests.support.embedding import TEXTS, Bench, Texts, do, make_texts, take_events
from tests.support.fixtures import ModelFolder
from tests.support.tiny import FAMILIES

# Right.


@pytest.mark.parametrize("family", per_cache(name for name in FAMILIES if name != "qwen3-46m"))
def test_the_inner_model_gives_what_the_output_head_takes(
    model_folder: ModelFolder, family: str
) -> None:
    model, _ = load_model(model_folder(family))
    tokens = mx.array(TEXTS[1])[None]
    inner = find_inner(model, tokens)
    outer = getattr(model, "language_model", model)
    heads = [outer[name] for name in ("lm_head", "output") if name in outer]
    head = heads[0] if heads else inner.embed_tokens.as_linear
    np.testing.assert_allclose(head(inner(tokens, cache=None)), model(tokens), atol=1e-4)


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "gemma3_text", "gpt_oss", "mamba2", "falcon_h1", "llama4"]
)
def test_a_batch_and_chunks_give_what_a_text_gives_alone(
    model_folder: ModelFolder, family: str
) -> None:
    bench = Bench(model_folder(family))
    together = bench.embed(TEXTS)
    assert any(len(set(lengths)) > 1 for lengths in bench.slices)  # there was padding
    for text, vector in zip(TEXTS, together, strict=True):
        alone = Bench(model_folder(family)).embed((text,))
        np.testing.assert_allclose(alone[0], vector, atol=1e-5)
    chunked = Bench(model_folder(family), chunk=16).embed(TEXTS, decoding=True)
    np.testing.assert_allclose(chunked, together, atol=1e-5)


def test_a_mean_is_that_of_the_hidden_states(model_folder: ModelFolder) -> None:
    model, _ = load_model(model_folder("qwen3"))
    vectors = Bench(model_folder("qwen3")).embed(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        mean = np.array(model.model(mx.array(text)[None]))[0].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)


def test_the_name_of_an_embedding_model_has_it_pool_the_last_token(
    model_folder: ModelFolder,
) -> None:
    model, _ = load_model(model_folder("qwen3"))
    [vector] = Bench(model_folder("qwen3"), name="Qwen3-Embedding-0.6B").embed(TEXTS[1:2])
    last = np.array(model.model(mx.array(TEXTS[1])[None]))[0, -1]
    np.testing.assert_allclose(vector, last / np.linalg.norm(last), atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("cls", [1, 2]),
        ("last", [5, 1]),
        ("max", [5, 3]),
        ("mean", [3, 2]),
        ("mean_sqrt_len", [9 / 3**0.5, 6 / 3**0.5]),
        ("weightedmean", [(1 + 2 * 3 + 3 * 5) / 6, (2 + 2 * 3 + 3 * 1) / 6]),
    ],
)
def test_pooling_leaves_padding_out(pooling: Pooling, expected: list[float]) -> None:
    hidden = mx.array([[[1, 2], [3, 3], [5, 1], [mx.nan, 99]], [[9, 9], [8, 7], [7, 7], [6, 8.0]]])
    mask = mx.array([[True, True, True, False], [True] * 4])
    found = pool(hidden.astype(mx.float16), mask, pooling)
    assert found.dtype == mx.float32
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)


def test_an_encoder_masks_padding_and_a_cross_encoder_judges_pairs(bert: Any) -> None:
    texts = make_texts(30, 12, 28, 4, 26)
    together = Bench(bert()).embed(texts)
    assert together.shape == (5, 32)
    firsts = (9, 5, 20, 1, 13)
    judged = Bench(bert(3)).embed(texts, firsts)
    assert judged.shape == (5, 3)
    for i, text in enumerate(texts):
        np.testing.assert_allclose(Bench(bert()).embed((text,))[0], together[i], atol=1e-5)
        alone = Bench(bert(3)).embed((text,), (firsts[i],))
        np.testing.assert_allclose(alone[0], judged[i], atol=1e-5)
    other = Bench(bert(3)).embed(texts, (25, 5, 20, 1, 13))
    assert np.abs(other[0] - judged[0]).max() > 1e-3
    np.testing.assert_allclose(other[1:], judged[1:], atol=1e-5)


# Slices.


def test_texts_of_all_jobs_share_slices_with_little_padding(model_folder: ModelFolder) -> None:
    bench = Bench(model_folder("qwen3"))
    expected = Bench(model_folder("qwen3")).embed(TEXTS)
    for number, place in enumerate([0, 2, 4, 6, 8]):
        bench.submit(number, TEXTS[place : place + 2])
    bench.finish()
    assert sorted(chain(*bench.slices)) == sorted(map(len, TEXTS))
    assert len(bench.slices) < len(TEXTS) - 2
    for lengths in bench.slices:
        assert max(lengths) * len(lengths) <= 1.25 * sum(lengths)
    found = np.concatenate([bench.vectors(number) for number in range(5)])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_no_text_is_read_of_a_job_whose_pooling_is_not_known(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder("qwen3"), tmp_path / "m")
    modules = folder / "modules.json"
    modules.symlink_to(modules)
    bench = Bench(folder)
    items: list[WorkItem] = []
    for number, lengths in ((1, (5, 6)), (2, (5,))):
        bench.submit(number, make_texts(*lengths))
        bench.schedule.budget.begin_round()
        items += bench.schedule.plan_rows()
    slice = bench.schedule.embeddings.plan(decoding=False, beside=False)
    assert slice is not None
    assert len(slice.texts) == 3
    for work in [*items, slice]:  # planned before it was known
        bench.schedule.settle(work, do(work, bench.embedder))
        modules.unlink(missing_ok=True)
    bench.events += take_events(bench.schedule)
    bench.finish()
    assert bench.slices == [[5]]
    assert bench.ended == [1, 2]
    assert isinstance(bench.events[0], Failed)
    assert "modules.json" in bench.events[0].reason
    np.testing.assert_allclose(
        bench.vectors(2), Bench(model_folder("qwen3")).embed(make_texts(5)), atol=1e-5
    )


def test_slices_beside_streams_are_as_long_as_the_pace_allows(model_folder: ModelFolder) -> None:
    bench = Bench(model_folder("qwen3"), chunk=64)
    bench.submit(0, make_texts(*[16] * 12))
    bench.finish(beside=True)
    assert bench.slices[0] == [16]  # nothing is known yet, so it is the least
    assert max(map(sum, bench.slices)) <= 64
    bench.slices.clear()
    bench.submit(1, make_texts(*[16] * 12))
    bench.finish()
    assert sum(map(sum, bench.slices)) == 192
    assert len(bench.slices) < 4


def test_one_text_waits_a_few_slices_for_a_job_of_many(model_folder: ModelFolder) -> None:
    bench = Bench(model_folder("qwen3"), chunk=64)
    bench.submit(0, make_texts(*[30] * 100))
    bench.submit(1, make_texts(*[60] * 3))
    for _ in range(3):
        bench.step(beside=True)
    bench.submit(2, make_texts(5))
    for _ in range(4):
        bench.step(beside=True)
    assert bench.ended == [2]
    bench.finish(beside=True)
    assert bench.ended == [2, 1, 0]


def test_short_texts_do_not_wait_for_a_long_one(model_folder: ModelFolder) -> None:
    bench = Bench(model_folder("qwen3"), chunk=16)
    bench.submit(0, make_texts(400))
    bench.step(decoding=True)
    bench.submit(1, make_texts(5, 10, 300))
    bench.submit(2, make_texts(5))
    for _ in range(6):
        bench.step(decoding=True)
    assert bench.ended == [2]
    assert bench.schedule.memory.book.count_texts() == 2
    bench.finish(decoding=True)
    assert bench.ended == [2, 0, 1]
    np.testing.assert_allclose(
        bench.vectors(0), Bench(model_folder("qwen3")).embed(make_texts(400)), atol=1e-5
    )


def test_an_encoder_reads_a_text_whole_whatever_the_pace(bert: Any) -> None:
    bench = Bench(bert(), chunk=16)
    bench.embed(make_texts(100, 7), decoding=True)
    assert bench.slices == [[100], [7]]


# Ends.


def test_a_cancelled_job_is_gone_at_whatever_stage(model_folder: ModelFolder) -> None:
    bench = Bench(model_folder("qwen3"), chunk=16)
    bench.submit(0, make_texts(100))
    bench.submit(1, make_texts(10, 11, 12))
    bench.submit(2, make_texts(8))
    bench.step(decoding=True)
    bench.schedule.cancel([0, 7])
    bench.schedule.cancel([1])
    assert bench.schedule.memory.book.count_texts() == 1
    bench.finish(decoding=True)
    assert bench.ended == [2]
    assert sum(map(sum, bench.slices)) <= 8 + 12


def test_a_long_text_after_one_that_was_cancelled_is_read_from_its_beginning(
    model_folder: ModelFolder,
) -> None:
    texts = (tuple(range(200, 320)),)
    bench = Bench(model_folder("qwen3"), chunk=16)
    bench.submit(1, make_texts(100))
    bench.step(decoding=True)
    bench.schedule.cancel([1])
    found = bench.embed(texts, decoding=True)
    np.testing.assert_allclose(found, Bench(model_folder("qwen3")).embed(texts), atol=1e-5)


def test_an_error_fails_the_jobs_of_its_slice_only(model_folder: ModelFolder) -> None:
    bench = Bench(model_folder("qwen3"))
    inner = bench.model.run

    def fail(tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
        if tokens.shape[1] == 40:
            raise RuntimeError("no room")
        return cast(mx.array, inner(tokens, mask, firsts))

    bench.model.run = fail
    bench.submit(0, make_texts(10, 10))
    bench.submit(1, make_texts(40, 10))
    bench.submit(2, make_texts(38))
    bench.finish()
    failed = {event.job: event.reason for event in bench.events if isinstance(event, Failed)}
    assert failed == {1: "RuntimeError: no room", 2: "RuntimeError: no room"}
    assert bench.vectors(0).shape == (2, 64)


def test_what_a_model_cannot_do_is_said_at_once(model_folder: ModelFolder, bert: Any) -> None:
    def refuses(bench: Bench, why: str, texts: Texts, firsts: tuple[int, ...] = ()) -> None:
        with pytest.raises(ValueError, match=why):
            bench.submit(0, texts, firsts)
        assert bench.schedule.idle

    refuses(Bench(model_folder("qwen3")), "pairs", TEXTS[:1], (1,))
    refuses(Bench(bert()), "pairs", TEXTS[:1], (1,))
    refuses(Bench(bert(2)), "makes no vectors", TEXTS[:1])
    refuses(Bench(bert()), "no tokens", ((1, 2), ()))
    refuses(Bench(bert()), "no tokens", ())
    refuses(Bench(bert()), "129 tokens", make_texts(5, 129))


def test_a_model_whose_hidden_states_are_not_to_be_had_says_so() -> None:
    class Headed(dict[str, Any]):
        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            return mx.zeros((*tokens.shape, 512))

        def __getattr__(self, name: str) -> Any:
            if name in self:
                return self[name]
            raise AttributeError(name)

    tokens = mx.array([[1, 2]])
    for model in (Headed(), Headed(model=Headed()), Headed(model=Headed(transformer=Headed()))):
        with pytest.raises(ValueError, match="do not give their hidden states"):
            find_inner(model, tokens)
