"""A sparse autoencoder in memory: encoding hidden states, decoding, and the features' directions.

- The encoder is kept by feature, as the decoder is: a feature is a row of both.
- Everything is computed in float32, whatever the type of the hidden states.
- A feature's activation at a token depends on no other token and on no other row. Where only the k
  highest features are active, they are chosen for each token alone.

The formulas are those of SAELens (sae_lens/saes) and of Gemma Scope (arXiv:2408.05147); of topk
those of sparsify, which are the same. Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxsrv.formats.arrays import PIECE_BYTES, read_array
from mlxsrv.formats.sae_files import SAEFile, SAETensor, SAETensorRole, list_sae_tensors, sizes

_LEAST_LENGTH = 1e-8  # of a decoder's row, where activations are in units of it


class Arrays(NamedTuple):
    """An SAE's arrays, all in float32.

    `encoder` and `decoder` are `(d_sae, d_in)`, `decoder_bias` is `(d_in,)`, the others are
    `(d_sae,)`. A gated SAE has magnitudes and no threshold. `lengths` are the lengths of the
    decoder's rows, where activations are in units of these: the encoder is scaled by them already,
    the decoder is as in the file.
    """

    encoder: mx.array
    decoder: mx.array
    encoder_bias: mx.array  # a gated SAE's: the bias of the gate
    decoder_bias: mx.array
    threshold: mx.array | None = None
    magnitude_scale: mx.array | None = None
    magnitude_bias: mx.array | None = None
    lengths: mx.array | None = None


class SAE:
    """A sparse autoencoder; `load_sae` reads one.

    Attributes:
        file: what its files say.
        nbytes: the size of its arrays.
    """

    def __init__(self, file: SAEFile, arrays: Arrays) -> None:
        self.file = file
        self.nbytes = sum(array.nbytes for array in arrays if array is not None)
        self._arrays = arrays

    def directions(self, features: Sequence[int]) -> mx.array:
        """The decoder's rows of these features as in the file: `(features, d_in)`.

        Raises IndexError for features that do not exist.
        """
        return self._arrays.decoder[self._index(features)]

    def effects(self, features: Sequence[int]) -> mx.array:
        """The vectors that an activation of 1 decodes to, for each feature: `(features, d_in)`.

        Raises IndexError for features that do not exist.
        """
        directions, lengths = self.directions(features), self._arrays.lengths
        return directions if lengths is None else directions / lengths[self._index(features), None]

    def _index(self, features: Sequence[int]) -> mx.array:
        if any(not 0 <= feature < self.file.d_sae for feature in features):
            raise IndexError(f"there are {self.file.d_sae} features")  # MLX would read other memory
        return mx.array(list(features), dtype=mx.int32)

    def encode(self, hidden: mx.array) -> mx.array:
        """The activations `(..., d_sae)` in float32 at hidden states `(..., d_in)` of any type."""
        return self._activate(self._enter(hidden), self._arrays)

    def activations(self, hidden: mx.array, features: mx.array) -> mx.array:
        """The activations `(..., m)` of the features `(m,)` alone."""
        return self.probe(features)(hidden)

    def probe(self, features: mx.array) -> Callable[[mx.array], mx.array]:
        """Return a function from hidden states `(..., d_in)` to activations `(..., m)` of the
        features `(m,)`.

        It computes these features only. In a top-k SAE it computes all, because which ones are
        active depends on the others.
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
        """The hidden states that activations stand for.

        Args:
            activations: `(..., d_sae)`.
            hidden: the hidden states `(..., d_in)` that were encoded, to undo what `encode` has
                normalized.

        Returns:
            `(..., d_in)` in float32.
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
        """The encoder's input: hidden states, normalized as the SAE was trained."""
        hidden = hidden.astype(mx.float32)
        if self.file.normalization == "constant_norm_rescale":
            hidden = hidden * self._rescaling(hidden)
        elif self.file.normalization == "layer_norm":
            mean, deviation = _moments(hidden)
            hidden = (hidden - mean) / (deviation + 1e-5)
        return hidden - self._arrays.decoder_bias if self.file.subtracts_b_dec else hidden

    def _rescaling(self, hidden: mx.array) -> mx.array:
        """The factors that scale hidden states to length `√d_in`; 1 for zeros."""
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
    """Mean and sample deviation, as in PyTorch: SAELens trains with it."""
    mean = hidden.mean(axis=-1, keepdims=True)
    return mean, mx.std(hidden, axis=-1, keepdims=True, ddof=1)


def _keep(values: mx.array, k: int) -> mx.array:
    """Keep exactly k of the largest values, even if some are equal; zeros elsewhere."""
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
    """The tensor's array, by feature, evaluated; yields between slices."""
    pieces = read_array(file.weights, tensor.stored)
    if tensor.role not in ("encoder", "decoder"):
        (piece,) = pieces
        size = file.d_in if tensor.role == "decoder_bias" else file.d_sae
        array = mx.broadcast_to(mx.array(piece.reshape(-1)), (size,))
        array = mx.contiguous(array)
        mx.eval(array)
        yield
        return array
    # Filled piece by piece: concatenating the pieces would take the memory twice.
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
    """Scale the encoder by the lengths of the decoder's rows; returns these, `(d_sae,)`.

    The encoder then computes SAELens's `pre * W_dec.norm(dim=-1)`. The decoder is not scaled, since
    steering adds its rows.
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
