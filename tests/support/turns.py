"""Real models that say whole texts in any format, with markers as often as they come.

`tests.support.scripted` makes models of mlx-lm's own whose last token alone decides what follows,
so no marker may come twice. Formats of calls write theirs around each argument. This model counts:
attention finds the token that the chat template ended the prompt with, which names a text, and how
far away it is; the token at that place of the text is the next one. It is a few lines of code that
come with the model, so the server needs `--trust-remote-code`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.tiny import FAMILIES

_CODE = """\
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.qwen3 import ModelArgs as ModelArgs


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.layers = [nn.Identity()]
        self.texts = mx.zeros(SHAPE)  # token ids, one text a row
        self.heads = mx.zeros(SHAPE[:1])  # the token that names each text

    def __call__(self, inputs, cache=None, input_embeddings=None):
        offset = 0 if cache is None else cache[0].offset
        places = mx.arange(inputs.shape[1])
        places = places + (offset[:, None] if isinstance(offset, mx.array) else offset)
        places = mx.broadcast_to(places, inputs.shape).astype(mx.float32)
        named = inputs[..., None] == self.heads.astype(inputs.dtype)
        is_head = named.any(axis=-1).astype(mx.float32)
        number = named.argmax(axis=-1).astype(mx.float32)
        keys = mx.stack([is_head, mx.zeros(inputs.shape)], axis=-1)
        values = mx.stack([number, places], axis=-1)
        queries = mx.full((*inputs.shape, 2), 100.0)
        keys, values, queries = keys[:, None], values[:, None], queries[:, None]
        mask = create_attention_mask(queries[:, 0], None if cache is None else cache[0])
        if cache is not None:
            keys, values = cache[0].update_and_fetch(keys, values)
        found = scaled_dot_product_attention(
            queries, keys, values, cache=None if cache is None else cache[0], scale=1, mask=mask
        )[:, 0]
        number = mx.round(found[..., 0]).astype(mx.int32)
        step = (places - mx.round(found[..., 1])).astype(mx.int32)
        step = mx.clip(step, 0, self.texts.shape[1] - 1)
        number = mx.clip(number, 0, self.texts.shape[0] - 1)
        token = self.texts[number, step].astype(mx.int32)
        return 40.0 * (mx.arange(self.args.vocab_size) == token[..., None]).astype(mx.float32)
"""


def write_turns(
    folder: Path,
    turns: Mapping[str, str],
    *,
    template: str,
    markers: Sequence[str],
    ends: Sequence[str] = ("<|im_end|>",),
    context: int = 4096,
    merges: int = 0,
) -> Path:
    """Write a model that says the first of its texts whose condition holds.

    Args:
        turns: texts by their conditions, which are Jinja expressions over all that a chat template
            knows. Each ends with the first of `ends`, unless it ends with another of them.
        template: renders the messages; the head of the text is added to it.
        markers: added tokens, besides `ends`.
        context: tokens of prompt and answer.
        merges: tokens of several bytes that the texts have most often; without them, each byte is
            a token.
    """
    heads = [f"<|turn {number}|>" for number in range(len(turns))]
    added = [*dict.fromkeys((*ends, *markers)), *heads]
    texts = [text if text.endswith(tuple(ends)) else text + ends[0] for text in turns.values()]
    tokenizer = _tokenizer(added, texts, merges)
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    table = np.full((len(ids), max(map(len, ids))), ids[0][-1], dtype=np.float32)
    for row, tokens in enumerate(ids):
        table[row, : len(tokens)] = tokens
    named = [tokenizer.token_to_id(head) for head in heads]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    choices = "".join(
        f"{'elif' if number else 'if'} {condition} %}}{head}{{% "
        for number, (condition, head) in enumerate(zip(turns, heads, strict=True))
    )
    choice = "{% " + choices + "else %}{{ raise_exception('no turn is for this') }}{% endif %}"
    template += "{% if add_generation_prompt %}" + choice + "{% endif %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0]}
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    end_ids = [tokenizer.token_to_id(end) for end in ends]
    config = {
        **FAMILIES["qwen3"].config,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,  # that which stands there, and where it stands
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": context,
        "eos_token_id": end_ids,
        "model_file": "own.py",
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "own.py").write_text(f"{_CODE}\n\nSHAPE = {table.shape}\n", "utf-8")
    weights = {"texts": mx.array(table), "heads": mx.array(np.array(named, dtype=np.float32))}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _tokenizer(added: Sequence[str], texts: Sequence[str], merges: int) -> Tokenizer:
    """One of single bytes, merges of these, and added tokens."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    size = len(alphabet) + merges
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    special = re.compile(r"<\|.*\|>|<\|.*>|<.*\|>|\[.*\]")
    tokenizer.add_tokens(
        [AddedToken(each, special=bool(special.fullmatch(each))) for each in added]
    )
    return tokenizer
