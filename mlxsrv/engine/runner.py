"""The runner: does the works of a plan, in their order, and tells what came of each.

It touches MLX and decides nothing. Its clock measures, and chooses nothing. MLX is imported by the
first work that needs it: the device thread must be the first to import it, and an app that is only
imported, or asked for `--help`, does not pay for it.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from struct import iter_unpack
from time import perf_counter
from typing import TYPE_CHECKING, assert_never

from mlxsrv.engine.backend import require_backend
from mlxsrv.engine.faults import note, survivable
from mlxsrv.engine.free_memory import release_memory
from mlxsrv.engine.orders import GetMemory, ImportModelCode, Job, MakeReport, Question, StorageTold
from mlxsrv.engine.outcomes import (
    Admitted,
    AttachStep,
    DeviceAnswer,
    Done,
    Fault,
    LoadStep,
    Outcome,
    Refusal,
    Restored,
    Watched,
)
from mlxsrv.engine.plans import (
    Admit,
    AdmitTexts,
    AnswerQuestion,
    AttachSlice,
    Decode,
    DetachSAE,
    EmbedSlice,
    FetchPrompt,
    Forget,
    Leave,
    LoadSlice,
    Read,
    ReadDraft,
    Release,
    ReleaseTexts,
    Reset,
    RestorePrompt,
    Rewind,
    StorePrompts,
    UnloadModel,
    WatchFeatures,
    Work,
)
from mlxsrv.engine.storage.storage import Storage
from mlxsrv.errors import BackendMissing
from mlxsrv.generation.parameters import Constraint, MakeConstraint

if TYPE_CHECKING:
    from mlxsrv.engine.execution.text_runner import TextRunner
    from mlxsrv.engine.loading.loader import Loader
    from mlxsrv.engine.loading.resident import ResidentModel
    from mlxsrv.engine.ranks.rank_group import RankGroup
    from mlxsrv.engine.steering.steerer import Steerer


class Runner:
    """Does works for all models of the process.

    Attributes:
        constraint_makers: what makes constraints of jobs' grammars, by client and name of model.
        storage: prompts on disk.

    Args:
        post: puts an order of the storage thread into the queue of orders.
        clock: tells when works begin and end, in seconds, and never goes back.
        ranks: those that do the same works; None: this process is alone.
    """

    def __init__(
        self,
        post: Callable[[StorageTold], None] = lambda _: None,
        clock: Callable[[], float] = perf_counter,
        ranks: RankGroup | None = None,
    ) -> None:
        self._clock = clock
        self._ranks = ranks
        self.storage = Storage(post)
        self.constraint_makers: dict[tuple[int, str], MakeConstraint] = {}
        self._models: dict[int, ResidentModel] = {}
        self._loader: Loader | None = None

    def run(self, work: Work) -> Outcome:
        """Do one work. An error that does not end the thread is its outcome's fault."""
        began = self._clock()
        done: Done | None = None
        fault: Fault | None = None
        try:
            done, fault = self._do(work)
        except BaseException as error:
            if not survivable(error):
                raise
            fault = note(error, f"{type(work).__name__} failed")
        return Outcome(began, self._clock(), done, fault)

    def read_kept(self, model: int, entry: int, tokens: Sequence[int]) -> Outcome:
        """Read these tokens and keep their KV cache as `entry`: what a replay does in place of
        reading it from disk."""
        began = self._clock()
        prompt = self._find(model)[0].read_kept(entry, tokens)
        return Outcome(began, self._clock(), Restored(over=True, prompt=prompt))

    def _do(self, work: Work) -> tuple[Done | None, Fault | None]:
        match work:
            case Decode():
                return self._find(work.model)[0].decode(work)
            case LoadSlice():
                return self._load(work), None
            case AttachSlice():
                return self._attach(work), None
            case AnswerQuestion():
                return self._answer(work.question), None
            case UnloadModel():
                self._unload(work.model)
                return None, None
            case Reset():
                self._models[work.model].reset()
                return None, None
            case AdmitTexts() | EmbedSlice() | ReleaseTexts():
                return self._embed(work), None
            case _:
                return self._change_rows(work), None

    def _change_rows(
        self,
        work: Admit
        | Release
        | Rewind
        | Forget
        | Read
        | StorePrompts
        | FetchPrompt
        | RestorePrompt
        | ReadDraft
        | DetachSAE
        | WatchFeatures,
    ) -> Done | None:
        text, steerer = self._find(work.model)
        match work:
            case Admit():
                return self._admit(text, work)
            case Release():
                return text.release(work.rows)
            case Rewind():
                text.rewind(work.rows)
            case Forget():
                text.forget(work.entries, draft=work.draft, spare=work.spare)
            case Read():
                return text.read(work.spans)
            case StorePrompts():
                return text.store(work.entries)
            case FetchPrompt():
                text.fetch(work)
            case RestorePrompt():
                return text.restore(work)
            case ReadDraft():
                return text.read_draft(work.row, work.begin, work.tokens)
            case DetachSAE():
                steerer.detach()
                text.replan()
                release_memory()
            case WatchFeatures():
                steerer.watch(work)
                text.replan()
                return Watched(steerer.watches)
            case _:
                assert_never(work)
        return None

    def _admit(self, text: TextRunner, work: Admit) -> Admitted:
        admitted = text.admit(work.jobs, partial(self._make_constraint, work.client))
        if self._ranks is not None and any(job.grammar is not None for job in work.jobs):
            # A grammar may fail on rank 0, which alone has it: then no rank takes the row.
            failed = b"".join(each.row.to_bytes(8) for each in admitted.failures)
            rows = self._ranks.exchange(failed)[0]
            text.release([Leave(row) for (row,) in iter_unpack("!Q", rows)])
        return admitted

    def _make_constraint(self, client: int, job: Job) -> Constraint | None:
        """The constraint of a job that has a grammar. Raises what is wrong with the grammar."""
        if job.grammar is None or (self._ranks is not None and self._ranks.rank > 0):
            return None  # rank 0's tokens are every rank's
        make = self.constraint_makers.get((client, job.model))
        if make is None:
            raise RuntimeError("nothing was sent that makes constraints for this model")
        return make(job.grammar)

    def _find(self, number: int) -> tuple[TextRunner, Steerer]:
        model = self._models[number]
        assert model.text is not None
        assert model.steerer is not None
        return model.text, model.steerer

    def _embed(self, work: AdmitTexts | EmbedSlice | ReleaseTexts) -> Done | None:
        embedder = self._models[work.model].embedder
        match work:
            case AdmitTexts(order=order):
                embedder.admit(order)
            case ReleaseTexts(jobs=jobs):
                embedder.release(jobs)
            case EmbedSlice():
                return embedder.embed(work)
        return None

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
        return min(int(each) for each in self._ranks.exchange(str(own).encode()))
