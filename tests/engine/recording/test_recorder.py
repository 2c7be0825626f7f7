"""The recorder: what it writes, and what it may cost."""

from __future__ import annotations

import logging
import os
import re
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mlxsrv.engine.device import DeviceThread
from mlxsrv.engine.events import Activations, Likelihood, PromptScored
from mlxsrv.engine.orders import (
    Ask,
    Attach,
    Cancel,
    Close,
    Detach,
    Job,
    Load,
    MakeReport,
    Open,
    Order,
    Submit,
    Unload,
    Watch,
)
from mlxsrv.engine.outcomes import (
    Decoded,
    Done,
    Fault,
    Outcome,
    PromptsRead,
    TextsRead,
)
from mlxsrv.engine.plans import (
    Admit,
    Decode,
    EmbedSlice,
    Read,
    RoundPlan,
    WorkItem,
)
from mlxsrv.engine.recording.record_file import RecordReader
from mlxsrv.engine.recording.recorder import Recorder, Recording
from mlxsrv.engine.scheduling.scheduler import Received
from mlxsrv.generation.parameters import Bans, Grammar, Sampling, Steering
from mlxsrv.settings import Settings
from tests.support.fake_device import FakeDevice
from tests.support.growth import least_seconds
from tests.support.recording import LOAD, job, recorded, replay, write_record
from tests.support.scheduling import Bench


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.getMessage() == "recording ended"]


def test_a_record_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text("of a crash")
    write_record(path)
    assert (tmp_path / "r.old").read_text() == "of a crash"
    assert replay(path).rounds
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_record_ends_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recorded(tmp_path / "r", most_bytes=6000):
        bench = Bench()
    bench.load(LOAD)
    for number in range(9):
        bench.submit(job(number, (1, 2, 3), max_tokens=20))
    with caplog.at_level(logging.WARNING):
        bench.finish()
    assert 5000 < (tmp_path / "r").stat().st_size <= 6000
    assert all(log.ended for log in bench.jobs.values())
    assert len(warnings(caplog)) == 1
    summary = replay(tmp_path / "r")
    assert summary.difference is None
    assert summary.rounds < len(bench.plans)


@pytest.mark.parametrize("place", ["folder", "missing/r", "pipe"])
def test_a_file_that_cannot_be_written_costs_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with caplog.at_level(logging.WARNING):
        bench = write_record(tmp_path / place, job(1, (1, 2, 3)))
    assert len(bench.job(1).tokens) == 5
    assert len(warnings(caplog)) == 1


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file of this process can be larger meanwhile. Python ignores the signal that tells it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), room(3000):
        bench = write_record(tmp_path / "r", job(1, (1, 2, 3)))
    assert len(bench.job(1).tokens) == 5
    [warning] = warnings(caplog)
    assert "File too large" in str(warning.__dict__)
    # The last line is written in part.
    assert (tmp_path / "r").stat().st_size == 3000
    assert replay(tmp_path / "r").difference is None


def test_a_line_that_is_written_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a system may do it with any write, and hardly ever does."""
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: write(file, data[:100]))
        write_record(tmp_path / "r", job(1, (1, 2, 3)))
    assert replay(tmp_path / "r").tokens == 5


def test_a_round_is_in_the_file_before_its_works_are_done(tmp_path: Path) -> None:
    seen: list[str | None] = []

    class Looking(FakeDevice):
        def fail(self, work: WorkItem) -> Fault | None:
            seen.append(replay(tmp_path / "r").ended)
            assert seen[-1] == type(work).__name__
            return None

    write_record(tmp_path / "r", job(1, (1, 2, 3)), device=Looking())
    assert "Decode" in seen


def test_what_clients_alone_are_told_is_not_recorded(tmp_path: Path) -> None:
    recorder = Recorder(Recording(path=str(tmp_path / "r"), most_bytes=10**6))
    reported = Likelihood(-1.25, ((77, -1.25),))
    activations = (Activations(1, 0, ((88, 1.5),)),)
    outcomes: dict[WorkItem, Done] = {
        Decode(model=1): Decoded(((1, 5),), likelihoods={1: reported}, activations=activations),
        Read(model=1, spans=()): PromptsRead((), PromptScored(1, (reported,)), (), activations),
        EmbedSlice(model=1, texts=()): TextsRead(3, {1: np.full((2, 3), 99.0, np.float32)}),
    }
    recorder.note_plan(RoundPlan(tuple(outcomes)))
    for done in outcomes.values():
        recorder.note_outcome(Outcome(1.0, 2.0, done))
    text = (tmp_path / "r").read_text()
    assert not re.findall(r"1\.25|77|88|99", text.partition("\n")[2])
    [this] = RecordReader(str(tmp_path / "r"))
    decoded, read, embedded = (outcome.done for outcome in this.outcomes)
    assert decoded == Decoded(((1, 5),), activations=(Activations(1, 0, ()),))
    assert read == PromptsRead((), PromptScored(1, ()), (), (Activations(1, 0, ()),))
    assert isinstance(embedded, TextsRead)
    assert embedded.vectors[1].shape == (2, 3)


def test_a_thread_that_runs_already_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thread = DeviceThread.shared()
    wish = Recording(path=str(tmp_path / "r"))
    with caplog.at_level(logging.WARNING):
        assert DeviceThread.shared(wish) is thread
    assert "not recorded" in caplog.text
    assert not (tmp_path / "r").exists()


def test_a_record_costs_little(tmp_path: Path) -> None:
    """It is compared with msgspec's JSON of the same: both are as fast as the machine. The bounds
    are ten times what was measured; `pytest -s` prints what a record costs here."""
    recorder = Recorder(Recording(path=str(tmp_path / "r"), most_bytes=10**9))
    jobs = [job(i, tuple(range(100))) for i in range(32)]
    recorder.note_orders([Received(1, Submit(each)) for each in jobs])
    recorder.note_plan(RoundPlan((Admit(model=1, client=1, jobs=tuple(jobs)),)))
    step = RoundPlan((Decode(model=1),))
    tokens_drawn = tuple((i, 777 * i) for i in range(32))
    outcome = Outcome(1000.123456, 1000.234567, Decoded(tokens_drawn, waited=1000.2))
    long = job(99, tuple(range(32_000)))

    def record_steps() -> None:
        for _ in range(100):
            recorder.note_plan(step)
            recorder.note_outcome(outcome)

    def encode_steps() -> None:
        for _ in range(100):
            msgspec.json.encode(step)
            msgspec.json.encode(outcome)

    steps, plain_steps = least_seconds(record_steps), least_seconds(encode_steps)
    prompt = least_seconds(lambda: recorder.note_orders([Received(1, Submit(long))]))
    plain_prompt = least_seconds(lambda: msgspec.json.encode(long))
    print(f"a step: {steps * 1e4:.0f} us; a prompt's token: {prompt / 0.032:.2f} us")
    assert steps < 250 * plain_steps
    assert prompt < 50 * plain_prompt


def test_settings_that_are_numbers_are_recorded() -> None:
    assert Recording.from_settings(Settings()) is None
    recording = Recording.from_settings(
        Settings(record="~/r", max_gap=0.5, metrics=True, api_key=("secret",), data_dir="/x/y")
    )
    assert recording is not None
    assert recording.path == os.path.expanduser("~/r")
    assert dict(recording.options) == {"max_gap": 0.5, "metrics": True}


def test_orders_are_read_as_they_were_written(tmp_path: Path) -> None:
    recorder = Recorder(Recording(path=str(tmp_path / "r"), most_bytes=10**6))
    steering = Steering(3, "clamp", ((1, 0.5),), (("v", 2.0),))
    asked = job(
        1,
        (1, 2),
        sampling=Sampling(0.7, seed=1 << 62, logit_bias=((3, -1.5),)),
        bans=Bans(1, (3,), ((4, 5),)),
        end_tokens=frozenset([7, 8]),
        steering=steering,
        logprobs=1,
        scores=2,
        grammar=Grammar("a grammar", by_characters=True, openers=("<",), thinking=True),
    )
    orders: list[Order] = [
        Open(),
        Ask(1, Load(model="m", path="m", max_rows=1, prefill_chunk=64, max_gap=1 / 3)),
        Ask(2, Attach("m", 1, "sae", 3, before=True)),
        Ask(3, MakeReport()),
        Submit(asked),
        Submit(Job(4, "m", texts=((1, 2),), firsts=(1,))),
        Cancel(1),
        Watch("m", (1, 2), 3),
        Detach("m"),
        Unload("m"),
        Close(),
    ]
    received = [Received(client, order) for client, order in enumerate(orders)]
    recorder.note_orders(received)
    [this] = RecordReader(str(tmp_path / "r"))
    assert this.orders == tuple(received)
