"""Real models that say what a test has written for them, token by token as the test cuts it.

The demo model writes good calls and a random model none at all; what else a model may write, a
call that breaks off or a character in pieces, needs a model of its own. Its layers add nothing,
so a token alone decides what follows: the head takes the direction of each of the script's tokens
to the next one. The script begins after a line end, where a chat's prompt stops.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny import CHAT_TEMPLATE, END_TOKENS, FAMILIES, MARKER_TOKENS, SPECIAL_TOKENS

_CERTAIN = 4.0
"""Times the square root of the vocabulary: the logit of the next token, where others have 0."""


def cut(text: str, size: int) -> list[bytes]:
    """`text` in pieces of `size` bytes or, where there was such a piece before, a few more."""
    data, pieces = text.encode(), [b"\n"]
    while data:
        n = size
        while data[:n] in pieces and n < len(data):
            n += 1
        pieces.append(data[:n])
        data = data[n:]
    while pieces[-1] in pieces[:-1]:
        pieces[-2:] = [pieces[-2] + pieces[-1]]
    return pieces[1:]


def write_scripted(
    folder: Path, script: Iterable[str | bytes], *, template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write a model that says `script` and ends; each piece is a token, and none comes twice.

    Args:
        script: pieces of text, in UTF-8 if taken together; a marker is a token of its own.
        template: for chats; None: the model has none.
    """
    pieces = [piece.encode() if isinstance(piece, str) else piece for piece in script]
    tokenizer = _tokenizer(pieces)
    ids = [_id(tokenizer, piece) for piece in (b"\n", *pieces, END_TOKENS[0].encode())]
    if len({*ids}) < len(ids):
        raise ValueError("a token that comes twice would not know what follows it")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKENS[0]}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    size = tokenizer.get_vocab_size()
    config: dict[str, Any] = {
        **FAMILIES["qwen3"].config,
        "num_hidden_layers": 1,
        "hidden_size": size,
        "vocab_size": size,
        "eos_token_id": ids[-1],
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(config, ids), {"format": "mlx"})
    return folder


def _tokenizer(pieces: Sequence[bytes]) -> Tokenizer:
    """One that reads single bytes and writes `pieces` as well."""
    spellings = {*pre_tokenizers.ByteLevel.alphabet(), *map(spell, pieces)}
    spellings -= {*MARKER_TOKENS}
    vocabulary = {spelling: n for n, spelling in enumerate(sorted(spellings))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKER_TOKENS])
    return tokenizer


def _id(tokenizer: Tokenizer, piece: bytes) -> int:
    added = piece.decode(errors="replace")
    token = tokenizer.token_to_id(
        added if added in MARKER_TOKENS + SPECIAL_TOKENS else spell(piece)
    )
    assert token is not None
    return int(token)


def spell(piece: bytes) -> str:
    """GPT-2's spelling of bytes: those that print stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return "".join(
        chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in piece
    )


def _weights(config: dict[str, Any], script: Sequence[int]) -> dict[str, mx.array]:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, value in parameters:
        norm = value.ndim == 1
        weights[name] = mx.ones(value.shape) if norm else mx.zeros(value.shape)
    size = config["vocab_size"]
    head = np.zeros((size, size), dtype=np.float32)
    for token, following in pairwise(script):
        head[following, token] = _CERTAIN
    return weights | {"model.embed_tokens.weight": mx.eye(size), "lm_head.weight": mx.array(head)}
