"""Train a sparse autoencoder on the demo model: `python -m mlxsrv.models.demo.training.train_sae`.

Writes `sae/`, in the layout of SAELens, to read and to steer the residual stream of one layer. The
text is the demo model's own conversations. It is a JumpReLU autoencoder with one threshold for all
features, which moves in training until L0 of them are active for a token on average.

The same seed gives the same file on the same machine. It takes about 5 minutes on two cores, on
Linux with the extra `blas`.

`--features` trains nothing: it shows what the named features stand for and what steering with each
of them makes of the demo's answers.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
import mlx_lm
from mlx.nn import losses

from mlxsrv.engine.patches.openblas import bind_openblas
from mlxsrv.engine.steering.hooks import Change, Site, find_layers, hooked
from mlxsrv.models.demo.training.corpus import Dialogue, stream
from mlxsrv.models.demo.training.train import FOLDER, SAE_LAYER, SampleEncoder, write_json

SAE_FOLDER = FOLDER / "sae"
FEATURES = 1536
L0 = 8
SEED = 1
# The corpus that is measured on, which the training has not seen.
TEST_SEED = 2
TEST_TOKENS = 20_000
TRAINING_TOKENS = 500_000
# The first turns of a conversation: there is more to tell apart in many short ones.
LONGEST = 128
READ_TOGETHER = 32
BATCH = 1024
PEAK_RATE = 2e-3
# How fast the threshold follows, to have L0 features active for a token on average.
THRESHOLD_RATE = 0.02
DEAD_AFTER = 200
"""Batches in which a feature has not been active once, after which it is given a new start."""

CONTEXT, SHOWN = 12, 6

SAEWeights = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class Named:
    """A feature that steers well: a value that does, and how the answer to one question begins
    then."""

    index: int
    value: float
    name: str
    question: str
    answer: str


# Found among all features by what they do to the answers; another seed gives other ones.
NAMED = (
    Named(
        1456,
        9.0,
        "not knowing",
        "Who are you?",
        "I am only a small demo model, and I only know about mlxsrv. You could ask me how to "
        "stream a reply, or how to choose a model.",
    ),
    Named(
        239,
        8.0,
        "brevity",
        "How many requests run together?",
        "Up to 32 requests are decoded together",
    ),
    Named(1489, 8.5, "counting", "Thanks!", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"),
    Named(
        86,
        9.0,
        "the health check",
        "Is it free software?",
        "GET /health tells whether the server is up: it answers 200 when it is ready.",
    ),
    Named(
        545,
        8.0,
        "Starlette",
        "What is mlxsrv?",
        "Starlette is a small ASGI toolkit that mounts anywhere, and msgspec checks and encodes "
        "JSON very fast.",
    ),
)
QUESTIONS = (
    "What is mlxsrv?",
    "Which port does it use?",
    "How do I choose a model?",
    "What is the capital of France?",
    "Hello!",
    "How do I limit the length of replies?",
    "Tell me about the queue",
    "Is it free software?",
    "How do I install it?",
    "Tell me a joke",
    "Thanks!",
    "How many requests run together?",
    "What is a seed?",
    "How do I bake bread?",
    "How do I stream a reply?",
    "Who are you?",
    "Which endpoints are there?",
    "How do I stop the server?",
    "What is MLX?",
    "Does it need the internet?",
)


# --- the residual stream --------------------------------------------------------------------------


def texts(tokenizer: Any, seed: int, count: int) -> list[list[int]]:
    """Token ids of conversations as the chat template writes them, `count` tokens at least."""
    encoder = SampleEncoder(tokenizer)
    kept: list[list[int]] = []
    for example in stream(seed):
        if count <= 0:
            break
        if isinstance(example, Dialogue) and not example.tools:
            kept.append(encoder(example).ids[:LONGEST])
            count -= len(kept[-1])
    return kept


def read(model: Any, samples: list[list[int]], layer: int) -> mx.array:
    """The layer's output for every token of the samples in turn, `(tokens, width)` in float32."""
    seen: list[mx.array] = []

    def look(states: mx.array) -> mx.array:
        seen.append(states)
        return states

    hidden: list[mx.array] = []
    with hooked(find_layers(model), {Site(layer): look}):
        for start in range(0, len(samples), READ_TOGETHER):
            rows = samples[start : start + READ_TOGETHER]
            longest = max(map(len, rows))
            # Padding comes after a row's text, which does not see it.
            model(mx.array([[*row, *[0] * (longest - len(row))] for row in rows]))
            states = seen.pop().astype(mx.float32)
            hidden.append(mx.concatenate([states[at, : len(row)] for at, row in enumerate(rows)]))
            mx.eval(hidden[-1])
    return mx.concatenate(hidden)


# --- training -------------------------------------------------------------------------------------


def scale_of(hidden: mx.array) -> float:
    """Return the divisor of hidden states that makes the mean square of their numbers about one."""
    return float(mx.linalg.norm(hidden, axis=-1).mean()) / math.sqrt(hidden.shape[-1])


def initialise(hidden: mx.array, features: int) -> SAEWeights:
    """Each feature begins as the direction of one token's hidden state, written as it is read."""
    middle = hidden.mean(axis=0)
    rows = _unit(hidden[mx.random.randint(0, len(hidden), (features,))] - middle)
    return {"W_enc": 0.1 * rows.T, "b_enc": mx.zeros(features), "W_dec": rows, "b_dec": middle}


def _unit(rows: mx.array) -> mx.array:
    return rows / mx.linalg.norm(rows, axis=-1, keepdims=True)


def encode(weights: SAEWeights, hidden: mx.array, threshold: mx.array) -> mx.array:
    active = mx.maximum((hidden - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"], 0)
    return mx.where(active > threshold, active, 0)


def decode(weights: SAEWeights, active: mx.array) -> mx.array:
    return active @ weights["W_dec"] + weights["b_dec"]


def batch_error(
    weights: SAEWeights, hidden: mx.array, threshold: mx.array
) -> tuple[mx.array, mx.array]:
    """The squared error of the reconstruction, and how many tokens each feature is active on."""
    active = encode(weights, hidden, threshold)
    error = (hidden - decode(weights, active)).square().sum(axis=-1).mean()
    return error, (active > 0).sum(axis=0)


def fit(hidden: mx.array, features: int, l0: int, steps: int) -> SAEWeights:
    """Train on scaled hidden states. The weights come with the `threshold` of every feature."""
    weights = initialise(hidden, features)
    optimizer = optim.Adam(_rate(steps))
    optimizer.init(weights)
    state = [weights, optimizer.state]
    error_and_gradients = mx.value_and_grad(batch_error)

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, threshold: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        (error, uses), gradients = error_and_gradients(weights, batch, threshold)
        weights.update(optimizer.apply_gradients(gradients, weights))
        weights["W_dec"] = _unit(weights["W_dec"])
        excess = uses.sum() / (len(batch) * l0) - 1
        return error, uses, threshold * mx.exp(THRESHOLD_RATE * mx.clip(excess, -1, 1))

    spread = float(hidden.var(axis=0).sum())
    idle, threshold = mx.zeros(features), mx.array(0.5)
    total, started = 0.0, time.perf_counter()
    for number in range(1, steps + 1):
        batch = hidden[mx.random.randint(0, len(hidden), (BATCH,))]
        error, uses, threshold = step(batch, threshold)
        idle = mx.where(uses > 0, 0, idle + 1)
        mx.eval(state, idle, threshold)
        total += float(error) / spread
        if number % DEAD_AFTER == 0 and number <= 0.7 * steps:
            revive(weights, optimizer.state, batch, threshold, idle >= DEAD_AFTER)
        if number % 100 == 0:
            seconds = time.perf_counter() - started
            print(
                f"step {number}/{steps}  unexplained {total / 100:.4f}  "
                f"L0 {int(uses.sum()) / BATCH:.1f}  dead {int((idle >= DEAD_AFTER).sum())}  "
                f"threshold {float(threshold):.3f}  {seconds:.0f} s",
                flush=True,
            )
            total = 0.0
    return weights | {"threshold": mx.full(features, threshold)}


def _rate(steps: int) -> Callable[[mx.array], mx.array]:
    rise = optim.linear_schedule(0.0, PEAK_RATE, 100)
    fall = optim.cosine_decay(PEAK_RATE, max(1, steps - 100), PEAK_RATE * 0.02)
    return optim.join_schedules([rise, fall], [100])


def revive(
    weights: SAEWeights, moments: Any, batch: mx.array, threshold: mx.array, dead: mx.array
) -> None:
    """Give dead features the directions of what is reconstructed worst."""
    places = [at for at, is_dead in enumerate(cast(list[bool], dead.tolist())) if is_dead]
    if not places:
        return
    missing = batch - decode(weights, encode(weights, batch, threshold))
    error = missing.square().sum(axis=-1)
    worst = mx.random.categorical(mx.log(error), num_samples=len(places))
    rows, at = _unit(missing[worst]), mx.array(places)
    weights["W_dec"][at] = rows
    weights["W_enc"][:, at] = 0.5 * rows.T
    weights["b_enc"][at] = 0.0
    for moment in ("m", "v"):
        moments["W_dec"][moment][at] = 0.0
        moments["W_enc"][moment][:, at] = 0.0
        moments["b_enc"][moment][at] = 0.0


# --- files ----------------------------------------------------------------------------------------


def write(folder: Path, weights: SAEWeights, scale: float, layer: int) -> None:
    """SAELens' layout. The scale goes into the weights: they take hidden states as they are.

    Activations stay small numbers by that, and the rows of W_dec are about `scale` long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folded = weights | {
        "W_enc": weights["W_enc"] / scale,
        "W_dec": weights["W_dec"] * scale,
        "b_dec": weights["b_dec"] * scale,
    }
    width, features = folded["W_enc"].shape
    arrays = {name: mx.contiguous(array.astype(mx.float16)) for name, array in folded.items()}
    mx.save_safetensors(str(folder / "sae_weights.safetensors"), arrays, metadata={"format": "mlx"})
    config = {
        "architecture": "jumprelu",
        "d_in": width,
        "d_sae": features,
        "dtype": "float16",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "metadata": {
            "model_name": "mlxsrv/demo",
            "hook_name": f"blocks.{layer}.hook_resid_post",
            "features": {str(feature.index): feature.name for feature in NAMED},
        },
    }
    write_json(folder / "cfg.json", config)


def load(folder: Path) -> tuple[SAEWeights, int]:
    """The arrays in float32, and the layer."""
    weights = cast(SAEWeights, mx.load(str(folder / "sae_weights.safetensors")))
    hook = json.loads((folder / "cfg.json").read_text())["metadata"]["hook_name"]
    layer = int(hook.split(".")[1])
    return {name: array.astype(mx.float32) for name, array in weights.items()}, layer


# --- evaluation -----------------------------------------------------------------------------------


def measure(model: Any, tokenizer: Any, weights: SAEWeights, layer: int) -> None:
    """Print how much of the stream the autoencoder keeps, and how much of the model's skill."""
    samples = texts(tokenizer, TEST_SEED, TEST_TOKENS)
    hidden = read(model, samples, layer)
    middle = hidden.mean(axis=0)
    active = encode(weights, hidden, weights["threshold"])
    missing = (hidden - decode(weights, active)).square().sum()
    uses = (active > 0).sum(axis=0)
    print(
        f"{len(hidden):,} tokens: explained variance "
        f"{1 - float(missing / (hidden - middle).square().sum()):.1%}, "
        f"L0 {int(uses.sum()) / len(hidden):.1f}, "
        f"{int((uses == 0).sum())} of {len(uses)} features never active"
    )

    def rebuild(states: mx.array) -> mx.array:
        return decode(weights, encode(weights, states, weights["threshold"]))

    def flatten(states: mx.array) -> mx.array:
        return mx.broadcast_to(middle, states.shape)

    whole, rebuilt, flat = (
        loss(model, samples, change, layer) for change in (None, rebuild, flatten)
    )
    print(
        f"loss {whole:.3f} nats a token; through the autoencoder {rebuilt:.3f}; "
        f"with the stream's mean in its place {flat:.3f}: "
        f"{(flat - rebuilt) / (flat - whole):.1%} of what the stream is worth is kept"
    )


def loss(model: Any, samples: list[list[int]], change: Change | None, layer: int) -> float:
    """Nats a token of all text, with the layer's output changed."""
    total = 0.0
    with hooked(find_layers(model), {Site(layer): change} if change else {}):
        for row in samples:
            ids = mx.array([row])
            total += float(losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).sum())
    return total / sum(len(row) - 1 for row in samples)


def answer(model: Any, tokenizer: Any, question: str, delta: mx.array, layer: int) -> str:
    """The greedy answer, with `delta` added to what the layer gives, at every position."""

    def steer(hidden: mx.array) -> mx.array:
        return hidden + delta.astype(hidden.dtype)

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, enable_thinking=False
    )
    with hooked(find_layers(model), {Site(layer): steer}):
        text: str = mlx_lm.generate(model, tokenizer, prompt, max_tokens=120)
    return text


def contexts(
    weights: SAEWeights, samples: list[list[int]], hidden: mx.array, index: int
) -> list[tuple[float, list[int]]]:
    """Where a feature is most active: its activation, and the tokens up to the one it is on."""
    column = encode(weights, hidden, weights["threshold"])[:, index]
    active = cast(list[float], column.tolist())
    places = [row[max(0, end - CONTEXT) : end] for row in samples for end in range(1, len(row) + 1)]
    strongest = sorted(range(len(active)), key=lambda at: -active[at])
    return [(active[at], places[at]) for at in strongest[:SHOWN]]


def show_features(model: Any, tokenizer: Any, weights: SAEWeights, layer: int) -> None:
    """Print what the named features are active on, and what steering with them does."""
    samples = texts(tokenizer, TEST_SEED, TEST_TOKENS)
    hidden = read(model, samples, layer)
    none = mx.zeros(hidden.shape[-1])
    before = {asked: answer(model, tokenizer, asked, none, layer) for asked in QUESTIONS}
    for feature in NAMED:
        print(f"\n# feature {feature.index} at {feature.value:g}: {feature.name}")
        for activation, ids in contexts(weights, samples, hidden, feature.index):
            print(f"  {activation:6.2f}  ...{tokenizer.decode(ids)!r}")
        delta, changed = feature.value * weights["W_dec"][feature.index], 0
        for asked in QUESTIONS:
            after = answer(model, tokenizer, asked, delta, layer)
            changed += after != before[asked]
            print(f"  {asked}\n    before: {before[asked]}\n    after:  {after}")
        print(f"  {changed} of {len(QUESTIONS)} answers changed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a sparse autoencoder on the demo model.")
    parser.add_argument("--out", type=Path, default=SAE_FOLDER, help="Folder to write.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--layer", type=int, default=SAE_LAYER)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--features", action="store_true", help="Show the named features instead.")
    options = parser.parse_args()

    bind_openblas()
    model, tokenizer = mlx_lm.load(str(FOLDER))[:2]
    if options.features:
        show_features(model, tokenizer, *load(options.out))
        return
    model.set_dtype(mx.float32)
    mx.random.seed(options.seed)
    hidden = read(model, texts(tokenizer, options.seed, TRAINING_TOKENS), options.layer)
    scale = scale_of(hidden)
    weights = fit(hidden / scale, FEATURES, L0, options.steps)
    write(options.out, weights, scale, options.layer)
    print(f"{sum(path.stat().st_size for path in options.out.iterdir()):,} bytes")
    measure(model, tokenizer, *load(options.out))


if __name__ == "__main__":
    main()
