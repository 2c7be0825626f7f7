"""Replies, without HTTP: what a reader that never comes must not hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mlxsrv.errors import ShuttingDown
from mlxsrv.service.service import Service
from mlxsrv.settings import Settings
from mlxsrv.wire.requests import ChatRequest, Message
from tests.support.tiny import write_model


def test_a_reply_that_failed_in_the_queue_takes_no_row(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3", plain=True, max_position_embeddings=10**6)
    request = ChatRequest(messages=[Message(role="user", content="x")], max_tokens=10**5)

    async def test() -> None:
        service = Service(Settings(model=(f"m={folder}",), max_concurrency=1))
        running, queued, third = [await service.chat(request, name) for name in "abc"]
        model = service.pool.model("m")
        assert model is not None
        rows = model.rows
        await running.admit()
        admission = asyncio.create_task(queued.admit())
        while rows.statistics().tasks_waiting == 0:  # noqa: ASYNC110 - anyio tells no event of it
            await asyncio.sleep(0.01)
        queued.fail(ShuttingDown("over"))  # and nobody reads it
        running.close()
        await admission
        assert rows.borrowed_tokens == 0
        await third.admit()
        assert await third.outputs()
        for reply in (queued, third):
            reply.close()
        assert rows.borrowed_tokens == 0
        await service.close()

    asyncio.run(asyncio.wait_for(test(), 60))
