"""Loading: what is read when, what models share, and that unloading gives everything back."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import KVCacheFactory, choose_kv_caches
from mlxsrv.engine.events import kv_bytes
from mlxsrv.engine.execution.facts import weights
from mlxsrv.engine.loading import device_memory
from mlxsrv.engine.loading.device_memory import working_memory
from mlxsrv.engine.loading.loader import Loader
from mlxsrv.engine.loading.weights import ByteBudget, WeightReader
from mlxsrv.engine.patches.attention import patch_attention
from mlxsrv.engine.plans import LoadSlice
from mlxsrv.settings import Settings
from tests.support.effort import often
from tests.support.fixtures import ModelFolder
from tests.support.loading import (
    MIB,
    HandRunner,
    Refused,
    generate,
    load,
    make_load,
    nothing_left,
    run_load,
)
from tests.support.tiny import RARE, write_model

T = TypeVar("T")

PROMPT = (5, 6, 7, 8, 9, 10)


def finish(slices: Generator[None, None, T]) -> T:
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            value: T = stop.value
            return value


def decode(
    model: Any, prompt: tuple[int, ...], max_tokens: int = 30, cache: Any = None
) -> list[int]:
    """Greedy text by mlx-lm's own means, a token at a time."""
    cache = make_prompt_cache(model) if cache is None else cache
    for token in prompt[:-1]:
        model(mx.array([[token]]), cache=cache)
    text = [prompt[-1]]
    for _ in range(max_tokens):
        logits = model(mx.array([[text[-1]]]), cache=cache)[0, -1]
        text.append(cast(int, mx.argmax(logits).item()))
    return text[1:]


# Slices.


@pytest.mark.parametrize("limit", [1, 2048, 65536, 10**9])
def test_a_slice_reads_as_much_as_it_may(model_folder: ModelFolder, limit: int) -> None:
    folder = model_folder("qwen3")
    sizes = [array.nbytes for array in weights(load_model(folder, lazy=True)[0])]
    steps = run_load(Loader({}), 1, make_load(folder), limit)
    read = [step.bytes for step in steps if step.bytes]
    assert sum(read) == sum(sizes)
    assert all(limit <= size < limit + max(sizes) for size in read[:-1])
    assert len(read) == min(len(sizes), len(read))
    assert (len(read) == 1) == (limit > sum(sizes))


def test_a_limit_may_change_from_slice_to_slice(model_folder: ModelFolder) -> None:
    reader = WeightReader(budget := ByteBudget(), list, trust_remote_code=False)
    mapped = finish(reader.map(str(model_folder("qwen3"))))
    slices = reader.read(mapped)
    read = []
    for limit in (1, 1, 65536, 1, 200_000, 10**9):
        budget.begin_slice(limit)
        next(slices)
        read.append(budget.read)
    assert read[0] == 0, "before it reads, a slice ends"
    assert all(size >= limit for size, limit in zip(read[1:5], (1, 65536, 1, 200_000), strict=True))
    assert sum(read) == reader.bytes


def test_a_load_yields_between_its_steps(model_folder: ModelFolder) -> None:
    steps = run_load(Loader({}), 1, make_load(model_folder("qwen3")))
    assert len(steps) >= 8
    assert [step.loaded is not None for step in steps] == [False] * (len(steps) - 1) + [True]


# What MLX may do with memory.


def test_a_load_bounds_the_buffers_that_mlx_keeps(model_folder: ModelFolder) -> None:
    kept = mx.set_cache_limit(1 << 40)
    try:
        load(model_folder("qwen3"), mlx_cache_limit=12345)
        assert mx.set_cache_limit(1 << 40) == 12345
        load(model_folder("qwen3"))
        share = mx.set_cache_limit(100)
        assert 0 < share < working_memory() / 10
        load(model_folder("qwen3"))
        assert mx.set_cache_limit(100) == 100, "a limit of MLX's own that is less stays"
    finally:
        mx.set_cache_limit(kept)


def test_memory_is_wired_only_if_that_is_asked_for(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here MLX recommends nothing, so nothing is wired; what is asked of mlx-lm can be seen."""
    asked: list[bool] = []
    monkeypatch.setattr(
        device_memory, "maybe_set_recommended_wired_limit", lambda: asked.append(True)
    )
    load(model_folder("qwen3"))
    load(model_folder("qwen3"), wire_memory=Settings().wire_memory)
    assert asked == []
    load(model_folder("qwen3"), wire_memory=True)
    assert asked == [True]


def test_what_a_row_costs_is_known_with_the_model(model_folder: ModelFolder) -> None:
    resident = load(model_folder("gemma3_text"))  # two layers with a window of 16, one without
    assert resident.text is not None
    costs = {cost.window: cost.per_token for cost in resident.loaded.kv_costs}
    one = 2 * 2 * 16 * 4  # keys and values, heads, numbers of a head, bytes
    assert costs == {0: one, 16: 2 * one}
    assert resident.loaded.kv_costs == resident.text.facts.kv_costs
    assert kv_bytes(resident.loaded.kv_costs, 100) == (100 + 32) * one


# Unloading.


@pytest.mark.parametrize(
    "family", often(["qwen3", "gpt_oss", "qwen3_next", "llama4"], ["qwen3", "qwen3_next"])
)
@pytest.mark.slow
def test_a_model_that_is_dropped_leaves_nothing(family: str, model_folder: ModelFolder) -> None:
    prompts = [tuple(range(5, 90 + i)) for i in range(3)]
    warm = load(model_folder(family))  # constants of compiled functions stay with MLX
    generate(warm, *prompts, max_tokens=3)
    del warm
    with nothing_left():
        resident = load(model_folder(family), draft=None)
        hand = HandRunner(resident)
        hand.generate(*prompts, max_tokens=3)
        assert len(hand.kept) == 3
        hand.step(hand.start(*prompts[: 3 if hand.text.facts.batched else 1]), 5)
        del resident, hand


@pytest.mark.slow
def test_a_load_that_is_given_up_leaves_nothing(model_folder: ModelFolder) -> None:
    order = make_load(model_folder("qwen3"))
    for steps in (1, 3, 7):
        with nothing_left():
            loader = Loader({})
            for step in range(steps):
                loader.load(LoadSlice(model=1, limit=MIB, order=None if step else order))
            loader.abandon(1)
            with pytest.raises(KeyError):
                loader.load(LoadSlice(model=1, limit=MIB))


# Caches that are bounded or quantized.


def test_a_bound_that_is_not_reached_changes_nothing(model_folder: ModelFolder) -> None:
    prompts = [PROMPT, PROMPT[:2], tuple(range(5, 45))]
    plain = generate(load(model_folder("llama")), *prompts)
    bounded = load(model_folder("llama"), max_kv_size=128)
    assert (bounded.loaded.batched, bounded.loaded.cuts, bounded.loaded.notes) == (True, False, ())
    assert generate(bounded, *prompts) == plain


@pytest.mark.slow
def test_a_bounded_cache_keeps_the_first_tokens_and_the_last(model_folder: ModelFolder) -> None:
    size = 24
    dice = np.random.default_rng(0)
    lengths = (1, 3, 21, 24, 25, 70)
    prompts = [tuple(dice.integers(5, 400, length).tolist()) for length in lengths]
    model, _ = load_model(model_folder("qwen3", plain=True))
    expected = [
        decode(model, prompt, 32, [RotatingKVCache(size, keep=4) for _ in model.layers])
        for prompt in prompts
    ]
    hand = HandRunner(load(model_folder("qwen3", plain=True), max_kv_size=size))
    assert [hand.generate(prompt, max_tokens=32)[0] for prompt in prompts] == expected
    assert len(hand.kept) == len(prompts) - 1  # of a prompt of one token nothing is read
    # Once more, together, from what was kept of them
    assert hand.generate(*prompts, max_tokens=32) == expected


def test_caches_that_a_model_makes_itself_are_not_bounded(model_folder: ModelFolder) -> None:
    resident = load(model_folder("gemma3_text"), max_kv_size=32)
    [note] = resident.loaded.notes
    assert note.startswith("max_kv_size: this model makes its own caches (KVCache, Rotating")
    assert generate(resident, PROMPT) == generate(load(model_folder("gemma3_text")), PROMPT)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models with heads that can be quantized."""
    root = tmp_path_factory.mktemp("wide")

    def write(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else write_model(folder, family, head_dim=32)

    return write


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_a_text_that_ends_before_the_start_is_not_touched(
    wide: Callable[[str], Path], family: str
) -> None:
    unbound = load(wide(family))
    plain = generate(unbound, PROMPT)
    start = len(PROMPT) + 30
    resident = load(wide(family), kv_bits=2, quantized_kv_start=start)
    assert resident.loaded.notes == ()
    assert generate(resident, PROMPT) == plain
    quantized, plainly = resident.loaded.kv_costs, unbound.loaded.kv_costs
    assert kv_bytes(quantized, start) == kv_bytes(plainly, start)
    assert generate(load(wide(family), kv_bits=2), PROMPT) != plain


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_rows_on_both_sides_of_the_start_draw_what_each_draws_alone(
    wide: Callable[[str], Path], family: str
) -> None:
    resident = load(wide(family), kv_bits=4, quantized_kv_start=20)
    prompts = [tuple(range(3, 3 + length)) for length in (6, 18, 19, 40)]
    alone = [generate(resident, prompt, max_tokens=16)[0] for prompt in prompts]
    assert [text[:16] for text in generate(resident, *prompts, max_tokens=16)] == [
        text[:16] for text in alone
    ]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_a_quantized_cache_is_close_to_a_plain_one(
    wide: Callable[[str], Path], family: str
) -> None:
    resident = load(wide(family), kv_bits=8, quantized_kv_start=10)
    assert resident.loaded.batched
    assert resident.loaded.notes == ()
    model, _ = load_model(wide(family))
    tokens = mx.array([list(range(5, 45))])
    plain = model(tokens, cache=make_prompt_cache(model))[0]
    patch_attention()
    maker = finish(choose_kv_caches(model, None, 8, start=10))
    near = model(tokens, cache=maker.make().layers)[0]
    cosine = (plain * near).sum(-1) / mx.linalg.norm(plain, axis=-1) / mx.linalg.norm(near, axis=-1)
    assert 0.999 < cosine.min().item() < 1
    # Rows of a prompt that is kept, cut back, and gone on with
    long = tuple(range(5, 105))
    hand = HandRunner(resident)
    [first] = hand.generate(long, max_tokens=8)
    assert len(hand.kept) == 1
    assert hand.generate(long, max_tokens=8) == [first]
    assert len(hand.generate(PROMPT, PROMPT[:1], max_tokens=8)) == 2


@pytest.mark.parametrize(
    ("family", "settings", "note"),
    [
        (
            "small",
            {"kv_bits": 8},
            "kv_bits: heads of 16 numbers cannot be quantized, but",
        ),
        ("mamba", {"kv_bits": 8}, "kv_bits: no layer of this model has mlx-lm's KVCache"),
        ("deepseek_v32", {"kv_bits": 8}, "kv_bits: heads of 16, 32 numbers cannot be quantized"),
        ("longcat_flash", {"kv_bits": 8}, "kv_bits: heads of 16, 32 numbers cannot be quantized"),
        ("qwen3", {"kv_bits": 8, "max_kv_size": 64}, "kv_bits: a cache that max_kv_size bounds"),
    ],
)
def test_what_cannot_be_had_is_noted_and_left_out(
    wide: Callable[[str], Path],
    model_folder: ModelFolder,
    family: str,
    settings: dict[str, Any],
    note: str,
) -> None:
    own = {"small": "qwen3"}.get(family, family)
    folder = model_folder(own) if own in RARE or family in ("small", "mamba") else wide(family)
    resident = load(folder, **settings)
    assert resident.loaded.batched
    [reported] = resident.loaded.notes
    assert reported.startswith(note)
    assert generate(resident, PROMPT) == generate(load(folder), PROMPT)


# A draft model.


@pytest.mark.slow
def test_a_draft_model_is_loaded_beside(model_folder: ModelFolder) -> None:
    main, small = model_folder("qwen3"), model_folder("llama")
    plain, draft = load(main), load(small)
    expected = generate(plain, PROMPT, max_tokens=80)
    with nothing_left():
        both = load(main, draft=str(small))
        assert both.loaded.bytes == plain.loaded.bytes + draft.loaded.bytes
        assert (both.loaded.shared, both.loaded.notes) == (0, ())
        hand = HandRunner(both)
        assert hand.text.facts.drafts
        [text] = hand.step(hand.start(PROMPT), 80, proposals=3)
        assert [text[:80]] == expected
        del both, hand
    both = load(main, [draft], draft=str(small))
    assert both.loaded.shared == draft.loaded.bytes
    both = load(main, [plain, draft], draft=str(small))
    assert both.loaded.shared == both.loaded.bytes == plain.loaded.bytes + draft.loaded.bytes


def test_a_draft_model_that_is_of_no_use_is_left_out(
    wide: Callable[[str], Path], model_folder: ModelFolder
) -> None:
    resident = load(wide("qwen3"), draft=str(model_folder("llama")), max_kv_size=64)
    assert not HandRunner(resident).text.facts.drafts
    assert resident.loaded.notes[-1].startswith("draft_model: the model's cache cannot be cut back")
    assert resident.loaded.bytes == load(wide("qwen3")).loaded.bytes


def test_tokens_are_proposed_to_rows_with_quantized_caches(
    wide: Callable[[str], Path], model_folder: ModelFolder
) -> None:
    resident = load(wide("qwen3"), draft=str(model_folder("llama")), kv_bits=8)
    assert HandRunner(resident).text.facts.drafts
    assert HandRunner(load(wide("qwen3"), lookup=True, kv_bits=8)).text.facts.lookup
    assert resident.loaded.notes == ()


def test_a_draft_model_that_cannot_take_tokens_back_is_left_out(model_folder: ModelFolder) -> None:
    resident = load(model_folder("qwen3"), draft=str(model_folder("mamba")))
    [note] = resident.loaded.notes
    assert note.startswith("draft_model: the draft model's cache cannot be cut back")
    assert resident.loaded.bytes == load(model_folder("qwen3")).loaded.bytes


def test_a_draft_model_of_another_vocabulary_is_refused(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "m", "qwen3", vocab_size=600)
    with pytest.raises(Refused, match="vocabulary"):
        load(model_folder("qwen3"), draft=str(other))


@pytest.mark.slow
def test_tokens_are_looked_up_if_that_is_ordered(model_folder: ModelFolder) -> None:
    folder = model_folder("qwen3")
    resident = load(folder, lookup=True)
    assert HandRunner(resident).text.facts.lookup
    assert resident.loaded.notes == ()
    assert not HandRunner(load(folder)).text.facts.lookup


@pytest.mark.parametrize(
    ("family", "settings", "note"),
    [
        ("qwen3", {"max_kv_size": 64}, "draft_model: the model's cache cannot be cut back"),
        ("mamba", {}, "draft_model: the model's cache cannot be cut back"),
    ],
)
def test_tokens_are_not_looked_up_where_that_cannot_be(
    wide: Callable[[str], Path],
    model_folder: ModelFolder,
    family: str,
    settings: dict[str, Any],
    note: str,
) -> None:
    folder = wide(family) if settings else model_folder(family)
    resident = load(folder, lookup=True, **settings)
    assert not HandRunner(resident).text.facts.lookup
    assert resident.loaded.notes[-1].startswith(note)


# Others.


def test_code_that_comes_with_a_model_runs_only_if_it_may(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for file in model_folder("qwen3").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    (folder / "own.py").write_text("from mlx_lm.models.qwen3 import Model, ModelArgs\n")
    with pytest.raises(Refused, match="trust_remote_code"):
        load(folder)
    trusted = load(folder, trust_remote_code=True)
    assert generate(trusted, PROMPT) == generate(load(model_folder("qwen3")), PROMPT)


def test_a_model_that_cannot_compute_is_not_loaded(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import qwen3

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(qwen3.Attention, "__call__", fail)
    with pytest.raises(Refused, match="no kernel for this"):
        load(model_folder("qwen3"))


def test_one_maker_makes_all_caches(model_folder: ModelFolder) -> None:
    model, _ = load_model(model_folder("qwen3"))
    assert [type(layer).__name__ for layer in KVCacheFactory(model).make().layers] == [
        "KVCache",
        "KVCache",
    ]
    bounded = KVCacheFactory(model, max_size=32).make().layers
    assert [(type(layer).__name__, layer.max_size) for layer in bounded] == [("SinkCache", 32)] * 2
