"""A sparse autoencoder in memory: encoding hidden states, decoding, and the features' directions.

- The encoder is kept by feature, as the decoder is, so that a few features' columns are rows.
- All is computed in float32, whatever the hidden states come in.
- What a feature makes of a token depends on no other token, nor on the batch; where a number of
  features is the limit, the choice is made for each token alone.

The formulas are those of SAELens (sae_lens/saes) and of Gemma Scope (arXiv:2408.05147); of topk
those of sparsify, which are the same. Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxsrv.formats.arrays import PIECE_BYTES, read_array
from mlxsrv.formats.sae_files import SAEFile
from mlxsrv.formats.sae_tensors import SAETensor, SAETensorRole, list_sae_tensors, sizes

_LEAST_LENGTH = 1e-8  # of a decoder's row, where activations are counted in it


class Arrays(NamedTuple):
    """All in float32. `encoder` and `decoder` are `(d_sae, d_in)`, biases of `(d_sae)` but for the
    decoder's of `(d_in)`. Gated ones have no threshold, others no magnitude. `lengths` `(d_sae)`
    are those of the decoder's rows, where activations count in them: the encoder is scaled by them
    already, the decoder is as the file has it."""

    encoder: mx.array
    decoder: mx.array
    encoder_bias: mx.array  # a gated one's of the gate
    decoder_bias: mx.array
    threshold: mx.array | None = None
    magnitude_scale: mx.array | None = None
    magnitude_bias: mx.array | None = None
    lengths: mx.array | None = None


class SAE:
    """What `load_sae` makes of files.

    Attributes:
        nbytes: of its arrays.
    """

    def __init__(self, file: SAEFile, arrays: Arrays) -> None:
        self.file = file
        self.nbytes = sum(array.nbytes for array in arrays if array is not None)
        self._arrays = arrays

    def directions(self, features: Sequence[int]) -> mx.array:
        """The decoder's rows of these features as the file has them, `(features, d_in)`.

        Raises IndexError for features that there are not.
        """
        return self._arrays.decoder[self._index(features)]

    def effects(self, features: Sequence[int]) -> mx.array:
        """What an activation of 1 decodes to, for each of these features: `(features, d_in)`.

        Raises IndexError for features that there are not.
        """
        directions, lengths = self.directions(features), self._arrays.lengths
        return directions if lengths is None else directions / lengths[self._index(features), None]

    def _index(self, features: Sequence[int]) -> mx.array:
        if any(not 0 <= feature < self.file.d_sae for feature in features):
            raise IndexError(f"there are {self.file.d_sae} features")  # MLX would read elsewhere
        return mx.array(list(features), dtype=mx.int32)

    def encode(self, hidden: mx.array) -> mx.array:
        """The activations `(..., d_sae)` in float32 of hidden states `(..., d_in)` of any type."""
        return self._activate(self._enter(hidden), self._arrays)

    def activations(self, hidden: mx.array, features: mx.array) -> mx.array:
        """As `encode`, of the features `(m,)` alone: `(..., m)`."""
        return self.probe(features)(hidden)

    def probe(self, features: mx.array) -> Callable[[mx.array], mx.array]:
        """What gives the `activations` of these features, to be used again and again.

        Costs what they cost, unless features compete for being active.
        """
        if self.file.k is not None:
            return lambda hidden: self.encode(hidden)[..., features]
        chosen = Arrays(
            self._arrays.encoder[features],
            self._arrays.decoder,
            self._arrays.encoder_bias[features],
            self._arrays.decoder_bias,
            *(None if array is None else array[features] for array in self._arrays[4:]),
        )
        return lambda hidden: self._activate(self._enter(hidden), chosen)

    def decode(self, activations: mx.array, hidden: mx.array) -> mx.array:
        """What activations `(..., d_sae)` stand for, `(..., d_in)` in float32.

        Where hidden states are normalized before encoding, that is undone with `hidden`, those
        that the activations are of.
        """
        if self._arrays.lengths is not None:
            activations = activations / self._arrays.lengths
        decoded = activations @ self._arrays.decoder + self._arrays.decoder_bias
        hidden = hidden.astype(mx.float32)
        if self.file.normalization == "constant_norm_rescale":
            decoded = decoded / self._rescaling(hidden)
        elif self.file.normalization == "layer_norm":
            mean, deviation = _moments(hidden)
            decoded = decoded * deviation + mean
        return decoded

    def _enter(self, hidden: mx.array) -> mx.array:
        """What the encoder is given."""
        hidden = hidden.astype(mx.float32)
        if self.file.normalization == "constant_norm_rescale":
            hidden = hidden * self._rescaling(hidden)
        elif self.file.normalization == "layer_norm":
            mean, deviation = _moments(hidden)
            hidden = (hidden - mean) / (deviation + 1e-5)
        return hidden - self._arrays.decoder_bias if self.file.subtracts_b_dec else hidden

    def _rescaling(self, hidden: mx.array) -> mx.array:
        """What brings hidden states to the length that is usual, `√d_in`; of zeros nothing does."""
        length = mx.linalg.norm(hidden, axis=-1, keepdims=True)
        return mx.where(length > 0, self.file.d_in**0.5 / length, 1.0)

    def _activate(self, entered: mx.array, arrays: Arrays) -> mx.array:
        projected = entered @ arrays.encoder.T
        before = projected + arrays.encoder_bias
        if arrays.magnitude_scale is not None:
            assert arrays.magnitude_bias is not None
            magnitude = projected * arrays.magnitude_scale + arrays.magnitude_bias
            return mx.where(before > 0, mx.maximum(magnitude, 0), 0)
        if arrays.threshold is not None:
            return mx.where(before > arrays.threshold, mx.maximum(before, 0), 0)
        return mx.maximum(before if self.file.k is None else _keep(before, self.file.k), 0)


def _moments(hidden: mx.array) -> tuple[mx.array, mx.array]:
    """Mean and sample deviation, as PyTorch has it: SAELens is trained with that."""
    mean = hidden.mean(axis=-1, keepdims=True)
    return mean, mx.std(hidden, axis=-1, keepdims=True, ddof=1)


def _keep(values: mx.array, k: int) -> mx.array:
    """The k largest, exactly, whatever is equal; zeros elsewhere."""
    largest = mx.argpartition(-values, kth=k - 1, axis=-1)[..., :k]
    kept = mx.take_along_axis(values, largest, axis=-1)
    return mx.put_along_axis(mx.zeros_like(values), largest, kept, axis=-1)


def load_sae(file: SAEFile) -> Generator[None, None, SAE]:
    """Read an SAE, yielding between slices of at most 16 MiB.

    Raises:
        ValueError: its files are damaged, hold numbers that are not finite, or have changed.
    """
    tensors = list_sae_tensors(file.weights, file.source, file.architecture)
    _check_sizes(file, tensors)
    read: dict[SAETensorRole, mx.array] = {}
    for role, tensor in tensors.items():
        read[role] = yield from _read(file, tensor)
    ones = read.pop("ones", None)
    if ones is not None and not mx.allclose(ones, mx.ones_like(ones)).item():
        raise ValueError("it scales activations by a factor of their own, which is not supported")
    lengths = (yield from _rescale(read)) if file.rescales else None
    arrays = Arrays(
        read["encoder"],
        read["decoder"],
        read["gate_bias"] if file.architecture == "gated" else read["encoder_bias"],
        read["decoder_bias"],
        read.get("threshold"),
        mx.exp(read["magnitude_scale"]) if "magnitude_scale" in read else None,
        read.get("magnitude_bias"),
        lengths,
    )
    mx.eval([array for array in arrays if array is not None])
    return SAE(file, arrays)


def _check_sizes(file: SAEFile, tensors: dict[SAETensorRole, SAETensor]) -> None:
    same = sizes(tensors) == (file.d_in, file.d_sae) and ("threshold" in tensors) == _limited(file)
    if not same:
        raise ValueError(f"{file.weights.name!r} has changed since the server looked at it")


def _limited(file: SAEFile) -> bool:
    return file.architecture == "jumprelu" or (file.architecture == "batch_topk" and file.k is None)


def _read(file: SAEFile, tensor: SAETensor) -> Generator[None, None, mx.array]:
    """The array, by feature; evaluated."""
    pieces = read_array(file.weights, tensor.stored)
    if tensor.role not in ("encoder", "decoder"):
        (piece,) = pieces
        size = file.d_in if tensor.role == "decoder_bias" else file.d_sae
        array = mx.broadcast_to(mx.array(piece.reshape(-1)), (size,))
        array = mx.contiguous(array)
        mx.eval(array)
        yield
        return array
    # Written into, piece by piece: to put pieces together would take the memory twice.
    array = mx.zeros((file.d_sae, file.d_in))
    mx.eval(array)
    done = 0
    for piece in pieces:
        end = done + len(piece)
        if tensor.by_feature:
            array[done:end] = mx.array(piece)
        else:
            array[:, done:end] = mx.array(np.ascontiguousarray(piece.T))
        mx.eval(array)
        done = end
        yield
    return array


def _rescale(read: dict[SAETensorRole, mx.array]) -> Generator[None, None, mx.array]:
    """Scale the encoder by the lengths `(d_sae)` of the decoder's rows, and return these.

    It then gives SAELens's `pre * W_dec.norm(dim=-1)`. The decoder stays as it is, since its rows
    are what steering adds.
    """
    d_sae, d_in = read["decoder"].shape
    step = max(1, PIECE_BYTES // (4 * d_in))
    lengths = []
    for start in range(0, d_sae, step):
        rows = slice(start, start + step)
        length = mx.linalg.norm(read["decoder"][rows], axis=-1)
        lengths.append(mx.maximum(length, _LEAST_LENGTH))
        read["encoder"][rows] = read["encoder"][rows] * lengths[-1][:, None]
        mx.eval(read["encoder"], lengths[-1])
        yield
    whole = mx.concatenate(lengths)
    read["encoder_bias"] = read["encoder_bias"] * whole
    return whole
