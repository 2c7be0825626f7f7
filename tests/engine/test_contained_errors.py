"""An error in deciding, on the real thread: the model that it concerns goes on with new jobs."""

from __future__ import annotations

import asyncio
import logging
from itertools import count

import pytest

from mlxsrv.engine.events import Failed
from mlxsrv.engine.outcomes import Decoded, Outcome
from mlxsrv.engine.plans import WorkItem
from mlxsrv.engine.scheduling.text_schedule import TextSchedule
from tests.support.device import Listener, generate, job, load, open_client, run
from tests.support.fixtures import ModelFolder


def test_an_error_in_deciding_ends_the_jobs_of_one_model(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes when a step of the broken model is done, and work items of the same plan are
    left."""
    bad, reading = job(10**6, "broken"), job(10**6, "broken", prompt=(5,) * 3000)
    real, reported = TextSchedule.settle, count(1)

    def settle(self: TextSchedule, work: WorkItem, outcome: Outcome) -> None:
        if isinstance(outcome.done, Decoded):
            for row, _ in outcome.done.tokens:
                if row == bad.id and next(reported) == 21:
                    raise LookupError("a policy is wrong")
        real(self, work, outcome)

    monkeypatch.setattr(TextSchedule, "settle", settle)

    async def test() -> None:
        async with open_client() as client:
            more = {"prompt_cache_bytes": 1 << 20, "prefill_chunk": 16}
            await client.load(load(model_folder("qwen3"), "broken", **more))
            await client.load(load(model_folder("llama"), "other"))
            alone = await generate(client, job(60, "other"))
            kept = job(5, "broken", prompt=tuple(range(5, 205)))
            before = await generate(client, kept)
            await client.report()  # a round later the row has left, and its prompt is kept
            assert (await client.report()).models["broken"]["prompt_cache_bytes"] > 0
            other = asyncio.ensure_future(generate(client, job(60, "other")))
            heard = [Listener(), Listener()]
            for asked, receiver in zip((bad, reading), heard, strict=True):
                client.submit(asked, receiver)
            await asyncio.gather(*(each.ended.wait() for each in heard))
            for each in heard:
                assert [type(event) for event in each.events].count(Failed) == 1
                assert isinstance(each.events[-1], Failed)
                assert each.events[-1].reason == "LookupError: a policy is wrong"
            assert (await other).tokens == alone.tokens
            numbers = (await client.report()).models["broken"]
            assert not any(numbers[name] for name in ("rows", "waiting", "prompt_cache_bytes"))
            again = await generate(client, job(5, "broken", prompt=kept.prompt))
            assert again.tokens == before.tokens
            assert client.failure is None

    with caplog.at_level(logging.ERROR):
        run(test)
    [record] = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert record.exc_info[0] is LookupError
