"""Train the demo model from scratch: `python -m mlxsrv.models.demo.training.train`.

Writes the whole folder that `mlx_lm.load` reads: weights, config, tokenizer and chat template. The
same seed gives the same files on the same machine.

On two cores of a Linux machine the default run takes about 16 minutes with the extra `blas`, and
some ten times as long without.

`--further` is for a few changed answers: it begins with the files that are there, and trains only
the layers after the one that the SAE reads. So the SAE fits as before, and its features stand for
the same. Only what steering makes of the answers has to be looked at: `train_sae --features`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
import mlx_lm
from mlx.nn import losses
from mlx.nn.layers.base import Module
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from mlxsrv.engine.patches.openblas import bind_openblas
from mlxsrv.models.demo.training.corpus import Dialogue, held_out_questions, stream

FOLDER = Path(__file__).parents[1]
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCABULARY = 1536
POSITIONS = 4096
SAE_LAYER = 2
FURTHER_RATE = 0.3  # of the usual learning rates
BATCH_TOKENS = 2048
# What the user writes counts a little: repetition in it teaches the model to copy.
PROMPT_WEIGHT = 0.2
# Until this share of the steps, samples are cut at this length. Short samples hold many more
# questions per second of training, so that the model soon learns to look at the question.
CURRICULUM = ((0.3, 48), (0.6, 160), (1.0, 768))
MIN_TARGETS = 6
LENGTHS = (24, 32, 40, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 160,
    "num_hidden_layers": 4,
    "intermediate_size": 448,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}

# A space belongs to the lower-case word after it, but not to a capitalised word or a digit: a city
# or a number is then the same tokens in a question and in a tool call's JSON, which eases copying.
PIECES = (
    r"\p{N}| ?[\p{Ll}\p{Lo}\p{Lm}\p{M}]+|\p{Lu}+[\p{Ll}\p{Lo}\p{Lm}\p{M}]*"
    r"| ?[^\s\p{L}\p{N}\p{M}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# --- tokenizer ------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE: any text has tokens, and tokens give back the very same text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in (END_OF_TEXT, TURN_START, TURN_END)]
    markers = [AddedToken(text, special=False, normalized=False) for text in MARKERS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(markers),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(markers)
    return tokenizer


def write_tokenizer(folder: Path, seed: int) -> Any:
    """Train and save the tokenizer with its template, and load it the way that users do."""
    source, target = FOLDER / "chat_template.jinja", folder / "chat_template.jinja"
    if source.resolve() != target.resolve():
        shutil.copyfile(source, target)
    texts = map(_plain, islice(stream(seed), 6000))
    train_tokenizer(texts).save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "model_max_length": POSITIONS,
            "clean_up_tokenization_spaces": False,
        },
    )
    return AutoTokenizer.from_pretrained(folder)


def _plain(example: Dialogue | str) -> str:
    if isinstance(example, str):
        return example
    texts = [json.dumps(tool, ensure_ascii=False) for tool in example.tools]
    for message in example.messages:
        texts += [message["role"], message["content"], message.get("reasoning_content") or ""]
        for call in message.get("tool_calls", ()):
            texts.append(json.dumps(call["function"], ensure_ascii=False))
    return "\n".join(texts)


# --- batches --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids, and for each how much the model has to learn to write it."""

    ids: list[int]
    weights: list[float]

    def cut(self, length: int) -> Sample:
        return Sample(self.ids[:length], self.weights[:length])

    @property
    def target_count(self) -> int:
        return self.weights.count(1.0)


class SampleEncoder:
    """Turns examples into samples. What the assistant writes counts most."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._assistant = self._encode(f"{TURN_START}assistant\n")
        self._think = self._encode("<think>\n")
        self._end = self._encode(TURN_END)[0]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def __call__(self, example: Dialogue | str) -> Sample:
        if isinstance(example, str):
            ids = self._encode(example + END_OF_TEXT)
            return Sample(ids, [1.0] * len(ids))
        text = self._tokenizer.apply_chat_template(
            example.messages, tools=example.tools or None, tokenize=False
        )
        ids = self._encode(text)
        return Sample(ids, self._weights(ids))

    def _weights(self, ids: list[int]) -> list[float]:
        weights = [PROMPT_WEIGHT] * len(ids)
        at = 0
        while at < len(ids):
            if ids[at : at + len(self._assistant)] != self._assistant:
                at += 1
                continue
            at += len(self._assistant)
            # the prompt opens the thoughts, so the model must not learn to
            if ids[at : at + len(self._think)] == self._think:
                weights[at : at + len(self._think)] = [0.0] * len(self._think)
                at += len(self._think)
            end = ids.index(self._end, at) + 1
            weights[at:end] = [1.0] * (end - at)
            at = end
        return weights


def batches(samples: Iterator[Sample], steps: int) -> Iterator[tuple[mx.array, mx.array]]:
    """One batch of (ids, weights) per step, each of samples of like length."""
    waiting: dict[int, list[Sample]] = defaultdict(list)
    for step in range(steps):
        limit = next(limit for until, limit in CURRICULUM if step < until * steps)
        yield _stack(*_gather(samples, limit, waiting))


def _gather(
    samples: Iterator[Sample], limit: int, waiting: dict[int, list[Sample]]
) -> tuple[list[Sample], int]:
    """Sort samples by length until those of one length fill a batch."""
    for sample in samples:
        short = sample.cut(limit + 1)
        if short.target_count < min(MIN_TARGETS, sample.target_count):
            continue
        length = next(length for length in LENGTHS if len(short.ids) <= length + 1)
        waiting[length].append(short)
        if len(waiting[length]) * length >= BATCH_TOKENS:
            return waiting.pop(length), length
    raise ValueError("the stream of samples has ended")


def _stack(samples: list[Sample], length: int) -> tuple[mx.array, mx.array]:
    ids, weights = [], []
    for sample in samples:
        padding = length + 1 - len(sample.ids)
        ids.append([*sample.ids, *[0] * padding])
        weights.append([*sample.weights, *[0.0] * padding])
    return mx.array(ids), mx.array(weights)


# --- training -------------------------------------------------------------------------------------


def weighted_loss(model: Module, ids: mx.array, weights: mx.array) -> mx.array:
    surprise = losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
    return (surprise * weights[:, 1:]).sum() / weights[:, 1:].sum()


def learning_rate(steps: int, peak: float) -> Callable[[mx.array], mx.array]:
    warm_up = min(100, steps // 10)
    rise = optim.linear_schedule(0.0, peak, warm_up)
    fall = optim.cosine_decay(peak, max(1, steps - warm_up), peak * 0.02)
    return optim.join_schedules([rise, fall], [warm_up])


def make_optimizer(steps: int, share: float = 1.0) -> Any:
    """Muon for the layers' matrices, which needs half the steps, and AdamW for the rest. `share` is
    the part of the usual learning rates."""

    def is_layer_matrix(name: str, weight: mx.array) -> bool:
        return weight.ndim == 2 and "layers" in name

    muon = optim.Muon(learning_rate(steps, share * 0.02), weight_decay=0.0)
    rate = learning_rate(steps, share * 4e-3)
    adam = optim.AdamW(rate, betas=[0.9, 0.98], weight_decay=0.01)
    return optim.MultiOptimizer([muon, adam], [is_layer_matrix])


def fit(
    model: Module, data: Iterator[tuple[mx.array, mx.array]], steps: int, optimizer: Any
) -> None:
    state = [model.state, optimizer.state]
    clip_grad_norm: Callable[..., Any] = optim.clip_grad_norm
    loss_and_gradients = value_and_grad(model, weighted_loss)

    @partial(mx.compile, inputs=state, outputs=state)
    def step(ids: mx.array, weights: mx.array) -> Any:
        loss, gradients = loss_and_gradients(model, ids, weights)
        gradients, _ = clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        return loss

    started, total = time.perf_counter(), 0.0
    for number, (ids, weights) in enumerate(data, 1):
        loss = step(ids, weights)
        mx.eval(loss, state)
        total += float(loss)
        if number % 50 == 0 or number == steps:
            seconds = time.perf_counter() - started
            print(f"step {number}/{steps}  loss {total / 50:.4f}  {seconds:.0f} s", flush=True)
            total = 0.0


def initialise(model: Module) -> None:
    """Small normal weights, and smaller ones where a layer adds to the residual stream."""

    def drawn(name: str, weight: mx.array) -> mx.array:
        if weight.ndim == 1:
            return weight
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = 1 / math.sqrt(2 * CONFIG["num_hidden_layers"]) if is_residual else 1.0
        return mx.random.normal(weight.shape, scale=0.04 * scale)

    model.load_weights([(name, drawn(name, weight)) for name, weight in weights_of(model).items()])


def resume(model: Model, folder: Path) -> None:
    """The folder's weights, of which only those behind the SAE's layer are trained on."""
    model.load_weights(str(folder / "model.safetensors"))
    model.set_dtype(mx.float32)
    model.freeze()
    for module in (*model.layers[SAE_LAYER + 1 :], model.model.norm):
        module.unfreeze()


def weights_of(model: Any) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


# --- files ----------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(folder: Path, model: Module, config: dict[str, Any], tokenizer: Any) -> None:
    end, start = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    write_json(folder / "config.json", config | {"eos_token_id": end, "bos_token_id": start})
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": [end, start], "bos_token_id": start, "temperature": 0.0},
    )
    model.set_dtype(mx.bfloat16)
    path = str(folder / "model.safetensors")
    mx.save_safetensors(path, weights_of(model), metadata={"format": "mlx"})


# --- evaluation -----------------------------------------------------------------------------------


def answer(model: Module, tokenizer: Any, question: str) -> str:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, enable_thinking=False
    )
    text: str = mlx_lm.generate(model, tokenizer, prompt, max_tokens=200)
    return text


def evaluate(folder: Path) -> float:
    """The share of held-out questions that get the answer to the right topic."""
    model, tokenizer = mlx_lm.load(str(folder))
    questions = held_out_questions()
    right = 0
    for topic, question in questions:
        reply = answer(model, tokenizer, question.capitalize() + "?")
        if all(keyword in reply for keyword in topic.keywords):
            right += 1
        else:
            print(f"wrong: {question!r} ({topic.name}): {reply[:70]!r}")
    return right / len(questions)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train mlxsrv's demo model.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="Folder to write.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2300)
    parser.add_argument("--further", action="store_true", help="Begin with the files in --out.")
    options = parser.parse_args()

    bind_openblas()
    options.out.mkdir(parents=True, exist_ok=True)
    mx.random.seed(options.seed)
    config = CONFIG | {"vocab_size": VOCABULARY}
    model = Model(ModelArgs.from_dict(config))
    if options.further:
        tokenizer = AutoTokenizer.from_pretrained(options.out)
        resume(model, options.out)
    else:
        tokenizer = write_tokenizer(options.out, options.seed)
        initialise(model)
    samples = map(SampleEncoder(tokenizer), stream(options.seed))
    optimizer = make_optimizer(options.steps, FURTHER_RATE if options.further else 1.0)
    fit(model, batches(samples, options.steps), options.steps, optimizer)
    write_model(options.out, model, config, tokenizer)
    size = (options.out / "model.safetensors").stat().st_size
    count = sum(weight.size for weight in weights_of(model).values())
    print(f"{count:,} parameters, {size:,} bytes")
    print(f"held-out accuracy {evaluate(options.out):.1%}")


if __name__ == "__main__":
    main()
