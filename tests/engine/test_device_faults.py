"""Faults that clients of the device thread meet: of loads, of receivers, and of orders."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.events import (
    Failed,
    JobEvent,
    Started,
    Token,
)
from mlxsrv.engine.orders import Load
from mlxsrv.errors import ModelNotLoaded
from mlxsrv.generation.parameters import Steering
from tests.support.faulty_text import (
    job,
    prompt,
    texts,
)
from tests.support.tiny import write_model


def load_command(folder: Path) -> Load:
    return Load(model="m", path=str(folder), max_rows=4, prefill_chunk=64, max_gap=0.01)


def test_files_that_vanish_while_they_are_read_fail_the_load(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3", vocab_size=4096)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()

    async def test() -> None:
        client = EngineClient.open()
        try:
            before = (await client.report()).active_bytes
            for damage in (weights.unlink, lambda: weights.write_bytes(whole[: len(whole) // 2])):
                damage()
                with pytest.raises(ModelNotLoaded):
                    await client.load(load_command(folder))
                after = await client.report()
                assert after.active_bytes - before < 4096
                assert after.cache_bytes == 0
                weights.write_bytes(whole)
            await client.load(load_command(folder))
        finally:
            client.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_receiver_that_raises_costs_nobody_else_an_event(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3")

    async def test() -> None:
        client = EngineClient.open()
        ended = asyncio.Event()
        heard: list[JobEvent] = []
        refused: list[JobEvent] = []

        def listen(event: JobEvent) -> None:
            heard.append(event)
            if isinstance(event, Token) and event.finish:
                ended.set()

        def refuse(event: JobEvent) -> None:
            refused.append(event)
            if len([each for each in refused if isinstance(each, Token)]) >= 3:
                raise ValueError("I cannot")

        try:
            await client.load(load_command(folder))
            client.submit(job(1, prompt(1), 10**6), refuse)
            client.submit(job(2, prompt(1), 30), listen)
            await ended.wait()
            assert len(texts(list(heard))[2]) == 30
            assert isinstance(refused[-1], Failed)
            assert len(texts(list(refused))[1]) == 3
            rows = (await client.report()).models["m"]
            assert (rows["rows"], rows["waiting"]) == (0, 0)
        finally:
            client.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_an_order_that_fails_is_its_own_affair(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3")

    async def test() -> None:
        client = EngineClient.open()
        ended = asyncio.Queue[JobEvent]()
        try:
            await client.load(load_command(folder))
            bad = job(1, prompt(1), steering=Steering(vectors=(("v", "high"),)))  # type: ignore[arg-type]
            bad = msgspec.structs.replace(bad, prompt=("no", "tokens"))
            client.submit(bad, ended.put_nowait)
            assert isinstance(await ended.get(), Failed)
            client.submit(job(2, prompt(1), 1), ended.put_nowait)
            assert isinstance(await ended.get(), Started)
            assert client.failure is None
        finally:
            client.close()

    asyncio.run(asyncio.wait_for(test(), 60))
