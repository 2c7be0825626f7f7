"""Records: what is in the file and what is not, and what a replay tells."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import msgspec
import pytest

from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Fault
from mlxsrv.engine.plans import Decode, EmbedSlice, WorkItem
from mlxsrv.engine.recording.record_file import FORMAT, RecordError, RecordReader
from mlxsrv.engine.recording.replay import replay_record
from mlxsrv.engine.scheduling.groups import Groups
from mlxsrv.errors import ServeError
from tests.support.fake_device import FACTS
from tests.support.recording import FIRST, LOAD, Writer, job, recorded, replay, write_record
from tests.support.scheduling import Bench

# Replays.


def test_a_scheduler_that_decides_otherwise_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r"
    write_record(path, job(1, (1, 2, 3)))
    replay_record(str(path))
    assert capsys.readouterr().out.endswith("no difference\n")
    record = path.read_text()
    assert record.count('"groups":[{"rows":[1],') == 1
    path.write_text(record.replace('"groups":[{"rows":[1],', '"groups":[{"rows":[7],'))
    with pytest.raises(ServeError, match="differs"):
        replay_record(str(tmp_path / "r"))
    reported = capsys.readouterr().out
    [recorded_step] = re.findall(r"recorded: (Decode.*)", reported)
    [planned_step] = re.findall(r"planned: (Decode.*)", reported)
    assert "RowGroup(rows=(7,), slots=1," in recorded_step
    assert "RowGroup(rows=(1,), slots=1," in planned_step


def test_a_scheduler_that_fails_in_a_replay_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "r", job(1, (1, 2, 3)))

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Groups, "take_changed", fail)
    with pytest.raises(ServeError, match="differs"):
        replay_record(str(tmp_path / "r"))
    assert "ZeroDivisionError: a bug" in capsys.readouterr().out


def test_works_that_fail_are_counted_by_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Writer):
        def fail(self, work: WorkItem) -> Fault | None:
            return Fault("by order") if isinstance(work, EmbedSlice) else None

    with recorded(tmp_path / "r"):
        bench = Bench(Failing())
    bench.load(LOAD)
    bench.submit(job(1, tuple(range(100))))
    bench.submit(Job(2, "m", texts=((1, 2), (3,))))
    bench.finish()
    replay_record(str(tmp_path / "r"))
    reported = capsys.readouterr().out
    assert "2 jobs (2 texts to embed), 5 tokens" in reported
    assert "work items that failed: 1 times: by order" in reported


def test_a_work_has_no_tokens_that_its_order_has(tmp_path: Path) -> None:
    write_record(tmp_path / "r", job(1, tuple(range(FIRST, FIRST + 90))))
    assert (tmp_path / "r").read_text().count(str(FIRST + 50)) == 1


def test_tokens_that_were_looked_up_are_found_again(tmp_path: Path) -> None:
    class Repeating(Writer):
        def draw(self, job: Job, place: int) -> int:
            return FIRST + place % 6

    facts = msgspec.structs.replace(FACTS, lookup=True)
    asked = job(1, tuple(range(FIRST + 10, FIRST + 20)), max_tokens=60)
    bench = write_record(tmp_path / "r", asked, device=Repeating(facts))
    assert any(work.proposals for work in bench.items(Decode))
    assert replay(tmp_path / "r").difference is None


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
        lines[0].decode().replace(f'"format":{FORMAT}', '"format":99'): "has format 99",
        lines[0].decode() + "hello\n": "line 2 is damaged$",
        (lines[0] + lines[1]).decode() + "[]\n": "line 3 is damaged; without it",
        lines[0].decode().replace('"began":', '"begun":'): "line 1 is damaged$",
    }
    for text, reported in wrong.items():
        path.write_text(text)
        with pytest.raises(RecordError, match=reported):
            replay(path)
    with pytest.raises(RecordError, match="No such file"):
        RecordReader(str(tmp_path / "none"))
