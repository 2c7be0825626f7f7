"""Loads and attachments under way, done a slice at a time as plans say.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, MutableMapping
from typing import NamedTuple, TypeVar

from mlxsrv.engine.events import Attached
from mlxsrv.engine.faults import survivable
from mlxsrv.engine.free_memory import release_memory
from mlxsrv.engine.loading.load import ResidentModel, load
from mlxsrv.engine.loading.weights import ByteBudget
from mlxsrv.engine.orders import Attach
from mlxsrv.engine.outcomes import AttachStep, LoadStep, Refusal
from mlxsrv.engine.plans import AttachSlice, LoadSlice
from mlxsrv.engine.ranks.in_step import Meet, in_step
from mlxsrv.engine.ranks.rank_group import RankGroup, Split
from mlxsrv.engine.storage.storage import Storage

_log = logging.getLogger("mlxsrv.engine")

T = TypeVar("T")


class _Load(NamedTuple):
    slices: Generator[Meet | None, None, ResidentModel]
    budget: ByteBudget


class _Attachment(NamedTuple):
    model: int
    slices: Generator[Meet | None, None, Attached]


class Loader:
    """Does the slices of loads and attachments.

    Args:
        models: those in memory, by number. A model is put there when its load is done.
        storage: prompts on disk; none are stored, unless given.
        ranks: those that each load their part; None: this process is alone.
    """

    def __init__(
        self,
        models: MutableMapping[int, ResidentModel],
        storage: Storage | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self._models = models
        self._ranks = ranks
        self._storage = storage
        self._loads: dict[int, _Load] = {}  # by model
        self._attachments: dict[int, _Attachment] = {}  # by their own numbers

    def load(self, work: LoadSlice) -> LoadStep:
        """Do one slice of a load. One that fails is over, and its step says why."""
        if work.order is not None:
            budget = ByteBudget()
            slices = load(
                work.order, budget, self._models.values, self._storage, work.model, self._ranks
            )
            self._loads[work.model] = _Load(self._keep_in_step(slices), budget)
        slices, budget = self._loads[work.model]
        budget.begin_slice(work.limit)
        step = self._run_load(work.model, slices, budget)
        if step.loaded is not None or step.refusal is not None:
            del self._loads[work.model]
            release_memory()
        return step

    def _run_load(
        self, number: int, slices: Generator[Meet | None, None, ResidentModel], budget: ByteBudget
    ) -> LoadStep:
        try:
            next(slices)
        except StopIteration as done:
            model: ResidentModel = done.value
        except BaseException as error:
            if not survivable(error):
                raise
            _log.debug("load failed", exc_info=True)
            # The reason alone: the error's traceback would keep the arrays that were read.
            return LoadStep(refusal=Refusal("model not loaded", _reason(error)))
        else:
            return LoadStep(bytes=budget.read)
        self._models[number] = model
        return LoadStep(
            bytes=budget.read,
            loaded=model.loaded,
            text=None if model.text is None else model.text.facts,
            embed=model.embedder.facts,
        )

    def attach(self, work: AttachSlice) -> AttachStep:
        """Do one slice of an attachment. One that fails is over, and its step says why."""
        if work.model not in self._models:
            self._attachments.pop(work.number, None)
            return AttachStep(refusal=Refusal("model not loaded", "its model is not loaded"))
        if work.order is not None:
            slices = _attach(self._models[work.model], work.order, self._ranks)
            self._attachments[work.number] = _Attachment(work.model, self._keep_in_step(slices))
        step = _run_attachment(self._attachments[work.number].slices)
        if step.attached is not None or step.refusal is not None:
            del self._attachments[work.number]
            release_memory()
        return step

    def _keep_in_step(
        self, slices: Generator[Meet | None, None, T]
    ) -> Generator[Meet | None, None, T]:
        return slices if self._ranks is None else in_step(slices, self._ranks)

    def abandon(self, model: int) -> None:
        """Give up what is under way of a model, whether it is loaded or not."""
        self._loads.pop(model, None)
        for number in [n for n, each in self._attachments.items() if each.model == model]:
            del self._attachments[number]


def _attach(
    model: ResidentModel, order: Attach, ranks: RankGroup | None
) -> Generator[None, None, Attached]:
    """Raises ValueError with the reason why the SAE cannot be used."""
    if model.steerer is None:
        raise ValueError("this model does not generate text")
    if ranks is not None and ranks.split is Split.PIPELINE:
        raise ValueError("a rank has some of the layers only (--parallel pipeline)")
    return (yield from model.steerer.attach(order))


def _run_attachment(slices: Generator[Meet | None, None, Attached]) -> AttachStep:
    try:
        next(slices)
    except StopIteration as done:
        return AttachStep(attached=done.value)
    except Exception as error:
        _log.debug("attaching an SAE failed", exc_info=True)
        return AttachStep(refusal=Refusal("sae incompatible", _reason(error)))
    return AttachStep()


def _reason(error: BaseException) -> str:
    """The message alone, or the error's type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
