"""Replay with models: does the recorded works again, and compares the tokens that are drawn.

The scheduler is given the recorded outcomes, so the works are those of the record whatever comes of
them here. A work that failed in the record is not done here, unless it told tokens; the works
behind it drop what it had touched. A load is done in one go.

Grammars are compiled again, with the tokenizers of the models that are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mlxsrv.engine.orders import Ask, Attach, Fetched, Load
from mlxsrv.engine.outcomes import (
    Admitted,
    AttachStep,
    Decoded,
    LoadStep,
    Outcome,
    Restored,
    TextFacts,
)
from mlxsrv.engine.plans import (
    Admit,
    AnswerQuestion,
    AttachSlice,
    FetchPrompt,
    LoadSlice,
    Release,
    RestorePrompt,
    StorePrompts,
    UnloadModel,
    Work,
)
from mlxsrv.engine.recording.record_file import OutcomeLine, RecordError
from mlxsrv.engine.recording.replay import JobKey
from mlxsrv.engine.runner import Runner
from mlxsrv.engine.scheduling.scheduler import Received
from mlxsrv.generation.parameters import Constraint, Grammar

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

_ALL = 1 << 62  # bytes of a slice that reads a model whole


class _ConstraintMaker:
    """Makes constraints with the tokenizer in a model's folder, which the first grammar needs."""

    def __init__(self, folder: str, *, trust_remote_code: bool) -> None:
        self._folder = Path(folder)
        self._trusts = trust_remote_code
        self._tokenizer: Tokenizer | None = None

    def __call__(self, grammar: Grammar) -> Constraint:
        if self._tokenizer is None:
            from mlxsrv.prompts.tokenizer import Tokenizer

            self._tokenizer = Tokenizer(self._folder, trust_remote_code=self._trusts)
        return self._tokenizer.make_constraint(grammar)


class ModelReplay:
    """Does works with real models.

    Args:
        models: folders of models, by the names that their clients use.
        files: paths of adapters, draft models, control vectors and SAEs, by their names in the
            record.

    Attributes:
        compared: tokens that were compared.
        differing: the jobs that drew another token, by client and job; the first, with what came.
        notes: facts of a model that are others here.
        skipped: names of models that are not among `models`.
    """

    def __init__(self, models: Mapping[str, str], files: Mapping[str, str]) -> None:
        self.compared = 0
        self.differing: dict[JobKey, str] = {}
        self.notes: list[str] = []
        self.skipped: set[str] = set()
        self._models = models
        self._files = files
        self._runner = Runner()
        self._loads: dict[int, Load] = {}  # by model
        self._attachments: dict[int, Attach] = {}  # by their own numbers
        self._clients: dict[int, int] = {}  # by model
        self._drawn: dict[JobKey, int] = {}  # tokens
        # What was read from disk is read by the model here.
        self._prompts: dict[tuple[int, int], tuple[int, ...]] = {}  # by model and row
        self._fetching: dict[tuple[int, int], tuple[int, ...]] = {}  # by model and entry
        self._fetched: dict[tuple[int, int], int] = {}  # tokens, by model and entry

    def take_orders(self, orders: Sequence[Received]) -> None:
        """Note what was read from disk, and what makes constraints of a model's jobs."""
        for client, order in ((received.client, received.order) for received in orders):
            match order:
                case Fetched():
                    self._fetched[order.model, order.entry] = order.tokens
                case Ask(question=Load(model=name) as load) if name in self._models:
                    self._runner.constraint_makers[client, name] = _ConstraintMaker(
                        self._models[name], trust_remote_code=load.trust_remote_code
                    )

    def follow(self, work: Work, result: OutcomeLine) -> str | None:
        """Do a work of the record.

        Raises RecordError if a file is missing.
        """
        outcome = result.outcome
        match work:
            case LoadSlice():
                return self._load(work, outcome)
            case AttachSlice():
                return self._attach(work, outcome)
            case AnswerQuestion():
                return None
            case Admit():
                self._clients[work.model] = work.client
                self._prompts |= {(work.model, job.id): job.prompt for job in work.jobs}
            case Release():
                for leave in work.rows:
                    self._prompts.pop((work.model, leave.row), None)
            case FetchPrompt():
                self._fetching[work.model, work.entry] = self._prompts[work.model, work.row]
                return None
            case StorePrompts():
                return None
        if work.model not in self._loads:
            return None
        told = isinstance(outcome.done, Decoded) and outcome.done.tokens
        if outcome.fault is not None and not told:
            return None
        here = self._restore(work, outcome) or self._runner.run(work)
        if here.fault is not None and outcome.fault is None:
            return f"{type(work).__name__} failed here: {here.fault.reason}"
        if isinstance(outcome.done, Admitted) and isinstance(here.done, Admitted):
            then = {failure.row for failure in outcome.done.failures}
            for failure in here.done.failures:
                if failure.row not in then:
                    return f"job {failure.row} cannot be admitted here: {failure.reason}"
        if isinstance(outcome.done, Decoded) and isinstance(here.done, Decoded):
            self._compare(work.model, outcome.done, here.done)
        elif isinstance(work, UnloadModel):
            del self._loads[work.model]
        return None

    def _restore(self, work: Work, outcome: Outcome) -> Outcome | None:
        """Read a prompt that was on disk, and is not here; None if the work is another."""
        if not isinstance(work, RestorePrompt):
            return None
        if not isinstance(outcome.done, Restored) or outcome.done.prompt is None:
            return outcome
        key = work.model, work.entry
        text = self._fetching.pop(key)[: self._fetched.pop(key)]
        return self._runner.read_kept(work.model, work.entry, text)

    # Models.

    def _load(self, work: LoadSlice, outcome: Outcome) -> str | None:
        if work.order is not None:
            if work.order.model not in self._models:
                self.skipped.add(work.order.model)
                return None
            self._loads[work.model] = self._find_files(work.order)
        if work.model not in self._loads:
            return None
        then = outcome.done if isinstance(outcome.done, LoadStep) else LoadStep()
        if outcome.fault is not None or then.refusal is not None:
            del self._loads[work.model]
        if then.loaded is None:
            return None
        order: Load | None = self._loads[work.model]
        while True:
            here = self._runner.run(LoadSlice(model=work.model, limit=_ALL, order=order))
            order = None
            step = here.done
            if here.fault is not None:
                return f"the load failed here: {here.fault.reason}"
            assert isinstance(step, LoadStep)
            if step.refusal is not None:
                return f"the model cannot be loaded here: {step.refusal.reason}"
            if step.loaded is not None:
                self._compare_facts(work.model, then.text, step.text)
                return None

    def _attach(self, work: AttachSlice, outcome: Outcome) -> str | None:
        if work.model not in self._loads:
            return None
        if work.order is not None:
            path = self._find_file(work.order.path)
            self._attachments[work.number] = msgspec.structs.replace(work.order, path=path)
        then = outcome.done if isinstance(outcome.done, AttachStep) else AttachStep()
        if then.attached is None:
            return None
        order: Attach | None = self._attachments.pop(work.number)
        while True:
            slice = AttachSlice(model=work.model, number=work.number, order=order)
            here = self._runner.run(slice)
            order = None
            if here.fault is not None:
                return f"the SAE cannot be attached here: {here.fault.reason}"
            assert isinstance(here.done, AttachStep)
            if here.done.refusal is not None:
                return f"the SAE cannot be attached here: {here.done.refusal.reason}"
            if here.done.attached is not None:
                return None

    def _find_files(self, order: Load) -> Load:
        return msgspec.structs.replace(
            order,
            path=self._models[order.model],
            adapter=None if order.adapter is None else self._find_file(order.adapter),
            draft=None if order.draft is None else self._find_file(order.draft),
            prompt_cache_dir=None,
            vectors=tuple((name, self._find_file(file)) for name, file in order.vectors),
        )

    def _find_file(self, name: str) -> str:
        if name not in self._files:
            raise RecordError(f"the record needs a file: --file '{name}'=PATH")
        return self._files[name]

    def _compare_facts(self, model: int, then: TextFacts | None, here: TextFacts | None) -> None:
        if then is None or here is None:
            return
        costs = ("kv_costs", "draft_costs")
        for name in ("batched", "cuts", "pads", "drafts", "lookup", "vocabulary", *costs):
            was, is_now = getattr(then, name), getattr(here, name)
            if was != is_now:
                self.notes.append(f"model {model}: {name} was {was}, and is {is_now} here")

    # Tokens.

    def _compare(self, model: int, then: Decoded, here: Decoded) -> None:
        """Compare the tokens of a step, row by row."""
        were, are = _group(then), _group(here)
        for job, tokens in were.items():
            key = self._clients[model], job
            place = self._drawn.get(key, 0)
            self._drawn[key] = place + len(tokens)
            self.compared += len(tokens)
            if tokens != are.get(job) and key not in self.differing:
                self.differing[key] = (
                    f"from token {place} of its answer on: {tokens} in the record, "
                    f"{are.get(job)} here"
                )


def _group(done: Decoded) -> dict[int, list[int]]:
    """The tokens of each row."""
    rows: dict[int, list[int]] = {}
    for job, token in done.tokens:
        rows.setdefault(job, []).append(token)
    return rows
