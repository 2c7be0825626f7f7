"""Prompts on disk, from one process to the next: real models, real files, all kinds of caches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from mlxsrv.engine.orders import Cancel, Submit
from mlxsrv.engine.plans import FetchPrompt, Read
from mlxsrv.engine.scheduling.scheduler import Received
from mlxsrv.engine.storage.node_file import NODE
from mlxsrv.generation.parameters import Steering
from tests.support.adapters import write_adapter
from tests.support.effort import often
from tests.support.fixtures import ModelFolder
from tests.support.recording import replay
from tests.support.serving import PATIENCE
from tests.support.stored import StoringEngine, full, make_job
from tests.support.tiny import write_model
from tests.support.vectors import write_safetensors

PROMPT = tuple(20 + i * 7 % 300 for i in range(700))
MORE = tuple(range(40, 60))
READ = (len(PROMPT) - 1) // NODE * NODE
"""Tokens of the prompt that need not be read again, whatever the answer: those in whole nodes."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {}),
    "quantized": ("wide", {"kv_bits": 8}),
    "quantized behind a start": ("wide", {"kv_bits": 8, "quantized_kv_start": 300}),
    "quantized behind all": ("wide", {"kv_bits": 8, "quantized_kv_start": 5000}),
    "bounded": ("qwen3", {"max_kv_size": 64}),
    "sliding": ("gemma3_text", {}),
    "recurrent": ("qwen3_next", {}),
    "states": ("mamba", {}),
    "lists": ("falcon_h1", {}),
    "indices": ("deepseek_v32", {}),
    "indices beside quantized": ("minimax_m3_vl", {"kv_bits": 8}),
    "unused": ("nemotron-nas", {"kv_bits": 8}),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads are wide enough for a quantized KV cache."""
    return write_model(tmp_path_factory.mktemp("wide"), "qwen3", plain=True, head_dim=32)


def find_folder(model_folder: ModelFolder, wide: Path, family: str) -> Path:
    return wide if family == "wide" else model_folder(family, plain=True)


@pytest.mark.parametrize(
    "kind",
    often(KINDS, ["full", "quantized behind a start", "bounded", "sliding", "lists", "indices"]),
)
def test_the_next_process_goes_on_from_the_answer(
    model_folder: ModelFolder, wide: Path, tmp_path: Path, kind: str
) -> None:
    family, more = KINDS[kind]
    folder = find_folder(model_folder, wide, family)
    first = StoringEngine(folder, tmp_path, **more)
    answer, _ = first.ask(make_job(1, PROMPT))
    first.end()
    asked = make_job(2, (*PROMPT, *answer, *MORE))

    second = StoringEngine(folder, tmp_path, **more)
    drawn, cached = second.ask(asked)
    assert cached >= READ, second.numbers
    assert second.numbers["prompt_cache_disk_hits"] == 1
    second.end()
    assert drawn == StoringEngine(folder, None, **more).ask(asked)[0]


def test_what_a_client_left_half_read_is_kept(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("qwen3", plain=True)
    first = StoringEngine(folder, tmp_path)
    first.round([Received(1, Submit(make_job(1, PROMPT)))])
    while sum(span.end - span.begin for work in first.find(Read) for span in work.spans) < 400:
        first.round([])
    first.send(Cancel(1))
    first.end()
    second = StoringEngine(folder, tmp_path)
    assert second.ask(make_job(2, PROMPT))[1] >= 400 // NODE * NODE


def test_rows_under_way_at_the_end_are_kept(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("qwen3", plain=True)
    first = StoringEngine(folder, tmp_path)
    first.round([Received(1, Submit(make_job(1, PROMPT, 1000)))])
    while not first.scheduler._models[1].rows.streaming:
        first.round([])
    first.end()
    assert StoringEngine(folder, tmp_path).ask(make_job(2, (*PROMPT, 5)))[1] >= READ


def test_what_a_full_disk_did_not_take_is_written_later(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", plain=True)
    first = StoringEngine(folder, tmp_path)
    first.ask(make_job(1, PROMPT[::-1]))
    written = first.numbers["prompt_cache_disk_writes"]
    with full():
        missed = first.ask(make_job(2, PROMPT))[0]
        first.ask(make_job(3, PROMPT[1:]))
    assert first.numbers["prompt_cache_disk_writes"] == written
    max(tmp_path.rglob("*"), key=lambda path: path.stat().st_size).unlink()
    first.ask(make_job(4, PROMPT[2:]))
    assert first.numbers["prompt_cache_disk_writes"] == 4 * written
    del first  # as by kill -9: nothing is written at the end
    second = StoringEngine(folder, tmp_path)
    assert second.ask(make_job(2, PROMPT)) == (missed, READ)


def test_a_model_that_is_unloaded_finds_its_prompts_again(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", plain=True)
    engine = StoringEngine(folder, tmp_path)
    engine.ask(make_job(1, PROMPT))
    engine.unload()
    assert StoringEngine(folder, tmp_path).ask(make_job(2, PROMPT))[1] == READ


def test_others_go_on_while_a_prompt_is_fetched(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("qwen3", plain=True)
    first = StoringEngine(folder, tmp_path)
    first.ask(make_job(1, PROMPT))
    first.end()
    second = StoringEngine(folder, tmp_path)
    jobs = [make_job(2, PROMPT), make_job(3, PROMPT), make_job(4, tuple(range(50, 90)))]
    second.send(*map(Submit, jobs))
    assert len(second.find(FetchPrompt)) == 1, "twins share a fetch"
    reads = [row for work in second.find(Read) for span in work.spans for row in span.rows]
    assert reads[0] == 4
    cached = {event.job: event.cached for event in second.events if hasattr(event, "cached")}
    assert cached == {2: READ, 3: READ, 4: 0}


def test_what_a_row_that_runs_holds_is_not_fetched(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    engine = StoringEngine(model_folder("qwen3", plain=True), tmp_path)
    engine.ask(make_job(1, PROMPT))
    engine.round([Received(1, Submit(make_job(2, PROMPT, 1000)))])
    while not engine.scheduler._models[1].rows.streaming:
        engine.round([])
    engine.round([Received(1, Submit(make_job(3, (*PROMPT, *MORE))))])
    for _ in range(20):
        engine.round([])
    spans = {row: span for work in engine.find(Read) for span in work.spans for row in span.rows}
    assert spans[2].moves, "nothing is kept in memory meanwhile"
    assert (spans[3].from_row, spans[3].begin) == (2, len(PROMPT) - 1)
    assert not engine.find(FetchPrompt)
    engine.end()


def test_a_client_that_leaves_while_its_prompt_is_fetched_is_gone(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", plain=True)
    first = StoringEngine(folder, tmp_path)
    first.ask(make_job(1, PROMPT))
    first.end()
    second = StoringEngine(folder, tmp_path)
    second.round([Received(1, Submit(make_job(2, PROMPT)))])
    second.round([])
    assert second.find(FetchPrompt)
    second.send(Cancel(2))
    assert second.ask(make_job(3, PROMPT))[1] == READ


def test_what_chats_share_is_there_for_another_chat(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Also where a KV cache cannot be cut: it is kept at checkpoints, and each is stored."""
    folder = model_folder("qwen3_next", plain=True)
    first = StoringEngine(folder, tmp_path)
    first.ask(make_job(1, PROMPT, checkpoints=(300,)))
    first.end()
    second = StoringEngine(folder, tmp_path)
    assert second.ask(make_job(2, (*PROMPT[:300], *MORE)))[1] == 300


# Misses.


def stored(folder: Path, disk: Path, **more: Any) -> None:
    engine = StoringEngine(folder, disk, **more)
    engine.ask(make_job(1, PROMPT))
    engine.end()


def test_other_weights_under_the_same_path_are_a_miss(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3", plain=True)
    stored(folder, tmp_path / "kv")
    write_model(folder, "qwen3", plain=True, seed=1)
    engine = StoringEngine(folder, tmp_path / "kv")
    drawn, cached = engine.ask(make_job(2, PROMPT))
    assert cached == 0
    assert drawn == StoringEngine(folder, None).ask(make_job(2, PROMPT))[0]


def test_another_kind_of_cache_is_a_miss(wide: Path, tmp_path: Path) -> None:
    stored(wide, tmp_path)
    kinds: list[dict[str, Any]] = [
        {"kv_bits": 8},
        {"kv_bits": 8, "quantized_kv_start": 64},
        {"kv_bits": 4},
        {"max_kv_size": 64},
    ]
    for more in kinds:
        assert StoringEngine(wide, tmp_path, **more).ask(make_job(2, PROMPT))[1] == 0


def test_a_row_that_is_steered_has_no_part_in_it(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder, disk = model_folder("qwen3", plain=True), tmp_path / "kv"
    file = tmp_path / "v.safetensors"
    direction = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    write_safetensors(file, [("direction.0", 3 * direction)])
    stored(folder, disk)
    engine = StoringEngine(folder, disk, vectors=(("v", str(file)),))
    steered = Steering(vectors=(("v", 2.0),))
    assert engine.ask(make_job(2, PROMPT, steering=steered))[1] == 0
    assert not engine.find(FetchPrompt)
    assert engine.numbers["prompt_cache_disk_writes"] == 0
    engine.end()
    other = StoringEngine(folder, disk)
    assert other.ask(make_job(3, PROMPT)) == (plain_text(folder), READ)


def test_an_adapter_is_a_miss(model_folder: ModelFolder, tmp_path: Path) -> None:
    """And so is another one of the same name."""
    folder, disk, adapter = model_folder("qwen3", plain=True), tmp_path / "kv", tmp_path / "a"
    stored(folder, disk)
    for seed in (0, 1):
        shutil.rmtree(adapter, ignore_errors=True)
        write_adapter(adapter, folder, seed=seed)
        engine = StoringEngine(folder, disk, adapter=str(adapter))
        assert engine.ask(make_job(2, PROMPT))[1] == 0
        engine.end()
    again = StoringEngine(folder, disk, adapter=str(adapter))
    assert again.ask(make_job(2, PROMPT))[1] == READ


def plain_text(folder: Path) -> list[int]:
    return StoringEngine(folder, None).ask(make_job(3, PROMPT))[0]


def test_a_prompt_that_is_scored_is_read(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("qwen3", plain=True)
    stored(folder, tmp_path)
    assert StoringEngine(folder, tmp_path).ask(make_job(2, PROMPT, scores=1))[1] == 0


def test_what_would_not_fit_in_memory_is_not_fetched(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", plain=True)
    stored(folder, tmp_path)
    engine = StoringEngine(folder, tmp_path, prompt_cache_bytes=10_000)
    assert engine.ask(make_job(2, PROMPT))[1] == 0
    assert not engine.find(FetchPrompt)


def test_a_read_that_takes_too_long_is_given_up(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("qwen3", plain=True)
    stored(folder, tmp_path)
    engine = StoringEngine(folder, tmp_path)
    engine.round([Received(1, Submit(make_job(2, PROMPT)))])
    engine.round([])
    [fetch] = engine.find(FetchPrompt)
    storage = engine.runner.storage
    for each in storage._reads.values():
        each.until = 0.0
    late = storage.give_up()
    assert [(order.entry, order.tokens) for order in late] == [(fetch.entry, 0)]
    engine.round([Received(0, order) for order in late])
    engine.send()
    cached = [event.cached for event in engine.events if hasattr(event, "cached")]
    assert cached == [0]


def test_prompts_do_not_wait_in_turn_for_a_disk_that_hangs(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", plain=True)
    prompts = [tuple(20 + i * step % 300 for i in range(300)) for step in (7, 11, 13)]
    first = StoringEngine(folder, tmp_path)
    for number, prompt in enumerate(prompts):
        first.ask(make_job(number, prompt))
    first.end()

    engine = StoringEngine(folder, tmp_path)
    storage, hangs = engine.runner.storage, Event()

    def hang() -> Iterator[None]:
        hangs.wait(PATIENCE)
        yield

    storage._thread.add_read(hang())
    jobs = [make_job(number, prompt) for number, prompt in enumerate(prompts[:2])]
    engine.round([Received(1, Submit(job)) for job in jobs])
    engine.round([])
    [under_way] = storage._reads.values()
    under_way.until = 0.0
    while not engine.scheduler.idle or storage._reads:
        assert storage.seconds_left is None or storage.seconds_left <= 0
        engine.round([Received(0, order) for order in storage.give_up()])
    assert len(engine.find(FetchPrompt)) == 2
    hangs.set()
    storage.finish_writes()
    engine.send()
    assert not storage._given_up, "what was read too late is dropped"
    assert engine.ask(make_job(5, prompts[2]))[1] == 300 // NODE * NODE, "it hangs no more"


# Records.


def test_a_record_is_replayed_without_the_disk(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("qwen3", plain=True)
    stored(folder, tmp_path / "kv")
    path = tmp_path / "r"
    engine = StoringEngine(folder, tmp_path / "kv", record=path)
    assert engine.ask(make_job(2, (*PROMPT, *MORE)))[1] == READ
    engine.ask(make_job(3, (*PROMPT, 7)))
    engine.end()
    assert replay(path).difference is None
