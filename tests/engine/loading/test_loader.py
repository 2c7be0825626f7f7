"""The loader: what each slice says, and what is left of one that fails or is given up."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsrv.engine.events import Attached
from mlxsrv.engine.loading import loader as loading
from mlxsrv.engine.loading.load import load
from mlxsrv.engine.loading.loader import Loader
from mlxsrv.engine.loading.resident import ResidentModel
from mlxsrv.engine.orders import Attach, Load
from mlxsrv.engine.outcomes import AttachStep, EmbedFacts, Refusal
from mlxsrv.engine.plans import AttachSlice, LoadSlice
from tests.support.encoders import write_encoder
from tests.support.fixtures import ModelFolder
from tests.support.loading import MIB, make_load, nothing_left, run_load
from tests.support.saes import write_sae
from tests.support.tiny import write_model


class PanicException(BaseException):
    """As pyo3 raises it for a panic of Rust code."""


def test_the_last_slice_says_what_was_loaded(model_folder: ModelFolder) -> None:
    models: dict[int, ResidentModel] = {}
    step = run_load(Loader(models), 5, make_load(model_folder("qwen3"), "own"))[-1]
    assert step.loaded is not None
    assert step.loaded.model == "own"
    assert step.text is not None
    assert (step.text.batched, step.text.cuts, step.text.prompt_cache_bytes) == (True, True, MIB)
    assert step.embed == EmbedFacts(slices=True)
    assert models[5].loaded is step.loaded
    assert models[5].text is not None
    assert models[5].text.facts is step.text


def test_an_encoder_generates_no_text(tmp_path: Path) -> None:
    models: dict[int, ResidentModel] = {}
    folder = write_encoder(tmp_path / "encoder", "bert")
    step = run_load(Loader(models), 5, make_load(folder))[-1]
    assert (step.text, models[5].text) == (None, None)
    assert step.embed == models[5].embedder.facts
    assert step.embed is not None
    assert not step.embed.slices
    assert step.embed.longest is not None


def test_models_of_the_same_files_share_their_arrays(model_folder: ModelFolder) -> None:
    loader = Loader({})
    first = run_load(loader, 1, make_load(model_folder("qwen3")))
    second = run_load(loader, 2, make_load(model_folder("qwen3")))
    loaded = second[-1].loaded
    assert loaded is not None
    assert loaded.shared == loaded.bytes == sum(step.bytes for step in first)
    assert sum(step.bytes for step in second) == 0


# Loads that fail.


@pytest.mark.parametrize("error", [MemoryError("no room"), PanicException("panicked")])
def test_a_load_that_fails_in_any_slice_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    order = make_load(write_model(tmp_path / "m", "qwen3", vocab_size=4096))
    last = len(run_load(Loader({}), 1, order)) - 1
    assert last >= 4
    for number in (0, 1, 2, last // 2, last - 1):
        models: dict[int, ResidentModel] = {}
        loader = Loader(models)
        with monkeypatch.context() as patched, nothing_left():
            patched.setattr(loading, "load", fail_in(number, error))
            steps = run_load(loader, 1, order)
            assert len(steps) == number + 1
            assert steps[-1].refusal == Refusal("model not loaded", str(error))
            assert not models
            assert mx.get_cache_memory() == 0, number
            with pytest.raises(KeyError):
                loader.load(LoadSlice(model=1, limit=MIB))
        assert run_load(loader, 1, order)[-1].loaded is not None


def fail_in(slice: int, error: BaseException) -> Callable[..., Generator[None, None, Any]]:
    """A load that raises in this slice."""

    def failing(*args: Any) -> Generator[None, None, Any]:
        slices = load(*args)
        for _ in range(slice):
            next(slices)
            yield
        return slices.throw(type(error)(*error.args))  # whose traceback dies with it

    return failing


def test_an_error_that_ends_the_process_passes(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load", fail_in(1, SystemExit(3)))
    with pytest.raises(SystemExit):
        run_load(Loader({}), 1, make_load(model_folder("qwen3")))


def test_files_that_vanish_while_they_are_read_fail_the_load(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3", vocab_size=4096)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    loader = Loader({})
    for damage in (weights.unlink, lambda: weights.write_bytes(whole[: len(whole) // 2])):
        damage()
        with nothing_left():
            refusal = run_load(loader, 1, make_load(folder))[-1].refusal
        assert refusal is not None
        assert refusal.kind == "model not loaded"
        weights.write_bytes(whole)
    assert run_load(loader, 1, make_load(folder))[-1].loaded is not None


# Attachments.


def attach(loader: Loader, path: Path, model: int = 1, number: int = 7) -> AttachStep:
    """Attach an SAE. Returns the last step."""
    order = Attach("m", number, str(path), 1)
    step = loader.attach(AttachSlice(model=model, number=number, order=order))
    slices = 1
    while step == AttachStep():
        step = loader.attach(AttachSlice(model=model, number=number))
        slices += 1
    assert slices > 2 or step.refusal is not None
    return step


def test_an_sae_is_attached_slice_by_slice(model_folder: ModelFolder, tmp_path: Path) -> None:
    models: dict[int, ResidentModel] = {}
    loader = Loader(models)
    run_load(loader, 1, make_load(model_folder("qwen3")))
    sae = write_sae(tmp_path / "sae", d_in=64, d_sae=256, layer=1)
    step = attach(loader, sae)
    assert isinstance(step.attached, Attached)
    assert (step.attached.number, step.refusal) == (7, None)
    steerer = models[1].steerer
    assert steerer is not None
    with nothing_left():
        attach(loader, sae, number=8)
        steerer.detach()
        attach(loader, sae, number=9)
        loader.attach(AttachSlice(model=1, number=10, order=Attach("m", 10, str(sae), 1)))
        loader.attach(AttachSlice(model=1, number=10))
        loader.abandon(1)
        attach(loader, sae)


def test_an_attachment_says_what_is_wrong(model_folder: ModelFolder, tmp_path: Path) -> None:
    models: dict[int, ResidentModel] = {}
    loader = Loader(models)
    sae = write_sae(tmp_path / "sae", d_in=32, d_sae=256, layer=1)
    run_load(loader, 1, make_load(model_folder("qwen3")))
    run_load(loader, 2, make_load(write_encoder(tmp_path / "encoder", "bert")))
    refusal = attach(loader, sae).refusal
    assert refusal is not None
    assert refusal.kind == "sae incompatible"
    assert "64" in refusal.reason
    assert attach(loader, sae, model=2).refusal == Refusal(
        "sae incompatible", "this model does not generate text"
    )
    assert attach(loader, sae, model=3).refusal == Refusal(
        "model not loaded", "its model is not loaded"
    )
    right = write_sae(tmp_path / "right", d_in=64, d_sae=256, layer=1)
    assert attach(loader, right).attached is not None


def test_what_is_given_up_leaves_nothing(model_folder: ModelFolder, tmp_path: Path) -> None:
    sae = write_sae(tmp_path / "sae", d_in=64, d_sae=256, layer=1)
    models: dict[int, ResidentModel] = {}
    loader = Loader(models)
    with nothing_left():
        run_load(loader, 1, make_load(model_folder("qwen3")))
        order = Attach("m", 7, str(sae), 1)
        for given in (order, None):
            assert loader.attach(AttachSlice(model=1, number=7, order=given)) == AttachStep()
        other: Load | None = make_load(model_folder("llama"))
        while not loader.load(LoadSlice(model=2, limit=MIB, order=other)).bytes:
            other = None
        loader.abandon(1)
        loader.abandon(2)
        del models[1]
