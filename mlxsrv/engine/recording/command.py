"""The command `mlxsrv replay`: replays a record, prints what was in it, and tells what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mlxsrv.engine.backend import import_engine, require_backend
from mlxsrv.engine.recording.model_replay import ModelReplay
from mlxsrv.engine.recording.printing import describe_header, describe_round
from mlxsrv.engine.recording.record_file import RecordedRound, RecordError, RecordReader
from mlxsrv.engine.recording.replay import Difference, Replay, ReplaySummary
from mlxsrv.errors import ServeError
from mlxsrv.version import __version__


def replay_record(
    path: str, models: Mapping[str, str], files: Mapping[str, str], *, prints: bool = False
) -> None:
    """Replay a record and print what comes of it.

    Args:
        path: the record.
        models: folders of the models whose works are done again, by name.
        files: paths of other files, by their names in the record.
        prints: every round is printed.

    Raises:
        RecordError: the file is no record, models are given and it has no real token ids, or a
            file that they need is not given.
        ServeError: something differs.
    """
    reader = RecordReader(path)
    if models and not reader.header.tokens:
        raise RecordError(
            f"{path} has no real token ids, so no model can read them; record with --record-tokens"
        )
    for line in describe_header(reader.header):
        print(line)
    if reader.header.versions.get("mlxsrv") != __version__:
        print(f"This is mlxsrv {__version__}: another version may plan otherwise.")
    live: ModelReplay | None = None
    if models:
        require_backend()
        import_engine()
        live = ModelReplay(models, files)

    def show(this: RecordedRound) -> None:
        for line in describe_round(this, reader.header.clock):
            print(line)

    replay = Replay(reader, live, show if prints else lambda _: None)
    summary = replay.run()
    _print_summary(summary, cut=reader.cut)
    differs = summary.difference is not None
    if live is not None:
        differs |= _print_tokens(live)
    if summary.difference is not None:
        _print_difference(summary.difference)
    if differs:
        raise ServeError("the replay differs from the record")
    print("no difference")


def _print_summary(summary: ReplaySummary, *, cut: bool) -> None:
    print(
        f"{summary.rounds} rounds, {summary.works} works of {summary.seconds:.3f} s, "
        f"{summary.jobs} jobs ({summary.texts} texts to embed), {summary.tokens} tokens"
    )
    _print_counts("works that failed", summary.faults)
    _print_counts("jobs that failed", summary.failures)
    if cut:
        print("the last line is not whole")
    if summary.ended is not None:
        print(f"the record ends before this was done: {summary.ended}")


def _print_counts(what: str, reasons: Counter[str]) -> None:
    for reason, count in reasons.most_common():
        print(f"{what}: {count} times: {reason}")


def _print_tokens(live: ModelReplay) -> bool:
    """Print how the tokens compare. Returns whether some differ."""
    for note in live.notes:
        print(note)
    for name in sorted(live.skipped):
        print(f"the works of {name} were not done: there is no --model {name}=PATH")
    print(f"{live.compared} tokens compared, {len(live.differing)} jobs differ")
    for (client, job), what in live.differing.items():
        print(f"job {job} of client {client}: {what}")
    return bool(live.differing)


def _print_difference(difference: Difference) -> None:
    print(f"round {difference.round}: {difference.what}")
    for name, works in (("recorded", difference.recorded), ("planned", difference.planned)):
        for work in works or ():
            print(f"  {name}: {work}")
