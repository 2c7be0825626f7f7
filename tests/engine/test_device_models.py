"""Models of the device thread: how they come, what they share, and what is left when they go."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.events import Failed
from mlxsrv.engine.outcomes import Outcome
from mlxsrv.engine.plans import Decode, LoadSlice, WorkItem
from mlxsrv.engine.runner import Runner
from mlxsrv.errors import ModelNotLoaded, ShuttingDown
from mlxsrv.generation.parameters import Constraint, Grammar
from tests.support.device import Listener, gate, generate, job, load, open_client, run
from tests.support.fixtures import ModelFolder


@pytest.mark.slow
def test_streams_go_on_beside_a_load(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two slices of the load there is a step of the stream, however fast each is."""
    done: list[type[WorkItem]] = []
    run_work = Runner.run

    def note_and_run(runner: Runner, work: WorkItem) -> Outcome:
        done.append(type(work))
        return run_work(runner, work)

    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
            asked = job(100_000)
            client.submit(asked, heard := Listener())
            await heard.began.wait()
            with monkeypatch.context() as watched:
                watched.setattr(Runner, "run", note_and_run)
                await client.load(load(model_folder("llama"), "other"))
            assert len((await generate(client, job(5, "other"))).tokens) == 5
            client.cancel(asked.id)
            begun = heard.tokens[:100]
            assert (await generate(client, job(len(begun)))).tokens == begun

    run(test)
    slices = [place for place, kind in enumerate(done) if kind is LoadSlice]
    assert len(slices) > 2
    for before, after in pairwise(slices):
        assert Decode in done[before:after]


@pytest.mark.parametrize("damage", ["missing", "truncated", "config"])
def test_a_load_that_fails_says_why_and_can_be_tried_again(
    model_folder: ModelFolder, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for file in model_folder("qwen3").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        (folder / "config.json").write_text('{"model_type": "no_such_model"}')

    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("llama"), "other"))
            with pytest.raises(ModelNotLoaded) as error:
                await client.load(load(folder))
            assert "\n" not in error.value.message
            assert len((await generate(client, job(5, "other"))).tokens) == 5
            for name, data in whole.items():
                (folder / name).write_bytes(data)
            await client.load(load(folder))
            assert len((await generate(client, job(5))).tokens) == 5

    run(test)


@pytest.mark.slow
def test_two_loads_of_the_same_files_share_them(model_folder: ModelFolder, tmp_path: Path) -> None:
    async def test() -> None:
        async with open_client() as client, open_client() as app:
            first, second, other = await asyncio.gather(
                client.load(load(model_folder("qwen3"), "one")),
                client.load(load(model_folder("qwen3"), "two")),
                client.load(load(model_folder("llama"), "other")),
            )
            assert (first.shared, second.shared, other.shared) == (0, second.bytes, 0)
            # Apps mounted side by side share as well.
            assert (await app.load(load(model_folder("qwen3")))).shared == first.bytes
            client.unload("one")
            text = (await generate(client, job(20, "two"))).tokens
            assert (await generate(app, job(20))).tokens == text

    run(test)


def test_a_model_may_be_unloaded_while_it_loads(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            before = (await client.report()).active_bytes
            with gate(LoadSlice) as held:
                loading = asyncio.create_task(client.load(load(model_folder("qwen3"))))
                await held.reached()
                again = asyncio.create_task(client.load(load(model_folder("qwen3"))))
                await asyncio.sleep(0)  # its order is sent
                client.unload("m")
                held.open()
                with pytest.raises(ModelNotLoaded, match="is being loaded"):
                    await again
                with pytest.raises(ModelNotLoaded, match="was unloaded"):
                    await loading
            assert (await client.report()).active_bytes - before < 4096
            await client.load(load(model_folder("qwen3")))
            with pytest.raises(ModelNotLoaded, match="there is a model of this name"):
                await client.load(load(model_folder("llama")))
            asked = job(100_000)
            client.submit(asked, heard := Listener())
            await heard.began.wait()
            client.unload("m")
            client.cancel(asked.id)  # of a row that is gone
            await client.load(load(model_folder("llama")))
            assert len((await generate(client, job(5))).tokens) == 5

    run(test)


def test_a_client_tells_what_the_device_is_and_holds(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            assert await client.memory() > 1 << 20
            await client.import_model_code(str(model_folder("qwen3")))
            await client.import_model_code("/no/such/folder")  # its load will say so
            before = await client.report()
            assert before.models == {}
            loaded = await client.load(load(model_folder("qwen3"), prompt_cache_bytes=1 << 20))
            heard = Listener()
            asked = job(100_000, prompt=tuple(range(5, 105)))
            client.submit(asked, heard)
            await heard.began.wait()
            report = await client.report()
            assert report.active_bytes >= before.active_bytes + loaded.bytes
            assert report.peak_bytes >= report.active_bytes
            model = report.models["m"]
            assert (model["rows"], model["reading"], model["waiting"]) == (1, 0, 0)
            assert model["tokens"] >= 1
            client.cancel(asked.id)  # what was read for it is kept
            await generate(client, job(1))
            model = (await client.report()).models["m"]
            assert model["prompt_cache_entries"] == 1
            assert model["prompt_cache_bytes"] > 100
            client.unload("m")
            after = await client.report()
            assert (after.models, after.cache_bytes) == ({}, 0)
            assert after.active_bytes - before.active_bytes < 4096

    run(test)


@pytest.mark.slow
def test_free_buffers_are_given_back_once_there_is_no_work(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
            asked = job(100_000)
            client.submit(asked, heard := Listener())
            await heard.began.wait()
            assert (await client.report()).cache_bytes > 0
            client.cancel(asked.id)
            await _wait_for_release(client)
            assert len((await generate(client, job(max_tokens=50))).tokens) == 50

    run(test)


async def _wait_for_release(client: EngineClient) -> None:
    """Look so seldom that the thread may rest meanwhile. `run` limits the time."""
    if (await client.report()).cache_bytes > 0:
        await asyncio.sleep(1)
        await _wait_for_release(client)


def test_a_client_that_is_closed_holds_nothing(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as other:
            before = (await other.report()).active_bytes
            async with open_client() as client:
                await client.load(load(model_folder("qwen3")))
                client.submit(job(100_000), Listener())
            client.unload("m")  # too late, and harmless
            after = await other.report()
            assert after.active_bytes - before < 4096
            assert after.cache_bytes == 0

    run(test)


def test_a_client_that_is_closed_keeps_nobody_waiting(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            loading = asyncio.create_task(client.load(load(model_folder("qwen3"))))
            given_up = asyncio.create_task(client.report())
            await asyncio.sleep(0)
            given_up.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(ShuttingDown):
                await loading

    run(test)


def test_a_closed_loop_does_not_stop_the_thread(model_folder: ModelFolder) -> None:
    async def leave() -> None:
        client = EngineClient.open()  # neither closed nor cancelled: the loop just ends
        await client.load(load(model_folder("qwen3")))
        client.submit(job(100_000), heard := Listener())
        await heard.began.wait()

    run(leave)

    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
            assert len((await generate(client, job(5))).tokens) == 5

    run(test)


def test_what_makes_constraints_comes_with_a_load_and_goes_with_the_model(
    model_folder: ModelFolder,
) -> None:
    def refuse(grammar: Grammar) -> Constraint:
        raise ValueError(f"refused: {grammar.text}")

    bound = msgspec.structs.replace(job(), grammar=Grammar("g"))

    async def fail(client: EngineClient) -> str:
        heard = await generate(client, msgspec.structs.replace(bound, id=job().id))
        [failed] = [event for event in heard.events if isinstance(event, Failed)]
        return failed.reason

    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")), refuse)
            assert await fail(client) == "refused: g"
            assert len((await generate(client, job(5))).tokens) == 5
            client.unload("m")
            await client.load(load(model_folder("qwen3")))
            assert "nothing was sent that makes constraints" in await fail(client)

    run(test)
