"""Folders of tiny encoders with a tokenizer."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.support.encoders import write_encoder

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_tokenizer() -> Tokenizer:
    """WordPiece of single letters, as BERT frames its texts and pairs."""
    words = [*SPECIAL, *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
    vocabulary = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return made


def write(folder: Path, name: str, **overrides: Any) -> Path:
    write_encoder(folder, name, **overrides)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "BertTokenizer",
        "model_max_length": 40,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
