"""Steering in the batch, against mlx-lm's own generator with a layer changed by other means."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxsrv.engine.events import Activations, Failed, PromptRead, Token
from mlxsrv.engine.orders import Job, Watch
from mlxsrv.engine.scheduling.prompt_index import LEAST
from mlxsrv.engine.steering.hooks import Site, check_sites, find_layers, hooked
from mlxsrv.engine.steering.plan import forward
from mlxsrv.engine.steering.steerer import Steerer, fit_vectors
from mlxsrv.generation.parameters import Steering
from tests.support.effort import often, per_cache
from tests.support.saes import make_arrays, write_sae, write_safetensors
from tests.support.steering import (
    FEATURES,
    STRONG,
    TOKENS,
    additive,
    alone,
    answers,
    ask,
    attach,
    clamp,
    direction,
    events,
    hidden_states,
    make,
    only,
    patched,
    patched_layers,
    prompts,
)
from tests.support.text_engine import Always, TextEngine
from tests.support.tiny import FAMILIES, write_model

SMALL = [name for name in FAMILIES if name != "qwen3-46m"]
"""Enough of one feature to change what a tiny model says."""

Models = Callable[[str], Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")

    @cache
    def load(family: str) -> Any:
        return load_model(write_model(root / family, family))[0]

    return load


@pytest.fixture(scope="session")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sae(tmp_path_factory.mktemp("sae"), layer=0, d_sae=FEATURES)


@pytest.mark.parametrize("family", often(SMALL, ["qwen3", "mamba2"]))
@pytest.mark.slow
def test_rows_steered_differently_say_what_each_says_alone(
    models: Models, family: str, sae: Path
) -> None:
    model = models(family)
    kinds = [type(layer) for layer in find_layers(model)]
    parameters = str(model.parameters().keys())
    steerer = attach(Steerer(model), sae)
    wanted = [
        additive((3, STRONG)),
        None,
        additive((3, -STRONG), (9, 10.0)),
        additive((70, STRONG)),
        None,
        additive((3, STRONG)),
    ]
    asked = prompts(6, seed=1)
    jobs = [
        ask(i, prompt, steering)
        for i, (prompt, steering) in enumerate(zip(asked, wanted, strict=True))
    ]
    drawn = answers(make(model, steerer), jobs[:4], jobs[4:])
    expected = [alone(model, prompt, each) for prompt, each in zip(asked, wanted, strict=True)]
    assert [drawn[i] for i in range(6)] == expected
    assert expected != [alone(model, prompt) for prompt in asked]
    assert [type(layer) for layer in find_layers(model)] == kinds
    assert str(model.parameters().keys()) == parameters


@pytest.mark.parametrize("family", often(["qwen3", "gemma3_text"], ["qwen3"]))
def test_rows_in_groups_of_their_own_are_steered(models: Models, family: str, sae: Path) -> None:
    model = models(family)
    steerer = attach(Steerer(model), sae)
    wanted = [additive((i, STRONG)) if i % 2 else None for i in range(6)]
    jobs = [ask(i, prompt, wanted[i]) for i, prompt in enumerate(prompts(6, seed=2))]
    drawn = answers(make(model, steerer, padding=0), jobs[:3], jobs[3:])
    assert all(drawn[job.id] == alone(model, job.prompt, job.steering) for job in jobs)


@pytest.mark.parametrize("family", often(SMALL, ["qwen3", "llama4", "mamba2"]))
def test_nothing_is_as_it_was_without(models: Models, family: str, sae: Path) -> None:
    model = models(family)
    asked = prompts(2, seed=3)
    expected = [alone(model, prompt) for prompt in asked]
    steerer = attach(Steerer(model), sae)
    batch = make(model, steerer)
    drawn = answers(batch, [ask(i, prompt) for i, prompt in enumerate(asked)])
    assert [drawn[0], drawn[1]] == expected
    tokens = mx.array([asked[0]])
    plain = model(tokens, cache=make_prompt_cache(model))
    zero = forward(model, only(steerer, additive((5, 0.0))), tokens, make_prompt_cache(model))
    assert mx.array_equal(plain, zero)
    steerer.detach()
    drawn = answers(batch, [ask(i, prompt) for i, prompt in enumerate(asked)])
    assert [drawn[0], drawn[1]] == expected


@pytest.mark.parametrize("family", per_cache(SMALL))
def test_what_is_added_is_the_delta(models: Models, family: str, sae: Path) -> None:
    model = models(family)
    if len(find_layers(model)) < 2:
        pytest.skip("its only layer has none above to look at")
    steerer = attach(Steerer(model), sae)
    [prompt] = prompts(1, seed=4)
    steering = additive((3, 2.0), (8, -1.0))
    plan = only(steerer, steering)
    assert plan is not None
    seen: list[mx.array] = []

    def look(hidden: mx.array) -> mx.array:
        seen.append(hidden)
        return hidden

    with hooked(find_layers(model), {Site(1, before=True): look}):
        mx.eval(model(mx.array([prompt]), cache=make_prompt_cache(model)))
        mx.eval(plan.forward(mx.array([prompt]), make_prompt_cache(model)))
    difference = np.array(seen[1] - seen[0])[0]
    rounding = 1e-6 * max(1.0, float(np.abs(np.array(seen[0])).max()))
    assert np.abs(difference - np.array(direction(steering))).max() < rounding


def test_at_the_last_layer_the_logits_are_those_of_the_changed_stream(
    models: Models, sae: Path
) -> None:
    model = models("qwen3")
    steerer = attach(Steerer(model), sae, layer=1)
    [prompt] = prompts(1, seed=5)
    steering = additive((3, 5.0))
    hidden = hidden_states(model, prompt, Site(1)) + direction(steering)
    expected = model.lm_head(model.model.norm(hidden))
    logits = forward(model, only(steerer, steering), mx.array([prompt]), make_prompt_cache(model))[
        0
    ]
    assert np.abs(np.array(logits - expected)).max() < 1e-4


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "olmo3", "llama"])
@pytest.mark.parametrize("steering", [additive((3, 8.0)), clamp((3, 2.0), (9, 0.0))])
def test_a_prompt_read_token_by_token_is_the_same(
    models: Models, sae: Path, family: str, steering: Steering
) -> None:
    model = models(family)
    plan = only(attach(Steerer(model), sae), steering)
    assert plan is not None
    [prompt] = prompts(1, seed=6, low=12, high=12)  # within all windows
    whole = plan.forward(mx.array([prompt]), make_prompt_cache(model))[0, -1]
    cache = make_prompt_cache(model)
    for token in prompt:
        last = plan.forward(mx.array([[token]]), cache)[0, -1]
    assert np.abs(np.array(whole - last)).max() < 1e-4


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_layers_input_is_the_output_of_the_one_below(
    models: Models, sae: Path, family: str
) -> None:
    model = models(family)
    asked = prompts(2, seed=7)
    steering = additive((3, STRONG))
    pre = attach(Steerer(model), sae, layer=1, before=True)
    post = attach(Steerer(model), sae, layer=0)
    jobs = [ask(i, prompt, steering) for i, prompt in enumerate(asked)]
    assert answers(make(model, pre), jobs) == answers(make(model, post), jobs)


def test_the_input_of_the_first_layer_is_the_embedding(models: Models, sae: Path) -> None:
    model = models("qwen3")
    [prompt] = prompts(1, seed=8)
    steering = additive((3, STRONG))
    batch = make(model, attach(Steerer(model), sae, before=True))
    drawn = answers(batch, [ask(0, prompt, steering)])[0]
    delta = direction(steering)
    steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS)
    with patched(model.model.embed_tokens, lambda hidden: hidden + delta):
        assert drawn == [int(token) for token, _ in steps]
    assert drawn != alone(model, prompt)


def test_kept_prompts_never_cross_steerings(models: Models, sae: Path) -> None:
    model = models("qwen3")
    batch = make(model, attach(Steerer(model), sae), cache_bytes=1 << 24)
    [prompt] = prompts(1, seed=9, low=2 * LEAST, high=2 * LEAST)
    one, other = additive((3, STRONG)), additive((3, STRONG), (4, 1.0))
    cached: list[int] = []
    for steering in (None, one, other, None, one, other, clamp((3, STRONG))):
        for event in events(batch, [ask(0, prompt, steering)]):
            if isinstance(event, PromptRead):
                cached.append(event.cached)
        if steering is not None and steering.mode == "additive":
            assert answers(batch, [ask(0, prompt, steering)])[0] == alone(model, prompt, steering)
    assert cached[:3] == [0, 0, 0]
    assert all(count > LEAST for count in cached[3:6])
    assert cached[6] == 0


def test_the_same_prompt_is_read_for_each_steering(models: Models, sae: Path) -> None:
    model = models("qwen3")
    [prompt] = prompts(1, seed=10)
    wanted = [None, additive((3, STRONG)), additive((3, STRONG)), additive((9, STRONG))]
    jobs = [ask(i, prompt, steering) for i, steering in enumerate(wanted)]
    drawn = answers(make(model, attach(Steerer(model), sae)), jobs)
    assert [drawn[i] for i in range(4)] == [alone(model, prompt, each) for each in wanted]


@pytest.mark.parametrize("architecture", ["standard", "jumprelu", "topk", "gated"])
def test_a_clamped_feature_gets_its_activation(
    models: Models, tmp_path: Path, architecture: Any
) -> None:
    """`h' - h = Σ (t_i - a_i) W_dec[i]`, beside a row that has nothing."""
    model = models("qwen3")
    folder = write_sae(tmp_path, architecture=architecture, layer=0, d_sae=FEATURES)
    steerer = attach(Steerer(model), folder)
    rows = make_arrays(architecture, d_sae=FEATURES)["W_dec"]
    [prompt] = prompts(1, seed=11, low=20, high=20)
    hidden = hidden_states(model, prompt, Site(0))
    active = np.array(steerer._attachment.sae.encode(hidden))  # type: ignore[union-attr]
    chosen = [int(i) for i in np.argsort(-active.sum(axis=0))[:2]]
    targets = [7.0, 0.0]
    steering = clamp(*sorted(zip(chosen, targets, strict=True)))
    plan = steerer.make_plan([None, steerer.prepare(steering)])
    assert plan is not None
    seen: list[mx.array] = []

    def look(given: mx.array) -> mx.array:
        seen.append(given)
        return given

    with hooked(find_layers(model), {Site(1, before=True): look}):
        mx.eval(plan.forward(mx.array([prompt, prompt]), make_prompt_cache(model)))
    difference = np.array(seen[0] - hidden)
    missing = np.array(targets) - active[:, chosen]
    assert np.abs(difference[0]).max() < 1e-5
    assert np.abs(difference[1] - missing @ rows[chosen]).max() < 1e-4
    assert np.abs(missing).max() > 1


def test_rows_that_are_not_folded_are_added_as_they_are(models: Models, tmp_path: Path) -> None:
    """SAELens's `rescale_acts_by_decoder_norm`: `s · W_dec[i]` is added, of whatever length."""
    arrays = make_arrays(d_sae=FEATURES)
    arrays["W_dec"] = 3 * arrays["W_dec"]
    folder = write_sae(
        tmp_path, architecture="topk", layer=0, arrays=arrays, rescale_acts_by_decoder_norm=True
    )
    steer = attach(Steerer(models("qwen3")), folder).prepare(additive((3, 2.0)))
    assert steer is not None
    assert np.abs(np.array(steer.directions[Site(0)]) - 2 * arrays["W_dec"][3]).max() < 1e-6


def test_in_bfloat16_the_delta_is_as_near_as_that_allows(tmp_path: Path, sae: Path) -> None:
    model = load_model(write_model(tmp_path / "m", "qwen3"))[0]
    model.set_dtype(mx.bfloat16)
    steerer = attach(Steerer(model), sae)
    [prompt] = prompts(1, seed=12)
    steering = additive((3, 4.0))
    hidden = hidden_states(model, prompt, Site(0))
    plan = only(steerer, steering)
    assert plan is not None
    seen: list[mx.array] = []

    def look(given: mx.array) -> mx.array:
        seen.append(given)
        return given

    with hooked(find_layers(model), {Site(1, before=True): look}):
        logits = plan.forward(mx.array([prompt]), make_prompt_cache(model))
    assert logits.dtype == mx.bfloat16
    changed = np.array(seen[0][0].astype(mx.float32))
    expected = np.array(hidden.astype(mx.float32) + direction(steering))
    assert np.abs(changed - expected).max() <= 2**-7 * np.abs(expected).max()
    drawn = answers(make(model, steerer), [ask(0, prompt, steering), ask(1, prompt)])
    assert drawn[0] == alone(model, prompt, steering)


def test_a_draft_model_changes_nothing_in_what_is_steered(
    models: Models, tmp_path: Path, sae: Path
) -> None:
    model = models("qwen3")
    draft = load_model(write_model(tmp_path / "d", "qwen3", seed=1))[0]
    batch = make(model, attach(Steerer(model), sae), draft=draft)
    [prompt] = prompts(1, seed=13)
    steering = additive((3, STRONG))
    batch.speculate(Always)
    assert answers(batch, [ask(0, prompt, steering)])[0] == alone(model, prompt, steering)
    assert batch.statistics()["drafted"] > 0


def reported(
    batch: TextEngine, jobs: list[Job], later: Iterable[Job] = ()
) -> dict[int, dict[int, Any]]:
    """For each job the activations at each position, as far as its client would hear of them."""
    found: dict[int, dict[int, Any]] = {}
    ended: set[int] = set()
    for event in events(batch, jobs, later):
        if isinstance(event, Token) and event.finish is not None:
            ended.add(event.job)
        if isinstance(event, Activations) and event.job not in ended:
            mine = found.setdefault(event.job, {})
            assert event.position not in mine
            mine[event.position] = dict(event.values)
    return found


@pytest.mark.parametrize("family", often(["qwen3", "gemma3_text", "gpt_oss"], ["qwen3"]))
@pytest.mark.parametrize("chunk", [16, 512])
def test_watching_tells_what_each_token_was(
    models: Models, sae: Path, family: str, chunk: int
) -> None:
    model = models(family)
    steerer = attach(Steerer(model), sae)
    batch = make(model, steerer, chunk=chunk)
    steerer.watch(Watch("m", (5, 90), 3))
    jobs = [ask(i, prompt) for i, prompt in enumerate(prompts(5, seed=14))]
    drawn = {job.id: alone(model, job.prompt) for job in jobs}
    found = reported(batch, jobs[:3], jobs[3:])
    for job in jobs:
        text = (*job.prompt, *drawn[job.id][:-1])  # nothing is made of the last one
        hidden = hidden_states(model, text, Site(0))
        active = np.array(steerer._attachment.sae.encode(hidden))  # type: ignore[union-attr]
        assert sorted(found[job.id]) == list(range(len(text)))
        for position, values in found[job.id].items():
            row = active[position]
            assert {5, 90} <= values.keys()
            highest = {int(i) for i in np.argsort(-row)[:3] if row[i] > 1e-3}
            assert highest <= values.keys()
            assert len(values) <= 5
            assert all(abs(row[feature] - value) < 1e-3 for feature, value in values.items())


def test_watching_sees_what_was_there_before_steering(models: Models, sae: Path) -> None:
    model = models("qwen3")
    steerer = attach(Steerer(model), sae)
    batch = make(model, steerer)
    steerer.watch(Watch("m", (3,)))
    [prompt] = prompts(1, seed=15)
    plain = reported(batch, [ask(0, prompt, tokens=1)])[0]
    steered = reported(batch, [ask(1, prompt, additive((3, STRONG)), tokens=1)])[1]
    # The layer below is the same, so the first layer's own output is, too.
    assert plain[0] == pytest.approx(steered[0], abs=1e-4)


def test_a_long_prompt_is_watched_in_parts(
    models: Models, sae: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("qwen3")
    steerer = attach(Steerer(model), sae)
    steerer.watch(Watch("m", top=4))
    [prompt] = prompts(1, seed=19)
    whole = reported(make(model, steerer), [ask(0, prompt)])
    monkeypatch.setattr("mlxsrv.engine.steering.plan._MOST_ACTIVATIONS", 3 * FEATURES)
    parts = reported(make(model, steerer), [ask(0, prompt)])
    assert parts[0].keys() == whole[0].keys()
    for position, values in whole[0].items():
        assert parts[0][position] == pytest.approx(values, abs=1e-4)


def test_what_watches_is_free_at_once(models: Models, sae: Path) -> None:
    """A server freezes what the cyclic collector looks through, so a cycle would hold the model."""
    model = models("qwen3")
    steerer = attach(Steerer(model), sae)
    steerer.watch(Watch("m", (3,), 2))
    plan = steerer.make_plan([None])
    assert plan is not None
    gc.disable()
    try:
        plan.forward(mx.array([[1, 2, 3]]), make_prompt_cache(model))
        assert plan.activations is not None
        left = weakref.ref(plan)
        del plan
        assert left() is None
    finally:
        gc.enable()


def test_watching_ends(models: Models, sae: Path) -> None:
    model = models("qwen3")
    steerer = attach(Steerer(model), sae)
    batch = make(model, steerer)
    steerer.watch(Watch("m", (3,)))
    [prompt] = prompts(1, seed=16)
    seen = 0
    for i, event in enumerate(events(batch, [ask(0, prompt, tokens=40)])):
        seen += isinstance(event, Activations)
        if i == 60:
            steerer.detach()
            batch.replan()
            before = seen
    assert before <= seen <= before + 2  # what was under way


def test_rows_go_on_as_they_are_when_their_sae_goes(models: Models, sae: Path) -> None:
    model = models("qwen3")
    steerer = attach(Steerer(model), sae)
    batch = make(model, steerer)
    [prompt] = prompts(1, seed=17)
    steering = additive((3, STRONG))
    drawn: list[int] = []
    for event in events(batch, [ask(0, prompt, steering)]):
        if isinstance(event, Token):
            drawn.append(event.id)
            steerer.detach()
            batch.replan()
    assert drawn == alone(model, prompt, steering)
    [event] = batch.submit(ask(1, prompt, steering))
    assert isinstance(event, Failed)
    assert "detached" in event.reason


def test_control_vectors_are_added_at_their_layers(models: Models, tmp_path: Path) -> None:
    model = models("qwen3")
    dice = np.random.default_rng(0)
    rows = {layer: 3 * dice.standard_normal(64).astype(np.float32) for layer in (0, 1)}
    file = tmp_path / "happy.safetensors"
    write_safetensors(file, {f"direction.{layer}": row for layer, row in rows.items()})
    vectors, notes = fit_vectors(model, [("happy", str(file))])
    assert notes == ()
    [prompt] = prompts(1, seed=18)
    steering = Steering(vectors=(("happy", 2.0),))
    batch = make(model, Steerer(model, vectors))
    drawn = answers(batch, [ask(0, prompt, steering), ask(1, prompt)])
    layers = find_layers(model)
    steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS)
    with (
        patched_layers(layers, {layer: 2 * mx.array(row) for layer, row in rows.items()}),
    ):
        expected = [int(token) for token, _ in steps]
    assert drawn[0] == expected
    assert drawn[1] == alone(model, prompt)
    assert drawn[0] != drawn[1]


def test_a_vector_that_does_not_fit_is_left_out_with_the_reason(
    models: Models, tmp_path: Path
) -> None:
    model = models("qwen3")
    for name, key, width in (("deep", "direction.7", 64), ("wide", "direction.1", 65)):
        file = tmp_path / f"{name}.safetensors"
        write_safetensors(file, {key: np.ones(width, np.float32)})
    wanted = [(name, str(tmp_path / f"{name}.safetensors")) for name in ("deep", "wide")]
    vectors, notes = fit_vectors(model, wanted)
    assert vectors == {}
    assert "no layer 7" in notes[0]
    assert "64 numbers a token, not 65" in notes[1]


def test_an_sae_of_another_width_or_layer_is_refused(models: Models, tmp_path: Path) -> None:
    model = models("qwen3")
    folder = write_sae(tmp_path, d_in=32, d_sae=FEATURES)
    with pytest.raises(ValueError, match="64 numbers a token, not 32"):
        attach(Steerer(model), folder)
    with pytest.raises(ValueError, match="no layer 2; the model has 2"):
        check_sites(model, [Site(2)], 64)
