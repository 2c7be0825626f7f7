"""Replies, without HTTP: races of their end with their admission, and readers that never come."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from mlxsrv.engine.plans import Read
from mlxsrv.errors import Overloaded, ShuttingDown
from mlxsrv.generation.outputs import Ended, TextPiece
from mlxsrv.generation.spec import ChatMessage, ChatPrompt, GenerationSpec
from mlxsrv.models.pool.clients import Client
from mlxsrv.service.lifecycle import State, TimedWork
from mlxsrv.service.reply import Reply
from mlxsrv.service.service import Service
from mlxsrv.settings import Settings
from tests.support.device import gate
from tests.support.tiny import write_model

CLIENT = Client("c")
PROMPT = ChatPrompt(messages=[ChatMessage(role="user", content="x")])


def test_a_reply_that_failed_in_the_queue_takes_no_row(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3", plain=True, max_position_embeddings=10**6)
    request = GenerationSpec(prompt=PROMPT, limit=10**5)

    async def test() -> None:
        service = Service(Settings(model=(f"m={folder}",), max_concurrency=1))
        running, queued, third = [
            await service.generate(request, name, name, CLIENT) for name in "abc"
        ]
        model = service.pool.model("m")
        assert model is not None
        await running.admit()
        assert await running.outputs()
        await queued.admit()
        assert (len(model.running), len(model.queued)) == (1, 1)
        queued.fail(ShuttingDown("over"))  # and nobody reads it
        running.release()
        assert (model.running, model.queued) == (set(), {})
        await third.admit()
        assert await third.outputs()
        for reply in (queued, third):
            reply.release()
        assert (model.running, model.queued) == (set(), {})
        await service.close()

    asyncio.run(asyncio.wait_for(test(), 60))


async def read_to_failure(reply: Reply) -> None:
    with pytest.raises(ShuttingDown):  # noqa: PT012 - outputs from before the error come first
        while True:
            await reply.outputs()


@pytest.mark.parametrize("when", [*State][:5])
def test_a_reply_may_fail_at_any_step_of_its_admission(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: State
) -> None:
    """Whatever the admission waits for, it ends quietly, and nothing of the reply is left."""
    folder = write_model(tmp_path / "m", "qwen3", plain=True)
    request = GenerationSpec(prompt=PROMPT, limit=10**5)

    async def test() -> None:
        service = Service(Settings(model=(f"m={folder}",), max_concurrency=1))
        reply = await service.generate(request, "a", "a", CLIENT)
        admission = asyncio.create_task(reply.admit())
        model = service.pool.model("m")
        assert model is not None
        while reply.state is not when:  # noqa: ASYNC110 - a reply tells no event of it
            await asyncio.sleep(0)
        reply.fail(ShuttingDown("over"))
        reply.fail(Overloaded("too late"))
        await admission
        await read_to_failure(reply)
        assert (model.leases, model.running, model.queued) == (0, set(), {})
        reply.release()
        await service.close()

    with caplog.at_level(logging.INFO, "mlxsrv"), gate(Read) as reading:
        if when is State.RUNNING:
            reading.open()
        asyncio.run(asyncio.wait_for(test(), 60))
    assert "admission failed" not in caplog.messages
    assert caplog.messages.count("stream error") == 1


class Loaded:
    """A model that nothing waits for."""

    progressing = False
    turn = 0


def test_work_that_was_ended_takes_no_further_step() -> None:
    """Its task goes on once, if what it waited for came before the cancellation."""

    def run(work: TimedWork) -> None:
        with work.run():
            work.enter(State.PREPARING)
            work.end(ShuttingDown("over"))
            work.end(Overloaded("too late"))
            work.note_progress()
            work.enter(State.QUEUED)
            raise AssertionError("it went on")

    async def test() -> None:
        work = TimedWork(Settings(), Loaded(), float)
        with pytest.raises(ShuttingDown):
            run(work)

    asyncio.run(test())


def test_a_choice_that_waits_for_a_row_ends_with_the_time_of_its_reply(tmp_path: Path) -> None:
    """The text of the first choice is an answer, so the reply does not fail."""
    folder = write_model(tmp_path / "m", "qwen3", plain=True, max_position_embeddings=10**6)

    async def test() -> None:
        settings = Settings(model=(f"m={folder}",), max_concurrency=1)
        spec = GenerationSpec(prompt=PROMPT, limit=10**5, choices=2)
        service = Service(settings)
        await service.pool.preload(await service.pool.catalogue.find(None))
        reply = await service.generate(spec, "a", "a", CLIENT)
        admission = asyncio.create_task(reply.admit())
        while not any(isinstance(output, TextPiece) for output in await reply.outputs()):
            pass
        assert reply.spec.prompt == ChatPrompt(messages=()), "its texts are needed no longer"
        reply._lifecycle._expire_whole(1.5)  # as its timer does
        ends: list[Ended] = []
        while len(ends) < 2:
            ends += [output for output in await reply.outputs() if isinstance(output, Ended)]
        assert [(end.choice, end.reason) for end in ends] == [(0, "timeout"), (1, "timeout")]
        assert ends[-1].usage is not None
        assert reply.state is State.FINISHED
        reply.fail(ShuttingDown("too late"))
        await admission
        model = service.pool.model("m")
        assert model is not None
        assert (model.leases, model.running, model.queued) == (0, set(), {})
        reply.release()
        await service.close()

    asyncio.run(asyncio.wait_for(test(), 60))
