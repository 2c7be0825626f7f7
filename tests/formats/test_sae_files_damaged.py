"""SAE files that anybody may have written: whatever they hold, there is an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxsrv.engine.steering.sae import load_sae
from mlxsrv.formats.sae_files import SAEFile, read_sae
from tests.support.effort import examples
from tests.support.sae_files import header, write, write_second_scope
from tests.support.saes import Layout, make_arrays

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = [
    *("architecture", "d_in", "d_sae", "k", "metadata", "hook_name", "hook_point", "hook_layer"),
    *("activation_fn", "activation_fn_str", "activation_fn_kwargs", "apply_b_dec_to_input"),
    *("normalize_activations", "hook_head_index", "reshape_activations", "model_name"),
    *("rescale_acts_by_decoder_norm", "model_from_pretrained_kwargs", "hook_name_out"),
    *("num_latents", "expansion_factor", "transcode", "skip_connection", "activation", "signed"),
    *("hf_hook_point_in", "width", "type"),
]
VALUES = JSON | st.sampled_from(["topk", "jumprelu", "batchtopk", "layer_norm", "layers.3", 16, {}])
OBJECTS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)
TENSORS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F64", "U8", "X\ud800"]) | JSON,
        "shape": st.lists(st.integers(0, 20) | st.integers(0, 2**64), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(0, 64), st.integers(0, 64)) | JSON,
    }
)
NAMES = st.sampled_from(["W_enc", "W_dec", "b_enc", "b_dec", "threshold"]) | st.text(max_size=3)
CONTENTS = OBJECTS | st.binary(max_size=60) | st.dictionaries(NAMES, TENSORS, max_size=4)
LAYOUTS: list[Layout] = ["saelens", "saelens_old", "sparsify", "gemma_scope"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each, to be spoiled; archives compressed, too."""
    root = tmp_path_factory.mktemp("originals")
    folders: dict[str, Path] = {
        layout: write(root / layout, layout, "jumprelu" if layout == "gemma_scope" else "topk")
        for layout in LAYOUTS
    }
    folders["second"] = write_second_scope(root / "second" / "layer_17")
    folders["compressed"] = root / "compressed" / "layer_1"
    folders["compressed"].mkdir(parents=True)
    arrays = make_arrays("jumprelu", d_in=8, d_sae=16)
    np.savez_compressed(folders["compressed"] / "params.npz", allow_pickle=False, **arrays)
    return folders


@pytest.fixture(scope="module")
def spoil(
    originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Callable[[Path], None]], None]:
    """Spoil a copy of one and read it: there is an answer."""
    folder = tmp_path_factory.mktemp("spoiled") / "layers.3"

    def check(which: str, change: Callable[[Path], None]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(originals[which], folder)
        change(folder)
        file = _answer(read_sae, folder)
        if isinstance(file, SAEFile):
            assert msgspec.json.encode([file.hook_name, file.model_name, file.warnings])
            assert 0 < file.bytes < 10**6
            _answer(lambda: list(load_sae(file)))

    return check


def _answer(look: Callable[..., Any], *given: Path) -> Any:
    """Return the result, or the reason: one line that can be sent and has no path in it."""
    try:
        return look(*given)
    except ValueError as error:
        text = str(error)
    assert len(text.splitlines()) == 1
    assert "spoiled" not in text
    return msgspec.json.encode(text)


@settings(max_examples=examples(120))
@given(
    which=st.sampled_from([*LAYOUTS, "second"]),
    weights=st.booleans(),
    content=CONTENTS,
    keep=st.booleans(),
)
@example(which="saelens", weights=False, content={"metadata": {"hook_name": "\ud800"}}, keep=True)
@example(which="saelens", weights=True, content={"a\ud800": {}}, keep=False)
def test_whatever_a_file_holds_there_is_an_answer(
    which: str, weights: bool, content: Any, keep: bool, spoil: Any
) -> None:
    def change(folder: Path) -> None:
        (array_file,) = [*folder.glob("*.safetensors"), *folder.glob("*.npz")]
        text_file = folder / ("config.json" if which == "second" else "cfg.json")
        path = array_file if weights else text_file
        data = content
        if isinstance(content, dict) and weights:
            data = header(content)
        elif isinstance(content, dict):
            held = json.loads(path.read_text()) if keep and path.exists() else {}
            data = json.dumps(held | content).encode()
        path.write_bytes(data)

    spoil(which, change)


@settings(max_examples=examples(120))
@given(
    which=st.sampled_from([*LAYOUTS, "second", "compressed", "compressed"]),
    place=st.floats(0, 1, exclude_max=True),
    from_end=st.booleans(),
    data=st.binary(min_size=1, max_size=8),
    cut=st.booleans(),
)
def test_damaged_weights_have_an_answer(
    which: str, place: float, from_end: bool, data: bytes, cut: bool, spoil: Any
) -> None:
    def change(folder: Path) -> None:
        (path,) = [*folder.glob("*.safetensors"), *folder.glob("*.npz")]
        held = bytearray(path.read_bytes())
        # Most of what can go wrong is in the headers, at the start, or in an archive's directory.
        at = len(held) - 1 - int(place * 600) if from_end else int(place * min(len(held), 1200))
        at = max(0, at)
        if cut:
            del held[at:]
        else:
            held[at : at + len(data)] = data
        path.write_bytes(held)

    spoil(which, change)
