"""Vectors of texts: each as if alone, in order, in turn; and beside streams through the device."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxsrv.engine.embedding.embedder import Embedder
from mlxsrv.engine.embedding.embedding_models import (
    EmbeddingDecoder,
    EmbeddingEncoder,
    find_inner,
)
from mlxsrv.engine.embedding.encoders.bert import Bert
from mlxsrv.engine.embedding.encoders.load import load_encoder
from mlxsrv.engine.embedding.pooling import pool
from mlxsrv.engine.events import Embedded, Event, Failed
from mlxsrv.engine.loading.resident import ResidentModel
from mlxsrv.engine.orders import Embed
from mlxsrv.engine.scheduling.embed_schedule import EmbedSchedule
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.errors import ServeError
from mlxsrv.formats.pooling import Pooling
from mlxsrv.generation.outputs import Vectors
from tests.engine.test_device import Listener, generate, job, load, open_client, run
from tests.support.effort import per_cache
from tests.support.embedding import do, run_slice
from tests.support.fixtures import ModelFolder
from tests.support.loading import Refused, nothing_left
from tests.support.loading import load as load_resident
from tests.support.tiny import FAMILIES

Texts = tuple[tuple[int, ...], ...]


def make_texts(*lengths: int, seed: int = 0) -> Texts:
    random = np.random.default_rng(seed)
    return tuple(tuple(random.integers(3, 500, length).tolist()) for length in lengths)


TEXTS = make_texts(3, 40, 9, 33, 1, 25, 40, 17, 60, 38)


class Bench:
    """An embedder of one tiny model, and what it has said."""

    def __init__(self, folder: Path, *, chunk: int = 4096, name: str = "m") -> None:
        config = json.loads((folder / "config.json").read_text())
        model: Any = (
            EmbeddingEncoder(load_encoder(folder))
            if config["model_type"] == "bert"
            else EmbeddingDecoder(load_model(folder)[0])
        )
        self.model = model
        self.embedder = Embedder(model, folder, name)
        self.schedule = EmbedSchedule(1, self.embedder.facts, Pace(chunk, 1.0))
        self.events: list[Event] = []
        self.slices: list[list[int]] = []  # the lengths of the texts in each
        inner = model.run

        def seen(tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
            self.slices.append(cast(list[int], mask.sum(axis=1).tolist()))
            return cast(mx.array, inner(tokens, mask, firsts))

        model.run = seen

    def submit(self, number: int, texts: Texts, firsts: tuple[int, ...] = ()) -> None:
        self.schedule.submit(Embed(number, "m", texts, firsts))

    def step(self, *, decoding: bool = False, beside: bool = False) -> None:
        self.events += run_slice(self.schedule, self.embedder, decoding=decoding, beside=beside)

    def finish(self, **streams: bool) -> None:
        while not self.schedule.idle:
            self.step(**streams)
        assert not self.embedder._jobs
        assert self.embedder._long is None

    def embed(self, texts: Texts, firsts: tuple[int, ...] = (), **streams: bool) -> Vectors:
        self.submit(0, texts, firsts)
        self.finish(**streams)
        return self.vectors(0)

    def vectors(self, number: int) -> Vectors:
        [event] = [event for event in self.events if cast(Any, event).job == number]
        assert isinstance(event, Embedded), event
        return event.vectors

    @property
    def ended(self) -> list[int]:
        return [cast(Any, event).job for event in self.events]


def embed(resident: ResidentModel, texts: Texts) -> Vectors:
    """The vectors of texts by a model that is loaded."""
    embedder = resident.embedder
    schedule = EmbedSchedule(1, embedder.facts, Pace(64, 1.0))
    schedule.submit(Embed(1, "m", texts))
    events: list[Event] = []
    while not schedule.idle:
        events += run_slice(schedule, embedder)
    [event] = events
    assert isinstance(event, Embedded)
    return event.vectors


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a tiny encoder; with labels, of a cross-encoder."""

    @cache
    def write(labels: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("bert")
        config = {
            "model_type": "bert",
            "architectures": ["BertForSequenceClassification" if labels else "BertModel"],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 512,
            "max_position_embeddings": 128,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "num_labels": labels,
        }
        (folder / "config.json").write_text(json.dumps(config))
        mx.random.seed(0)
        model: Any = Bert(config)
        weights = {
            name: mx.random.normal(array.shape) * 0.2
            for name, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
        }
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return folder

    return write


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
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(model_folder("qwen3"))
    find, failures = bench.embedder._find_pooler, [OSError("no such file")]

    def fail() -> Any:
        if failures:
            raise failures.pop()
        return find()

    monkeypatch.setattr(bench.embedder, "_find_pooler", fail)
    bench.submit(1, make_texts(5, 6))
    bench.submit(2, make_texts(5))
    slice = bench.schedule.plan(decoding=False, beside=False)
    assert slice is not None
    assert len(slice.texts) == 3
    for work in [*bench.schedule.take_changes(), slice]:  # planned in one round
        bench.events += bench.schedule.settle(work, do(work, bench.embedder))
    bench.finish()
    assert bench.slices == [[5]]
    assert bench.ended == [1, 2]
    assert isinstance(bench.events[0], Failed)
    assert "no such file" in bench.events[0].reason
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
    assert bench.schedule.statistics() == {"texts": 2}
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
    assert bench.schedule.statistics() == {"texts": 1}
    bench.finish(decoding=True)
    assert bench.ended == [2]
    assert sum(map(sum, bench.slices)) <= 8 + 12


def test_a_long_text_after_one_that_was_cancelled_is_read_from_its_beginning(
    model_folder: ModelFolder,
) -> None:
    texts = (tuple(range(200, 320)),)
    bench = Bench(model_folder("qwen3"), chunk=16)
    bench.submit(0, make_texts(100))
    bench.step(decoding=True)
    bench.schedule.cancel([0])
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
    refuses(Bench(bert()), "no texts", ())
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


# Through loading and the device thread.


def test_an_encoder_loads_shares_its_arrays_and_leaves_nothing(bert: Any) -> None:
    texts = make_texts(20, 5)
    expected = Bench(bert()).embed(texts)
    with nothing_left():
        one = load_resident(bert())
        two = load_resident(bert(), [one])
        assert one.loaded.batched
        assert one.loaded.shared == 0
        assert two.loaded.shared == two.loaded.bytes == one.loaded.bytes > 0
        for resident in (one, two):
            assert (resident.text, resident.steerer) == (None, None)
            np.testing.assert_allclose(embed(resident, texts), expected, atol=1e-5)
        del resident, one, two


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_that_was_saved_without_its_head_loads(
    model_folder: ModelFolder, tmp_path: Path, tied: bool
) -> None:
    whole = model_folder("qwen3")
    config = json.loads((whole / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = cast(dict[str, mx.array], mx.load(str(whole / "model.safetensors")))
    inner = {name: array for name, array in arrays.items() if "lm_head" not in name}
    renamed = {name.removeprefix("model."): array for name, array in inner.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    resident = load_resident(tmp_path)
    found = embed(resident, TEXTS[:1])
    np.testing.assert_allclose(found, Bench(whole).embed(TEXTS[:1]), atol=1e-5)
    del renamed["norm.weight"]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    with pytest.raises(Refused, match="parameters"):
        load_resident(tmp_path)


def test_an_encoder_with_an_adapter_is_refused(bert: Any) -> None:
    with pytest.raises(Refused, match="adapter"):
        load_resident(bert(), adapter="/nowhere")


@pytest.mark.slow
def test_vectors_come_through_a_client_beside_streams(model_folder: ModelFolder, bert: Any) -> None:
    texts = make_texts(12, 30, 7, 30, 41)

    async def test() -> None:
        async with open_client() as client, open_client() as other:
            await client.load(load(model_folder("qwen3")))
            await client.load(load(bert(), "bert"))
            await other.load(load(bert(), "bert"))
            expected = await generate(client, job(300))
            heard = Listener()
            client.submit(job(300), heard)
            await heard.began.wait()
            found = await asyncio.gather(
                client.embed(Embed(10**6, "m", texts)),
                client.embed(Embed(10**6 + 1, "bert", texts)),
                other.embed(Embed(10**6, "bert", texts)),
                client.embed(Embed(10**6 + 2, "m", texts[:1])),
            )
            assert not heard.ended.is_set()
            await heard.ended.wait()
            assert heard.tokens == expected.tokens
            own = Bench(model_folder("qwen3")).embed(texts)
            encoded = Bench(bert()).embed(texts)
            for vectors, expected_ones in zip(found, (own, encoded, encoded, own[:1]), strict=True):
                assert vectors.dtype == np.float32
                np.testing.assert_allclose(vectors, expected_ones, atol=1e-5)
            asked = job(3, "bert")
            refused = await generate(client, asked)
            assert refused.events == [Failed(asked.id, "this model does not generate text")]

    run(test)


def test_what_ends_an_embedding_is_told(model_folder: ModelFolder, bert: Any) -> None:
    texts = make_texts(*[100] * 2000)

    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
            await client.load(load(bert(), "bert"))
            with pytest.raises(ServeError, match="is not loaded"):
                await client.embed(Embed(10**6, "nobody", texts))
            with pytest.raises(ServeError, match="129 tokens"):
                await client.embed(Embed(10**6, "bert", make_texts(5, 129)))
            asked = asyncio.create_task(client.embed(Embed(10**6, "m", texts)))
            await asyncio.sleep(0)
            assert (await client.report()).models["m"]["texts"] > 1900
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await client.embed(Embed(10**6 + 1, "m", texts[:1]))  # not in the round of the cancel
            assert (await client.report()).models["m"]["texts"] == 0
            assert not client._receivers
            asked = asyncio.create_task(client.embed(Embed(10**6, "m", texts)))
            await asyncio.sleep(0)
            client.unload("m")
            with pytest.raises(ServeError, match="its model was unloaded"):
                await asked
            assert len(await client.embed(Embed(10**6, "bert", texts[:2]))) == 2

    run(test)
