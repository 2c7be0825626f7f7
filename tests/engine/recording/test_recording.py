"""Records: what is in the file and what is not, and what a replay tells."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path

import msgspec
import pytest

from mlxsrv.engine.orders import (
    Attach,
    Embed,
    Job,
    Submit,
)
from mlxsrv.engine.outcomes import (
    Decoded,
    Fault,
)
from mlxsrv.engine.plans import (
    Admit,
    Decode,
    Leave,
    Release,
    UnloadModel,
    Work,
)
from mlxsrv.engine.recording.command import replay_record
from mlxsrv.engine.recording.hiding import PathNames, Pseudonyms
from mlxsrv.engine.recording.record_file import RecordError, RecordReader
from mlxsrv.engine.scheduling.groups import Groups
from mlxsrv.errors import ServeError
from mlxsrv.generation.parameters import Bans, Sampling
from tests.support.fake_device import FACTS, FakeDevice
from tests.support.recording import FIRST, LOAD, Writer, job, recorded, replay, write_record
from tests.support.scheduling import Bench


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r"
    write_record(path, job(1, (1, 2, 3)))
    replay_record(str(path), {}, {})
    assert capsys.readouterr().out.endswith("no difference\n")
    record = path.read_text()
    assert record.count('"groups":[{"rows":[1],') == 1
    path.write_text(record.replace('"groups":[{"rows":[1],', '"groups":[{"rows":[7],'))
    with pytest.raises(ServeError, match="differs"):
        replay_record(str(tmp_path / "r"), {}, {})
    told = capsys.readouterr().out
    [recorded_step] = re.findall(r"recorded: (Decode.*)", told)
    [planned_step] = re.findall(r"planned: (Decode.*)", told)
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


def test_tokens_that_were_looked_up_are_not_in_the_file_and_not_found_again(
    tmp_path: Path,
) -> None:
    class Repeating(Writer):
        def draw(self, job: Job, place: int) -> int:
            return FIRST + place % 6

    facts = msgspec.structs.replace(FACTS, lookup=True)
    asked = job(1, tuple(range(FIRST + 10, FIRST + 20)), max_tokens=60)
    for tokens in (True, False):
        path = tmp_path / f"{tokens}"
        bench = write_record(path, asked, tokens=tokens, device=Repeating(facts))
        assert any(work.guesses for work in bench.works(Decode))
        found = {str(FIRST + n) for n in range(20)} & set(re.findall(r"\d+", path.read_text()))
        assert bool(found) == tokens
    assert replay(tmp_path / "True").difference is None
    with pytest.raises(RecordError, match="record with --record-tokens"):
        replay(tmp_path / "False")


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
    """The next token's pseudonym is known before it is told; a released row is forgotten."""
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
        lines[0].decode().replace('"format":3', '"format":99'): "has format 99",
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
