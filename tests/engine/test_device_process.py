"""The device thread in processes of its own: where it has no back end, dies, or is left at work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.effort import examples
from tests.support.fixtures import ModelFolder

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
    began, ended = asyncio.Event(), asyncio.Event()
    def receive(event):
        heard.append(event)
        began.set()
        if isinstance(event, Failed):
            ended.set()
    client.submit(Job(1, "m", (5, 6), 100_000, frozenset(), Sampling()), receive)
    await asyncio.wait_for(began.wait(), 20)
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
    began = asyncio.Event()
    client.submit(Job(1, "m", (5, 6), 10**9, frozenset(), Sampling()), lambda event: began.set())
    await asyncio.wait_for(began.wait(), 20)

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


CLOSED_EXIT = """
import asyncio, sys, threading, time
from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.device import DeviceThread
from mlxsrv.engine.events import Token
from mlxsrv.engine.loading import device_memory
from mlxsrv.engine.orders import Job, Load
from mlxsrv.generation.parameters import Sampling

async def main():
    client = EngineClient.open()
    await client.load(
        Load(
            model="m", path=sys.argv[1], max_rows=4, prefill_chunk=64, max_gap=0.2,
            prompt_cache_dir=sys.argv[2], prompt_cache_disk_bytes=10**9,
        )
    )
    drawn = asyncio.Event()
    def receive(event):
        if isinstance(event, Token):
            drawn.set()
    client.submit(Job(1, "m", tuple(range(5, 205)), 10**9, frozenset(), Sampling()), receive)
    await asyncio.wait_for(drawn.wait(), 20)
    held = threading.Event()
    inbox = DeviceThread.shared()._inbox
    def wait_for_the_end():  # that the client closes, and that the process is at its end
        held.set()
        while inbox.qsize() < 2:
            time.sleep(0.001)
    device_memory.report = wait_for_the_end
    asyncio.ensure_future(client.report())
    assert await asyncio.to_thread(held.wait, 20)
    client.close()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_process_that_ends_at_work_stores_what_was_read(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    subprocess.run(
        [sys.executable, "-c", CLOSED_EXIT, str(model_folder("qwen3", plain=True)), str(tmp_path)],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert [*tmp_path.glob("*/*.safetensors")]
