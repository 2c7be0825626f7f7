"""Loading a model: its weights, an adapter, a draft model, in slices between decode steps.

- Weights are mapped, then brought into memory a slice at a time; how much a slice takes is learnt
  from the slices before, so that streams of other models never wait long.
- Models of the same files share their arrays, not copies: an adapter that stands beside the
  weights costs its own bytes only, and a draft model that is also served costs nothing.
- A model is warmed up before it is said to be there.

Used on the device thread only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten
from mlx_lm.utils import (
    _get_classes,
    load_adapters,
    load_config,
    load_model,
    maybe_set_recommended_wired_limit,
)

from mlxsrv.engine.cache.prompt_cache import PromptCache
from mlxsrv.engine.cache.row_caches import Caches, choose_caches
from mlxsrv.engine.embedding.embedder import DecoderRunner, Embedder, EncoderRunner, Runner
from mlxsrv.engine.embedding.encoders.load import load_encoder
from mlxsrv.engine.execution.batch import Batch, weights
from mlxsrv.engine.execution.prefill import try_padding
from mlxsrv.engine.execution.speculation import check_draft, find_obstacle
from mlxsrv.engine.faults import describe
from mlxsrv.engine.patches.blas import bind_openblas
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.steerer import Steerer, fit_vectors
from mlxsrv.events import (
    Attach,
    Attached,
    Constraint,
    Embed,
    Event,
    Failed,
    Job,
    Load,
    Loaded,
    Progress,
    Report,
    Sampling,
    Token,
    Watch,
)
from mlxsrv.formats.encoders import is_encoder
from mlxsrv.formats.json_files import read_object

_log = logging.getLogger("mlxsrv.engine")

Files = frozenset[tuple[str, int, int]]

_FIRST_SLICE = 16 * 1024 * 1024  # bytes
_LEAST_SLICE = 1024 * 1024
_MOST_SLICE = 256 * 1024 * 1024


class Base:
    """Arrays as they come from a folder's files, which other models of these files may use."""

    def __init__(self, files: Files, model: Any) -> None:
        self.files = files
        self.arrays = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))

    @property
    def ids(self) -> set[int]:
        return {id(array) for _, array in self.arrays}

    def keep(self, ids: Container[int]) -> None:
        """Forget all other arrays."""
        self.arrays = [(name, array) for name, array in self.arrays if id(array) in ids]


class Resident:
    """A model that is loaded: what embeds, and the batch where it generates text, too."""

    def __init__(
        self,
        embedder: Embedder,
        bases: Sequence[Base],
        loaded: Loaded,
        batch: Batch | None = None,
        cached: PromptCache | None = None,
        steerer: Steerer | None = None,
    ) -> None:
        self.embedder = embedder
        self.bases = bases
        self.loaded = loaded
        self._batch = batch
        self._cached = cached
        self._steerer = steerer
        self._tokens = 0
        self._texts_turn = False

    @property
    def batch(self) -> Batch:
        """Raises ValueError for an encoder."""
        if self._batch is None:
            raise ValueError("this model does not generate text")
        return self._batch

    @property
    def idle(self) -> bool:
        return self.embedder.idle and (self._batch is None or self._batch.idle)

    @property
    def streaming(self) -> bool:
        return self._batch is not None and self._batch.streaming

    def submit(self, job: Job, constraint: Constraint | None) -> list[Event]:
        if self._batch is None:
            return [Failed(job.id, "this model does not generate text")]
        return self._batch.submit(job, constraint)

    def embed(self, command: Embed) -> list[Event]:
        return self.embedder.submit(command)

    def attach(self, command: Attach) -> Generator[None, None, Attached]:
        """Raises ValueError with the reason why the SAE cannot be used."""
        if self._steerer is None:
            raise ValueError("this model does not generate text")
        return (yield from self._steerer.attach(command))

    def detach(self) -> None:
        if self._steerer is not None and self._batch is not None:
            self._steerer.detach()
            self._batch.replan()

    def watch(self, command: Watch) -> None:
        if self._steerer is not None and self._batch is not None:
            self._steerer.watch(command)
            self._batch.replan()

    def cancel(self, job_ids: Iterable[int]) -> None:
        self.embedder.cancel(job_ids)
        if self._batch is not None:
            self._batch.cancel(job_ids)

    def fail(self, reason: str) -> list[Event]:
        """End all jobs."""
        return self.fail_batch(reason) + self.embedder.fail(reason)

    def fail_batch(self, reason: str) -> list[Event]:
        return [] if self._batch is None else self._batch.fail(reason)

    def decode(self) -> list[Event]:
        """One step of the batch."""
        if self._batch is None:
            return []
        events = self._batch.decode()
        self._tokens += sum(type(event) is Token for event in events)
        return events

    def read(self, *, beside: bool) -> list[Event]:
        """One slice of prompts, and one of texts to embed; `beside`: other models have streams.

        While there are streams the two take turns, for each may fill their gap.
        """
        # The embedder first: it is idle nearly always, and this is asked at every step.
        if not self.embedder.idle and (beside or self.streaming) and self._asked:
            self._texts_turn = not self._texts_turn
            return self._embed(beside) if self._texts_turn else self._prefill(beside)
        return self._prefill(beside) + self._embed(beside)

    def progress(self) -> list[Event]:
        """What is told of slices that completed nothing."""
        jobs = [] if self.embedder.idle else self.embedder.take_progress()
        if self._batch is not None:
            jobs += self._batch.take_progress()
        return [Progress(job) for job in jobs]

    @property
    def _asked(self) -> int:
        """Prompts that wait or are being read."""
        numbers = {} if self._batch is None else self._batch.statistics()
        return numbers.get("reading", 0) + numbers.get("waiting", 0)

    def _prefill(self, beside: bool) -> list[Event]:
        return [] if self._batch is None else self._batch.prefill(beside=beside)

    def _embed(self, beside: bool) -> list[Event]:
        return self.embedder.step(decoding=self.streaming, beside=beside)

    def statistics(self) -> dict[str, int]:
        numbers = self.embedder.statistics()
        if self._batch is not None:
            numbers |= self._batch.statistics()
        if self._cached is not None:
            numbers["prompt_cache_bytes"] = self._cached.nbytes
            numbers["prompt_cache_entries"] = len(self._cached)
        return numbers | {"tokens": self._tokens}


def load(
    command: Load, others: Callable[[], Sequence[Resident]]
) -> Generator[None, None, Resident]:
    """Load a model, yielding between slices. `others` tells what is loaded at the moment.

    Raises what mlx-lm raises on files that it cannot use.
    """
    # With nothing under way: the limit must not change during an asynchronous evaluation.
    mx.synchronize()
    maybe_set_recommended_wired_limit()
    reader = Reader(command.max_gap / 2, others, trust_remote_code=command.trust_remote_code)
    if is_encoder(read_object(Path(command.path) / "config.json")):
        return (yield from _load_encoder(command, reader))
    mapped = yield from reader.map(command.path, command.adapter)
    yield from reader.bring(mapped)
    model = mapped.model
    caches = yield from choose_caches(model, command.max_kv_size, command.kv_bits)
    yield from warm_up(model, caches)
    draft, notes = None, caches.notes
    if command.draft is not None:
        draft, obstacle = yield from _load_draft(command.draft, reader, model, caches)
        notes += (f"draft_model: {obstacle}",) if obstacle is not None else ()
    cached = PromptCache(_prompt_cache_bytes(command))
    pace = Pace(command.prefill_chunk, command.max_gap)
    vectors, unfit = fit_vectors(model, command.vectors)
    steerer = Steerer(model, vectors)
    batch = Batch(
        model,
        max_rows=command.max_rows,
        pace=pace,
        cached=cached,
        caches=caches,
        draft=draft,
        steerer=steerer,
    )
    loaded = Loaded(
        command.model,
        batch.batched,
        batch.cuts,
        bytes=reader.bytes,
        shared=reader.shared,
        notes=notes + unfit,
        vectors=tuple(vectors),
    )
    embedder = _make_embedder(command, DecoderRunner(model), pace)
    return Resident(embedder, reader.bases, loaded, batch, cached, steerer)


def _load_encoder(command: Load, reader: Reader) -> Generator[None, None, Resident]:
    """Load an encoder. Raises ValueError where it is not run, or is to have an adapter."""
    if command.adapter is not None:
        raise ValueError("its adapter cannot be used: it is an encoder")
    mapped = yield from reader.map(command.path, encoder=True)
    yield from reader.bring(mapped)
    runner = EncoderRunner(mapped.model)
    yield from warm_up_encoder(runner)
    notes = ("draft_model: not with an encoder, so it is not used",) if command.draft else ()
    loaded = Loaded(
        command.model, True, True, bytes=reader.bytes, shared=reader.shared, notes=notes
    )
    pace = Pace(command.prefill_chunk, command.max_gap)
    return Resident(_make_embedder(command, runner, pace), reader.bases, loaded)


def _make_embedder(command: Load, runner: Runner, pace: Pace) -> Embedder:
    return Embedder(runner, Path(command.path), command.model, pace)


def _load_draft(
    path: str, reader: Reader, model: Any, caches: Caches
) -> Generator[None, None, tuple[Any, str | None]]:
    """The draft model in folder `path`, or None and why it is not to be had.

    Raises ValueError if its vocabulary is not the model's.
    """
    if caches.quantized or caches.bounded:
        setting = "kv_bits" if caches.quantized else "max_kv_size"
        return None, f"not with {setting}, so it is not used"
    mapped = yield from reader.map(path)
    check_draft(model, mapped.model)
    if (obstacle := find_obstacle(model, mapped.model)) is not None:
        return None, obstacle
    yield from reader.bring(mapped)
    yield from warm_up(mapped.model, Caches(mapped.model))
    return mapped.model, None


class Mapped(NamedTuple):
    """A model whose arrays are not read yet, but for those that another has read."""

    model: Any
    base: Base
    shared: set[int]  # ids


class Reader:
    """Reads the models of one load, in slices of about so many seconds.

    `bytes` are those of all arrays that were brought, `shared` of those that were there.
    """

    def __init__(
        self,
        seconds: float,
        others: Callable[[], Sequence[Resident]],
        *,
        trust_remote_code: bool,
    ) -> None:
        self.bytes = 0
        self.shared = 0
        self.bases: list[Base] = []
        self._seconds = seconds
        self._slice = _FIRST_SLICE
        self._others = others
        self._trust_remote_code = trust_remote_code

    def map(
        self, path: str, adapter: str | None = None, *, encoder: bool = False
    ) -> Generator[None, None, Mapped]:
        """Build the model in folder `path`, with the adapter in folder `adapter` on it."""
        folder = Path(path)
        model = load_encoder(folder) if encoder else self._map_decoder(folder)
        yield
        lay_out(model)
        files = list_files(folder)
        there = self._find(files)
        model.load_weights(list(there.items()), strict=False)
        base = Base(files, model)
        if adapter is not None:
            yield
            _put_on(adapter, model)
            # A full fine-tune puts arrays of its own in the place of the base's.
            lay_out(model, done=base.ids)
            base.keep({id(array) for array in weights(model)})
        # Layers are made with random weights that nobody sees, each of a key split off the one
        # before: unless somebody asks for the last, the chain of them grows with every load.
        mx.eval(mx.random.state)
        return Mapped(model, base, {id(array) for array in there.values()})

    def _map_decoder(self, folder: Path) -> Any:
        try:
            return self._map_by(folder, _get_classes)
        except ValueError as error:
            if " parameters" not in str(error):
                raise
            try:
                return self._map_by(folder, headless_classes)
            except ValueError:
                raise error from None

    def _map_by(self, folder: Path, classes: Callable[[dict[str, Any]], tuple[Any, Any]]) -> Any:
        model, _ = load_model(
            folder,
            lazy=True,
            get_model_classes=classes,
            trust_remote_code=self._trust_remote_code,
        )
        return model

    def _find(self, files: Files) -> dict[str, mx.array]:
        """Arrays of these files that are in memory, by name."""
        bases = [base for other in self._others() for base in other.bases] + self.bases
        return {name: array for base in bases if base.files == files for name, array in base.arrays}

    def bring(self, mapped: Mapped) -> Generator[None, None, None]:
        """Bring what is not there into memory."""
        arrays = {id(array): array for array in weights(mapped.model)}
        self.bases.append(mapped.base)
        self.bytes += sum(array.nbytes for array in arrays.values())
        self.shared += sum(array.nbytes for key, array in arrays.items() if key in mapped.shared)
        yield from self._bring(array for key, array in arrays.items() if key not in mapped.shared)

    def _bring(self, arrays: Iterable[mx.array]) -> Generator[None, None, None]:
        """Bring arrays into memory, a slice at a time."""
        pending: list[mx.array] = []
        size = 0
        for array in arrays:
            pending.append(array)
            size += array.nbytes
            if size >= self._slice:
                self._evaluate(pending, size)
                pending, size = [], 0
                yield
        self._evaluate(pending, size)
        yield

    def _evaluate(self, arrays: Sequence[mx.array], size: int) -> None:
        begun = perf_counter()
        mx.eval(arrays)
        fitting = size * self._seconds / max(perf_counter() - begun, 1e-6)
        # At most doubled: what is in the system's file cache says little of what is not.
        self._slice = max(_LEAST_SLICE, min(int(fitting), 2 * self._slice, _MOST_SLICE))


def headless_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes for a decoder that was saved without its output head.

    Embedding models are, Qwen3-Embedding for one: the names of their weights begin inside the
    model, and where the config says that there is a head none comes. It is then the embedding's.
    """
    model_class, arguments = _get_classes(config)

    class Headless(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            parts = ("model.", "lm_head.")
            weights = {
                name if name.startswith(parts) else f"model.{name}": array
                for name, array in weights.items()
            }
            if hasattr(model_class, "sanitize"):
                weights = super().sanitize(weights)
            if "lm_head" in self and not any(name.startswith("lm_head.") for name in weights):
                weights |= {
                    name.replace("model.embed_tokens", "lm_head", 1): array
                    for name, array in weights.items()
                    if name.startswith("model.embed_tokens.")
                }
            return weights

    return Headless, arguments


def list_files(folder: Path) -> Files:
    """The files that make a model, with size and time of change: another model's if they differ."""
    files = [*folder.glob("model*.safetensors"), *folder.glob("*config.json")]
    stats = [(file.resolve(), file.stat()) for file in files]
    return frozenset((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def _put_on(adapter: str, model: Any) -> None:
    """Put the LoRA adapter in folder `adapter` on the model. Reads JSON and safetensors only."""
    try:
        load_adapters(model, adapter)
    except Exception as error:
        raise ValueError(f"its adapter cannot be used: {describe(error)}") from error
    model.eval()  # without dropout


def lay_out(model: Any, done: Container[int] = ()) -> None:
    """Have the CPU, where it is the device, multiply by the model's float32 weights as fast as it
    can: with OpenBLAS if that is installed. If not, weights of linear layers are kept by columns,
    but for those whose `id` is in `done`.

    With columns shapes and results stay as they are, to the bit. MLX multiplies by the transposed
    weight, and the reference BLAS of its Linux wheels does so 1.6 to 1.9 times as fast if that is
    contiguous: it can then add up columns, many at a time, instead of one dot product after the
    other. OpenBLAS is slower with them.
    """
    if mx.default_device() != mx.Device(mx.cpu) or bind_openblas():
        return
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.weight.dtype != mx.float32:
            continue
        if id(layer.weight) not in done:
            layer.weight = mx.contiguous(layer.weight.T).T


def warm_up(model: Any, caches: Caches) -> Generator[None, None, None]:
    """Run the model once for each shape of work, yielding after each.

    MLX compiles parts of a model on first use, on the CPU back end with a C++ compiler: seconds
    that no request should pay for. It also finds out whether the weights compute at all.

    Raises ValueError if they do not.
    """
    caches.pads = (yield from try_padding(model)) if caches.batched else False
    batch = Batch(model, max_rows=2, pace=Pace(16, 1.0), cached=PromptCache(0), caches=caches)
    for i, temperature in enumerate((0.0, 1.0)):
        sampling = Sampling(temperature=temperature, top_p=0.9)
        batch.submit(Job(i, "", (0, 1, 2), 2, frozenset(), sampling))
    while not batch.idle:
        batch.decode()
        yield
        for event in batch.prefill():
            if isinstance(event, Failed):
                raise ValueError(event.reason)
        yield


def warm_up_encoder(runner: EncoderRunner) -> Generator[None, None, None]:
    """As `warm_up`: a text alone, and one beside a longer one."""
    tokens = mx.array([[0, 1, 2], [0, 0, 0]])
    mask = mx.array([[True, True, True], [True, False, False]])
    for rows in (1, 2):
        hidden = runner.run(tokens[:rows], mask[:rows], [1] * rows if runner.labels else None)
        mx.eval(runner.classify(hidden, mask[:rows]) if runner.labels else hidden)
        yield


def _prompt_cache_bytes(command: Load) -> int:
    """What was asked for, else an eighth of the memory that the device works in."""
    asked = command.prompt_cache_bytes
    return working_memory() // 8 if asked is None else asked


def working_memory() -> int:
    """The bytes of memory that MLX recommends to work in, else of all memory."""
    info = mx.device_info()
    memory = info.get("max_recommended_working_set_size") or info.get("memory_size")
    return int(memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def meet(path: str) -> None:
    """Import the code of the model in folder `path`, if there is one that can be."""
    try:
        _get_classes(load_config(Path(path)))
    except Exception:
        _log.debug("no code for the model in %s", path, exc_info=True)


def take_stock(models: Mapping[str, Resident]) -> Report:
    """What the device's memory and these models hold."""
    return Report(
        mx.get_active_memory(),
        mx.get_cache_memory(),
        mx.get_peak_memory(),
        {name: model.statistics() for name, model in models.items()},
    )
