"""Downloads into the Hugging Face cache, from a small hub on loopback."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants, scan_cache_dir, snapshot_download

from mlxsrv.models.catalogue.download import fetch
from mlxsrv.models.catalogue.hub_cache import CachedModel, Repository, cached, cached_models
from tests.support.hub import Hub
from tests.support.hub_caches import (
    TINY,
    WEIGHTS,
    cache,
    copy,
    failure,
    files,
    hub,
    model,
    partials,
    ranges,
    refusal,
    server,
    use,
)
from tests.support.serving import wait_for
from tests.support.tiny import write_model

__all__ = ["cache", "copy", "hub", "model", "server"]

pytestmark = pytest.mark.served  # a hub is served here


# Downloads.


def test_a_model_is_fetched(hub: Hub, cache: Path, copy: Path) -> None:
    wanted = files(copy) | {
        "README.md": b"# Tiny\n",
        "1_Pooling/config.json": b"{}",
        "2_Dense/model.safetensors": (copy / WEIGHTS).read_bytes(),
    }
    others = ["pytorch_model.bin", "modeling.py", "consolidated.safetensors", "onnx/model.onnx"]
    for path, content in [*wanted.items(), *((path, b"other") for path in others)]:
        (copy / path).parent.mkdir(exist_ok=True)
        (copy / path).write_bytes(content)
    commit = hub.add(TINY.id, copy)
    assert cached_models() == []
    assert cached(TINY) is None

    folder = fetch(TINY)

    assert folder == cache / "models--org--tiny" / "snapshots" / commit
    assert files(folder) == wanted
    assert not {sent.path for sent in hub.sent}.intersection(others)
    assert not partials(cache)
    hub.asked.clear()
    assert cached(TINY) == folder
    assert cached_models() == [CachedModel("org/tiny", folder, incomplete=False)]
    assert not hub.asked
    assert fetch(TINY) == folder
    assert len(hub.asked) == 1  # for the commit


def test_other_programs_find_it(hub: Hub, cache: Path, model: Path) -> None:
    hub.add(TINY.id, model)
    folder = fetch(TINY)
    assert snapshot_download(TINY.id, local_files_only=True) == str(folder)
    scan = scan_cache_dir(cache)
    assert not scan.warnings
    assert not scan.incomplete_files
    assert [repo.refs.keys() for repo in scan.repos] == [{"main"}]


def test_what_another_program_has_fetched_is_found(hub: Hub, model: Path) -> None:
    hub.add(TINY.id, model)
    folder = Path(snapshot_download(TINY.id))
    assert cached(TINY) == folder
    hub.sent.clear()
    assert fetch(TINY) == folder
    assert not hub.sent


def test_each_revision_is_its_own(hub: Hub, model: Path, copy: Path) -> None:
    hub.add(TINY.id, model)
    (copy / "generation_config.json").unlink()
    commit = hub.add(TINY.id, copy, "v1")
    tag, exact = Repository(TINY.id, "v1"), Repository(TINY.id, commit)

    folder = fetch(exact)
    assert files(folder) == files(copy)
    assert (cached(TINY), cached(tag), cached(exact)) == (None, None, folder)
    assert cached_models() == [CachedModel("org/tiny", folder, incomplete=False)]

    main = fetch(TINY)
    assert ranges(hub, WEIGHTS) == [(0, len((model / WEIGHTS).read_bytes()))]  # the same file
    assert fetch(tag) == folder
    assert (cached(TINY), cached(tag)) == (main, folder)
    assert [(found.name, found.folder) for found in cached_models()] == [
        ("org/tiny", main),
        ("org/tiny@v1", folder),
    ]


@pytest.mark.parametrize("progress", [True, False])
def test_bars_are_shown_if_asked_for(
    hub: Hub, model: Path, capfd: pytest.CaptureFixture[str], progress: bool
) -> None:
    hub.add(TINY.id, model)
    fetch(TINY, progress=progress)
    written = capfd.readouterr()
    assert written.out == ""
    assert ("org/tiny: 100%" in written.err) is progress
    assert bool(written.err) is progress


# Downloads that break.


@pytest.mark.parametrize("silent", [False, True])
def test_a_dropped_connection_goes_on_where_it_was(hub: Hub, model: Path, silent: bool) -> None:
    size = len((model / WEIGHTS).read_bytes())
    hub.add(TINY.id, model)
    hub.drop(WEIGHTS, after=size // 2, times=1, silent=silent)
    assert files(fetch(TINY)) == files(model)
    assert ranges(hub, WEIGHTS) == [(0, size // 2), (size // 2, size)]


@pytest.mark.parametrize("silent", [False, True])
def test_a_later_download_goes_on_where_it_was(
    hub: Hub, cache: Path, model: Path, silent: bool
) -> None:
    size = len((model / WEIGHTS).read_bytes())
    hub.add(TINY.id, model)
    hub.drop(WEIGHTS, after=size // 2, silent=silent)
    assert "connection to the hub failed" in failure()
    assert [path.stat().st_size for path in partials(cache)] == [size // 2]
    assert cached(TINY) is None
    assert cached_models() == []

    hub.mend()
    assert files(fetch(TINY)) == files(model)
    assert ranges(hub, WEIGHTS) == [(size // 2, size)]
    assert {sent.path for sent in hub.sent} == {WEIGHTS}
    assert not partials(cache)


@pytest.mark.slow
def test_a_killed_download_goes_on_where_it_was(hub: Hub, cache: Path, model: Path) -> None:
    hub.add(TINY.id, model)
    hub.hold(WEIGHTS, at=100_000)
    content = (model / WEIGHTS).read_bytes()
    name = f"{hashlib.sha256(content).hexdigest()}.incomplete"
    partial = cache / "models--org--tiny" / "blobs" / name
    code = "from mlxsrv.models.catalogue.download import *; fetch(Repository('org/tiny'))"
    process = subprocess.Popen([sys.executable, "-c", code], env=hub.environment(cache.parent))
    try:
        wait_for(lambda: partial.exists() and partial.stat().st_size, why="weights arrive")
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    had = partial.stat().st_size

    hub.mend()
    assert files(fetch(TINY)) == files(model)
    assert ranges(hub, WEIGHTS) == [(had, len(content))]


def test_a_caller_can_stop_it(hub: Hub, cache: Path, model: Path) -> None:
    class Stop(Exception):
        pass

    def check() -> None:
        if partials(cache) and max(p.stat().st_size for p in partials(cache)) > 100_000:
            raise Stop

    hub.add(TINY.id, model)
    with pytest.raises(Stop):
        fetch(TINY, check=check)
    assert partials(cache)
    assert files(fetch(TINY)) == files(model)


def test_two_at_once_download_once(hub: Hub, model: Path) -> None:
    hub.add(TINY.id, model)
    hub.hold(WEIGHTS, at=100_000)
    commit = f"GET /api/models/{TINY.id}/revision/main"
    with ThreadPoolExecutor() as pool:
        begun = [pool.submit(fetch, TINY) for _ in range(2)]
        try:
            wait_for(lambda: ranges(hub, WEIGHTS), why="one of them fetches")
            wait_for(lambda: hub.asked.count(commit) == 2, why="so does the other")
        finally:
            hub.hurry(WEIGHTS)
    assert begun[0].result() == begun[1].result()
    assert sorted(sent.path for sent in hub.sent) == sorted(files(model))


def test_a_hub_without_ranges_starts_again(hub: Hub, cache: Path, model: Path) -> None:
    hub.add(TINY.id, model)
    hub.drop(WEIGHTS, after=100_000)
    failure()
    hub.mend()
    hub.ignore_ranges(WEIGHTS)
    assert files(fetch(TINY)) == files(model)


@pytest.mark.parametrize("path", [WEIGHTS, "tokenizer.json"])
def test_a_damaged_file_is_not_kept(hub: Hub, cache: Path, model: Path, path: str) -> None:
    hub.add(TINY.id, model)
    hub.corrupt(path)
    message = failure()
    assert path in message
    assert "checksum" in message
    assert not partials(cache)
    assert cached(TINY) is None

    hub.mend()
    assert files(fetch(TINY)) == files(model)


@pytest.mark.parametrize("size", [100, 10**6])
def test_a_partial_file_of_something_else_is_not_kept(
    hub: Hub, cache: Path, model: Path, size: int
) -> None:
    hub.add(TINY.id, model)
    hub.drop(WEIGHTS, after=50)
    failure()
    hub.mend()
    (partial,) = partials(cache)
    partial.write_bytes(b"?" * size)
    if size < len((model / WEIGHTS).read_bytes()):
        assert "checksum" in failure()
    assert files(fetch(TINY)) == files(model)


def test_a_file_damaged_in_the_cache_is_fetched_again(hub: Hub, model: Path) -> None:
    hub.add(TINY.id, model)
    folder = fetch(TINY)
    blob = (folder / WEIGHTS).resolve()
    blob.write_bytes(b"\0" * blob.stat().st_size)
    hub.sent.clear()
    assert files(fetch(TINY)) == files(model)
    assert [sent.path for sent in hub.sent] == [WEIGHTS]


def test_a_model_is_served_while_a_newer_one_arrives(hub: Hub, model: Path, copy: Path) -> None:
    hub.add(TINY.id, model)
    folder = fetch(TINY)
    whole = [CachedModel("org/tiny", folder, incomplete=False)]
    write_model(copy, "qwen3", seed=1)
    hub.add(TINY.id, copy)
    hub.drop(WEIGHTS, after=100_000)
    failure()
    assert cached(TINY) == folder
    assert cached_models() == whole

    hub.mend()
    assert files(fetch(TINY)) == files(copy)
    assert cached(TINY) != folder
    assert [found.folder for found in cached_models()] == [cached(TINY)]


# What is refused.


def remove(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def replace_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def break_up(folder: Path) -> None:
    """Write an index that names a missing shard."""
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    named = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: replace_config(folder, model_type="sd3"), "'sd3'"),
        (break_up, "model-00002-of-00002.safetensors"),
        (lambda folder: remove(folder, "tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    ],
    ids=["unknown-type", "no-shard", "no-tokenizer"],
)
def test_no_weights_come_of_what_cannot_be_served(
    hub: Hub, cache: Path, copy: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(copy)
    hub.add(TINY.id, copy)
    assert reason in refusal()
    assert not [sent for sent in hub.sent if sent.path.endswith(".safetensors")]
    assert not list(cache.glob("models--*"))


@pytest.mark.parametrize(
    ("name", "reason"), [("config.json", "config.json"), (WEIGHTS, "model*.safetensors")]
)
def test_nothing_comes_of_what_is_no_model(
    hub: Hub, cache: Path, copy: Path, name: str, reason: str
) -> None:
    remove(copy, name)
    (copy / "model.gguf").write_bytes(b"GGUF")
    hub.add(TINY.id, copy)
    assert f"it has no {reason}" in refusal()
    assert not hub.sent
    assert not cache.exists()


def test_weights_that_are_none_are_refused(hub: Hub, copy: Path) -> None:
    (copy / WEIGHTS).write_bytes(b"no header")
    hub.add(TINY.id, copy)
    assert WEIGHTS in refusal()
    assert cached(TINY) is None


def test_weights_that_do_not_fit_the_config_are_refused(hub: Hub, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 60_000}))
    hub.add(TINY.id, copy)
    assert "60000 for num_hidden_layers" in refusal()
    assert cached(TINY) is None


def test_what_the_hub_does_not_have_or_give(hub: Hub, model: Path) -> None:
    hub.add(TINY.id, model)
    assert "no repository 'org/other'" in refusal(Repository("org/other"))
    assert "no revision 'v9'" in refusal(Repository(TINY.id, "v9"))
    hub.gate(TINY.id)
    assert "hf auth login" in refusal()
    assert "gated" in refusal()


def test_errors_of_the_hub(hub: Hub, model: Path) -> None:
    hub.add(TINY.id, model)
    hub.fail(WEIGHTS, 404)
    assert "status 404" in failure()
    hub.fail(WEIGHTS, 500)
    message = failure()
    assert "status 500" in message
    assert "Signature" not in message
    hub.fail(WEIGHTS, 500, times=1)
    assert files(fetch(TINY)) == files(model)


def test_the_hub_is_out_of_reach(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # nobody else can have its port, and nobody listens
        taken.bind(("127.0.0.1", 0))
        use(f"http://127.0.0.1:{taken.getsockname()[1]}", monkeypatch)
        message = failure()
    assert "connection to the hub failed" in message
    assert "http" not in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in failure()


Usage = namedtuple("Usage", "total used free")


def test_a_full_disk(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(TINY.id, model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6, 1000))
    assert "does not fit" in failure()
    assert not hub.sent
