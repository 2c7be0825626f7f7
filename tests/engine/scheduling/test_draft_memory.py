"""The KV cache of a draft model in the memory budget: where it grows, and to whom it gives way."""

from __future__ import annotations

import msgspec

from mlxsrv.engine.events import KVCost
from mlxsrv.engine.orders import Budget
from mlxsrv.engine.plans import Decode, Forget, ReadDraft, Rewind
from mlxsrv.engine.scheduling.groups import STEP
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.scheduling import MODEL, Bench, DraftDevice, expected, job, make

COLUMN = FACTS.kv_bytes(1)
SLOT = STEP * COLUMN  # a row of up to STEP tokens
COSTS = (KVCost(COLUMN),)  # as many for each token as the model's own
NOTHING_KEPT = msgspec.structs.replace(FACTS, prompt_cache_bytes=0)


def bounded(slots: int, costs: tuple[KVCost, ...] = COSTS) -> Bench:
    """A model and a draft whose KV caches may take so many times SLOT in all. The runner checks
    that after each work."""
    bench = make(DraftDevice(1.0, NOTHING_KEPT, costs))
    bench.send(Budget(slots * SLOT))
    return bench


def run_checked(bench: Bench) -> None:
    """Go on to the end, and check that no less is counted than there is."""
    [model] = bench.scheduler._models.values()
    while not bench.done:
        bench.round()
        text = bench.runner.text(MODEL)
        counted = model.statistics().get("draft_bytes", 0)
        assert counted >= text.spare_bytes - text.kept_bytes


def rounds(bench: Bench) -> int:
    """Rounds in which tokens were proposed."""
    return sum(bool(work.proposals) for work in bench.items(Decode))


def drops(bench: Bench) -> int:
    """The number of times that the draft's KV cache went."""
    return sum(work.draft for work in bench.items(Forget))


def test_a_draft_follows_a_row_as_far_as_there_is_room() -> None:
    found: list[tuple[int, int]] = []
    for slots in (3, 5, 9):
        bench = bounded(slots)
        bench.submit(job(1, 20, 500))
        run_checked(bench)
        assert bench.job(1).tokens == expected(bench, 1, 500), slots
        assert not bench.items(Rewind), slots
        found.append((rounds(bench), drops(bench)))
    assert [each for each, _ in found] == sorted(each for each, _ in found)
    assert found[0][0] < found[-1][0], "where there is no room the row goes on without"
    assert any(each for _, each in found), "it has gone for the row"
    assert found[-1][1] == 0


def test_a_draft_gives_way_to_a_prompt() -> None:
    # The row takes 2 slots and the draft nearly 2; the prompt needs its own, and a place.
    bench = bounded(6)
    bench.submit(job(1, 20, 300))
    bench.rounds(40)
    assert bench.items(ReadDraft)
    assert not drops(bench)
    bench.submit(job(2, 300, 20))
    bench.rounds(8)
    assert drops(bench) == 1
    run_checked(bench)
    assert not bench.items(Rewind), "no row has to go for it"
    assert bench.job(2).tokens == expected(bench, 2, 20)


def test_a_draft_that_takes_more_than_its_model_stays_within_the_budget() -> None:
    bench = bounded(24, (KVCost(40 * COLUMN),))
    bench.submit(job(1, 20, 300))
    run_checked(bench)
    assert bench.job(1).tokens == expected(bench, 1, 300)


def test_kept_prompts_give_way_to_a_draft() -> None:
    gone: list[list[tuple[int, ...]]] = []
    for device in (FakeDevice(FACTS), DraftDevice(1.0, FACTS, COSTS)):
        bench = make(device)
        bench.send(Budget(7 * SLOT))
        bench.submit(job(1, 600))
        bench.finish()
        bench.submit(job(2, 20, 400))
        run_checked(bench)
        assert bench.job(2).tokens == expected(bench, 2, 400)
        gone.append([work.entries for work in bench.items(Forget)])
    assert gone == [[], [(1,)]]
    [plan] = [plan for plan in bench.plans if any(isinstance(work, Forget) for work in plan.items)]
    [step] = [work for work in plan.items if isinstance(work, Decode)]
    assert step.proposals, "what they free is the draft's in the same round"
    assert rounds(bench) > 40, "it follows the row to its end"
    assert not drops(bench)
