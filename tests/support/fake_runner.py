"""A runner without a model: it does work items as `FakeDevice` says, and checks that each may be
done.

It stands where the Runner does: `run` takes a work and returns its outcome. Its clock is its own,
and goes on by what work items take.
"""

from __future__ import annotations

import msgspec
import numpy as np

from mlxsrv.engine.events import Attached, Loaded, Report, kv_bytes
from mlxsrv.engine.orders import Attach, GetMemory, ImportModelCode, Job, Load, MakeReport
from mlxsrv.engine.outcomes import (
    Admitted,
    AttachStep,
    DeviceAnswer,
    Done,
    EmbedFacts,
    Fault,
    Kept,
    LoadStep,
    Outcome,
    Refusal,
    TextsRead,
    Watched,
)
from mlxsrv.engine.plans import (
    Admit,
    AnswerQuestion,
    AttachSlice,
    Decode,
    DetachSAE,
    EmbedSlice,
    Forget,
    LoadSlice,
    Read,
    ReadDraft,
    Release,
    Reset,
    Rewind,
    RoundPlan,
    UnloadModel,
    WatchFeatures,
    WorkItem,
)
from mlxsrv.engine.scheduling.scheduler import Scheduler
from tests.support.fake_decoders import IllegalWork, require
from tests.support.fake_device import FakeDevice, Pass
from tests.support.fake_text import FakeText


class FakeTexts:
    """The texts to embed of one model, and how far each is read.

    Args:
        facts: of the model.
        slice: tokens of a pass whose memory is a step's, and does not count.
    """

    def __init__(self, facts: EmbedFacts, slice: int) -> None:
        self._facts = facts
        self._slice = slice
        self._peak = 0
        self._jobs: dict[int, Job] = {}
        self._read: dict[tuple[int, int], int] = {}
        self._long: tuple[int, int] | None = None

    @property
    def empty(self) -> bool:
        return not self._jobs

    def has(self, job: int) -> bool:
        return job in self._jobs

    def admit(self, job: Job) -> None:
        require(job.id not in self._jobs, "job", job.id, "is there already")
        self._jobs[job.id] = job
        self._read |= {(job.id, i): 0 for i in range(len(job.texts))}

    def release(self, job: int) -> None:
        self.rewind(job)
        for i in range(len(self._jobs.pop(job).texts)):
            del self._read[job, i]

    def rewind(self, job: int) -> None:
        if self._long is not None and self._long[0] == job:
            self._read[self._long], self._long = 0, None

    def passes(self, work: EmbedSlice) -> list[Pass]:
        longest = max(text.end - text.begin for text in work.texts)
        return [Pass(len(work.texts), longest, work.texts[0].begin)]

    def _note_peak(self, work: EmbedSlice) -> None:
        """Note what a work takes: the pass, and what there is of a text in several slices."""
        [only], text = self.passes(work), work.texts[0]
        beyond = max(only.rows * only.tokens - self._slice, 0)
        # The tokens of a part attend to all before them as well.
        self._peak = self._facts.pass_bytes(beyond, max(each.end for each in work.texts))
        if (text.begin, text.end) != (0, len(self._jobs[text.job].texts[text.index])):
            self._peak += self._measure(text.end)

    def _measure(self, tokens: int) -> int:
        cache = kv_bytes(self._facts.kv_costs, tokens)
        return cache + self._facts.hidden_bytes * tokens

    def take_peak(self) -> int:
        """Bytes that were taken while the last work was done."""
        held = 0 if self._long is None else self._measure(self._read[self._long])
        peak, self._peak = max(self._peak, held), 0
        return peak

    def read(self, work: EmbedSlice, fault: Fault | None) -> TextsRead | None:
        require(work.texts, "a slice without texts")
        self._note_peak(work)
        for text in work.texts:
            require(text.job in self._jobs, "job", text.job, "is not there")
            place, length = (text.job, text.index), len(self._jobs[text.job].texts[text.index])
            require(self._read[place] == text.begin < text.end <= length, "a gap in a text")
            if (text.begin, text.end) != (0, length):
                require(len(work.texts) == 1 and self._facts.slices, "a part beside other texts")
                require(text.begin == 0 or self._long == place, "two long texts at once")
                self._long = place if text.end < length else None
            self._read[place] = text.end
        if fault is not None:
            return None
        for job in work.completes:
            sizes = list(map(len, self._jobs[job].texts))
            done = [self._read[job, i] for i in range(len(sizes))]
            require(done == sizes, "job", job, "is not complete")
        vectors = {
            job: np.zeros((len(self._jobs[job].texts), 2), np.float32) for job in work.completes
        }
        [only] = self.passes(work)
        return TextsRead(only.rows * only.tokens, vectors)


class _FakeModel:
    """One model, and how many slices are left of its load."""

    def __init__(self, order: Load, device: FakeDevice) -> None:
        self.order = order
        self.left = device.load_slices
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forget all rows, texts and kept prompts."""
        order, device = self.order, self._device
        self.texts = FakeTexts(device.embed, order.prefill_chunk)
        self.text: FakeText | None = None
        if device.text is not None:
            self.text = FakeText(
                device.text, device, max_rows=order.max_rows, prefill_chunk=order.prefill_chunk
            )

    @property
    def rows(self) -> FakeText:
        if self.text is None:
            raise IllegalWork("this model does not generate text")
        return self.text

    def admit(self, work: Admit) -> Admitted:
        for job in work.jobs:
            if job.texts:
                self.texts.admit(job)
        prompts = tuple(job for job in work.jobs if not job.texts)
        replaced = msgspec.structs.replace(work, jobs=prompts)
        return self.rows.admit(replaced) if prompts else Admitted()

    def release(self, work: Release, fault: Fault | None) -> Kept | None:
        embedded = [freed for freed in work.rows if self.texts.has(freed.row)]
        for freed in embedded:
            self.texts.release(freed.row)
        rows = tuple(freed for freed in work.rows if freed not in embedded)
        replaced = msgspec.structs.replace(work, rows=rows)
        return self.rows.release(replaced, fault) if rows else Kept()

    def rewind(self, work: Rewind) -> None:
        embedded = [row for row in work.rows if self.texts.has(row)]
        for row in embedded:
            self.texts.rewind(row)
        rows = tuple(row for row in work.rows if row not in embedded)
        if rows:
            self.rows.rewind(msgspec.structs.replace(work, rows=rows))


class FakeRunner:
    """Does work items for all models.

    Args:
        device: what comes of work items.
        now: the clock's first reading, in seconds.

    Attributes:
        items: work items that were done, in their order, while `record` is set.
        budget: bytes that the KV caches of all models may take.
        most: the most that they have taken.
    """

    def __init__(self, device: FakeDevice | None = None, now: float = 1.0) -> None:
        self.device = FakeDevice() if device is None else device
        self.now = now
        self.record = False
        self.items: list[WorkItem] = []
        self.budget: int | None = None
        self.most = 0
        self._loading: dict[int, _FakeModel] = {}
        self._models: dict[int, _FakeModel] = {}
        self._attachments: dict[int, tuple[Attach, int]] = {}
        self._sliced: set[str] = set()  # folders of loads, in this round

    @property
    def empty(self) -> bool:
        """Whether no rows and no texts are left."""
        models = self._models.values()
        return all(m.texts.empty and (m.text is None or m.text.empty) for m in models)

    @property
    def models(self) -> list[int]:
        """The numbers of the models that are there, or on their way."""
        return [*self._loading, *self._models]

    def text(self, model: int) -> FakeText:
        return self._models[model].rows

    def run_round(self, scheduler: Scheduler, plan: RoundPlan) -> None:
        """Do the work items of a plan, and have the scheduler learn what came of each."""
        for work in plan.items:
            scheduler.settle(work, self.run(work))
        self.end_round()

    def end_round(self) -> None:
        self._sliced.clear()
        for model in self._models.values():
            if model.text is not None:
                model.text.end_round()

    def run(self, work: WorkItem) -> Outcome:
        """Do one work.

        Raises:
            IllegalWork: it cannot be done.
        """
        if self.record:
            self.items.append(work)
        began, fault = self.now, self.device.fail(work)
        if isinstance(work, Decode) and self._model(work).rows.lacks_rows(work):
            fault = Fault("the rows of the step are lost")
        if isinstance(work, Read) and self._model(work).rows.lacks_sources(work):
            fault = Fault("the prompt that was to be kept is lost")
        passes: list[Pass] = []
        done: Done | None = None
        match work:
            case Read() | Decode() | ReadDraft() | Admit() | Release() | Rewind() | Forget():
                done = self._change_rows(work, fault, passes)
            case EmbedSlice():
                passes += self._model(work).texts.passes(work)
                done = self._model(work).texts.read(work, fault)
            case LoadSlice():
                done = self._load(work)
            case AttachSlice():
                done = self._attach(work)
            case DetachSAE():
                self._model(work).rows.watched = False
            case WatchFeatures():
                text = self._model(work).rows
                text.watched = bool(work.features or work.top)
                done = Watched(text.watched)
            case Reset():
                self._reset(self._model(work))
            case UnloadModel():
                self._unload(work.model)
            case AnswerQuestion():
                done = self._answer(work)
        self._check_budget(work)
        self.now += self.device.time(work, passes)
        return Outcome(began, self.now, done, fault)

    def _check_budget(self, work: WorkItem) -> None:
        texts = [model.text for model in self._models.values() if model.text is not None]
        taken = sum(text.bytes for text in texts)
        taken += sum(model.texts.take_peak() for model in self._models.values())
        self.most = max(self.most, taken)
        if self.budget is not None:
            require(taken <= self.budget, taken, "bytes of", self.budget, "after", work)

    def _change_rows(
        self,
        work: Read | Decode | ReadDraft | Admit | Release | Rewind | Forget,
        fault: Fault | None,
        passes: list[Pass],
    ) -> Done | None:
        model = self._model(work)
        match work:
            case Admit():
                return model.admit(work)
            case Release():
                return model.release(work, fault)
            case Rewind():
                model.rewind(work)
                return None
        text = model.rows
        match work:
            case Forget():
                text.forget(work)
            case Read():
                passes += text.passes(work.spans)
                return text.read(work, fault)
            case Decode():
                done = text.decode(work, fault, reported=self.device.tells(work))
                passes += text.passes_of_step(work)
                # No step is under way here: it was complete when its work was.
                return msgspec.structs.replace(done, waited=self.now)
            case ReadDraft():
                text.read_draft(work, fault)
        return None

    def _model(self, work: WorkItem) -> _FakeModel:
        if work.model not in self._models:
            raise IllegalWork(f"model {work.model} is not loaded")
        return self._models[work.model]

    def _reset(self, model: _FakeModel) -> None:
        watched = model.text is not None and model.text.watched
        model.reset()
        if model.text is not None:
            model.text.watched = watched

    # Models.

    def _load(self, work: LoadSlice) -> LoadStep:
        if work.order is not None:
            require(work.model not in self.models, "model", work.model, "is there already")
            self._loading[work.model] = _FakeModel(work.order, self.device)
        require(work.model in self._loading, "model", work.model, "is not being loaded")
        model = self._loading[work.model]
        require(model.order.path not in self._sliced, "two loads of one folder at once")
        require(work.limit > 0, "a slice of no bytes")
        self._sliced.add(model.order.path)
        if (reason := self.device.refuse_load(model.order.path)) is not None:
            del self._loading[work.model]
            return LoadStep(refusal=Refusal("model not loaded", reason))
        model.left -= 1
        if model.left > 0:
            return LoadStep(bytes=work.limit)
        self._models[work.model] = self._loading.pop(work.model)
        facts = self.device.text
        return LoadStep(
            bytes=work.limit,
            loaded=Loaded(
                model.order.model,
                batched=facts is not None and facts.batched,
                cuts=facts is not None and facts.cuts,
                bytes=1,
            ),
            text=facts,
            embed=self.device.embed,
        )

    def _attach(self, work: AttachSlice) -> AttachStep:
        assert self._model(work).rows
        if work.order is not None:
            require(work.number not in self._attachments, "this number was given before")
            self._attachments[work.number] = work.order, self.device.load_slices
        require(work.number in self._attachments, "nothing is attached as", work.number)
        order, left = self._attachments[work.number]
        self._attachments[work.number] = order, left - 1
        if (reason := self.device.refuse_load(order.path)) is not None:
            del self._attachments[work.number]
            return AttachStep(refusal=Refusal("sae incompatible", reason))
        return AttachStep(attached=Attached(work.number, 1)) if left <= 1 else AttachStep()

    def _unload(self, model: int) -> None:
        self._models.pop(model, None)
        self._loading.pop(model, None)

    def _answer(self, work: AnswerQuestion) -> DeviceAnswer:
        match work.question:
            case GetMemory():
                return DeviceAnswer(1 << 30)
            case MakeReport():
                return DeviceAnswer(Report(1, 2, 3, {}))
            case ImportModelCode():
                return DeviceAnswer()
