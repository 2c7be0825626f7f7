"""A record as text: a line for each order and each work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlxsrv.engine.orders import (
    Ask,
    Attach,
    Budget,
    Cancel,
    Embed,
    Fetched,
    Load,
    Order,
    Submit,
    Unload,
    Written,
)
from mlxsrv.engine.outcomes import (
    Admitted,
    AttachStep,
    Decoded,
    DeviceAnswer,
    Done,
    HandedOver,
    Kept,
    LoadStep,
    Outcome,
    PromptsRead,
    Restored,
    TextsRead,
)
from mlxsrv.engine.plans import (
    Admit,
    AdmitTexts,
    AnswerQuestion,
    AttachSlice,
    Decode,
    EmbedSlice,
    FetchPrompt,
    Forget,
    LoadSlice,
    Read,
    ReadDraft,
    Release,
    ReleaseTexts,
    RestorePrompt,
    Rewind,
    Span,
    StorePrompts,
    WatchFeatures,
    Work,
)
from mlxsrv.engine.recording.record_file import RecordedRound, RecordHeader

_MOST = 12  # rows of a line that are named


def describe_header(header: RecordHeader) -> list[str]:
    """The lines that say where and with what a record was made."""
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    device = ", ".join(f"{name} {value}" for name, value in header.device.items())
    options = ", ".join(f"{name} {value}" for name, value in header.options.items())
    return [
        f"recorded with {versions} on {header.system}",
        f"device: {device or 'none'}",
        f"options: {options or 'all have their defaults'}",
        f"token ids: {'real' if header.tokens else 'pseudonyms'}",
    ]


def describe_round(this: RecordedRound, clock: float) -> Iterator[str]:
    """Yield the lines of a round.

    Args:
        clock: the reading of the clock from which times are counted.
    """
    began = f" at {this.results[0].outcome.began - clock:.4f} s" if this.results else ""
    yield f"round {this.number}{began}"
    for received in this.orders:
        yield f"  < client {received.client}: {_describe_order(received.order)}"
    for place, work in enumerate(this.works or ()):
        what = f"  {type(work).__name__:<14} model {work.model:<3} {_describe_work(work)}"
        if place < len(this.results):
            yield f"{what:<72} {_describe_outcome(this.results[place].outcome)}"
        else:
            yield f"{what:<72} not done when the record ended"


def _describe_order(order: Order) -> str:
    name = type(order).__name__
    match order:
        case Submit(job):
            more = "" if job.grammar is None else ", with a grammar"
            sampling = job.sampling
            return (
                f"{name} job {job.id} for {job.model}: {len(job.prompt)} tokens, at most "
                f"{job.max_tokens} more, temperature {sampling.temperature:g}, "
                f"seed {sampling.seed}{more}"
            )
        case Embed():
            sizes = list(map(len, order.texts))
            return f"{name} job {order.id} for {order.model}: texts of {_list(sizes)} tokens"
        case Cancel(job):
            return f"{name} job {job}"
        case Budget(most):
            return f"{name} {most} bytes"
        case Ask(number, Load() as load):
            return f"Load {load.model} from {load.path} (question {number})"
        case Ask(number, Attach() as attach):
            return f"Attach {attach.path} to {attach.model} (question {number})"
        case Ask(number, question):
            return f"{type(question).__name__} (question {number})"
        case Written():
            return f"{name} entry {order.entry} of model {order.model}: {order.files} files"
        case Fetched():
            return f"{name} entry {order.entry} of model {order.model}: {order.tokens} tokens"
        case Unload(model):
            return f"{name} {model}"
    return f"{name} {getattr(order, 'model', '')}".rstrip()


def _describe_work(work: Work) -> str:
    match work:
        case Admit():
            return f"jobs {_list([job.id for job in work.jobs])}"
        case Release():
            kept = sum(leave.keep is not None for leave in work.rows)
            return f"rows {_list([leave.row for leave in work.rows])}, {kept} kept"
        case Rewind():
            return f"rows {_list(work.rows)}"
        case Forget():
            draft = ", what the draft has read" if work.draft else ""
            short = ", memory is short" if work.spare else ""
            return f"entries {_list(work.entries)}{draft}{short}"
        case Read():
            return "; ".join(map(_describe_span, work.spans))
        case Decode():
            return _describe_step(work)
        case ReadDraft():
            return f"row {work.row}: {work.begin} to {work.begin + work.tokens}"
        case StorePrompts():
            return f"entries {_list(work.entries)}"
        case FetchPrompt():
            return f"row {work.row} for entry {work.entry}"
        case RestorePrompt():
            return f"entry {work.entry}, {work.limit} bytes"
        case AdmitTexts():
            return f"job {work.order.id}"
        case EmbedSlice():
            tokens = sum(text.end - text.begin for text in work.texts)
            return f"{len(work.texts)} texts of {tokens} tokens, completes {_list(work.completes)}"
        case ReleaseTexts():
            return f"jobs {_list(work.jobs)}"
        case LoadSlice():
            return f"{work.limit} bytes"
        case AttachSlice():
            return f"SAE {work.number}"
        case WatchFeatures():
            return f"features {_list(work.features)}, top {work.top}"
        case AnswerQuestion():
            return f"{type(work.question).__name__} of client {work.client}"
        case _:
            return ""


def _describe_span(span: Span) -> str:
    source = "" if span.source is None else f" from entry {span.source}"
    source += " (moved)" if span.moves else ""
    source += "" if span.lender is None else f" from row {span.lender}"
    end = ", half read" if span.joins is None else ""
    return f"rows {_list(span.rows)}: {span.begin} to {span.end}{source}{end}"


def _describe_step(work: Decode) -> str:
    which = "on trial, " if work.trial else ""
    if work.groups is not None:
        which += "groups " + " | ".join(
            f"{_list(group.rows)} ({group.slots} x {group.columns})" for group in work.groups
        )
    else:
        which += "as before"
    proposals = work.proposals or [max(len(guess) - 1, 0) for guess in work.guesses]
    return which + (f", proposes {_list(proposals)}" if proposals else "")


def _describe_outcome(outcome: Outcome) -> str:
    took = f"{1000 * outcome.seconds:9.3f} ms"
    parts = [] if outcome.done is None else [part for part in _describe_done(outcome.done) if part]
    if outcome.fault is not None:
        memory = " (memory)" if outcome.fault.memory else ""
        parts.append(f"FAULT{memory}: {outcome.fault.reason}")
    return f"{took}  {', '.join(parts)}".rstrip()


def _describe_done(done: Done) -> list[str]:
    match done:
        case Decoded():
            broken = f"NaN in rows {_list(done.broken)}" if done.broken else ""
            failed = [f"row {each.row} failed: {each.reason}" for each in done.failures]
            return [f"{len(done.tokens)} tokens", broken, *failed]
        case PromptsRead():
            return [f"NaN in rows {_list(done.broken)}" if done.broken else ""]
        case Admitted():
            return [f"job {each.row} failed: {each.reason}" for each in done.failures]
        case Kept():
            size = sum(prompt.bytes for prompt in done.prompts)
            return [f"{len(done.prompts)} kept, {size} bytes" if done.prompts else ""]
        case HandedOver():
            return [f"entries {_list(done.entries)} handed over"]
        case Restored():
            return ["kept" if done.prompt else "", "" if done.over else "not over"]
        case TextsRead():
            return [f"{done.tokens} tokens with padding"]
        case LoadStep():
            return [
                f"{done.bytes} bytes",
                "" if done.loaded is None else "loaded",
                "" if done.refusal is None else f"refused: {done.refusal.reason}",
            ]
        case AttachStep():
            return [
                "" if done.attached is None else "attached",
                "" if done.refusal is None else f"refused: {done.refusal.reason}",
            ]
        case DeviceAnswer():
            return [str(done.value) if done.refusal is None else done.refusal.reason]
        case _:
            return []


def _list(numbers: Sequence[int]) -> str:
    """Numbers with spaces; of many, the first ones."""
    text = " ".join(map(str, numbers[:_MOST]))
    return f"{text} and {len(numbers) - _MOST} more" if len(numbers) > _MOST else text or "none"
