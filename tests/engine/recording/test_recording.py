"""Records: what is in the file and what is not, what a replay tells, and what a recorder may cost."""

from __future__ import annotations

import gzip
import logging
import os
import re
import stat
import time
from pathlib import Path
from statistics import median
from typing import Any

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
    Embed,
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
    Leave,
    Read,
    Release,
    RoundPlan,
    UnloadModel,
    Work,
)
from mlxsrv.engine.recording.command import replay_record
from mlxsrv.engine.recording.hiding import PathNames, Pseudonyms
from mlxsrv.engine.recording.record_file import RecordError, RecordReader
from mlxsrv.engine.recording.recorder import Recorder, Recording
from mlxsrv.engine.scheduling.groups import Groups
from mlxsrv.engine.scheduling.scheduler import Received
from mlxsrv.errors import ServeError
from mlxsrv.generation.parameters import Bans, Sampling, Steering
from mlxsrv.settings import Settings
from tests.support.fake_device import FakeDevice
from tests.support.recording import recorded, replay
from tests.support.scheduling import Bench

LOAD = Load(model="m", path="/home/someone/m", max_rows=4, prefill_chunk=64, max_gap=0.1)
FIRST = 3_000_000_000
"""An id so long that it is not found in a file by chance."""


def job(number: int, prompt: tuple[int, ...], **more: Any) -> Job:
    asked: dict[str, Any] = {"max_tokens": 5, "end_tokens": frozenset(), "sampling": Sampling()}
    return Job(number, "m", prompt, **(asked | more))


class Writer(FakeDevice):
    """Draws ids from FIRST on; the fifth of each answer is FIRST."""

    def draw(self, job: Job, place: int) -> int:
        return FIRST if place == 4 else FIRST + 100 * job.id + place


def write_record(
    path: Path, *jobs: Job, tokens: bool = False, device: FakeDevice | None = None
) -> Bench:
    """Record these jobs, one after the other."""
    with recorded(path, tokens=tokens):
        bench = Bench(Writer() if device is None else device)
    bench.load(LOAD)
    for each in jobs:
        bench.submit(each)
        bench.finish()
    return bench


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.getMessage() == "recording ended"]


def prompts(path: Path) -> list[tuple[int, ...]]:
    """The prompts in a record."""
    found: list[tuple[int, ...]] = []
    for this in RecordReader(str(path)):
        for received in this.orders:
            if isinstance(received.order, Submit):
                found.append(received.order.job.prompt)
    return found


# Replays.


def test_a_scheduler_that_decides_otherwise_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "r", job(1, (1, 2, 3)))
    replay_record(str(tmp_path / "r"), {}, {})
    assert capsys.readouterr().out.endswith("no difference\n")
    monkeypatch.setattr(Groups, "take_changed", lambda _: ((7,),))
    with pytest.raises(ServeError, match="differs"):
        replay_record(str(tmp_path / "r"), {}, {})
    told = capsys.readouterr().out
    [recorded_step] = re.findall(r"recorded: (Decode.*)", told)
    [planned_step] = re.findall(r"planned: (Decode.*)", told)
    assert "groups=((1,),)" in recorded_step
    assert "groups=((7,),)" in planned_step


def test_a_scheduler_that_fails_in_a_replay_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "r", job(1, (1, 2, 3)))

    def fail(_: Groups) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Groups, "take_changed", fail)
    with pytest.raises(ServeError, match="differs"):
        replay_record(str(tmp_path / "r"), {}, {})
    assert "ZeroDivisionError: a bug" in capsys.readouterr().out


def test_rounds_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Writer):
        def fail(self, work: Work) -> Fault | None:
            return Fault("by order") if type(work).__name__ == "EmbedSlice" else None

    with recorded(tmp_path / "r"):
        bench = Bench(Failing())
    bench.load(LOAD)
    bench.submit(job(1, tuple(range(100))))
    bench.embed(Embed(2, "m", ((1, 2), (3,))))
    bench.finish()
    replay_record(str(tmp_path / "r"), {}, {}, prints=True)
    told = capsys.readouterr().out
    assert "Submit job 1 for m: 100 tokens, at most 5 more" in told
    assert re.search(r"Read +model 1 +rows 1: 0 to 64, half read +1\.000 ms", told)
    assert re.search(r"EmbedSlice .* FAULT: by order", told)
    assert "works that failed: 1 times: by order" in told


# Texts and paths.


def test_no_token_id_is_in_the_file(tmp_path: Path) -> None:
    sampling = Sampling(logit_bias=((FIRST + 9, 1.5),))
    bans = Bans(2, allowed=(FIRST + 8, FIRST), words=((FIRST + 7,),))
    asked = job(
        1,
        tuple(range(FIRST + 10, FIRST + 90)),
        end_tokens=frozenset([FIRST, FIRST + 1]),
        sampling=sampling,
        bans=bans,
        max_tokens=9,
    )
    for tokens in (True, False):
        path = tmp_path / f"{tokens}"
        bench = write_record(path, asked, tokens=tokens)
        bench.embed(Embed(2, "m", ((FIRST + 91,) * 5,)))
        bench.finish()
        assert bench.job(1).tokens == [FIRST + 100, FIRST + 101, FIRST + 102, FIRST + 103, FIRST]
        ids = {str(FIRST + n) for n in range(200)}
        found = ids & set(re.findall(r"\d+", path.read_text()))
        assert len(found) == (90 if tokens else 0)
        assert replay(path).tokens == 5


def test_pseudonyms_show_what_prompts_share_and_no_more(tmp_path: Path) -> None:
    asked = [job(1, (5, 5, 5, 6, 7)), job(2, (5, 5, 5, 8, 7)), job(3, (6, 5, 5, 6, 7))]
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        write_record(file, *asked)
    one, two, three = prompts(files[0])
    assert one[:3] == two[:3]
    assert len({*one, *two, *three}) == 5 + 2 + 5
    other = prompts(files[1])
    assert {*one, *two, *three}.isdisjoint({token for prompt in other for token in prompt})


def test_pseudonyms_of_a_row() -> None:
    """That of a token that is to be told is known before; a row that is released is forgotten."""
    pseudonyms = Pseudonyms()
    asked = job(7, (1, 2), end_tokens=frozenset([9]))
    pseudonyms.hide(3, Submit(asked))
    pseudonyms.follow([Admit(model=1, client=3, jobs=(asked,))])
    step = Decode(model=1)
    before, ends = pseudonyms.hide_drawn(step, Decoded(((7, 5),), following={7: 9}))
    assert ends == ((3, 7, before.following[7]),)
    after, ends = pseudonyms.hide_drawn(step, Decoded(((7, 9),)))
    assert after.tokens == ((7, before.following[7]),)
    assert ends == ((3, 7, before.following[7]),)
    pseudonyms.forget(Release(model=1, rows=(Leave(7),)))
    assert pseudonyms.hide_drawn(step, Decoded(((7, 5),))) == (Decoded(), ())
    pseudonyms.hide(3, Submit(asked))
    pseudonyms.follow([Admit(model=1, client=3, jobs=(asked,)), UnloadModel(model=1)])
    assert pseudonyms.hide_drawn(step, Decoded(((7, 5),))) == (Decoded(), ())


def test_a_chat_that_goes_on_finds_its_kept_prompt_in_the_replay_as_well(tmp_path: Path) -> None:
    """The end token that was drawn is part of the next prompt."""
    ends = frozenset([FIRST])
    first = job(1, tuple(range(100)), end_tokens=ends, max_tokens=9)
    answer = (FIRST + 100, FIRST + 101, FIRST + 102, FIRST + 103, FIRST)
    following = job(2, (*first.prompt, *answer, 1, 2), end_tokens=ends, max_tokens=9)
    bench = write_record(tmp_path / "r", first, following)
    read = bench.job(2).read
    assert read is not None
    assert read.cached >= 104
    assert replay(tmp_path / "r").difference is None


def test_paths_are_told_by_their_last_parts() -> None:
    names = PathNames()
    assert names.name("/Users/john smith/models/good") == "good"
    assert names.name("/Volumes/x/good/") == "good (2)"
    assert names.name("/Users/john smith/models/good") == "good"
    told = names.clean(
        "OSError: /Users/john smith/models/good/config.json and '/opt/other/file.bin' are bad, "
        f"{os.path.expanduser('~')}/a/b too; see https://x.example/y/z and/or/but 1/2"
    )
    assert told == (
        "OSError: good/config.json and 'file.bin' are bad, "
        "b too; see https://x.example/y/z and/or/but 1/2"
    )


def test_no_folder_is_in_the_file(tmp_path: Path) -> None:
    class Refusing(FakeDevice):
        def refuse_load(self, path: str) -> str | None:
            return f"{path}/sae.safetensors cannot be read" if "sae" in path else None

    with recorded(tmp_path / "r"):
        bench = Bench(Refusing())
    order = msgspec.structs.replace(
        LOAD,
        adapter="/home/someone/a",
        draft="/home/someone/d",
        vectors=(("v", "/home/someone/v"),),
    )
    bench.load(order)
    bench.ask(Attach("m", 1, "/home/someone/sae", 0))
    bench.finish()
    text = (tmp_path / "r").read_text()
    assert "someone" not in text
    assert "sae/sae.safetensors cannot be read" in text
    assert replay(tmp_path / "r").difference is None


# The file.


def test_a_last_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write_record(path, job(1, (1, 2, 3)))
    whole = path.read_bytes()
    cuts = [len(whole) - 2, whole.rindex(b'{"type":"plan"') + 30]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        reader = RecordReader(str(path))
        assert [*reader]
        assert reader.cut
        assert replay(path).difference is None
    path.write_bytes(whole[: whole.rindex(b'{"type":"outcome"')])
    assert replay(path).ended == "Release"


def test_a_compressed_record_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write_record(path, job(1, (1, 2, 3)))
    packed = tmp_path / "r.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert replay(packed) == replay(path)
    packed.write_bytes(packed.read_bytes()[:-100])
    assert replay(packed).difference is None


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write_record(path, job(1, (1, 2, 3)))
    lines = path.read_bytes().splitlines(keepends=True)
    wrong = {
        "": "is no record",
        "hello\n": "is no record",
        '{"type":"orders","orders":[]}\n': "is no record",
        lines[0].decode().replace('"format":1', '"format":99'): "has format 99",
        lines[0].decode() + "hello\n": "line 2",
    }
    for text, told in wrong.items():
        path.write_text(text)
        with pytest.raises(RecordError, match=told):
            replay(path)
    with pytest.raises(RecordError, match="No such file"):
        RecordReader(str(tmp_path / "none"))


def test_a_record_without_token_ids_is_for_no_model(tmp_path: Path) -> None:
    write_record(tmp_path / "r", job(1, (1, 2, 3)))
    with pytest.raises(RecordError, match="--record-tokens"):
        replay_record(str(tmp_path / "r"), {"m": "/m"}, {})


# The recorder.


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


def test_a_full_disk_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = os.write
    room = 3000

    def fill(file: int, data: bytes | memoryview) -> int:
        nonlocal room
        part = data[: min(room, 100)]  # a write may be a part only
        if not part:
            raise OSError(28, "No space left on device")
        room -= len(part)
        return write(file, part)

    monkeypatch.setattr(os, "write", fill)
    with caplog.at_level(logging.WARNING):
        bench = write_record(tmp_path / "r", job(1, (1, 2, 3)))
    assert len(bench.job(1).tokens) == 5
    [warning] = warnings(caplog)
    assert "No space left" in str(warning.__dict__)
    assert (tmp_path / "r").stat().st_size == 3000
    assert replay(tmp_path / "r").difference is None


def test_a_round_is_in_the_file_before_its_works_are_done(tmp_path: Path) -> None:
    seen: list[str | None] = []

    class Looking(FakeDevice):
        def fail(self, work: Work) -> Fault | None:
            seen.append(replay(tmp_path / "r").ended)
            assert seen[-1] == type(work).__name__
            return None

    write_record(tmp_path / "r", job(1, (1, 2, 3)), device=Looking())
    assert "Decode" in seen


def test_what_clients_alone_are_told_is_not_recorded(tmp_path: Path) -> None:
    recorder = Recorder(Recording(path=str(tmp_path / "r"), tokens=True, most_bytes=10**6))
    told = Likelihood(-1.25, ((77, -1.25),))
    activations = (Activations(1, 0, ((88, 1.5),)),)
    outcomes: dict[Work, Done] = {
        Decode(model=1): Decoded(((1, 5),), likelihoods={1: told}, activations=activations),
        Read(model=1, spans=()): PromptsRead((), PromptScored(1, (told,)), (), activations),
        EmbedSlice(model=1, texts=()): TextsRead(3, {1: np.full((2, 3), 99.0, np.float32)}),
    }
    recorder.note_plan(RoundPlan(tuple(outcomes)))
    for work, done in outcomes.items():
        recorder.note_outcome(work, Outcome(1.0, 2.0, done))
    text = (tmp_path / "r").read_text()
    assert not re.findall(r"1\.25|77|88|99", text.partition("\n")[2])
    [this] = RecordReader(str(tmp_path / "r"))
    decoded, read, embedded = (result.outcome.done for result in this.results)
    assert decoded == Decoded(((1, 5),), activations=(Activations(1, 0, ()),))
    assert read == PromptsRead((), PromptScored(1, ()), (), (Activations(1, 0, ()),))
    assert isinstance(embedded, TextsRead)
    assert embedded.vectors[1].shape == (2, 3)


def test_a_thread_that_runs_already_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thread = DeviceThread.shared()
    wish = Recording(path=str(tmp_path / "r"), tokens=False)
    with caplog.at_level(logging.WARNING):
        assert DeviceThread.shared(wish) is thread
    assert "not recorded" in caplog.text
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("tokens", [True, False])
def test_a_record_costs_little(tmp_path: Path, tokens: bool) -> None:
    """The bounds are ten times what was measured; `pytest -s` prints what it is here."""
    recorder = Recorder(Recording(path=str(tmp_path / "r"), tokens=tokens, most_bytes=10**9))
    jobs = [job(i, tuple(range(100))) for i in range(32)]
    recorder.note_orders([Received(1, Submit(each)) for each in jobs])
    recorder.note_plan(RoundPlan((Admit(model=1, client=1, jobs=tuple(jobs)),)))
    step = RoundPlan((Decode(model=1),))
    tokens_drawn = tuple((i, 777 * i) for i in range(32))
    outcome = Outcome(1000.123456, 1000.234567, Decoded(tokens_drawn, waited=1000.2))
    costs: list[float] = []
    for _ in range(7):
        began, size = time.process_time(), (tmp_path / "r").stat().st_size
        for _ in range(100):
            recorder.note_plan(step)
            recorder.note_outcome(step.works[0], outcome)
        costs.append((time.process_time() - began) / 100)
        size = ((tmp_path / "r").stat().st_size - size) // 100
    began = time.process_time()
    recorder.note_orders([Received(1, Submit(job(99, tuple(range(32_000)))))])
    prompt = (time.process_time() - began) / 32_000
    print(
        f"a step: {median(costs) * 1e6:.0f} us, {size} B; a prompt's token: {prompt * 1e6:.2f} us"
    )
    assert median(costs) < 300e-6
    assert prompt < 10e-6


def test_settings_that_are_numbers_are_recorded() -> None:
    assert Recording.find(Settings()) is None
    recording = Recording.find(
        Settings(record="~/r", max_gap=0.5, metrics=True, api_key=("secret",), data_dir="/x/y")
    )
    assert recording is not None
    assert recording.path == os.path.expanduser("~/r")
    assert dict(recording.options) == {"max_gap": 0.5, "metrics": True}


def test_orders_are_read_as_they_were_written(tmp_path: Path) -> None:
    recorder = Recorder(Recording(path=str(tmp_path / "r"), tokens=True, most_bytes=10**6))
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
    )
    orders: list[Order] = [
        Open(),
        Ask(1, Load(model="m", path="m", max_rows=1, prefill_chunk=64, max_gap=1 / 3)),
        Ask(2, Attach("m", 1, "sae", 3, before=True)),
        Ask(3, MakeReport()),
        Submit(asked, constrained=True),
        Embed(4, "m", ((1, 2),), (1,)),
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
