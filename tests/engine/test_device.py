"""The device thread through its clients: what a caller may rely on, on a real loop and thread."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.events import Failed, JobEvent, Progress, PromptRead, Started, Token
from mlxsrv.engine.orders import Embed, Job, Load
from mlxsrv.errors import ModelNotLoaded, ShuttingDown
from mlxsrv.generation.parameters import Sampling
from tests.support.effort import examples
from tests.support.fixtures import ModelFolder

numbers = itertools.count(1)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_await(test), 60))


async def _await(test: Callable[[], Awaitable[None]]) -> None:
    await test()


@asynccontextmanager
async def open_client() -> AsyncIterator[EngineClient]:
    client = EngineClient.open()
    try:
        yield client
    finally:
        client.close()


def load(folder: Path, name: str = "m", **more: Any) -> Load:
    settings = {"max_rows": 4, "prefill_chunk": 64, "max_gap": 0.2, "prompt_cache_bytes": 0} | more
    return Load(model=name, path=str(folder), **settings)


def job(max_tokens: int = 8, model: str = "m", prompt: tuple[int, ...] = (5, 6, 7)) -> Job:
    greedy = Sampling(temperature=0)
    return Job(next(numbers), model, prompt, max_tokens, frozenset(), greedy)


class Listener:
    """Keeps what it hears and tells when the job has ended."""

    def __init__(self) -> None:
        self.events: list[JobEvent] = []
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    def __call__(self, event: JobEvent) -> None:
        self.events.append(event)
        if isinstance(event, Token):
            self.began.set()
        if isinstance(event, Failed) or (isinstance(event, Token) and event.finish):
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]


async def generate(client: EngineClient, asked: Job) -> Listener:
    heard = Listener()
    client.submit(asked, heard)
    await heard.ended.wait()
    return heard


def test_a_job_hears_started_then_tokens_then_one_end(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            loaded = await client.load(load(model_folder("qwen3")))
            assert loaded.batched
            assert loaded.bytes == sum(
                file.stat().st_size for file in model_folder("qwen3").glob("*.safetensors")
            ) - _header(model_folder("qwen3") / "model.safetensors")
            heard = await generate(client, job(8))
            assert isinstance(heard.events[0], Started)
            assert heard.events[1] == PromptRead(heard.events[0].job, 0)
            assert len(heard.tokens) == 8
            ends = [event.finish for event in heard.events if isinstance(event, Token)]
            assert ends == [None] * 7 + ["length"]

    run(test)


def test_a_long_prompt_tells_of_its_slices_and_a_short_one_of_none(
    model_folder: ModelFolder,
) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3"), prefill_chunk=16))
            long = generate(client, job(4, prompt=tuple(range(10, 211))))
            other = generate(client, job(4, prompt=tuple(range(11, 261))))
            short = generate(client, job(4))
            before = client.heard
            one, two, three = await asyncio.gather(long, other, short)
            assert client.heard > before
            told = [each.events.count(Progress(each.events[0].job)) for each in (one, two, three)]
            assert 200 // 16 <= told[0] < 2 * told[1]
            assert told[1] >= 249 // 16
            assert told[2] == 0
            for each in (one, two, three):
                kinds = [type(event) for event in each.events]
                assert kinds == sorted(kinds, key=[Started, Progress, PromptRead, Token].index)

    run(test)


@pytest.mark.parametrize("prompt", [(), (5, -1), (5, 1 << 40)])
def test_a_prompt_that_is_none_fails_alone(
    model_folder: ModelFolder, prompt: tuple[int, ...]
) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
            other = asyncio.ensure_future(generate(client, job(30)))
            heard = await generate(client, job(8, prompt=prompt))
            assert [type(event) for event in heard.events] == [Failed]
            assert len((await other).tokens) == 30

    run(test)


def test_a_job_that_has_ended_is_held_by_nobody(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3"), prompt_cache_bytes=1 << 20))
            jobs = [job(8, prompt=(5,) * 300), job(0), job(10**6)]
            held = list(map(sys.getrefcount, jobs))
            await generate(client, jobs[0])
            client.submit(jobs[1], Listener())
            client.submit(jobs[2], Listener())
            client.cancel(jobs[2].id)
            await client.report()  # behind the cancellation
            await generate(client, job(4))  # whose step is the last that is remembered
            assert list(map(sys.getrefcount, jobs)) == held

    run(test)


def test_an_id_is_given_to_one_job_at_a_time(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
            first, other = job(30), asyncio.ensure_future(generate(client, job(30)))
            client.submit(first, Listener())
            heard = await generate(client, first)
            assert isinstance(heard.events[-1], Failed)
            assert len((await other).tokens) == 30

    run(test)


def test_texts_that_take_several_slices_tell_of_them(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3"), prefill_chunk=16))
            streaming = Listener()
            endless = job(10**6)
            client.submit(endless, streaming)
            await streaming.began.wait()
            told: list[None] = []
            texts = tuple(tuple(range(5, 5 + 16 * n)) for n in (1, 3, 5))
            vectors = await client.embed(
                Embed(next(numbers), "m", texts), lambda: told.append(None)
            )
            assert len(vectors) == 3
            assert len(told) >= 8
            client.cancel(endless.id)

    run(test)


def _header(file: Path) -> int:
    """Bytes of a safetensors file before its data."""
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_one_call_of_the_loop_brings_the_tokens_of_all_rows(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
            batches: list[int] = []
            mailbox = client._mailbox
            receive = mailbox.deliver

            def counted(events: Sequence[Any]) -> None:
                batches.append(sum(isinstance(event, Token) for event in events))
                receive(events)

            mailbox.deliver = counted
            await asyncio.gather(*(generate(client, job(50)) for _ in range(4)))
            assert sum(batches) == 200
            assert sum(size == 4 for size in batches) >= 40

    run(test)


def test_two_models_of_two_clients_share_one_thread_and_nothing_else(
    model_folder: ModelFolder,
) -> None:
    async def test() -> None:
        async with open_client() as one, open_client() as two:
            await asyncio.gather(
                one.load(load(model_folder("qwen3"))), two.load(load(model_folder("llama")))
            )
            first, second = await asyncio.gather(generate(one, job(20)), generate(two, job(20)))
            assert first.tokens != second.tokens
            assert first.tokens == (await generate(one, job(20))).tokens
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("mlxsrv-device") == 1
            one.unload("m")
            gone = await generate(one, job(3))
            assert isinstance(gone.events[-1], Failed)
            assert (await generate(two, job(20))).tokens == second.tokens

    run(test)


@pytest.mark.slow
def test_streams_go_on_beside_a_load(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
            heard = Listener()
            client.submit(job(2000), heard)
            await heard.began.wait()
            await client.load(load(model_folder("llama"), "other"))
            assert len(heard.tokens) < 2000
            assert len((await generate(client, job(5, "other"))).tokens) == 5
            await heard.ended.wait()
            assert len(heard.tokens) == 2000

    run(test)


def test_a_cancelled_job_hears_nothing_more_and_frees_its_row(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3"), max_rows=1))
            asked = job(100_000)
            heard = Listener()
            client.submit(asked, heard)
            await heard.began.wait()
            client.cancel(asked.id)
            count = len(heard.events)
            assert len((await generate(client, job(5))).tokens) == 5
            assert len(heard.events) == count
            client.cancel(asked.id)  # again, and of a job that never was: harmless
            client.cancel(10**9)

    run(test)


def test_a_receiver_that_raises_ends_its_job_alone(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
            heard = Listener()
            bad = job(100_000)

            def receive(event: JobEvent) -> None:
                heard(event)
                if isinstance(event, Token):
                    raise RuntimeError("full")

            client.submit(bad, receive)
            other = await generate(client, job(50))
            assert len(other.tokens) == 50
            assert len(heard.tokens) == 1
            assert isinstance(heard.events[-1], Failed)
            assert "full" in heard.events[-1].reason
            assert (await client.report()).models["m"]["rows"] == 0

    run(test)


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


def test_a_closed_loop_does_not_stop_the_thread(model_folder: ModelFolder) -> None:
    async def leave() -> None:
        client = EngineClient.open()  # neither closed nor cancelled: the loop just ends
        await client.load(load(model_folder("qwen3")))
        client.submit(job(100_000), Listener())
        await asyncio.sleep(0.05)

    run(leave)

    async def test() -> None:
        async with open_client() as client:
            await client.load(load(model_folder("qwen3")))
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
            client.submit(job(100_000, prompt=tuple(range(5, 105))), heard)
            await heard.began.wait()
            report = await client.report()
            assert report.active_bytes >= before.active_bytes + loaded.bytes
            assert report.peak_bytes >= report.active_bytes
            model = report.models["m"]
            assert (model["rows"], model["reading"], model["waiting"]) == (1, 0, 0)
            assert model["prompt_cache_entries"] == 1
            assert model["prompt_cache_bytes"] > 100
            assert model["tokens"] >= 1
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
            await generate(client, job(max_tokens=50))
            assert (await client.report()).cache_bytes > 0
            await asyncio.sleep(1)
            assert (await client.report()).cache_bytes == 0
            assert len((await generate(client, job(max_tokens=50))).tokens) == 50

    run(test)


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
            loading = asyncio.create_task(client.load(load(model_folder("qwen3"))))
            await asyncio.sleep(0)
            with pytest.raises(ModelNotLoaded, match="is being loaded"):
                await client.load(load(model_folder("qwen3")))
            client.unload("m")
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


NO_BACKEND = """
import asyncio, sys
from importlib.abc import MetaPathFinder
from mlxsrv.engine.client import EngineClient
from mlxsrv.errors import BackendMissing, ModelNotLoaded
from mlxsrv.engine.orders import Load

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "mlx.core":
            raise ImportError("libmlx.so: cannot open shared object file")

sys.meta_path.insert(0, Missing())

async def main():
    for _ in range(2):
        client = EngineClient.open()
        for asked in (client.memory(), client.report()):
            try:
                await asyncio.wait_for(asked, 10)
            except BackendMissing as error:
                assert "mlxsrv[cpu]" in error.message
            else:
                raise AssertionError("there is no back end")
        load = Load(model="m", path="m", max_rows=4, prefill_chunk=64, max_gap=0.2)
        try:
            await asyncio.wait_for(client.load(load), 10)
        except ModelNotLoaded:
            pass
        assert client.failure is None
        client.close()
    print("told")

asyncio.run(main())
"""


@pytest.mark.slow
def test_without_a_back_end_the_thread_lives_and_says_so() -> None:
    result = subprocess.run(
        [sys.executable, "-c", NO_BACKEND], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, "told\n"), result.stderr


DYING = """
import asyncio, sys
from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.loading import device_memory
from mlxsrv.errors import EngineFailed
from mlxsrv.engine.events import Failed
from mlxsrv.engine.orders import Job, Load
from mlxsrv.generation.parameters import Sampling

def load(name):
    return Load(
        model=name, path=sys.argv[1], max_rows=4, prefill_chunk=64, max_gap=0.2
    )

def deadly(*_):
    raise SystemExit("killed")

async def main():
    client = EngineClient.open()
    await client.load(load("m"))
    heard = []
    ended = asyncio.Event()
    def receive(event):
        heard.append(event)
        if isinstance(event, Failed):
            ended.set()
    client.submit(Job(1, "m", (5, 6), 100_000, frozenset(), Sampling()), receive)
    await asyncio.sleep(0.2)
    device_memory.report = deadly
    try:
        await asyncio.wait_for(client.report(), 10)
    except EngineFailed:
        pass
    await asyncio.wait_for(ended.wait(), 10)
    assert client.failure, client.failure
    try:
        client.submit(Job(2, "m", (5, 6), 5, frozenset(), Sampling()), receive)
    except EngineFailed:
        pass
    else:
        raise AssertionError("a dead engine took a job")
    # a client opened afterwards hears it, too, instead of waiting for ever
    late = EngineClient.open()
    try:
        await asyncio.wait_for(late.load(load("n")), 10)
    except EngineFailed:
        pass
    for asked in (late.memory(), late.import_model_code("m"), late.report(), client.report()):
        try:
            await asyncio.wait_for(asked, 10)
        except EngineFailed:
            continue
        raise AssertionError("a dead engine answered")
    print("told")

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_dead_thread_fails_its_jobs_and_tells_all_who_ask(model_folder: ModelFolder) -> None:
    # In a process of its own: the thread is the process's, and this kills it.
    result = subprocess.run(
        [sys.executable, "-c", DYING, str(model_folder("qwen3"))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "told"
    assert "the device thread died" in result.stderr


BUSY_EXIT = """
import asyncio, sys
from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.orders import Job, Load
from mlxsrv.generation.parameters import Sampling

def load(name):
    return Load(
        model=name, path=sys.argv[1], max_rows=4, prefill_chunk=64, max_gap=0.2
    )

async def main():
    client = EngineClient.open()
    await client.load(load("m"))
    client.submit(Job(1, "m", (5, 6), 10**9, frozenset(), Sampling()), lambda event: None)
    await asyncio.sleep(0.2)

asyncio.run(main())
print("bye")
"""


@pytest.mark.slow
def test_a_process_can_end_while_the_thread_works(model_folder: ModelFolder) -> None:
    for _ in range(examples(5)):  # a crash at exit is a race
        result = subprocess.run(
            [sys.executable, "-c", BUSY_EXIT, str(model_folder("qwen3"))],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (result.returncode, result.stdout, result.stderr) == (0, "bye\n", "")
