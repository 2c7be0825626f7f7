"""Reading a model's weights: mapped at once, then read into memory a slice at a time.

Models of the same files share their arrays, not copies: an adapter that stands beside
the weights costs its own bytes only, and a draft model that is also served costs nothing.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_adapters, load_config, load_model

from mlxsrv.engine.embedding.encoders.load import load_encoder
from mlxsrv.engine.execution.facts import weights
from mlxsrv.engine.faults import describe_error
from mlxsrv.engine.patches.openblas import bind_openblas
from mlxsrv.engine.ranks.rank_group import RankGroup

_log = logging.getLogger("mlxsrv.engine")

FileStamps = frozenset[tuple[str, int, int]]
"""The files of a model: path, size, and time of change in nanoseconds."""


class ByteBudget:
    """A count of bytes: those that the slice under way is to read, and those that it has read.

    The Loader begins each slice, and the generator of the load reads.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.read = 0

    def begin_slice(self, limit: int) -> None:
        """Begin a slice that is to read so many bytes."""
        self.limit = limit
        self.read = 0


class FileArrays:
    """Arrays as they come from a folder's files; other models of these files may use them."""

    def __init__(self, stamps: FileStamps, model: Any) -> None:
        self.stamps = stamps
        self.arrays = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))

    @property
    def ids(self) -> set[int]:
        return {id(array) for _, array in self.arrays}

    def keep(self, ids: Container[int]) -> None:
        """Forget all other arrays."""
        self.arrays = [(name, array) for name, array in self.arrays if id(array) in ids]


class MappedModel(NamedTuple):
    """A model whose arrays are not read yet, except those that another model has read."""

    model: Any
    files: FileArrays
    shared: set[int]
    """`id` of the arrays that another model has read."""


class WeightReader:
    """Reads the models of one load: the model itself, and its draft model.

    Args:
        budget: how much a slice reads. An array is read whole, so it may be more.
        resident: gives the arrays of the models that are in memory at the moment.
        trust_remote_code: whether code that comes with a model may run.
        ranks: those that each read their part; None: this process is alone.

    Attributes:
        bytes: the size of all arrays of the load.
        shared: how many of these bytes were in memory before.
        files: the arrays of each folder that was read.
    """

    def __init__(
        self,
        budget: ByteBudget,
        resident: Callable[[], Iterable[FileArrays]],
        *,
        trust_remote_code: bool,
        ranks: RankGroup | None = None,
    ) -> None:
        self.bytes = 0
        self.shared = 0
        self.files: list[FileArrays] = []
        self._budget = budget
        self._resident = resident
        self._trust_remote_code = trust_remote_code
        self._ranks = ranks

    def map(
        self, path: str, adapter: str | None = None, *, encoder: bool = False
    ) -> Generator[None, None, MappedModel]:
        """Build the model in folder `path`, with the adapter in folder `adapter` on it."""
        folder = Path(path)
        model = load_encoder(folder) if encoder else self._map_decoder(folder)
        if self._ranks is not None:
            self._ranks.divide(model, load_config(folder))
        yield
        lay_out_weights(model)
        stamps = stamp_files(folder)
        there = self._find(stamps)
        model.load_weights(list(there.items()), strict=False)
        files = FileArrays(stamps, model)
        if adapter is not None:
            yield
            _put_on(adapter, model)
            # A full fine-tune puts arrays of its own in the place of the base's.
            lay_out_weights(model, done=files.ids)
            files.keep({id(array) for array in weights(model)})
        # Layers are made with random weights that nobody reads, each of a key split off the one
        # before. Unless the last key is evaluated, the chain of keys grows with every load.
        mx.eval(mx.random.state)
        return MappedModel(model, files, {id(array) for array in there.values()})

    def _map_decoder(self, folder: Path) -> Any:
        try:
            return self._map_by(folder, find_classes)
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

    def _find(self, stamps: FileStamps) -> dict[str, mx.array]:
        """Arrays of these files that are in memory, by name."""
        return {
            name: array
            for files in (*self._resident(), *self.files)
            if files.stamps == stamps
            for name, array in files.arrays
        }

    def read(self, mapped: MappedModel) -> Generator[None, None, None]:
        """Read the arrays that no other model has read, yielding before, between and after slices.
        So a slice that reads does nothing else, and its time is that of the reading."""
        arrays = {id(array): array for array in weights(mapped.model)}
        self.files.append(mapped.files)
        self.bytes += sum(array.nbytes for array in arrays.values())
        self.shared += sum(array.nbytes for key, array in arrays.items() if key in mapped.shared)
        yield
        yield from self._read(array for key, array in arrays.items() if key not in mapped.shared)

    def _read(self, arrays: Iterable[mx.array]) -> Generator[None, None, None]:
        pending: list[mx.array] = []
        for array in arrays:
            pending.append(array)
            self._budget.read += array.nbytes
            if self._budget.read >= self._budget.limit:
                mx.eval(pending)
                pending = []
                yield
        mx.eval(pending)
        yield


def import_model_code(path: str) -> None:
    """Import mlx-lm's code for the model in folder `path`. Errors are left to its load."""
    try:
        find_classes(load_config(Path(path)))
    except Exception:
        _log.debug("no code for the model in %s", path, exc_info=True)


def find_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes for a decoder.

    Raises ImportError where their import would end the process, as OLMo's does without a package.
    """
    try:
        classes: tuple[Any, Any] = _get_classes(config)
    except SystemExit as error:
        kind = config.get("model_type")
        reason = f"mlx-lm's code for {kind} needs a package that is not installed"
        raise ImportError(reason) from error
    return classes


def headless_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes for a decoder that was saved without its output head.

    Embedding models are, for example Qwen3-Embedding: the names of their weights begin inside the
    model, and the head that the config promises is missing. The embedding's weights take its place.
    """
    model_class, arguments = find_classes(config)

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


def stamp_files(folder: Path) -> FileStamps:
    """The files that make a model. Two models with different stamps share nothing."""
    files = [*folder.glob("model*.safetensors"), *folder.glob("*config.json")]
    stats = [(file.resolve(), file.stat()) for file in files]
    return frozenset((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def lay_out_weights(model: Any, done: Container[int] = ()) -> None:
    """Prepare a model's float32 weights for fast multiplication, where the CPU is the device.

    With OpenBLAS installed there is nothing to prepare. Without it, weights of linear layers are
    kept by columns. Shapes and results stay as they are, to the bit: MLX multiplies by the
    transposed weight, and the reference BLAS of its Linux wheels does so 1.6 to 1.9 times as fast
    if that is contiguous, for it then adds up many columns at a time instead of one dot product
    after the other. OpenBLAS is slower with such weights.

    Args:
        model: any of MLX's modules; its weights are replaced in place.
        done: `id` of weights that are laid out already.
    """
    if mx.default_device() != mx.Device(mx.cpu) or bind_openblas():
        return
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.weight.dtype != mx.float32:
            continue
        if id(layer.weight) not in done:
            layer.weight = mx.contiguous(layer.weight.T).T


def _put_on(adapter: str, model: Any) -> None:
    """Put the LoRA adapter in folder `adapter` on the model. Reads JSON and safetensors only."""
    try:
        load_adapters(model, adapter)
    except Exception as error:
        raise ValueError(f"its adapter cannot be used: {describe_error(error)}") from error
    model.eval()  # without dropout
