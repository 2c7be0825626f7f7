"""The runner: does the work items of a plan in their order, and returns the outcome of each.

It touches MLX and decides nothing. Its clock measures, and chooses nothing. MLX is imported by the
first work item that needs it: the device thread must be the first to import it, and an app that is
only imported, or asked for `--help`, does not pay for it.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import iter_unpack
from time import perf_counter
from typing import TYPE_CHECKING, assert_never

from mlxsrv.engine.backend import require_backend
from mlxsrv.engine.faults import note, survivable
from mlxsrv.engine.free_memory import release_memory
from mlxsrv.engine.orders import (
    GetMemory,
    ImportModelCode,
    Job,
    MakeReport,
    Question,
    StorageReport,
)
from mlxsrv.engine.outcomes import (
    Admitted,
    AttachStep,
    DeviceAnswer,
    Done,
    Fault,
    LoadStep,
    Outcome,
    Refusal,
    Watched,
)
from mlxsrv.engine.plans import (
    Admit,
    AnswerQuestion,
    AttachSlice,
    Decode,
    DetachSAE,
    EmbedSlice,
    FetchPrompt,
    Forget,
    FreedRow,
    LoadSlice,
    PlainItem,
    Read,
    ReadDraft,
    Release,
    Reset,
    RestorePrompt,
    Rewind,
    StorePrompts,
    UnloadModel,
    WatchFeatures,
    WorkItem,
)
from mlxsrv.engine.storage.storage import Storage
from mlxsrv.errors import BackendMissing
from mlxsrv.generation.parameters import Constraint, MakeConstraint

if TYPE_CHECKING:
    from mlxsrv.engine.execution.text_runner import TextRunner
    from mlxsrv.engine.loading.load import ResidentModel
    from mlxsrv.engine.loading.loader import Loader
    from mlxsrv.engine.ranks.rank_group import RankGroup
    from mlxsrv.engine.steering.steerer import Steerer


class Runner:
    """Does the work items of all models of the process.

    Args:
        post: puts an order of the storage thread into the queue of orders.
        clock: seconds; it never goes back. Read when a work item begins and when it ends.
        ranks: those that do the same work items; None: this process is alone.

    Attributes:
        storage: prompts on disk.
        constraint_makers: what makes constraints of jobs' grammars, by client and name of model.
    """

    def __init__(
        self,
        post: Callable[[StorageReport], None] = lambda _: None,
        clock: Callable[[], float] = perf_counter,
        ranks: RankGroup | None = None,
    ) -> None:
        self._clock = clock
        self._ranks = ranks
        self.storage = Storage(post)
        self.constraint_makers: dict[tuple[int, str], MakeConstraint] = {}
        self._models: dict[int, ResidentModel] = {}
        self._loader: Loader | None = None

    def run(self, work: WorkItem) -> Outcome:
        """Do one work item. An error that does not end the thread is its outcome's fault."""
        began = self._clock()
        done: Done | None = None
        fault: Fault | None = None
        try:
            if isinstance(work, Decode):
                done, fault = self._text(work.model).decode(work)
            else:
                done = self._do(work)
        except BaseException as error:
            if not survivable(error):
                raise
            fault = note(error, f"{type(work).__name__} failed")
        return Outcome(began, self._clock(), done, fault)

    def _do(self, work: PlainItem) -> Done | None:
        match work:
            case Read():
                return self._text(work.model).read(work.spans)
            case Admit():
                return self._admit(self._models[work.model], work)
            case Release():
                return self._models[work.model].free_rows(work.rows)
            case Rewind():
                self._models[work.model].rewind(work.rows)
            case Forget():
                self._text(work.model).forget(work.entries, draft=work.draft, spare=work.spare)
            case ReadDraft():
                return self._text(work.model).read_draft(work.row, work.begin, work.tokens)
            case StorePrompts():
                return self._text(work.model).store(work.entries)
            case FetchPrompt():
                self._text(work.model).fetch(work)
            case RestorePrompt():
                return self._text(work.model).restore(work)
            case DetachSAE():
                self._steerer(work).detach()
                self._text(work.model).replan()
                release_memory()
            case WatchFeatures():
                self._steerer(work).watch(work)
                self._text(work.model).replan()
                return Watched(self._steerer(work).watches)
            case EmbedSlice():
                return self._models[work.model].embedder.embed(work)
            case LoadSlice():
                return self._load(work)
            case AttachSlice():
                return self._attach(work)
            case Reset():
                self._models[work.model].reset()
            case UnloadModel():
                self._unload(work.model)
            case AnswerQuestion():
                return self._answer(work.question)
            case _:
                assert_never(work)
        return None

    def _admit(self, model: ResidentModel, work: Admit) -> Admitted:
        admitted = model.admit(work.jobs, partial(self._make_constraint, work.client))
        if self._ranks is not None and any(job.grammar is not None for job in work.jobs):
            # A grammar may fail on rank 0, which alone has it: then no rank takes the row.
            failed = b"".join(each.row.to_bytes(8) for each in admitted.failures)
            rows = self._ranks.exchange(failed)[0]
            model.free_rows([FreedRow(row) for (row,) in iter_unpack("!Q", rows)])
        return admitted

    def _make_constraint(self, client: int, job: Job) -> Constraint | None:
        """The constraint of a job that has a grammar. Raises what is wrong with the grammar."""
        if job.grammar is None or (self._ranks is not None and self._ranks.rank > 0):
            return None  # rank 0's tokens are every rank's
        make = self.constraint_makers.get((client, job.model))
        if make is None:
            raise RuntimeError("nothing was sent that makes constraints for this model")
        return make(job.grammar)

    def _text(self, number: int) -> TextRunner:
        text = self._models[number].text
        assert text is not None
        return text

    def _steerer(self, work: WorkItem) -> Steerer:
        steerer = self._models[work.model].steerer
        assert steerer is not None
        return steerer

    # Models.

    def _load(self, work: LoadSlice) -> LoadStep:
        if self._loader is None:
            from mlxsrv.engine.loading.loader import Loader

            self._loader = Loader(self._models, self.storage, self._ranks)
        return self._loader.load(work)

    def _attach(self, work: AttachSlice) -> AttachStep:
        assert self._loader is not None  # which has loaded the model
        return self._loader.attach(work)

    def _unload(self, model: int) -> None:
        self._models.pop(model, None)
        self.storage.forget(model)
        if self._loader is not None:
            self._loader.abandon(model)
        release_memory()

    def _answer(self, question: Question) -> DeviceAnswer:
        try:
            require_backend()
        except BackendMissing as error:
            return DeviceAnswer(refusal=Refusal("backend missing", str(error)))
        from mlxsrv.engine.loading import device_memory, weights

        match question:
            case GetMemory():
                return DeviceAnswer(self._least(device_memory.working_memory()))
            case ImportModelCode(path):
                weights.import_model_code(path)
                return DeviceAnswer()
            case MakeReport():
                return DeviceAnswer(device_memory.report())

    def _least(self, own: int) -> int:
        """The least of all ranks' numbers."""
        if self._ranks is None:
            return own
        return min(self._ranks.exchange_number(own))
