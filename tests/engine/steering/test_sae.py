"""Encoding and decoding against the formulas in NumPy, for each kind of SAE and each layout."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.engine.steering.sae import SAE, load_sae
from mlxsrv.formats.arrays import PIECE_BYTES
from mlxsrv.formats.sae_files import read_sae
from tests.support.effort import examples
from tests.support.saes import Array, Kind, Layout, Precision, make_arrays, write_sae

D_IN, D_SAE, K = 24, 40, 5
KINDS: list[tuple[Layout, Kind]] = [
    *(("saelens", kind) for kind in get_args(Kind)),
    *(("saelens_old", kind) for kind in get_args(Kind)),
    ("gemma_scope", "jumprelu"),
    ("sparsify", "topk"),
]


def load(folder: Path) -> SAE:
    loading = load_sae(read_sae(folder))
    while True:
        try:
            next(loading)
        except StopIteration as end:
            sae: SAE = end.value
            return sae


def write(folder: Path, layout: Layout, kind: Kind, **options: Any) -> Path:
    sizes = {"d_in": D_IN, "d_sae": D_SAE, "k": K} | options
    return write_sae(folder, layout=layout, architecture=kind, **sizes)


def make_hidden(*lead: int, width: int = D_IN, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((*lead, width)).astype(np.float32)


# The formulas.


def normalize(x: Array, how: str) -> tuple[Array, Callable[[Array], Array]]:
    """Return what is encoded of x, and the function that undoes it."""
    if how == "constant_norm_rescale":
        factor = np.sqrt(x.shape[-1]) / np.linalg.norm(x, axis=-1, keepdims=True)
        return x * factor, lambda y: y / factor
    if how == "layer_norm":
        mean = x.mean(-1, keepdims=True)
        deviation = np.sqrt(((x - mean) ** 2).sum(-1, keepdims=True) / (x.shape[-1] - 1))
        return (x - mean) / (deviation + 1e-5), lambda y: y * deviation + mean
    return x, lambda y: y


def encode(x: Array, w: dict[str, Array], kind: str, subtracts: bool, k: int = K) -> Array:
    w = {name: array.astype(np.float64) for name, array in w.items()}
    x = x.astype(np.float64) - (w["b_dec"] if subtracts else 0)
    if kind == "gated":
        gate = x @ w["W_enc"] + w["b_gate"]
        magnitude = x @ (w["W_enc"] * np.exp(w["r_mag"])) + w["b_mag"]
        return np.asarray((gate > 0) * np.maximum(magnitude, 0))
    pre = x @ w["W_enc"] + w["b_enc"]
    if kind == "jumprelu":
        return np.asarray(np.maximum(pre, 0) * (pre > w["threshold"]))
    if kind == "batchtopk":
        return np.asarray(np.maximum(pre, 0) * (pre > w["topk_threshold"]))
    if kind == "topk":
        floor = np.sort(pre, axis=-1)[..., -k, None]
        pre = np.where(pre >= floor, pre, 0)
    return np.maximum(pre, 0)


def decode(a: Array, w: dict[str, Array]) -> Array:
    return np.asarray(a @ w["W_dec"].astype(np.float64) + w["b_dec"])


def close(found: mx.array, expected: Array, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.array(found), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("layout", "kind"), KINDS)
@pytest.mark.parametrize("dtype", get_args(Precision))
def test_it_computes_the_formula(
    layout: Layout, kind: Kind, dtype: Precision, tmp_path: Path
) -> None:
    sae = load(write(tmp_path, layout, kind, dtype=dtype))
    arrays = make_arrays(kind, d_in=D_IN, d_sae=D_SAE, dtype=dtype)
    x = make_hidden(2, 3)
    found = sae.encode(mx.array(x))
    assert (found.shape, found.dtype) == ((2, 3, D_SAE), mx.float32)
    expected = encode(x, arrays, kind, subtracts=layout != "gemma_scope")
    assert 0 < (expected > 0).mean() < 0.6  # neither all nor nothing
    close(found, expected)
    close(sae.decode(found, mx.array(x)), decode(expected, arrays))
    features = [7, 0, D_SAE - 1, 7]
    chosen = sae.activations(mx.array(x), mx.array(features))
    close(chosen, expected[..., features])
    np.testing.assert_array_equal(np.array(sae.directions(features)), arrays["W_dec"][features])
    assert sae.nbytes == sae.file.bytes


@pytest.mark.parametrize("how", ["constant_norm_rescale", "layer_norm"])
@pytest.mark.parametrize("kind", ["standard", "jumprelu", "topk"])
def test_hidden_states_are_normalized_and_back(how: str, kind: Kind, tmp_path: Path) -> None:
    sae = load(write(tmp_path, "saelens", kind, normalize_activations=how))
    arrays = make_arrays(kind, d_in=D_IN, d_sae=D_SAE)
    x = 30 * make_hidden(4) + 3
    entered, undo = normalize(x, how)
    expected = encode(entered, arrays, kind, subtracts=True)
    found = sae.encode(mx.array(x))
    close(found, expected)
    close(sae.decode(found, mx.array(x)), undo(decode(expected, arrays)), 1e-4)
    close(sae.activations(mx.array(x), mx.array([3, 1])), expected[..., [3, 1]])


@pytest.mark.parametrize("how", ["none", "constant_norm_rescale", "layer_norm"])
def test_zeros_have_activations(how: str, tmp_path: Path) -> None:
    """The hidden states of padding may be anything, and nothing must spread from them."""
    sae = load(write(tmp_path, "saelens", "standard", normalize_activations=how))
    zeros = mx.zeros((1, D_IN))
    assert mx.isfinite(sae.decode(sae.encode(zeros), zeros)).all().item()


@pytest.mark.parametrize("subtracts", [True, False])
def test_whether_the_bias_is_taken_off_is_configured(subtracts: bool, tmp_path: Path) -> None:
    sae = load(write(tmp_path, "saelens", "standard", apply_b_dec_to_input=subtracts))
    x, arrays = make_hidden(3), make_arrays(d_in=D_IN, d_sae=D_SAE)
    close(sae.encode(mx.array(x)), encode(x, arrays, "standard", subtracts))


def test_at_the_threshold_a_feature_is_off(tmp_path: Path) -> None:
    """Numbers that float32 has exactly: with the identity, what goes in is what is compared."""
    identity = np.eye(4, dtype=np.float32)
    arrays = {
        "W_enc": identity,
        "W_dec": identity,
        "b_enc": np.zeros(4, np.float32),
        "b_dec": np.zeros(4, np.float32),
        "threshold": np.array([0.5, 0.5, 0.0, -1.0], np.float32),
    }
    options: dict[str, Any] = {"d_in": 4, "d_sae": 4, "arrays": arrays}
    sae = load(write(tmp_path, "saelens", "jumprelu", **options))
    above = float(np.nextafter(np.float32(0.5), np.float32(1)))
    for entered, expected in (
        ([0.5, above, 0.0, -0.5], [0.0, above, 0.0, 0.0]),
        ([above, 0.5, 0.25, 0.25], [above, 0.0, 0.25, 0.25]),
    ):
        assert sae.encode(mx.array(entered)).tolist() == expected


@settings(max_examples=examples(60))
@given(
    values=st.lists(st.integers(-2, 2), min_size=6, max_size=6),
    k=st.integers(1, 6),
)
def test_at_most_k_are_active_even_of_equals(values: list[int], k: int) -> None:
    sae = _identity(k)
    found = [int(value) for value in np.array(sae.encode(mx.array(values, dtype=mx.float32)))]
    kept = sorted((value for value in found if value), reverse=True)
    assert kept == [value for value in sorted(values, reverse=True)[:k] if value > 0]
    assert all(value in (0, entered) for value, entered in zip(found, values, strict=True))


@functools.cache
def _identity(k: int) -> SAE:
    identity = np.eye(6, dtype=np.float32)
    zeros = np.zeros(6, np.float32)
    arrays = {"W_enc": identity, "W_dec": identity, "b_enc": zeros, "b_dec": zeros}
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"d_in": 6, "d_sae": 6, "k": k, "arrays": arrays}
        return load(write(Path(folder), "saelens", "topk", **options))


@settings(max_examples=examples(25))
@given(
    d_in=st.integers(1, 9),
    d_sae=st.integers(1, 9),
    lead=st.lists(st.integers(1, 3), max_size=3),
    seed=st.integers(0, 99),
    which=st.sampled_from(KINDS),
)
def test_whatever_the_shape(
    d_in: int,
    d_sae: int,
    lead: list[int],
    seed: int,
    which: tuple[Layout, Kind],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    layout, kind = which
    folder = tmp_path_factory.mktemp("shapes")
    k = min(2, d_sae)
    options: dict[str, Any] = {"d_in": d_in, "d_sae": d_sae, "k": k, "seed": seed}
    if layout == "sparsify":
        options["expansion_factor"] = 1
    sae = load(write(folder, layout, kind, **options))
    arrays = make_arrays(kind, d_in=d_in, d_sae=d_sae, seed=seed)
    x = make_hidden(*lead, width=d_in, seed=seed)
    expected = encode(x, arrays, kind, subtracts=layout != "gemma_scope", k=k)
    close(sae.encode(mx.array(x)), expected, 1e-4)
    close(sae.activations(mx.array(x), mx.array([d_sae - 1])), expected[..., -1:], 1e-4)


def test_hidden_states_of_half_precision_are_computed_in_float32(tmp_path: Path) -> None:
    sae = load(write(tmp_path, "saelens", "standard"))
    x = mx.array(make_hidden(3)).astype(mx.bfloat16)
    close(sae.encode(x), np.array(sae.encode(x.astype(mx.float32))), 0)


def test_features_that_are_not_there(tmp_path: Path) -> None:
    sae = load(write(tmp_path, "saelens", "standard"))
    assert sae.directions([]).shape == (0, D_IN)
    for feature in (-1, D_SAE):
        with pytest.raises(IndexError, match="40 features"):
            sae.directions([0, feature])


# Files.


def test_an_encoder_the_other_way_round_is_turned(tmp_path: Path) -> None:
    arrays = make_arrays(d_in=D_IN, d_sae=D_SAE)
    turned = arrays | {"W_enc": arrays["W_enc"].T, "W_dec": arrays["W_dec"].T}
    sae = load(write(tmp_path, "saelens", "standard", arrays=turned))
    x = make_hidden(3)
    close(sae.encode(mx.array(x)), encode(x, arrays, "standard", True))
    assert sae.directions([1]).tolist() == arrays["W_dec"][[1]].tolist()


@pytest.mark.parametrize(("layout", "kind"), KINDS)
def test_a_square_one_is_turned_as_its_library_has_it(
    layout: Layout, kind: Kind, tmp_path: Path
) -> None:
    sae = load(write(tmp_path, layout, kind, d_in=8, d_sae=8))
    arrays, x = make_arrays(kind, d_in=8, d_sae=8), make_hidden(3, width=8)
    close(sae.encode(mx.array(x)), encode(x, arrays, kind, layout != "gemma_scope"))
    assert sae.directions([1]).tolist() == arrays["W_dec"][[1]].tolist()


@pytest.mark.parametrize("size", [8, 60_000])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.slow
def test_npz_in_the_order_of_fortran_and_compressed(
    size: int, save: Callable[..., None], tmp_path: Path
) -> None:
    folder = write(tmp_path, "gemma_scope", "jumprelu", d_in=8, d_sae=size)
    arrays = make_arrays("jumprelu", d_in=8, d_sae=size)
    w_dec = arrays.pop("W_dec")
    arrays["b_enc"] = np.zeros(size, np.float32)
    save(folder / "params.npz", **arrays, w_dec=np.asfortranarray(w_dec.astype(np.float64)))
    sae = load(folder)
    np.testing.assert_array_equal(np.array(sae.directions(range(size))), w_dec)


def test_a_batch_topk_without_a_threshold_keeps_k_of_each_token(tmp_path: Path) -> None:
    arrays = make_arrays("batchtopk", d_in=D_IN, d_sae=D_SAE)
    del arrays["topk_threshold"]
    sae = load(write(tmp_path, "saelens", "batchtopk", arrays=arrays, k=float(K)))
    assert sae.file.k == K
    assert "no threshold" in sae.file.warnings[0]
    x = make_hidden(3)
    close(sae.encode(mx.array(x)), encode(x, arrays, "topk", True))


def test_activations_in_lengths_of_the_decoders_rows(tmp_path: Path) -> None:
    """As SAELens computes it: `pre · ‖row‖` chooses the k, and each row counts as of length 1."""
    arrays = make_arrays(d_in=D_IN, d_sae=D_SAE)
    lengths = np.random.default_rng(5).uniform(0.2, 3, D_SAE).astype(np.float32)
    arrays["W_dec"] = arrays["W_dec"] * lengths[:, None]
    sae = load(write(tmp_path, "saelens", "topk", arrays=arrays, rescale_acts_by_decoder_norm=True))
    x = make_hidden(3)
    pre = (x - arrays["b_dec"]) @ arrays["W_enc"] + arrays["b_enc"]
    scaled = np.maximum(pre * lengths, 0)
    expected = np.where(scaled >= np.sort(scaled, axis=-1)[..., -K, None], scaled, 0)
    close(sae.encode(mx.array(x)), expected)
    decoded = (expected / lengths) @ arrays["W_dec"] + arrays["b_dec"]
    close(sae.decode(sae.encode(mx.array(x)), mx.array(x)), decoded)
    # Steering adds the file's own rows; what an activation decodes to is as long as itself.
    features = [7, 0, D_SAE - 1, 7]
    np.testing.assert_array_equal(np.array(sae.directions(features)), arrays["W_dec"][features])
    close(sae.effects(features), (arrays["W_dec"] / lengths[:, None])[features])
    close(sae.activations(mx.array(x), mx.array(features)), expected[..., features])
    assert sae.nbytes == sae.file.bytes


def test_folding_changes_no_activation_and_no_effect(tmp_path: Path) -> None:
    """As SAELens's `fold_W_dec_norm` does it; the rows, which are added, are of length 1 then."""
    arrays = make_arrays(d_in=D_IN, d_sae=D_SAE)
    lengths = np.random.default_rng(5).uniform(0.2, 3, D_SAE).astype(np.float32)
    loose = arrays | {"W_dec": arrays["W_dec"] * lengths[:, None]}
    folded = arrays | {"W_enc": arrays["W_enc"] * lengths, "b_enc": arrays["b_enc"] * lengths}
    one, other = (
        load(write(tmp_path / name, "saelens", "topk", arrays=a, rescale_acts_by_decoder_norm=True))
        for name, a in (("loose", loose), ("folded", folded))
    )
    x = mx.array(make_hidden(3))
    close(one.encode(x), np.array(other.encode(x)))
    close(one.effects([1, 2]), np.array(other.effects([1, 2])))
    close(one.directions([1, 2]), loose["W_dec"][[1, 2]], 0)


def test_a_scaling_factor_must_be_ones(tmp_path: Path) -> None:
    arrays = make_arrays(d_in=D_IN, d_sae=D_SAE)
    ones = np.ones(D_SAE, np.float32)
    load(write(tmp_path, "saelens_old", "standard", arrays=arrays | {"scaling_factor": ones}))
    folder = write(
        tmp_path, "saelens_old", "standard", arrays=arrays | {"scaling_factor": 2 * ones}
    )
    with pytest.raises(ValueError, match="scales activations"):
        load(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["W_enc", "W_dec", "b_enc"])
def test_numbers_that_are_not_finite(name: str, value: float, tmp_path: Path) -> None:
    arrays = make_arrays(d_in=D_IN, d_sae=D_SAE)
    arrays[name].flat[-1] = value
    folder = write(tmp_path, "saelens", "standard", arrays=arrays)
    with pytest.raises(ValueError, match=r"'sae_weights.safetensors'.* not finite"):
        load(folder)


def test_files_that_change_after_they_were_looked_at(tmp_path: Path) -> None:
    folder = write(tmp_path, "saelens", "standard")
    file = read_sae(folder)
    write(tmp_path, "saelens", "standard", d_in=D_SAE, d_sae=D_IN)
    with pytest.raises(ValueError, match="has changed"):
        next(load_sae(file))
    (folder / "sae_weights.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        next(load_sae(file))


@pytest.mark.slow
def test_a_large_one_is_read_in_slices(tmp_path: Path) -> None:
    d_in, d_sae = 1024, 8 * 1024
    decoder = np.zeros((d_sae, d_in), np.float32)
    decoder[:, 3] = np.arange(d_sae)
    arrays = {
        "W_enc": decoder.T,
        "W_dec": decoder,
        "b_enc": np.zeros(d_sae, np.float32),
        "b_dec": np.zeros(d_in, np.float32),
    }
    folder = write(tmp_path, "saelens", "standard", d_in=d_in, d_sae=d_sae, arrays=arrays)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    loading = load_sae(read_sae(folder))
    slices = 0
    while True:
        try:
            next(loading)
        except StopIteration as end:
            sae = end.value
            break
        slices += 1
    assert slices >= 2 * 4 * d_in * d_sae // PIECE_BYTES
    assert mx.get_peak_memory() - before < sae.nbytes + 3 * PIECE_BYTES
    assert sae.directions([d_sae - 1])[0, 3].item() == d_sae - 1
    hidden = mx.zeros((d_in,))
    hidden[3] = 1.0
    assert sae.encode(hidden).tolist() == list(range(d_sae))
