"""Model folders: all the ways to be broken, and the families that mlx-lm runs."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm.utils
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlxsrv.formats import architectures
from mlxsrv.formats.adapters import adapter_bytes
from mlxsrv.formats.files import UnusableFile
from mlxsrv.formats.model_folder import describe_model
from tests.support.effort import examples
from tests.support.model_folders import INDEX, SHARDS, change, folder, original, reason, split

__all__ = ["folder", "original"]


# What is wrong with one.


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _write(name: str, text: bytes | str) -> Callable[[Path], None]:
    data = text.encode() if isinstance(text, str) else text

    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return write


def _config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", **values)


def _cut(count: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = folder / "model.safetensors"
        os.truncate(path, count if count >= 0 else path.stat().st_size + count)

    return cut


def _replace(*names: str) -> Callable[[Path], None]:
    """Files of these names instead of the weights."""

    def replace(folder: Path) -> None:
        whole = folder / "model.safetensors"
        for name in names:
            shutil.copyfile(whole, folder / name)
        whole.unlink()

    return replace


def _shard(**change_of: Any) -> Callable[[Path], None]:
    """Shards, with an index that names these, too."""

    def shard(folder: Path) -> None:
        split(folder)
        named = json.loads((folder / INDEX).read_text())["weight_map"]
        change(folder / INDEX, weight_map=named | change_of)

    return shard


def _without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        if SHARDS[0] in names or SHARDS[1] in names or INDEX in names:
            split(folder)
        for name in names:
            (folder / name).unlink()

    return remove


def _instead_of_tokenizer(name: str) -> Callable[[Path], None]:
    def move(folder: Path) -> None:
        (folder / "tokenizer.json").rename(folder / name)

    return move


def _header(fields: Any) -> Callable[[Path], None]:
    text = json.dumps(fields).encode()
    return _write("model.safetensors", len(text).to_bytes(8, "little") + text + bytes(16))


def _dangling(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "blobs" / "gone")

    return link


def _pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"

BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (shutil.rmtree, "there is no such folder"),
    (_no_config, "'config.json' is not there"),
    (_write("config.json", ""), "'config.json' is empty"),
    (_write("config.json", "{}"), "something in it"),
    (_write("config.json", "[1]"), "not a JSON object"),
    (_write("config.json", '{"model_type": '), "not valid JSON"),
    (_write("config.json", "[" * 100_000), "not valid JSON"),
    (_write("config.json", b'{"model_type": "\xff"}'), "not valid JSON"),
    (_write("config.json", LFS), "'config.json' is a Git-LFS pointer"),
    (_pipe("config.json"), "'config.json' is not a file"),
    (_config(model_type=...), "no model_type"),
    (_config(model_type=5), "no model_type"),
    (_config(model_type="../models/llama"), "no model_type"),
    (_config(model_type="clip"), "does not know the model type 'clip'"),
    (_config(model_type="Qwen3"), "does not know the model type 'Qwen3'"),
    (_config(model_type="__init__"), "does not know"),
    (_config(model_type="switch_layers"), "cannot run the model type 'switch_layers'"),
    (_config(model_file="custom.py"), "--trust-remote-code"),
    (_without("model.safetensors"), r"it has no model\*.safetensors"),
    (_replace("pytorch_model.bin"), "'pytorch_model.bin', which is not read"),
    (_replace("tiny.gguf"), "'tiny.gguf'"),
    (_replace("weights.npz"), "'weights.npz'"),
    (_replace("weights.00.safetensors"), "'weights.00.safetensors'"),
    (_without(INDEX), "one of several"),
    (_replace(SHARDS[1]), "one of several"),
    (_without(SHARDS[0]), f"'{SHARDS[0]}' is not there"),
    (_shard(x="model-00003-of-00003.safetensors"), "'model-00003-of-00003.safetensors' is not"),
    (_shard(x="../model.safetensors"), "not a file beside it"),
    (_shard(x="/model.safetensors"), "not a file beside it"),
    (_shard(x="model\0.safetensors"), "not a file beside it"),
    (_shard(x=5), "not a file beside it"),
    (_shard(x=".."), "only model"),
    (_shard(x="other.safetensors"), "'other.safetensors', and only model"),
    (_write(INDEX, "{}"), "something in it"),
    (_write(INDEX, '{"weight_map": {}}'), "names no files"),
    (_write(INDEX, '{"weight_map": []}'), "names no files"),
    (_dangling("model.safetensors"), "'model.safetensors' is not there"),
    (_cut(0), "is empty"),
    (_cut(5), "cut short"),
    (_cut(100), "cut short"),
    (_cut(-1), "cut short"),
    (_write("model.safetensors", LFS), "Git-LFS"),
    (_write("model.safetensors", b"\xff" * 64), "cut short, or not safetensors"),
    (_header([]), "no header"),
    (_header({}), "hold no tensors"),
    (_header({"__metadata__": {"format": "mlx"}}), "hold no tensors"),
    (_header({"a": {"dtype": "F32", "shape": [4]}}), "no header"),
    (_header({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}), "no header"),
    (_header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}), "shape"),
    (_header({"a": {"dtype": "X9", "shape": [3], "data_offsets": [16, 0]}}), "shape"),
    (_header({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}), "cut short"),
    (_without("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
    (_without("tokenizer.json"), "tokenizer.json is missing"),
    (_instead_of_tokenizer("vocab.json"), "tokenizer.json is missing"),
    (_instead_of_tokenizer("spiece.model"), "tokenizer.json is missing"),
    (_write("tokenizer.json", LFS), "'tokenizer.json' is a Git-LFS pointer"),
    (_dangling("tokenizer.json"), "'tokenizer.json' is not there"),
    (_write("tokenizer_config.json", "nothing"), "'tokenizer_config.json' is not valid JSON"),
]


@pytest.mark.parametrize(("spoil", "expected"), BROKEN)
def test_a_broken_folder_says_what_is_wrong(
    spoil: Callable[[Path], None], expected: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(UnusableFile, match=expected) as error:
        describe_model(folder)
    assert "\n" not in str(error.value)


def test_code_is_run_when_it_is_trusted(folder: Path) -> None:
    change(folder / "config.json", model_type="my-own", model_file="custom.py")
    assert "'custom.py' is not there" in reason(folder, trust_remote_code=True)
    (folder / "custom.py").write_text("class Model: ...")
    assert describe_model(folder, trust_remote_code=True).family == "my-own"


def test_a_config_is_read_as_python_writes_it(folder: Path) -> None:
    change(folder / "config.json", time_step_limit=[0.0, float("inf")], x=float("nan"))
    assert describe_model(folder).family == "qwen3"


def test_a_path_that_mlx_lm_would_take_for_a_pattern(folder: Path) -> None:
    named = folder.rename(folder.with_name("Qwen [4bit]"))
    with pytest.raises(FileNotFoundError):
        mlx_lm.utils.load_model(named)
    assert "pattern" in reason(named)


def test_what_the_file_system_refuses_is_a_reason(folder: Path) -> None:
    # The name's length, since nothing is forbidden to a test that runs as root.
    change(folder / "config.json", model_file="x" * 300)
    assert reason(folder, trust_remote_code=True).endswith("cannot be read: File name too long")
    change(folder / "config.json", model_file="a\0b")
    assert "file name in it is not valid" in reason(folder, trust_remote_code=True)


# What mlx-lm knows.


def test_the_tables_are_mlx_lms() -> None:
    assert architectures._remappings() == (
        mlx_lm.utils.MODEL_REMAPPING,
        mlx_lm.utils.MODEL_ARCHITECTURE_REMAPPING,
    )


@pytest.mark.slow
def test_the_models_are_mlx_lms() -> None:
    names = architectures._modules("models")
    assert len(names) > 50
    for name in names:
        check = {"model_type": name}
        try:
            module = importlib.import_module(f"mlx_lm.models.{name}")
        except SystemExit:  # without a package that it wants
            module = None
        if hasattr(module, "Model") and hasattr(module, "ModelArgs"):
            assert architectures.check_architecture(check, trust_remote_code=False) == name
            template = getattr(module, "TOKENIZER_DEFAULTS", {}).get("chat_template_type")
            assert architectures._architecture(name).template == template
        else:
            with pytest.raises(UnusableFile, match="cannot run"):
                architectures.check_architecture(check, trust_remote_code=False)


def test_types_that_another_runs_are_known_and_keep_their_name(folder: Path) -> None:
    change(folder / "config.json", model_type="mistral")
    assert describe_model(folder).family == "mistral"
    pair = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]}
    assert architectures._module(pair) == "bailing_moe_v3"


@pytest.mark.served
def test_nothing_heavy_is_imported(original: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from mlxsrv.formats.model_folder import describe_model\n"
        "describe_model(Path(sys.argv[1]))\n"
        "print([m for m in ('mlx', 'mlx_lm', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(original)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Anything at all.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = [
    *("model_type", "architectures", "text_config", "quantization", "quantization_config"),
    *("max_position_embeddings", "model_max_length", "rope_scaling", "layer_types", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "hybrid_override_pattern"),
    *(
        "chat_template",
        "chat_template_type",
        "added_tokens_decoder",
        "weight_map",
        "max_seq_length",
    ),
    *("num_layers", "lora_parameters", "fine_tune_type", "model_file", "full_attention_interval"),
]
OBJECTS = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), JSON, max_size=6)
TENSORS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U32", "U8", "X\ud800"]) | JSON,
        "shape": st.lists(st.integers(0, 2**64), max_size=40) | JSON,
        "data_offsets": st.tuples(st.integers(0, 64), st.integers(0, 64)) | JSON,
    }
)
FILES = [
    *("config.json", "tokenizer_config.json", "sentence_bert_config.json", INDEX),
    *("model.safetensors", "chat_template.jinja", "README.md", "adapter_config.json"),
]


@settings(
    max_examples=examples(300),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(FILES),
    content=st.binary(max_size=60) | OBJECTS | st.dictionaries(st.text(max_size=9), TENSORS),
    keep=st.booleans(),
)
@example(name="config.json", content={"model_type": "a\ud800"}, keep=True)
@example(name="config.json", content={"rope_scaling": {"type": "yarn", "factor": 1e400}}, keep=True)
@example(name=INDEX, content={"weight_map": {"a": "model\ud800.safetensors"}}, keep=True)
@example(name="model.safetensors", content={"a\ud800": {}}, keep=True)
def test_whatever_a_file_holds_there_is_an_answer(
    name: str, content: Any, keep: bool, original: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files of random content, or of their old content with random additions."""
    folder = tmp_path_factory.getbasetemp() / "fuzzed-e5-model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    path = folder / name
    if isinstance(content, dict) and name == "model.safetensors":
        text = json.dumps(content).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(64)
    elif isinstance(content, dict):
        held = json.loads(path.read_text()) if keep and path.exists() else {}
        content = json.dumps(held | content).encode()
    path.write_bytes(content)
    for answer in (
        _answer(describe_model, folder, trust_remote_code=True),
        _answer(adapter_bytes, folder),
    ):
        if isinstance(answer, UnusableFile):
            assert len(str(answer).splitlines()) == 1
        assert msgspec.json.encode(str(answer) if isinstance(answer, UnusableFile) else answer)


def _answer(look: Callable[..., Any], folder: Path, **options: Any) -> Any:
    try:
        return look(folder, **options)
    except UnusableFile as error:
        return error
