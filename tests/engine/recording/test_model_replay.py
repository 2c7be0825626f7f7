"""Records of real models, replayed with these models: the same tokens, also behind faults."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxsrv.engine.events import Token
from mlxsrv.engine.orders import Ask, Job, Load, Open, Order, Submit
from mlxsrv.engine.outcomes import Decoded, Fault, Outcome
from mlxsrv.engine.plans import Decode, Work
from mlxsrv.engine.recording.model_replay import ModelReplay
from mlxsrv.engine.recording.record_file import RecordError, RecordReader
from mlxsrv.engine.recording.recorder import RecordedScheduler, Recorder, Recording
from mlxsrv.engine.recording.replay import Replay, ReplaySummary
from mlxsrv.engine.runner import Runner
from mlxsrv.engine.scheduling.scheduler import Received
from mlxsrv.generation.parameters import Grammar, Mask, Sampling
from mlxsrv.prompts.grammars.specs import GrammarSpec, each_call
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.fixtures import ModelFolder
from tests.support.recording import BYTES, replay

PROMPT = tuple(range(20, 90))
Change = Callable[[Work, Outcome], Outcome]


class Session:
    """A scheduler that is recorded, and a real runner; by hand, without a thread.

    Args:
        path: the record.
        change: makes other outcomes of those that works have.
    """

    def __init__(self, path: Path, *, tokens: bool, change: Change = lambda _, o: o) -> None:
        recording = Recording(path=str(path), tokens=tokens, most_bytes=BYTES)
        self._scheduler = RecordedScheduler(Recorder(recording))
        self.runner = Runner()
        self._change = change
        self.events: list[Any] = []
        self.works: list[Work] = []

    def send(self, *orders: Order) -> None:
        """Send orders, and do all that comes of them."""
        received = [Received(1, order) for order in orders]
        while received or not self._scheduler.idle:
            plan = self._scheduler.plan(received)
            received = []
            for work in plan.works:
                self.works.append(work)
                outcome = self._change(work, self.runner.run(work))
                self._scheduler.settle(work, outcome)
                for _, events in self._scheduler.take_events():
                    self.events += events


def order(folder: Path, **more: Any) -> Load:
    return Load(model="m", path=str(folder), max_rows=4, prefill_chunk=64, max_gap=0.2, **more)


def job(number: int, **more: Any) -> Submit:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "end_tokens": frozenset()}
    asked["sampling"] = Sampling(temperature=0.8, seed=number)
    return Submit(Job(id=number, model="m", **(asked | more)))


def replay_with(
    path: Path, folder: Path, files: dict[str, str] | None = None
) -> tuple[ModelReplay, ReplaySummary]:
    reader = RecordReader(str(path))
    live = ModelReplay({"m": str(folder)}, files or {})
    return live, Replay(reader, live).run()


def test_tokens_are_the_same_behind_a_step_that_told_its_tokens_and_failed(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", plain=True)
    steps = 0

    def fail(work: Work, outcome: Outcome) -> Outcome:
        nonlocal steps
        steps += isinstance(work, Decode)
        if steps == 4 and isinstance(work, Decode):
            assert isinstance(outcome.done, Decoded)
            assert len(outcome.done.tokens) == 3
            return msgspec.structs.replace(outcome, fault=Fault("by order"))
        return outcome

    session = Session(tmp_path / "r", tokens=True, change=fail)
    session.send(Open(), Ask(1, order(folder)))
    session.send(*(job(number) for number in (1, 2, 3)))
    live, summary = replay_with(tmp_path / "r", folder)
    assert summary.difference is None
    assert summary.faults == {"by order": 1}
    assert (live.compared, live.differing) == (36, {})


class Times:
    """Other times than those measured: every work takes a millisecond, so proposals pay."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self, _: Work, outcome: Outcome) -> Outcome:
        began, self._now = self._now, self._now + 0.001
        done = outcome.done
        if isinstance(done, Decoded):
            done = msgspec.structs.replace(done, waited=began)
        return Outcome(began, self._now, done, outcome.fault)


def test_speculative_rounds_are_replayed(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("qwen3", plain=True)
    draft = Path(shutil.copytree(folder, tmp_path / "draft"))
    for tokens in (True, False):
        path = tmp_path / f"r{tokens}"
        session = Session(path, tokens=tokens, change=Times())
        session.send(Open(), Ask(1, order(folder, draft=str(draft))))
        session.send(job(1, max_tokens=80))
        drawn = [event.id for event in session.events if hasattr(event, "finish")]
        # It ends with the answer's last new token, which a round has drawn.
        new = [place for place, token in enumerate(drawn) if token not in drawn[:place]]
        session.send(job(1, end_tokens=frozenset([drawn[new[-1]]]), max_tokens=80))
        assert any(isinstance(work, Decode) and work.proposals for work in session.works)
        assert replay(path).difference is None
    live, summary = replay_with(tmp_path / "rTrue", folder, {"draft": str(draft)})
    assert summary.difference is None
    assert live.differing == {}
    with pytest.raises(RecordError, match="--file 'draft'=PATH"):
        replay_with(tmp_path / "rTrue", folder)


@pytest.mark.served  # a process of its own tries the grammars
def test_constrained_jobs_are_replayed_from_their_grammars(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3")
    tokenizer = Tokenizer(folder)
    marker, close = "<tool_call>", "</tool_call>"
    tools = [("now", {"properties": {"zone": {"enum": ["a", "b"]}}})]
    regex = tokenizer.grammars.compile(GrammarSpec("regex", "[ab]{12}"), param="p")
    call = tokenizer.calls.compile(each_call(tools, marker, close), marker, param="p")
    assert call is not None
    [start] = tokenizer.token_ids(marker, special=False)
    calls = Sampling(temperature=0.8, seed=1, logit_bias=((start, 100.0),))
    thoughts = Sampling(temperature=0.8, seed=2, logit_bias=((tokenizer.think_end[0], 100.0),))
    first = msgspec.structs.replace(regex.grammar, thinking=True)
    asked = [
        job(1, grammar=regex.grammar),
        job(2, grammar=first, sampling=thoughts),
        job(3, grammar=call.grammar, sampling=calls, max_tokens=60),
        job(4),
    ]
    session = Session(tmp_path / "r", tokens=True)
    session.runner.constraint_makers[1, "m"] = tokenizer.make_constraint
    session.send(Open(), Ask(1, order(folder)))
    session.send(*asked)
    tokens = [event for event in session.events if isinstance(event, Token)]
    texts = {
        number: tokenizer.decode([each.id for each in tokens if each.job == number])
        for number in (1, 2, 3)
    }
    assert re.fullmatch("[ab]{1,12}", texts[1])
    assert re.fullmatch(r"</think>\n*[ab]{1,12}", texts[2])
    assert re.match(rf'{marker}\s*{{\s*"name"\s*:\s*"now"', texts[3])
    live, summary = replay_with(tmp_path / "r", folder)
    assert summary.difference is None
    assert live.compared == len(tokens)
    assert live.differing == {}


def test_a_grammar_that_does_not_compile_here_is_told(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3")
    session = Session(tmp_path / "r", tokens=True)
    session.runner.constraint_makers[1, "m"] = lambda _: HereOnly()
    session.send(Open(), Ask(1, order(folder)))
    session.send(job(1, grammar=Grammar("no grammar")))
    _, summary = replay_with(tmp_path / "r", folder)
    assert summary.difference is not None
    assert "job 1 cannot be admitted here" in summary.difference.what


class HereOnly:
    """A constraint that binds nothing."""

    dormant = True
    failure = None

    def fill(self, mask: Mask) -> None:
        raise AssertionError("it is dormant")

    def accept(self, token: int) -> None:
        pass


def test_what_fails_only_in_the_replay_is_told(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("qwen3", plain=True)
    session = Session(tmp_path / "r", tokens=True)
    session.send(Open(), Ask(1, order(folder)))
    session.send(job(1))
    _, summary = replay_with(tmp_path / "r", tmp_path / "none")
    assert summary.difference is not None
    assert "the model cannot be loaded here" in summary.difference.what


def test_facts_that_are_others_here_are_told(model_folder: ModelFolder, tmp_path: Path) -> None:
    session = Session(tmp_path / "r", tokens=True)
    session.send(Open(), Ask(1, order(model_folder("qwen3", plain=True))))
    session.send(job(1))
    live, _ = replay_with(tmp_path / "r", model_folder("gemma3_text", plain=True))
    assert any("cuts was True, and is False here" in note for note in live.notes)
    assert [*live.differing] == [(1, 1)]
