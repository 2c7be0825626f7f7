"""Real models that say what a test has written for them, token by token as the test cuts it.

The demo model writes good calls and a random model none at all; what else a model may write, a
call that breaks off or a character in pieces, needs a model of its own. Its layers add nothing,
so a token alone decides what follows: the head takes the direction of each of the script's tokens
to the next one. The script begins after a line end, where a chat's prompt stops.

A model with several scripts answers what the conversation has come to: it calls a tool and, when it
has read the result, says what it found. The chat template chooses the script and ends the prompt
with that script's head, a token of its own. Attention finds the head and adds the script's own
direction to every later token; so the markers of calls, which scripts share, are followed by the
right one's text.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
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


_ATTENTION = 4.0
"""Weight of the norms of queries and keys: a head's key then has the score 64, and others 0."""

_LONGEST_TURN = 1e12
"""Base of the rotary embedding: its slowest pair of dimensions hardly turns in a long prompt."""

AFTER_TOOL = "messages[-1].role == 'tool'"
"""A condition of `write_conversation`: the last message is the result of a call."""


def cut(text: str, size: int, taken: Iterable[bytes] = ()) -> list[bytes]:
    """`text` in pieces of `size` bytes or, where there was such a piece before, a few more.

    Args:
        taken: pieces that were there before.
    """
    pieces = [*taken, b"\n"]
    data, first = text.encode(), len(pieces)
    while data:
        n = size
        while data[:n] in pieces and n < len(data):
            n += 1
        pieces.append(data[:n])
        data = data[n:]
    while pieces[-1] in pieces[:-1]:
        if len(pieces) <= first + 1:
            raise ValueError(f"{text!r} was there before, so its token would be too")
        pieces[-2:] = [pieces[-2] + pieces[-1]]
    return pieces[first:]


def write_scripted(
    folder: Path,
    script: Iterable[str | bytes],
    *,
    template: str | None = CHAT_TEMPLATE,
    **config: Any,
) -> Path:
    """Write a model that says `script` and ends; each piece is a token, and none comes twice.

    Args:
        script: pieces of text, in UTF-8 if taken together; a marker is a token of its own.
        template: for chats; None: the model has none.
        config: changes to config.json, such as `max_position_embeddings`.
    """
    pieces = [piece.encode() if isinstance(piece, str) else piece for piece in script]
    return _write(folder, [(b"\n", *pieces)], (), template, config)


def write_conversation(
    folder: Path,
    scripts: Mapping[str, str],
    *,
    template: str = CHAT_TEMPLATE,
    size: int = 6,
    **config: Any,
) -> Path:
    """Write a model that says the first of its scripts whose condition holds.

    Args:
        scripts: texts by their conditions, which are Jinja expressions over all that a chat
            template knows: `AFTER_TOOL`, "not tools", "true". No text has a marker twice.
        template: renders the messages; the head of the script is added to it.
        size: bytes of a token.
        config: changes to config.json, such as `max_position_embeddings`.
    """
    heads = [f"<|script {number}|>" for number in range(len(scripts))]
    chains: list[tuple[bytes, ...]] = []
    taken: list[bytes] = []
    for head, text in zip(heads, scripts.values(), strict=True):
        pieces = _cut_between_markers(text, size, taken)
        taken += (piece for piece in pieces if piece.decode(errors="replace") not in MARKER_TOKENS)
        chains.append((head.encode(), *pieces))
    choices = "".join(
        f"{'elif' if number else 'if'} {condition} %}}{head}{{% "
        for number, (condition, head) in enumerate(zip(scripts, heads, strict=True))
    )
    choice = "{% " + choices + "else %}{{ raise_exception('no script is for this') }}{% endif %}"
    template += "{% if add_generation_prompt %}" + choice + "{% endif %}"
    return _write(folder, chains, heads, template, config)


def _cut_between_markers(text: str, size: int, taken: Iterable[bytes]) -> list[bytes]:
    """The pieces of a text; a marker is one of its own."""
    pieces: list[bytes] = []
    for part in re.split(f"({'|'.join(map(re.escape, MARKER_TOKENS))})", text):
        if part in MARKER_TOKENS:
            pieces.append(part.encode())
        elif part:
            pieces += cut(part, size, [*taken, *pieces])
    return pieces


def _write(
    folder: Path,
    chains: Sequence[Sequence[bytes]],
    heads: Sequence[str],
    template: str | None,
    changes: Mapping[str, Any],
) -> Path:
    """Write a model of which each chain is a script: its head, and the pieces that follow.

    Args:
        heads: those that are tokens of their own.
    """
    tokenizer = _tokenizer([piece for chain in chains for piece in chain[1:]], heads)
    end = END_TOKENS[0].encode()
    scripts = [[_id(tokenizer, piece) for piece in (*chain, end)] for chain in chains]
    if any(len({*script}) < len(script) for script in scripts):
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
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": size + len(heads),
        "vocab_size": size,
        "rope_theta": _LONGEST_TURN,
        "eos_token_id": scripts[0][-1],
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    weights = _weights(config, scripts)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _tokenizer(pieces: Sequence[bytes], heads: Sequence[str]) -> Tokenizer:
    """One that reads single bytes and `heads`, and writes `pieces` as well."""
    spellings = {*pre_tokenizers.ByteLevel.alphabet(), *map(spell, pieces)}
    spellings -= {*MARKER_TOKENS}
    vocabulary = {spelling: n for n, spelling in enumerate(sorted(spellings))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in (*SPECIAL_TOKENS, *heads)])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKER_TOKENS])
    return tokenizer


def _id(tokenizer: Tokenizer, piece: bytes) -> int:
    added = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
    text = piece.decode(errors="replace")
    token = added[text] if text in added else tokenizer.token_to_id(spell(piece))
    assert token is not None
    return int(token)


def spell(piece: bytes) -> str:
    """GPT-2's spelling of bytes: those that print stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return "".join(
        chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in piece
    )


def _weights(config: dict[str, Any], scripts: Sequence[Sequence[int]]) -> dict[str, mx.array]:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, value in parameters:
        norm = value.ndim == 1
        weights[name] = mx.ones(value.shape) if norm else mx.zeros(value.shape)
    size, width = config["vocab_size"], config["hidden_size"]
    head = np.zeros((size, width), dtype=np.float32)
    for script in scripts:
        for token, following in pairwise(script):
            head[following, token] = _CERTAIN
    if len(scripts) > 1:
        weights |= _attention(config, [script[0] for script in scripts])
        for number, script in enumerate(scripts):
            head[list(script[1:]), size + number] = _CERTAIN
        _check(head, scripts)
    embedding = mx.eye(size, width)
    return weights | {"model.embed_tokens.weight": embedding, "lm_head.weight": mx.array(head)}


def _attention(config: dict[str, Any], heads: Sequence[int]) -> dict[str, mx.array]:
    """Weights with which every token asks for a script's head, and gets the script's direction."""
    size, width, dims = config["vocab_size"], config["hidden_size"], config["head_dim"]
    if len(heads) > dims:
        raise ValueError(f"a value of attention has room for {dims} scripts")
    slowest = dims // 2 - 1
    query, key = np.zeros((2, dims, width), dtype=np.float32)
    value, out = np.zeros((dims, width), np.float32), np.zeros((width, dims), np.float32)
    query[slowest, :size] = 1
    for number, token in enumerate(heads):
        key[slowest, token] = 1
        value[number, token] = width**-0.5  # the norm before it has made the token's 1 larger
        out[size + number, number] = 1
    norm = mx.full((dims,), _ATTENTION)
    weights = {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": out}
    named = {name: mx.array(weight) for name, weight in weights.items()}
    named |= {"q_norm": norm, "k_norm": norm}
    return {f"model.layers.0.self_attn.{name}.weight": each for name, each in named.items()}


def _check(head: np.ndarray[Any, Any], scripts: Sequence[Sequence[int]]) -> None:
    """Raise if scripts share so much that a token would be followed by another script's."""
    size = len(head)
    for number, script in enumerate(scripts):
        for token, following in pairwise(script):
            logits = head[:, token] + head[:, size + number]
            if np.count_nonzero(logits >= logits[following]) > 1:
                raise ValueError(f"script {number} goes astray after token {token}")
