"""SAEs attached to the pool's models: a model that has one stays, and its bytes count."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxsrv.errors import (
    InsufficientMemory,
    SAEAttached,
    SAEIncompatible,
    SAENotAttached,
    ShuttingDown,
)
from mlxsrv.formats.sae_files import read_sae
from mlxsrv.models.pool.attachments import Attachments
from mlxsrv.models.pool.model import Attachment
from tests.support.pools import PATIENCE, Log, attach, folder, log, opened, run, sae, until, use
from tests.support.saes import write_sae

__all__ = ["sae"]

__all__ = ["folder", "log"]  # fixtures


@pytest.mark.slow
def test_a_model_with_an_sae_stays(folder: Path, sae: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder, max_models=2, idle_timeout=0.1) as pool:
            saes = Attachments(pool)
            attachment = await attach(saes, pool, "a", sae)
            assert pool.attachments == {"a": attachment}
            assert attachment.bytes == read_sae(sae).bytes
            await use(pool, "b", "c")
            await until(lambda: log.moves[-1] == "-c", "the idle ones go")
            assert log.moves[:4] == ["+a", "+b", "-b", "+c"]
            saes.detach("a")
            assert not pool.attachments
            await until(lambda: log.moves[-1] == "-a", "it is idle, too")

    run(test)


def test_a_model_cannot_have_two(folder: Path, sae: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            saes = Attachments(pool)
            both = (attach(saes, pool, "a", sae), attach(saes, pool, "a", sae))
            outcomes = await asyncio.gather(*both, return_exceptions=True)
            assert sorted(type(each) is SAEAttached for each in outcomes) == [False, True]
            with pytest.raises(SAEAttached):
                await attach(saes, pool, "a", sae)
            saes.detach("a")
            with pytest.raises(SAENotAttached):
                saes.detach("a")
            again = await attach(saes, pool, "a", sae)
            assert again.number > max(e.number for e in outcomes if isinstance(e, Attachment))
            saes.detach("a")

    run(test)


def test_what_cannot_be_attached_leaves_nothing(folder: Path, sae: Path, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            saes = Attachments(pool)
            narrow = write_sae(tmp_path, d_in=32)
            for path, layer, reason in ((narrow, 1, "not 32"), (sae, 7, "no layer 7")):
                before = pool.memory
                with pytest.raises(SAEIncompatible, match=reason):
                    await attach(saes, pool, "a", path, layer=layer)
                assert not pool.attachments
                assert pool.memory[1] <= max(before[1], pool.memory[1])
            await attach(saes, pool, "a", sae)
            saes.detach("a")

    run(test)


def test_attaching_ends_with_the_pool(folder: Path, sae: Path, log: Log) -> None:
    """Before the model is loaded, or while it is, and once it is there."""

    async def test() -> None:
        for steps in range(0, 60, 4):
            async with opened(folder) as pool:
                saes = Attachments(pool)
                attaching = asyncio.create_task(attach(saes, pool, "a", sae))
                for _ in range(steps):
                    await asyncio.sleep(0.002)
                await pool.shut_down()
                async with asyncio.timeout(PATIENCE):
                    [outcome] = await asyncio.gather(attaching, return_exceptions=True)
                assert isinstance(outcome, ShuttingDown | Attachment)

    run(test)


def test_an_sae_counts_as_memory(folder: Path, sae: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            saes = Attachments(pool)
            await use(pool, "a")
            _, alone = pool.memory
        size = read_sae(sae).bytes
        async with opened(folder, memory_limit=alone + size - 1) as pool:
            saes = Attachments(pool)
            with pytest.raises(InsufficientMemory, match=str(size)):
                await attach(saes, pool, "a", sae)
        async with opened(folder, memory_limit=alone + size) as pool:
            saes = Attachments(pool)
            await attach(saes, pool, "a", sae)
            assert pool.memory[1] == alone + size
            with pytest.raises(InsufficientMemory):
                await use(pool, "b")
            saes.detach("a")
            assert pool.memory[1] == alone
            await use(pool, "b")

    run(test)


def test_who_gives_up_waiting_does_not_stop_it(folder: Path, sae: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            saes = Attachments(pool)
            asked = asyncio.create_task(attach(saes, pool, "a", sae))
            await asyncio.sleep(0)
            asked.cancel()
            await until(lambda: pool.attachments, "the SAE is attached all the same")
            saes.detach("a")

    run(test)
