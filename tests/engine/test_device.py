"""The device thread through its ports: what a caller may rely on, on a real loop and thread."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.engine.device import DeviceThread, JobEvent, Port
from mlxsrv.errors import ModelNotLoaded
from mlxsrv.events import Failed, Job, Load, PromptRead, Sampling, Started, Token
from tests.engine.conftest import ModelFolder

numbers = itertools.count(1)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_await(test), 60))


async def _await(test: Callable[[], Awaitable[None]]) -> None:
    await test()


@asynccontextmanager
async def open_port() -> AsyncIterator[Port]:
    port = DeviceThread.open()
    try:
        yield port
    finally:
        port.close()


def load(folder: Path, name: str = "m", **more: Any) -> Load:
    return Load(name, str(folder), more.get("max_rows", 4), 64, 0.2, 0)


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


async def generate(port: Port, asked: Job) -> Listener:
    heard = Listener()
    port.submit(asked, heard)
    await heard.ended.wait()
    return heard


def test_a_job_hears_started_then_tokens_then_one_end(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_port() as port:
            loaded = await port.load(load(model_folder("qwen3")))
            assert loaded.batched
            assert loaded.bytes == sum(
                file.stat().st_size for file in model_folder("qwen3").glob("*.safetensors")
            ) - _header(model_folder("qwen3") / "model.safetensors")
            heard = await generate(port, job(8))
            assert isinstance(heard.events[0], Started)
            assert heard.events[1] == PromptRead(heard.events[0].job, 0)
            assert len(heard.tokens) == 8
            ends = [event.finish for event in heard.events if isinstance(event, Token)]
            assert ends == [None] * 7 + ["length"]

    run(test)


def _header(file: Path) -> int:
    """Bytes of a safetensors file before its data."""
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_one_call_of_the_loop_brings_the_tokens_of_all_rows(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_port() as port:
            await port.load(load(model_folder("qwen3")))
            batches: list[int] = []
            receive = port._receive

            def counted(events: list[Any]) -> None:
                batches.append(sum(isinstance(event, Token) for event in events))
                receive(events)

            port._receive = counted  # type: ignore[method-assign]
            await asyncio.gather(*(generate(port, job(50)) for _ in range(4)))
            assert sum(batches) == 200
            assert sum(size == 4 for size in batches) >= 40

    run(test)


def test_two_models_of_two_ports_share_one_thread_and_nothing_else(
    model_folder: ModelFolder,
) -> None:
    async def test() -> None:
        async with open_port() as one, open_port() as two:
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


def test_streams_go_on_beside_a_load(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_port() as port:
            await port.load(load(model_folder("qwen3")))
            heard = Listener()
            port.submit(job(2000), heard)
            await heard.began.wait()
            await port.load(load(model_folder("llama"), "other"))
            assert len(heard.tokens) < 2000
            assert len((await generate(port, job(5, "other"))).tokens) == 5
            await heard.ended.wait()
            assert len(heard.tokens) == 2000

    run(test)


def test_a_cancelled_job_hears_nothing_more_and_frees_its_row(model_folder: ModelFolder) -> None:
    async def test() -> None:
        async with open_port() as port:
            await port.load(load(model_folder("qwen3"), max_rows=1))
            asked = job(100_000)
            heard = Listener()
            port.submit(asked, heard)
            await heard.began.wait()
            port.cancel(asked.id)
            count = len(heard.events)
            assert len((await generate(port, job(5))).tokens) == 5
            assert len(heard.events) == count
            port.cancel(asked.id)  # again, and of a job that never was: harmless
            port.cancel(10**9)

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
        async with open_port() as port:
            await port.load(load(model_folder("llama"), "other"))
            with pytest.raises(ModelNotLoaded) as error:
                await port.load(load(folder))
            assert "\n" not in error.value.message
            assert len((await generate(port, job(5, "other"))).tokens) == 5
            for name, data in whole.items():
                (folder / name).write_bytes(data)
            await port.load(load(folder))
            assert len((await generate(port, job(5))).tokens) == 5

    run(test)


def test_a_closed_loop_does_not_stop_the_thread(model_folder: ModelFolder) -> None:
    async def leave() -> None:
        port = DeviceThread.open()  # neither closed nor cancelled: the loop just ends
        await port.load(load(model_folder("qwen3")))
        port.submit(job(100_000), Listener())
        await asyncio.sleep(0.05)

    run(leave)

    async def test() -> None:
        async with open_port() as port:
            await port.load(load(model_folder("qwen3")))
            assert len((await generate(port, job(5))).tokens) == 5

    run(test)


DYING = """
import asyncio, sys
from mlxsrv.engine.device import DeviceThread
from mlxsrv.engine import device
from mlxsrv.errors import EngineFailed
from mlxsrv.events import Failed, Job, Load, Sampling

def deadly(*_):
    raise SystemExit("killed")

async def main():
    port = DeviceThread.open()
    await port.load(Load("m", sys.argv[1], 4, 64, 0.2, 0))
    heard = []
    ended = asyncio.Event()
    def receive(event):
        heard.append(event)
        if isinstance(event, Failed):
            ended.set()
    port.submit(Job(1, "m", (5, 6), 100_000, frozenset(), Sampling()), receive)
    await asyncio.sleep(0.2)
    device.DeviceThread._work = deadly
    await asyncio.wait_for(ended.wait(), 10)
    assert port.failure, port.failure
    try:
        port.submit(Job(2, "m", (5, 6), 5, frozenset(), Sampling()), receive)
    except EngineFailed:
        pass
    else:
        raise AssertionError("a dead engine took a job")
    # a port opened afterwards hears it, too, instead of waiting for ever
    late = DeviceThread.open()
    try:
        await asyncio.wait_for(late.load(Load("n", sys.argv[1], 4, 64, 0.2, 0)), 10)
    except EngineFailed:
        print("told")

asyncio.run(main())
"""


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
from mlxsrv.engine.device import DeviceThread
from mlxsrv.events import Job, Load, Sampling

async def main():
    port = DeviceThread.open()
    await port.load(Load("m", sys.argv[1], 4, 64, 0.2, 0))
    port.submit(Job(1, "m", (5, 6), 10**9, frozenset(), Sampling()), lambda event: None)
    await asyncio.sleep(0.2)

asyncio.run(main())
print("bye")
"""


def test_a_process_can_end_while_the_thread_works(model_folder: ModelFolder) -> None:
    for _ in range(3):  # a crash at exit is a race
        result = subprocess.run(
            [sys.executable, "-c", BUSY_EXIT, str(model_folder("qwen3"))],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (result.returncode, result.stdout, result.stderr) == (0, "bye\n", "")
