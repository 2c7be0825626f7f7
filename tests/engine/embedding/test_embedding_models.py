"""Embedding models through loading and through the device thread."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from mlxsrv.engine.events import Failed
from mlxsrv.engine.orders import Job
from mlxsrv.engine.plans import EmbedSlice
from mlxsrv.errors import ServeError
from tests.support.device import Listener, gate, generate, job, load, open_client, run
from tests.support.embedding import TEXTS, Bench, embed, make_texts
from tests.support.fixtures import ModelFolder
from tests.support.loading import Refused, nothing_left
from tests.support.loading import load as load_resident

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
            endless = job(100_000)
            client.submit(endless, heard := Listener())
            await heard.began.wait()
            found = await asyncio.gather(
                client.embed(Job(10**6, "m", texts=texts)),
                client.embed(Job(10**6 + 1, "bert", texts=texts)),
                other.embed(Job(10**6, "bert", texts=texts)),
                client.embed(Job(10**6 + 2, "m", texts=texts[:1])),
            )
            client.cancel(endless.id)
            begun = heard.tokens[:300]
            assert begun
            assert begun == expected.tokens[: len(begun)]
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
                await client.embed(Job(10**6, "nobody", texts=texts))
            with pytest.raises(ServeError, match="129 tokens"):
                await client.embed(Job(10**6, "bert", texts=make_texts(5, 129)))
            with gate(EmbedSlice) as held:
                asked = asyncio.create_task(client.embed(Job(10**6, "m", texts=texts)))
                await held.reached()
                reporting = asyncio.create_task(client.report())
                await asyncio.sleep(0)  # its order is sent
                held.open()
                assert (await reporting).models["m"]["texts"] > 1900
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await client.embed(
                Job(10**6 + 1, "m", texts=texts[:1])
            )  # not in the round of the cancel
            assert (await client.report()).models["m"]["texts"] == 0
            assert not client._receivers
            with gate(EmbedSlice) as held:
                asked = asyncio.create_task(client.embed(Job(10**6, "m", texts=texts)))
                await held.reached()
                client.unload("m")
            with pytest.raises(ServeError, match="its model was unloaded"):
                await asked
            assert len(await client.embed(Job(10**6, "bert", texts=texts[:2]))) == 2

    run(test)
