"""The device thread through its clients: what a caller may rely on, on a real loop and thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.engine.events import Failed, JobEvent, Progress, PromptRead, Started, Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.plans import Admit
from tests.support.device import Listener, gate, generate, job, load, numbers, open_client, run
from tests.support.fixtures import ModelFolder


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
            reported = [
                each.events.count(Progress(each.events[0].job)) for each in (one, two, three)
            ]
            assert 200 // 16 <= reported[0] < 2 * reported[1]
            assert reported[1] >= 249 // 16
            assert reported[2] == 0
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
            first, other = job(100_000), asyncio.ensure_future(generate(client, job(30)))
            client.submit(first, Listener())
            heard = await generate(client, first)
            assert isinstance(heard.events[-1], Failed)
            client.cancel(first.id)
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
            reported: list[None] = []
            texts = tuple(tuple(range(5, 5 + 16 * n)) for n in (1, 3, 5))
            vectors = await client.embed(
                Job(next(numbers), "m", texts=texts), lambda: reported.append(None)
            )
            assert len(vectors) == 3
            assert len(reported) >= 8
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
            with gate(Admit) as held:  # so that none is far ahead of the others
                asked = [asyncio.ensure_future(generate(client, job(50))) for _ in range(4)]
                await held.reached()
                held.open()
                await asyncio.gather(*asked)
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
