"""A model that is loaded, and the workers that run its jobs a slice at a time.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple, Protocol

from mlxsrv.engine.cache.prompt_cache import PromptCache
from mlxsrv.engine.embedding.embedder import Embedder
from mlxsrv.engine.events import Attached, Event, Loaded, Progress, Token
from mlxsrv.engine.execution.batch import Batch
from mlxsrv.engine.faults import describe
from mlxsrv.engine.loading.weights import FileArrays
from mlxsrv.engine.orders import Attach, Watch
from mlxsrv.engine.steering.steerer import Steerer

_log = logging.getLogger("mlxsrv.engine")


class Worker(Protocol):
    """Reads what jobs of one kind ask of one model, a slice at a time: prompts for a Batch, which
    generates text, or texts for an Embedder, which makes vectors."""

    @property
    def idle(self) -> bool:
        """Whether it has no jobs."""

    @property
    def pending(self) -> bool:
        """Whether prompts or texts wait to be read, or are being read."""

    def prefill(self, *, beside: bool) -> list[Event]:
        """Read one slice of prompts or texts; `beside`: other models have streams."""

    def take_progress(self) -> list[int]:
        """The jobs that a slice since the last call has brought on without an event."""

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Forget these jobs; ids of other workers' jobs are ignored."""

    def fail(self, reason: str) -> list[Event]:
        """End all jobs."""

    def statistics(self) -> dict[str, int]: ...


class TextGeneration(NamedTuple):
    """The parts of a model that generates text; an encoder has none of them."""

    batch: Batch
    prompt_cache: PromptCache
    steerer: Steerer


class ResidentModel:
    """A model in memory.

    Args:
        loaded: the answer to its client's order.
        files: the arrays of its files; models that are loaded later from the same files share them.
        embedder: makes vectors of texts.
        generation: None for an encoder.
    """

    def __init__(
        self,
        loaded: Loaded,
        files: Sequence[FileArrays],
        embedder: Embedder,
        generation: TextGeneration | None = None,
    ) -> None:
        self.loaded = loaded
        self.files = files
        self.embedder = embedder
        self._generation = generation
        self._workers: tuple[Worker, ...] = (embedder,)
        if generation is not None:
            self._workers = (generation.batch, embedder)
        self._turn = 0
        self._tokens = 0

    @property
    def generation(self) -> TextGeneration:
        """Raises ValueError for an encoder."""
        if self._generation is None:
            raise ValueError("this model does not generate text")
        return self._generation

    @property
    def batch(self) -> Batch:
        """Raises ValueError for an encoder."""
        return self.generation.batch

    # Steering.

    def attach(self, order: Attach) -> Generator[None, None, Attached]:
        """Raises ValueError with the reason why the SAE cannot be used."""
        return (yield from self.generation.steerer.attach(order))

    def detach(self) -> None:
        self.generation.steerer.detach()
        self.batch.replan()

    def watch(self, order: Watch) -> None:
        self.generation.steerer.watch(order)
        self.batch.replan()

    # Slices.

    @property
    def idle(self) -> bool:
        return all(worker.idle for worker in self._workers)

    @property
    def streaming(self) -> bool:
        """Whether rows are being decoded."""
        return self._generation is not None and self._generation.batch.streaming

    def decode(self) -> list[Event]:
        """One decode step, if it generates text."""
        if self._generation is None:
            return []
        batch = self._generation.batch
        try:
            events = batch.decode()
        except Exception as error:
            return _fail(batch, error)
        self._tokens += sum(type(event) is Token for event in events)
        return events

    def prefill(self, *, beside: bool) -> list[Event]:
        """One slice of prompts, and one of texts to embed; `beside`: other models have streams."""
        events: list[Event] = []
        for worker in self._choose_workers(beside):
            try:
                events += worker.prefill(beside=beside)
            except Exception as error:
                events += _fail(worker, error)
        for worker in self._workers:
            events += [Progress(job) for job in worker.take_progress()]
        return events

    def _choose_workers(self, beside: bool) -> Sequence[Worker]:
        """All. But while there are streams, prompts and texts take turns: a slice of each may fill
        the streams' gap."""
        pending = [worker for worker in self._workers if worker.pending]
        if len(pending) < 2 or not (beside or self.streaming):
            return self._workers
        self._turn = (self._turn + 1) % len(pending)
        return (pending[self._turn],)

    def cancel(self, job_ids: Iterable[int]) -> None:
        for worker in self._workers:
            worker.cancel(job_ids)

    def fail(self, reason: str) -> list[Event]:
        """End all jobs."""
        return [event for worker in self._workers for event in worker.fail(reason)]

    def statistics(self) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for worker in reversed(self._workers):  # the embedder first, as `/health` lists them
            numbers |= worker.statistics()
        if self._generation is not None:
            prompt_cache = self._generation.prompt_cache
            numbers["prompt_cache_bytes"] = prompt_cache.nbytes
            numbers["prompt_cache_entries"] = len(prompt_cache)
        return numbers | {"tokens": self._tokens}


def _fail(worker: Worker, error: Exception) -> list[Event]:
    """End all of a worker's jobs, and no other worker's. A worker itself finds out which job an
    error belongs to, so this is for an error that has escaped it."""
    _log.error("a batch failed", exc_info=error)
    return worker.fail(f"{describe(error)} in a step")
