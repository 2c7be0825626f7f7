"""SAE files: those that are read, those that are refused and why, and files of random content."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxsrv.formats.sae_files import SAEFile, find_saes, read_sae
from tests.support.sae_files import WEIGHTS, header, reason, write, write_second_scope
from tests.support.saes import Kind, Layout, make_arrays

# What they say.


def test_a_file_of_saelens(tmp_path: Path) -> None:
    assert read_sae(write(tmp_path, layer=7)) == SAEFile(
        weights=tmp_path / WEIGHTS,
        source="saelens",
        architecture="standard",
        d_in=8,
        d_sae=16,
        layer=7,
        hook_name="blocks.7.hook_resid_post",
        model_name="tiny",
        subtracts_b_dec=True,
        bytes=4 * (2 * 8 * 16 + 16 + 8),
    )


@pytest.mark.parametrize("layout", ["saelens", "saelens_old"])
@pytest.mark.parametrize("kind", ["standard", "jumprelu", "gated", "topk"])
def test_its_kind(layout: Layout, kind: Kind, tmp_path: Path) -> None:
    file = read_sae(write(tmp_path, layout, kind, before=True, layer=2))
    assert (file.architecture, file.layer, file.before) == (kind, 2, True)
    assert file.k == (3 if kind == "topk" else None)
    assert file.warnings == ()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"apply_b_dec_to_input": ...}, {"subtracts_b_dec": True}),
        ({"apply_b_dec_to_input": False}, {"subtracts_b_dec": False}),
        ({"normalize_activations": "layer_norm"}, {"normalization": "layer_norm"}),
        ({"normalize_activations": None}, {"normalization": "none"}),
        ({"normalize_activations": False}, {"normalization": "none"}),
        ({"architecture": ...}, {"architecture": "standard"}),
        ({"architecture": "topk", "activation_fn_kwargs": {"k": 4}}, {"k": 4}),
        ({"architecture": "topk", "k": 4.0}, {"architecture": "topk", "k": 4}),
        ({"architecture": "matryoshka_batchtopk", "k": 4}, {"architecture": "batch_topk", "k": 4}),
        ({"activation_fn": "topk", "activation_fn_kwargs": {"k": 2}}, {"architecture": "topk"}),
        ({"metadata": ..., "hook_point": "blocks.3.hook_resid_pre"}, {"layer": 3, "before": True}),
        ({"metadata": ..., "hook_point_layer": 3}, {"layer": 3, "hook_name": None}),
        ({"metadata": ...}, {"layer": None, "model_name": None}),
        ({"metadata": {"model_name": "a\nb"}}, {"model_name": None}),
        ({"d_in": ..., "d_sae": ...}, {"d_in": 8, "d_sae": 16}),
    ],
)
def test_what_a_config_changes(
    config: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path)
    change(folder / "cfg.json", **config)
    file = read_sae(folder)
    assert {name: getattr(file, name) for name in expected} == expected


def test_warnings(tmp_path: Path) -> None:
    folder = write(tmp_path, metadata=...)
    assert "which hook" in read_sae(folder).warnings[0]
    kwargs = {"center_writing_weights": True}
    change(folder / "cfg.json", hook_name="layers.0", model_from_pretrained_kwargs=kwargs)
    assert "mean taken out" in read_sae(folder).warnings[0]


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ("blocks.12.hook_resid_post", (12, False)),
        ("blocks.0.hook_resid_pre", (0, True)),
        ("blocks.4.hook_out", (4, False)),
        ("model.layers.9.output", (9, False)),
        ("model.layers.9", (9, False)),
        ("transformer.h.11", (11, False)),
        ("layer_20", (20, False)),
        ("gpt_neox.layers.3.hook_resid_pre", (3, True)),
    ],
)
def test_the_layer_is_in_the_hooks_name(
    hook: str, expected: tuple[int, bool], tmp_path: Path
) -> None:
    file = read_sae(write(tmp_path, metadata={"hook_name": hook}))
    assert (file.layer, file.before) == expected


@pytest.mark.parametrize(
    "hook",
    [
        *("blocks.3.attn.hook_z", "blocks.3.hook_mlp_out", "blocks.3.hook_resid_mid"),
        *("blocks.3.ln2.hook_normalized", "hook_embed", "layers.5.mlp", "ln_final.hook_scale"),
        *("blocks.hook_resid_post", "layers.5.mlp.layers.3", "", "h" * 1000, 5, ["blocks.3"]),
    ],
)
def test_hooks_that_are_at_no_layers_end(hook: Any, tmp_path: Path) -> None:
    assert "hook" in (text := reason(write(tmp_path, metadata={"hook_name": hook}))) or (
        "neither" in text
    )


def test_gemma_scope_says_the_layer_in_its_folders(tmp_path: Path) -> None:
    folder = write(tmp_path, "gemma_scope", "jumprelu", layer=20)
    file = read_sae(folder)
    assert file == read_sae(folder / "params.npz")
    assert (file.source, file.architecture, file.layer) == ("gemma_scope", "jumprelu", 20)
    assert (file.d_in, file.d_sae, file.subtracts_b_dec) == (8, 16, False)
    moved = shutil.copytree(folder, tmp_path / "mine" / "a" / "b" / "c" / "d")
    assert read_sae(moved).layer is None
    assert "which layer" in read_sae(moved).warnings[0]


@pytest.mark.parametrize(
    "parent",
    [
        "embedding/width_4k/average_l0_6",
        "models--google--gemma-scope-2b-pt-att/snapshots/0/layer_3/width_16k/average_l0_9",
        "gemma-scope-9b-pt-mlp/layer_3/width_16k/average_l0_9",
        "transcoder_all/layer_5_width_16k_l0_big",
    ],
)
def test_of_gemma_scope_only_the_residual_stream(parent: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "gemma_scope", "jumprelu")
    (tmp_path / parent).parent.mkdir(parents=True)
    assert "not for a layer's output" in reason(folder.rename(tmp_path / parent))


def test_the_second_gemma_scope(tmp_path: Path) -> None:
    folder = write_second_scope(tmp_path / "resid_post" / "layer_17_width_16k_l0_small")
    file = read_sae(folder)
    assert (file.layer, file.model_name) == (17, "google/gemma-3-1b-it")
    assert (file.architecture, file.subtracts_b_dec) == ("jumprelu", False)
    other = write_second_scope(
        tmp_path / "x", hf_hook_point_in="model.layers.17.post_feedforward_layernorm.output"
    )
    assert "neither" in reason(other)
    assert "not what its folder" in reason(write_second_scope(tmp_path / "layer_3_l0_9"))
    assert "width" in reason(write_second_scope(tmp_path / "y", width=17))
    assert "not a jumprelu" in reason(write_second_scope(tmp_path / "z", type="clt"))


@pytest.mark.parametrize(
    ("name", "layer"),
    [("layers.5", 5), ("h.11", 11), ("model.layers.3", 3), ("layers_7", 7), ("mine", None)],
)
def test_sparsify_says_the_layer_in_its_folder(
    name: str, layer: int | None, tmp_path: Path
) -> None:
    folder = write(tmp_path, "sparsify", "topk").rename(tmp_path / name)
    file = read_sae(folder)
    assert (file.source, file.architecture, file.k, file.layer) == ("sparsify", "topk", 3, layer)
    assert (len(file.warnings), file.hook_name) == (layer is None, name if layer else None)
    (folder.parent / "config.json").write_text('{"model": "EleutherAI/pythia-70m"}')
    assert read_sae(folder).model_name == "EleutherAI/pythia-70m"
    seeded = shutil.copytree(folder, tmp_path / "more" / name / "seed3")
    assert read_sae(seeded).layer == layer


def test_sparsify_may_leave_the_number_of_features_to_a_factor(tmp_path: Path) -> None:
    folder = write(tmp_path, "sparsify", "topk", num_latents=0)
    assert read_sae(folder).d_sae == 16
    change(folder / "cfg.json", expansion_factor=3)
    assert "num_latents" in reason(folder)


# What is refused.


def change(path: Path, **values: Any) -> None:
    """Change a JSON file; `...` removes a key."""
    held = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in held.items() if value is not ...}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architecture": "transcoder"}, "architecture is 'transcoder'"),
        ({"architecture": "temporal"}, "not supported"),
        ({"architecture": ["standard"]}, "not supported"),
        ({"activation_fn_str": "tanh-relu"}, "activation function"),
        ({"activation_fn": "topk", "activation_fn_kwargs": {"k": 3, "signed": True}}, "absolute"),
        ({"architecture": "topk"}, "k is None"),
        ({"architecture": "topk", "k": 17}, "k is 17, of 16"),
        ({"architecture": "topk", "k": 0}, "its k is 0"),
        ({"architecture": "topk", "k": 2.5}, "its k is 2.5"),
        ({"architecture": "topk", "k": True}, "its k is True"),
        ({"architecture": "topk", "k": float("nan")}, "its k is nan"),
        ({"architecture": "jumprelu"}, "no threshold"),
        ({"architecture": "gated"}, "no gate bias"),
        ({"hook_head_index": 3}, "head"),
        ({"reshape_activations": "hook_z"}, "reshapes"),
        ({"hook_name_out": "blocks.3.hook_mlp_out"}, "transcoder"),
        ({"normalize_activations": "expected_average_only_in"}, "factor"),
        ({"normalize_activations": True}, "factor"),
        ({"normalize_activations": "zca"}, "'zca'"),
        ({"normalize_activations": []}, "normalizes"),
        ({"apply_b_dec_to_input": "yes"}, "neither true nor false"),
        ({"d_in": 9}, "its d_in is 9, that of its arrays is 8"),
        ({"d_sae": float("nan")}, "its d_sae is nan"),
        ({"hook_layer": 2}, "its layer 2"),
    ],
)
def test_what_a_config_rules_out(config: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    change(folder / "cfg.json", **config)
    assert expected in reason(folder)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"transcode": True}, "transcoder"),
        ({"skip_connection": True}, "skip"),
        ({"gram_lookup": True}, "n-grams"),
        ({"activation": "groupmax"}, "'groupmax'"),
        ({"signed": True}, "absolute"),
        ({"k": ...}, "its k"),
        ({"num_latents": 0, "expansion_factor": -1}, "expansion_factor"),
        ({"num_latents": 15}, "num_latents"),
    ],
)
def test_what_a_config_of_sparsify_rules_out(
    config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, "sparsify", "topk")
    change(folder / "cfg.json", **config)
    assert expected in reason(folder)


@pytest.mark.parametrize("name", ["layers.5.mlp", "embed_tokens", "transformer.wte"])
def test_other_modules_of_sparsify(name: str, tmp_path: Path) -> None:
    assert "layer's output" in reason(write(tmp_path, "sparsify", "topk").rename(tmp_path / name))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"W_skip": np.zeros((8, 8))}, "holds 'W_skip'"),
        ({"threshold": np.zeros(16)}, "holds a threshold; standard has none"),
        ({"b_dec": None}, "holds no decoder bias"),
        ({"W_enc": None}, "holds no encoder"),
        ({"W_enc": np.zeros((8, 17))}, "the encoder in 'sae_weights.safetensors' is (8, 17)"),
        ({"W_dec": np.zeros((16, 8, 1))}, "the decoder"),
        ({"b_dec": np.zeros((1, 8))}, "not a vector"),
        ({"b_dec": np.zeros(9)}, "is (8, 16), where there are 16 features of width 9"),
        ({"b_enc": np.zeros(0)}, "no features"),
        ({"scaling_factor": np.zeros(15)}, "the ones"),
    ],
)
def test_arrays_that_do_not_belong_together(
    arrays: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    held = make_arrays(d_in=8, d_sae=16) | arrays
    given = {name: array for name, array in held.items() if array is not None}
    folder = write(tmp_path, arrays=given, d_in=..., d_sae=...)
    assert expected in reason(folder)


BROKEN: list[tuple[str, bytes, str]] = [
    ("cfg.json", b"", "'cfg.json' is empty"),
    ("cfg.json", b"[1]", "not a JSON object"),
    ("cfg.json", b"[" * 100_000, "not valid JSON"),
    ("cfg.json", b" " * 2_000_000, "too large"),
    (WEIGHTS, b"", "is empty"),
    (WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS"),
    (WEIGHTS, b"\xff" * 64, "cut short"),
    (WEIGHTS, (2_000_000).to_bytes(8, "little") + bytes(2_000_000), "cut short"),
    (WEIGHTS, header([]), "no header"),
    (WEIGHTS, header({}), "no encoder"),
    (WEIGHTS, header({"b_enc": {"dtype": "I32", "shape": [16], "data_offsets": [0, 64]}}), "no"),
    (WEIGHTS, header({"b_enc": {"dtype": "F32", "shape": [9], "data_offsets": [0, 64]}}), "shape"),
    (
        WEIGHTS,
        header(
            {n: {"dtype": "F32", "shape": [512], "data_offsets": [0, 2048]} for n in "abc"}, 2048
        ),
        "overlap",
    ),
]


@pytest.mark.parametrize(("name", "content", "expected"), BROKEN)
def test_a_broken_file_says_what_is_wrong(
    name: str, content: bytes, expected: str, tmp_path: Path
) -> None:
    folder = write(tmp_path)
    (folder / name).write_bytes(content)
    assert expected in reason(folder)


def test_folders_without_an_sae(tmp_path: Path) -> None:
    assert "there is none of" in reason(tmp_path / "gone")
    assert "there is none of" in reason(tmp_path)
    folder = write(tmp_path / "a")
    (folder / "cfg.json").unlink()
    assert "'cfg.json' is not there" in reason(folder)
    (folder / "cfg.json").symlink_to(folder / "cfg.json")
    assert reason(folder)
    (folder / "cfg.json").unlink()
    os.mkfifo(folder / "cfg.json")
    assert "not a file" in reason(folder)


# Folders.


def test_all_below_a_folder_are_found(tmp_path: Path) -> None:
    folders = {
        write(tmp_path / "b"),
        write(tmp_path / "a" / "run", "sparsify", "topk"),
        write(tmp_path / "a", "gemma_scope", "jumprelu"),
        write_second_scope(tmp_path / "c" / "resid_post" / "layer_17_width_16k"),
    }
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / WEIGHTS).touch()  # without its cfg.json
    deep = tmp_path.joinpath(*"123456789")
    write(deep)
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "b")
    found = list(find_saes(tmp_path))
    assert len(found) == len(folders)
    assert {folder.resolve() for folder in found} == folders
    assert list(find_saes(deep)) == [deep]
    assert list(find_saes(tmp_path / "gone")) == []


def test_not_more_than_a_thousand_are_found(tmp_path: Path) -> None:
    for number in range(1001):
        folder = tmp_path / f"{number:04}"
        folder.mkdir()
        (folder / "params.npz").touch()
    found = list(find_saes(tmp_path))
    assert [folder.name for folder in found] == [f"{number:04}" for number in range(1000)]


@pytest.mark.served
def test_mlx_is_not_needed() -> None:
    """Floors above the engine read these files before there is a model."""
    root = Path(__file__).parents[2] / "mlxsrv"
    code = (
        "import sys, types; package = types.ModuleType('mlxsrv')\n"
        "package.__path__ = [sys.argv[1]]; sys.modules['mlxsrv'] = package\n"
        "import mlxsrv.formats.sae_files\n"
        "print([m for m in ('mlx', 'mlx_lm', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
