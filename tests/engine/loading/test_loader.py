"""The loader: what each slice says, and what is left of one that fails or is given up."""

from __future__ import annotations

import json
import os
from itertools import chain, count
from pathlib import Path

import mlx.core as mx
import pytest

from mlxsrv.engine.events import Attached
from mlxsrv.engine.loading.load import ResidentModel
from mlxsrv.engine.loading.loader import Loader
from mlxsrv.engine.loading.weights import import_model_code
from mlxsrv.engine.orders import Attach, Load
from mlxsrv.engine.outcomes import AttachStep, LoadStep, Refusal
from mlxsrv.engine.plans import AttachSlice, LoadSlice
from tests.support.effort import often
from tests.support.encoders import write_encoder
from tests.support.fixtures import ModelFolder
from tests.support.loading import MIB, make_load, nothing_left, run_load
from tests.support.saes import write_sae
from tests.support.tiny import write_model


def test_the_last_slice_says_what_was_loaded(model_folder: ModelFolder) -> None:
    models: dict[int, ResidentModel] = {}
    step = run_load(Loader(models), 5, make_load(model_folder("qwen3"), "own"))[-1]
    assert step.loaded is not None
    assert step.loaded.model == "own"
    assert step.text is not None
    assert (step.text.batched, step.text.cuts, step.text.prompt_cache_bytes) == (True, True, MIB)
    assert step.embed is not None
    assert (step.embed.slices, step.embed.kv_costs) == (True, step.text.kv_costs)
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


def write_failing(folder: Path, error: str, call: int) -> Path:
    """A model with code of its own. Raises at that call into the code: as it is imported, builds
    the model, takes the weights, makes the KV caches, and computes."""
    if not folder.exists():
        write_model(folder, "qwen3", vocab_size=4096)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    (folder / "own.py").write_text(f"CALL, calls = {call}, 0\n{FAILING}".replace("ERROR", error))
    return folder


FAILING = """
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import ModelArgs

class PanicException(BaseException):
    pass

def count():
    global calls
    calls += 1
    if calls == CALL:
        raise ERROR

class Model(qwen3.Model):
    def __init__(self, args):
        super().__init__(args)
        count()

    def sanitize(self, weights):
        count()
        return super().sanitize(weights)

    def make_cache(self):
        count()
        return [KVCache() for _ in self.layers]

    def __call__(self, *args, **named):
        count()
        return super().__call__(*args, **named)

count()
"""


@pytest.mark.parametrize(
    "error",
    often(["MemoryError('no room')", "PanicException('panicked')"], ["PanicException('panicked')"]),
)
def test_a_load_that_fails_at_any_point_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    caplog.set_level("CRITICAL", "mlxsrv.engine")  # a record keeps its traceback, and that arrays
    slices: list[int] = []
    # The last slices call many times: every fourth of them.
    for call in chain(range(1, 25), count(25, 4)):
        order = make_load(write_failing(tmp_path / "m", error, call), trust_remote_code=True)
        with nothing_left():
            last = fail_to_load(order, slices)
        if last.refusal is None:
            break
        assert last.refusal.kind == "model not loaded"
        assert error.split("'")[1] in last.refusal.reason
    assert len(slices) >= 9
    assert len({*slices}) >= 2, "it failed in several slices"


def fail_to_load(order: Load, slices: list[int]) -> LoadStep:
    """Load a model. Returns the last step, and notes in which slice the load failed, if it did."""
    models: dict[int, ResidentModel] = {}
    loader = Loader(models)
    steps = run_load(loader, 1, order)
    if steps[-1].refusal is not None:
        assert not models
        assert mx.get_cache_memory() == 0
        with pytest.raises(KeyError):
            loader.load(LoadSlice(model=1, limit=MIB))
        slices.append(len(steps))
    return steps[-1]


def test_an_error_that_ends_the_process_passes(tmp_path: Path) -> None:
    order = make_load(write_failing(tmp_path / "m", "SystemExit(3)", 2), trust_remote_code=True)
    with pytest.raises(SystemExit):
        run_load(Loader({}), 1, order)


def test_mlx_lms_code_that_wants_another_package_is_refused(tmp_path: Path) -> None:
    """Its import would end the process, so a request for OLMo would end the server."""
    (tmp_path / "config.json").write_text('{"model_type": "olmo"}')
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"weight": mx.zeros(1)})
    import_model_code(str(tmp_path))
    refusal = run_load(Loader({}), 1, make_load(tmp_path))[-1].refusal
    assert refusal is not None
    assert refusal.reason == "mlx-lm's code for olmo needs a package that is not installed"


@pytest.mark.parametrize("slices", [2, 3])
def test_a_file_that_is_cut_off_between_two_slices_fails_the_load(
    tmp_path: Path, slices: int
) -> None:
    folder = write_model(tmp_path / "m", "qwen3", vocab_size=4096)
    loader = Loader({})
    with nothing_left():
        loader.load(LoadSlice(model=1, limit=1000, order=make_load(folder)))
        for _ in range(slices - 1):
            assert loader.load(LoadSlice(model=1, limit=1000)).refusal is None
        os.truncate(folder / "model.safetensors", 20_000)
        step = loader.load(LoadSlice(model=1, limit=1000))
        while step.refusal is None:
            assert step.loaded is None
            step = loader.load(LoadSlice(model=1, limit=1000))
        with pytest.raises(KeyError):
            loader.load(LoadSlice(model=1, limit=1000))


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
