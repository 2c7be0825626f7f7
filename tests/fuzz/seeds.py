"""The first inputs of each target: at least one that goes all the way through it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.targets import DIALECTS
from tests.support.bodies import KINDS
from tests.support.ggufs import write_gguf
from tests.support.saes import make_arrays, write_sae, write_safetensors
from tests.support.tool_calls import FAMILIES, SECTIONS

_SIZES = b"\x01\x00\x03"
_THOUGHT = "<think>\nhm 你\n</think>\n\n"


def _text(*parts: bytes | str) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _requests() -> list[bytes]:
    """Every fine body of the table, and the shapes of the management's."""
    bodies = [body for kind in KINDS.values() for body in kind.fine]
    profile = {"name": "p", "steering": {"3": 1.5}, "model_id": "m", "sae_id": "s", "layer": 1}
    bodies += [
        {"input": ["a", "b"], "dimensions": 4, "encoding_format": "base64"},
        {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
        {"repository_id": "a/b", "revision": "main", "file_path": "x", "id": "s"},
        {"path": "s", "model": None, "layer": 3},
        {"feature_idx": 3, "value": -2.5, "mode": "replace"},
        {"steering": {"1": 1, "22": -3.5}},
        profile,
        {"format": "mlxsrv-profile", "version": 1, "profile": profile},
        {"enabled": True, "features": [1, 2], "top_k": 3, "history_size": 10},
        {"k": 5, "metric": "max"},
    ]
    return [_json(body) for body in bodies]


def _tools() -> list[bytes]:
    """A call of each family's, alone and among words, ended by the model and cut off."""
    seeds = []
    for number, name in enumerate(DIALECTS):
        for written in (FAMILIES[name], SECTIONS[name], f"hi {FAMILIES[name]}\n bye"):
            for flags in (b"\0\1\0", b"\1\0\1"):
                seeds.append(_text(bytes([number]), flags, _SIZES, written))
    doubted = '<tool_call>{"name": "f", "arguments": {"x": "a</tool_call> b\n"}}</tool_call>'
    quoted = '<tool_call>{"name": "f", "arguments": {"x": "a</tool_call> b"}}</tool_call>'
    return [*seeds, *(_text(b"\0\0\1\0", _SIZES, written) for written in (doubted, quoted))]


def _growth() -> list[bytes]:
    """Return texts that may be repeated: the beginnings and the ends of everything."""
    units = [
        *("<", "<think>", "</think>", " ", "\n", "\n\n\n\n\n\n\n", "{", "[", '"', "\\", "a", "</"),
        *('"a": {', '{"name": "f", "arguments": {"a": "', "</tool_call>", "<tool_call>"),
    ]
    begun = '<tool_call>{"name": "f", "arguments": {"a": "'
    return [
        *(_text(b"\0\0\0", b"\xff", unit, b"\xff") for unit in units),
        *(_text(b"\0\1\0", begun, b"\xff", unit, b"\xff") for unit in units),
        *(
            _text(bytes([number, 0, 1]), FAMILIES[name][:30], b"\xff", FAMILIES[name][30:40])
            for number, name in enumerate(DIALECTS)
        ),
    ]


def _saes() -> list[bytes]:
    sizes: dict[str, Any] = {"d_in": 8, "d_sae": 16, "k": 3}
    arrays = make_arrays("topk", d_in=8, d_sae=16)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        new = write_sae(root / "a", architecture="topk", **sizes)
        old = write_sae(root / "b", layout="saelens_old", architecture="topk", **sizes)
        sparsify = write_sae(root / "c", layout="sparsify", architecture="topk", **sizes)
        scope = write_sae(root / "d", layout="gemma_scope", architecture="jumprelu", **sizes)
        whole = (new / "sae_weights.safetensors").read_bytes()
        packed = root / "params.npz"
        np.savez_compressed(packed, allow_pickle=False, **make_arrays("jumprelu", d_in=1, d_sae=2))
        return [
            b"\0" + (new / "cfg.json").read_bytes(),
            b"\0" + (old / "cfg.json").read_bytes(),
            b"\1" + whole,
            b"\2" + _header(whole),
            b"\3" + (sparsify / "cfg.json").read_bytes(),
            b"\4" + _header((sparsify / "sae.safetensors").read_bytes()),
            b"\5" + (scope / "params.npz").read_bytes(),
            b"\5" + packed.read_bytes(),
            b"\6" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (8, 16), }      \n",
            b"\7"
            + _json({"hf_hook_point_in": "model.layers.17.output", "width": 16})[:-1]
            + b', "architecture": "jump_relu", "type": "sae"}',
            b"\x08" + _header(_second(root / "params.safetensors", arrays)),
        ]


def _header(file: bytes) -> bytes:
    return file[8 : 8 + int.from_bytes(file[:8], "little")]


def _second(path: Path, arrays: Mapping[str, Any]) -> bytes:
    renamed = {name.replace("W_", "w_"): array for name, array in arrays.items()}
    write_safetensors(path, renamed | {"threshold": arrays["b_enc"]})
    return path.read_bytes()


def _vectors() -> list[bytes]:
    direction = np.ones(4, np.float32)
    header = {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]}
    with tempfile.TemporaryDirectory() as name:
        fields = {"a": [1, 2], "b": ["x", "y"], "c": 1.5, "d": True, "general.alignment": 32}
        said = {"controlvector.model_hint": "qwen3"}
        tensors: list[tuple[str, Any]] = [
            ("direction.1", direction),
            ("direction.2", direction.astype(np.float16)),
        ]
        path = write_gguf(Path(name) / "v.gguf", tensors, said | fields)
        return [
            b"\0" + _json({"direction.3": header, "other": header}),
            b"\1" + path.read_bytes(),
        ]


def _folders() -> list[bytes]:
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 9},
        "quantization": {"bits": 4, "group_size": 64, "w": {"group_size": 32}},
        "text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
        "layer_types": ["full_attention", "linear_attention"],
        "kv_lora_rank": 8,
        "num_key_value_heads": 2,
    }
    bert = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    tokens = {"1": {"content": "<think>"}}
    settings = {"chat_template": "{{ tools }}", "added_tokens_decoder": tokens}
    named = {"chat_template": [{"name": "a", "template": "x"}], "model_max_length": 10**30}
    tensor = {"dtype": "U32", "shape": [2, 2], "data_offsets": [0, 16]}
    scales = {"dtype": "F16", "shape": [2], "data_offsets": [16, 20]}
    tensors = {"w.weight": tensor, "w.scales": scales, "__metadata__": {"format": "mlx"}}
    return [
        b"\0" + _json(config),
        b"\0" + _json(bert | {"architectures": ["BertModel"], "max_position_embeddings": 9}),
        b"\1" + _json(settings),
        b"\1" + _json(named),
        b"\2" + _json(tensors),
        b"\3" + _json({"weight_map": {"w": "model.safetensors"}}),
        b"\4" + _json({"max_seq_length": 256}),
        b"\5{% if enable_thinking %}{{ tools }}{% endif %}",
        b"\6---\npipeline_tag: feature-extraction\n---\n# A model\n",
    ]


SEEDS: Mapping[str, Sequence[bytes]] = {
    "requests": _requests(),
    "queries": [b"layer=3&model=m&limit=5&request_id=r&features=1,22", b"features=a%00&limit=x"],
    "stops": [
        _text(_SIZES, "END", b"\xff", "\n\n", b"\xff", "a\n\nbEN"),
        _text(_SIZES, "aab", b"\xff", "bc", b"\xff", "abcd", b"\xff", "aaabcd"),
    ],
    "detokenize": [
        _text(b"\1", _SIZES, " the 你好 👩‍👩‍👧 \ufffd"),
        _text(b"\0", _SIZES, "é", b"\xe4\xb8", "a", b"\xf0\x9f"),
    ],
    "channels": [
        _text(b"\0\0\0", _SIZES, "<think>", b"\xff", "</think>", b"\xff", _THOUGHT, "hi </thi"),
        _text(b"\1\1\1", _SIZES, "<t>", b"\xff", "</t>", b"\xff", " a</t>\nb<t>c</t"),
        _text(b"\1\0\1", _SIZES, "", b"\xff", "</t>", b"\xff", " a</t>\nb<t>c"),
    ],
    "tools": _tools(),
    "pipeline": [
        _text(bytes([0, 1, 0, 1]), _SIZES, b"\2\0\1", "\n\n", b"\xff", _THOUGHT, "a\n\nb"),
        *(
            _text(
                bytes([1]) + bytes([number]),
                b"\0\0\1",
                _SIZES,
                b"\1\2\3",
                "END",
                b"\xff",
                _THOUGHT,
                FAMILIES[name],
                " 你 END",
            )
            for number, name in enumerate(DIALECTS)
        ),
    ],
    "growth": _growth(),
    "sse": [_text("a\u2028b\u2029c\u0085d\n\r\0", b"\xff", '"\\data: [DONE]\n\n')],
    "saes": _saes(),
    "vectors": _vectors(),
    "folders": _folders(),
    "grammars": [b"a", b"b"],
}
