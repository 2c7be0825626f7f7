"""Properties of the readers of files, each of which comes from anywhere: any bytes at all are
answered, in one line that can be sent, and never with more memory than they are worth."""

from __future__ import annotations

import atexit
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from mlxsrv.engine.steering.sae import SAE, load_sae
from mlxsrv.formats.arrays import PIECE_BYTES
from mlxsrv.formats.control_vectors import VectorFile, read_directions, read_vector
from mlxsrv.formats.files import UnusableFile
from mlxsrv.formats.model_folder import ModelDescription, describe_model
from mlxsrv.formats.sae_files import SAEFile, read_sae
from tests.support.saes import make_arrays, write_sae, write_safetensors

T = TypeVar("T")

_NUMBERS = bytes(1024)  # of arrays that a header tells of
_KEPT = "model.safetensors"


@cache
def _scratch() -> Path:
    """A folder that lasts as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsrv-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def with_header(text: bytes) -> bytes:
    """A file of safetensors with this header."""
    return len(text).to_bytes(8, "little") + text + _NUMBERS


def archived(header: bytes) -> bytes:
    """An npz of an SAE but for one array, of which the npy header is given."""
    buffer = io.BytesIO()
    arrays = make_arrays("jumprelu", d_in=8, d_sae=16)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            if name == "W_enc":
                continue
            held = io.BytesIO()
            np.save(held, array, allow_pickle=False)
            archive.writestr(f"{name}.npy", held.getvalue())
        start = b"\x93NUMPY\x01\x00" + (len(header) % 65536).to_bytes(2, "little")
        archive.writestr("W_enc.npy", start + header + bytes(8 * 16 * 4))
    return buffer.getvalue()


def _answer(look: Callable[[], T], refusal: type[Exception]) -> T | None:
    """The result of `look`; None if it refuses, in one line that names no place of a file."""
    try:
        return look()
    except refusal as error:
        text = str(error)
    assert len(text.splitlines()) == 1
    assert _scratch().name not in text
    msgspec.json.encode(text)
    return None


# SAEs.


@cache
def _saes() -> tuple[tuple[Path, str, Callable[[bytes], bytes]], ...]:
    """A folder of each family's, which of its files is replaced, and how."""
    root = _scratch() / "saes"
    sizes: dict[str, Any] = {"d_in": 8, "d_sae": 16, "k": 3}

    def saelens(name: str) -> Path:
        return write_sae(root / name, architecture="topk", **sizes)

    def sparsify(name: str) -> Path:
        return write_sae(root / name, layout="sparsify", architecture="topk", **sizes)

    def scope(name: str) -> Path:
        return write_sae(root / name, layout="gemma_scope", architecture="jumprelu", **sizes)

    def second(name: str) -> Path:
        folder = root / name / "layer_17"
        folder.mkdir(parents=True)
        arrays = make_arrays("jumprelu", d_in=8, d_sae=16)
        renamed = {name.replace("W_", "w_"): array for name, array in arrays.items()}
        write_safetensors(folder / "params.safetensors", renamed)
        hook = "model.layers.17.output"
        said = {"hf_hook_point_in": hook, "architecture": "jump_relu", "type": "sae"}
        (folder / "config.json").write_text(json.dumps(said))
        return folder

    return (
        (saelens("a"), "cfg.json", bytes),
        (saelens("b"), "sae_weights.safetensors", bytes),
        (saelens("c"), "sae_weights.safetensors", with_header),
        (sparsify("d"), "cfg.json", bytes),
        (sparsify("e"), "sae.safetensors", with_header),
        (scope("f"), "params.npz", bytes),
        (scope("g"), "params.npz", archived),
        (second("h"), "config.json", bytes),
        (second("i"), "params.safetensors", with_header),
    )


def check_saes(data: bytes) -> None:
    """Whatever one of its files holds, a folder is an SAE or a ValueError, and so is loading it;
    of memory it takes what its files hold, and of zeros that an archive squeezes a bounded lot."""
    cases = _saes()
    folder, name, make = cases[data[0] % len(cases) if data else 0]
    path = folder / name
    path.write_bytes(make(data[1:]))
    file = _answer(lambda: read_sae(folder), ValueError)
    if file is None:
        return
    assert isinstance(file, SAEFile)
    msgspec.json.encode([file.hook_name, file.model_name, file.warnings])
    size = file.weights.stat().st_size
    squeezed = file.weights.suffix == ".npz"
    # Numbers of two bytes become ones of four, and one threshold one for each feature.
    assert 0 < file.bytes <= (8 * PIECE_BYTES + 100 * size if squeezed else 4 * size)
    sae = _answer(lambda: _load(file), ValueError)
    assert sae is None or sae.nbytes == file.bytes


def _load(file: SAEFile) -> SAE:
    loading = load_sae(file)
    while True:
        try:
            next(loading)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


# Control vectors.


def check_vectors(data: bytes) -> None:
    """A file is a control vector or a ValueError, and so is reading its directions, which are what
    the file was said to hold."""
    path = _scratch() / "vector"
    path.write_bytes(with_header(data[1:]) if data[:1] == b"\0" else data[1:])
    file = _answer(lambda: read_vector(path), ValueError)
    if file is None:
        return
    assert isinstance(file, VectorFile)
    msgspec.json.encode(file.model_hint)
    assert len(file.layers) * file.width * 2 <= path.stat().st_size
    directions = _answer(lambda: read_directions(file), ValueError)
    if directions is not None:
        assert tuple(directions) == file.layers
        assert {d.shape for d in directions.values()} == {(file.width,)}
        assert all(np.isfinite(d).all() for d in directions.values())


# Models.

_FILES: tuple[tuple[str, Callable[[bytes], bytes]], ...] = (
    ("config.json", bytes),
    ("tokenizer_config.json", bytes),
    ("model.safetensors", with_header),
    ("model.safetensors.index.json", bytes),
    ("sentence_bert_config.json", bytes),
    ("chat_template.jinja", bytes),
    ("README.md", bytes),
)


@cache
def _models() -> tuple[Path, ...]:
    """A folder for each of these files. The last two embed, so that their files are read."""
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    folders = []
    for name, _ in _FILES:
        folder = _scratch() / ("e5-model" if name.startswith("sentence") else f"of-{name}")
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        (folder / "tokenizer.json").write_text("{}")
        (folder / _KEPT).write_bytes(with_header(json.dumps({"w": tensor}).encode()))
        folders.append(folder)
    return tuple(folders)


def check_folders(data: bytes) -> None:
    """Whatever a folder holds gives a ModelDescription that can be sent, or UnusableFile."""
    number = data[0] % len(_FILES) if data else 0
    name, make = _FILES[number]
    folder = _models()[number]
    (folder / name).write_bytes(make(data[1:]))
    described = _answer(lambda: describe_model(folder), UnusableFile)
    if described is not None:
        sent = msgspec.json.encode(described)
        assert msgspec.json.decode(sent, type=ModelDescription) == described  # each of its type
        counts = described.context_length, described.hidden_size, described.layers
        assert all(count is None or count > 0 for count in counts)
        assert min(described.size, described.weights, described.kv_block + 1) > 0
