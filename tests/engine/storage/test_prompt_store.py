"""Stored prompts: real files of real KV caches, of every kind."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.host_arrays import CacheBuilder, describe_kind, share
from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.row_cache import RowCache
from mlxsrv.engine.patches.attention import patch_attention
from mlxsrv.engine.storage.node_file import NODE, Text, split
from mlxsrv.engine.storage.prompt_store import PromptStore, Transfer
from mlxsrv.engine.storage.store_folder import StoreFolder
from tests.support.effort import often
from tests.support.tiny import FAMILIES, write_model

FINGERPRINT = "0" * 32
PLENTY = 1 << 40
TOKENS = 3 * NODE
DAMAGES = ("cut", "flipped", "emptied", "foreign", "longer", "header")


@cache
def model(family: str) -> Any:
    """A family's; `wide` is one whose heads are wide enough for a quantized KV cache."""
    with TemporaryDirectory() as folder:
        if family == "wide":
            return load_model(write_model(Path(folder), "qwen3", head_dim=32))[0]
        return load_model(write_model(Path(folder), family))[0]


def text(tokens: int = TOKENS, seed: int = 1) -> Text:
    return np.random.default_rng(seed).integers(0, 500, tokens).astype(np.uint32)


def factory(kind: str) -> KVCacheFactory:
    family, _, option = kind.partition(" ")
    found = model(family)
    if option == "quantized":
        patch_attention()  # as a load does
        return KVCacheFactory(found, group=32, bits=8)
    if option == "bounded":
        return KVCacheFactory(found, max_size=64)
    return KVCacheFactory(found)


def read(kind: str, tokens: Text) -> RowCache:
    """The KV cache of these tokens."""
    cache = factory(kind).make()
    network = model(kind.partition(" ")[0])
    network(mx.array(tokens[None]), cache=cache.layers)
    cache.tokens = tokens.size
    mx.eval(cache.state)
    return cache


def following(kind: str, cache: RowCache) -> mx.array:
    """The logits behind one more token."""
    network = model(kind.partition(" ")[0])
    logits: mx.array = network(mx.array([[7]]), cache=cache.copy().layers)
    return logits


def hand_over(cache: RowCache) -> Transfer:
    shared = share(cache)
    return Transfer(shared.arrays, shared.cache)


def finish(task: Iterator[None]) -> None:
    for _ in task:
        pass


class Place:
    """A directory, and the store of one kind of KV cache in it, without a thread."""

    def __init__(
        self,
        path: Path,
        kind: str = "qwen3",
        *,
        most_bytes: int = PLENTY,
        fingerprint: str = FINGERPRINT,
    ) -> None:
        self.kind = kind
        self.caches = factory(kind)
        self.folder = StoreFolder(path, most_bytes)
        self.store = PromptStore(self.folder, fingerprint, cuts=self.caches.cuts)
        self.held = self.store.held

    def write(self, tokens: Text, cache: RowCache | None = None) -> int:
        """Returns how many files were written."""
        transfer = hand_over(cache or read(self.kind, tokens))
        finish(self.store.write(tokens, transfer))
        return transfer.files

    def begin_write(self, tokens: Text, cache: RowCache | None = None) -> Iterator[None]:
        return self.store.write(tokens, hand_over(cache or read(self.kind, tokens)))

    def fetch(self, tokens: Text) -> RowCache | None:
        transfer = Transfer()
        finish(self.store.fetch(tokens, transfer))
        if not transfer.nodes:
            return None
        builder = CacheBuilder(self.caches, transfer.nodes)
        while not builder.done:
            builder.go_on(1)
        return builder.build()

    @property
    def files(self) -> list[Path]:
        return sorted(self.held.path.glob("*.safetensors"))


KINDS = [
    "qwen3",
    "wide quantized",
    "qwen3 bounded",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "lfm2",
    "falcon_h1",
    "mamba",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_goes_on_as_if_it_had_been_read(tmp_path: Path, kind: str) -> None:
    tokens = text(TOKENS + NODE - 1)
    cache = read(kind, tokens)
    Place(tmp_path, kind).write(tokens, cache)
    again = Place(tmp_path, kind)  # as another process finds the folder
    asked = np.concatenate([tokens, text(40, seed=2)])
    stored = TOKENS if again.caches.cuts else tokens.size
    assert again.store.count_stored(asked) == stored
    found = again.fetch(asked)
    assert found is not None
    assert found.tokens == stored
    cache.cut(stored)
    assert mx.array_equal(following(kind, found), following(kind, cache)).item()


def test_every_family_can_be_stored(tmp_path: Path) -> None:
    for name in FAMILIES:
        if name == "qwen3-46m":
            continue
        tokens = text(NODE)
        cache = read(name, tokens)
        place = Place(tmp_path / name, name)
        place.write(tokens, cache)
        found = place.fetch(tokens)
        assert found is not None, name
        assert mx.array_equal(following(name, found), following(name, cache)).item(), name


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    tokens = text()
    cache = read("qwen3", tokens)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.astype(mx.bfloat16), layer.values.astype(mx.bfloat16)
    place = Place(tmp_path)
    place.write(tokens, cache)
    found = place.fetch(tokens)
    assert found is not None
    for one, other in zip(found.layers, cache.layers, strict=True):
        assert one.keys.dtype == mx.bfloat16
        assert mx.array_equal(one.keys, other.keys[..., :TOKENS, :]).item()


def test_texts_share_the_nodes_that_they_begin_with(tmp_path: Path) -> None:
    place = Place(tmp_path)
    one = text(TOKENS + 30)
    other = np.concatenate([one[: NODE + 30], text(2 * NODE - 30, seed=3)])
    assert place.write(one) == 3, "what is behind the last whole node is not stored"
    assert place.write(one) == 0
    assert place.write(other) == 2
    assert place.store.count_stored(other) == TOKENS
    assert place.store.count_stored(one[: 2 * NODE - 1]) == NODE
    assert place.store.count_stored(text(seed=9)) == 0


def test_another_answer_goes_on_from_the_last_node_that_is_shared(tmp_path: Path) -> None:
    place = Place(tmp_path)
    one = text()
    place.write(one)
    other = np.concatenate([one[: 2 * NODE + 50], text(300, seed=3)])
    found = place.fetch(other)
    assert found is not None
    assert found.tokens == 2 * NODE
    expected = read("qwen3", other[: found.tokens])
    assert mx.allclose(following("qwen3", found), following("qwen3", expected), atol=1e-4)


def test_a_file_is_safetensors(tmp_path: Path) -> None:
    """So other programs can look into it."""
    place = Place(tmp_path)
    tokens = text(NODE)
    place.write(tokens)
    [file] = place.files
    arrays, metadata = cast(Any, mx.load(str(file), return_metadata=True))
    assert mx.array_equal(arrays["tokens"], mx.array(tokens)).item()
    assert mx.array_equal(arrays["0.0"], read("qwen3", tokens).layers[0].keys[..., :NODE, :]).item()
    assert metadata["fingerprint"] == FINGERPRINT


def test_files_of_an_older_version_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / f"kv-{'1' * 32}" / "old.mlxkv"
    old.parent.mkdir()
    old.write_bytes(b"0" * 1000)
    place = Place(tmp_path)
    place.folder.open("2" * 32)
    [line] = caplog.records
    assert line.getMessage().startswith("prompts that an older version has stored are not used")
    assert place.write(text()) == 3
    assert old.exists()


def test_a_state_that_cannot_be_cut_serves_texts_that_begin_with_all_of_it(tmp_path: Path) -> None:
    place = Place(tmp_path, "mamba")
    tokens = text(600)
    place.write(tokens[:300])
    place.write(tokens[:500])
    assert place.store.count_stored(tokens) == 500
    assert place.store.count_stored(tokens[:499]) == 300
    assert place.store.count_stored(tokens[:299]) == 0


def test_what_is_handed_over_stays_as_it_is(tmp_path: Path) -> None:
    """A row that goes on in the same KV cache writes elsewhere while it is being stored."""
    tokens = text()
    cache = read("qwen3", tokens)
    expected = following("qwen3", cache)
    mx.eval(expected)  # so that nothing else refers to the arrays
    place = Place(tmp_path)
    writing = place.begin_write(tokens, cache)
    cache.cut(10)
    model("qwen3")(mx.array(text(300, seed=4)[None]), cache=cache.layers)
    mx.eval(cache.state)
    finish(writing)
    found = place.fetch(tokens)
    assert found is not None
    assert mx.array_equal(following("qwen3", found), expected).item()


# What is not taken.


def test_kinds_of_kv_caches_are_told_apart() -> None:
    chosen = ("qwen3", "wide quantized", "qwen3 bounded", "gemma3_text", "mamba", "falcon_h1")
    kinds = [describe_kind(factory(kind)) for kind in chosen]
    assert len(set(kinds)) == len(kinds)


def test_to_store_a_prompt_and_read_it_takes_one_look_and_no_launch_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 30,000 tokens has hundreds of nodes, and a folder many thousands of files."""
    looks: list[StoreFolder] = []
    refresh = StoreFolder.refresh

    def note(folder: StoreFolder) -> None:
        looks.append(folder)
        refresh(folder)

    place, tokens = Place(tmp_path), text()
    monkeypatch.setattr(StoreFolder, "refresh", note)
    assert place.write(tokens) == TOKENS // NODE
    assert len(looks) == 1
    monkeypatch.delattr(mx, "concatenate")
    assert place.fetch(tokens) is not None


def test_another_fingerprint_is_a_miss(tmp_path: Path) -> None:
    tokens = text()
    place = Place(tmp_path)
    place.write(tokens)
    other = Place(tmp_path, fingerprint="1" * 32)
    assert other.store.count_stored(tokens) == 0
    for file in place.files:  # even where somebody has copied them
        os.link(file, other.held.path / file.name)
    other.folder.refresh()
    assert other.store.count_stored(tokens) == tokens.size
    assert other.fetch(tokens) is None


@pytest.mark.parametrize("kind", ["qwen3", "mamba"])
def test_tokens_are_compared(tmp_path: Path, kind: str) -> None:
    """A file under the name of another text: the digest alone does not decide."""
    place = Place(tmp_path, kind)
    one, other = text(NODE), text(NODE, seed=5)
    place.write(one)
    [first] = place.files
    place.write(other)
    [second] = set(place.files) - {first}
    os.replace(second, first)
    assert place.fetch(one) is None


@pytest.mark.parametrize(
    ("kind", "damage"),
    often(
        product(("qwen3", "mamba"), DAMAGES),
        [*(("qwen3", damage) for damage in DAMAGES), ("mamba", "cut"), ("mamba", "flipped")],
    ),
)
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, kind: str, damage: str) -> None:
    place = Place(tmp_path, kind)
    tokens = text()
    place.write(tokens)
    chosen = place.files[-1]
    data = bytearray(chosen.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) * 2 // 3] ^= 4
    elif damage == "emptied":
        data = bytearray()
    elif damage == "foreign":
        data = bytearray(os.urandom(5000))
    elif damage == "longer":
        data += b"0" * 64
    else:
        data[8:12] = b"\xff\xff\xff\xff"
    chosen.write_bytes(data)
    again = Place(tmp_path, kind)
    found = again.fetch(tokens)
    assert found is None or found.tokens < tokens.size
    assert not chosen.exists()
    place.write(tokens)  # which sees that the file has gone
    assert Place(tmp_path, kind).store.count_stored(tokens) == tokens.size


def test_a_file_that_has_vanished_is_a_miss(tmp_path: Path) -> None:
    place = Place(tmp_path)
    tokens = text()
    place.write(tokens)
    assert place.store.count_stored(tokens) == tokens.size
    gone = [*split(tokens, cuts=True)][2]
    (place.held.path / gone.file).unlink()
    found = place.fetch(tokens)
    assert found is not None
    assert found.tokens == gone.begin == place.store.count_stored(tokens)
    for file in place.files:
        file.unlink()
    assert place.fetch(tokens) is None
    assert place.store.count_stored(tokens) == 0


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    place = Place(tmp_path / "prompts")
    place.write(text())
    shutil.rmtree(place.folder.path)
    assert place.fetch(text()) is None
    assert place.write(text(NODE, seed=2)) == 1
    assert place.store.count_stored(text()) == 0, "what was there is forgotten"
    assert place.fetch(text(NODE, seed=2)) is not None
    assert place.folder.nbytes == size(tmp_path)
    assert place.folder.path.stat().st_mode & 0o777 == 0o700


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "notes.safetensors", tmp_path / "photos" / "a.jpg"]
    place = Place(tmp_path)
    others += [place.held.path / name for name in ("README", "mine.safetensors")]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"0" * 100_000)
    place.write(text())
    small = Place(tmp_path, most_bytes=1000)
    assert small.files == [others[-1]]
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("kind", ["link", "file", "of another user"])
def test_what_is_named_as_a_folder_of_ours_is_left_alone(tmp_path: Path, kind: str) -> None:
    other, named = tmp_path / "other", tmp_path / "prompts" / f"kv-{'1' * 32}"
    other.mkdir()
    named.parent.mkdir()
    file = other / "a.safetensors"
    file.write_bytes(b"0" * 1_000_000)
    match kind:
        case "link":
            named.symlink_to(other)
        case "file":
            named.touch()
        case _:
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder away")
            os.chown(other.rename(named), 1234, 1234)
            file = named / "a.safetensors"
    place = Place(named.parent, most_bytes=500_000)
    assert place.write(text(NODE)) == 1
    assert place.fetch(text(NODE)) is not None
    assert file.exists()
    assert named.exists()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_nan_is_not_stored(tmp_path: Path, dtype: mx.Dtype) -> None:
    tokens = text()
    cache = read("qwen3", tokens)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.astype(dtype), layer.values.astype(dtype)
    cache.layers[1].values[0, 1, NODE + 7, 3] = float("nan")
    place = Place(tmp_path)
    assert place.write(tokens, cache) == 1
    assert place.store.count_stored(tokens) == NODE


# The bound.


def test_the_bound_holds_at_the_start_and_while_it_runs(tmp_path: Path) -> None:
    place = Place(tmp_path)
    texts = [text(NODE, seed=seed) for seed in range(12)]
    long_ago = time.time_ns() - 3600 * 10**9
    for age, tokens in enumerate(texts):
        place.write(tokens)
        [name] = split(tokens, cuts=True)
        os.utime(place.held.path / name.file, ns=(long_ago + age, long_ago + age))
    each = place.files[0].stat().st_size
    assert place.fetch(texts[0]) is not None  # used now, so it stays
    small = Place(tmp_path, most_bytes=5 * each)
    assert size(tmp_path) <= 5 * each
    assert small.store.count_stored(texts[0]) == NODE
    assert small.store.count_stored(texts[1]) == 0
    for seed in range(20, 30):
        small.write(text(NODE, seed=seed))
        assert size(tmp_path) <= 5 * each
    assert small.store.count_stored(text(NODE, seed=29)) == NODE


def test_of_a_text_the_end_goes_first(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(text())
    for step in ("written", "read"):
        if step == "read":
            assert place.fetch(text()) is not None
        times = [
            (place.held.path / name.file).stat().st_mtime_ns for name in split(text(), cuts=True)
        ]
        assert times == sorted({*times}, reverse=True), step
    small = Place(tmp_path, most_bytes=size(tmp_path) - 1)
    assert 0 < small.store.count_stored(text()) < TOKENS


def test_the_bound_is_for_all_fingerprints(tmp_path: Path) -> None:
    old = Place(tmp_path, fingerprint="1" * 32)
    for seed in range(4):
        old.write(text(NODE, seed=seed))
    each = old.files[0].stat().st_size
    new = Place(tmp_path, most_bytes=4 * each + each // 2, fingerprint="2" * 32)
    for seed in range(8):
        new.write(text(NODE, seed=seed))
        assert size(tmp_path) <= 4 * each + each // 2
    assert not old.held.path.exists()


def test_the_bound_holds_for_two_that_write_by_turns(tmp_path: Path) -> None:
    """Each counts what the other has written while its own file was not yet whole."""
    Place(tmp_path / "other").write(text(NODE))
    most = 4 * size(tmp_path / "other")
    one, two = (Place(tmp_path / "shared", most_bytes=most) for _ in range(2))
    for turn in range(4):
        tokens = text(NODE, seed=100 + turn)
        writing = one.begin_write(tokens)
        next(writing)
        for seed in range(4):
            two.write(text(NODE, seed=10 * turn + seed))
        finish(writing)
        assert size(tmp_path / "shared") <= most * 5 / 4, "but for the file that was being written"
        one.write(text(NODE, seed=200 + turn))
        assert size(tmp_path / "shared") <= most


def test_a_prompt_larger_than_the_bound_is_not_written(tmp_path: Path) -> None:
    place = Place(tmp_path, "mamba", most_bytes=1000)
    assert place.write(text()) == 0
    assert size(tmp_path) == 0


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_a_write_ends_when_its_memory_is_wanted(tmp_path: Path) -> None:
    place = Place(tmp_path)
    tokens = text()
    transfer = hand_over(read("qwen3", tokens))
    writing = place.store.write(tokens, transfer)
    next(writing)
    transfer.until = 0.0
    finish(writing)
    assert transfer.files == 1, "the file that was begun"
    assert [*place.store.fetch(tokens, Transfer(until=0.0))] == [], "nobody waits for it any more"


# Unfinished files.


def test_what_a_dead_writer_has_left_goes(tmp_path: Path) -> None:
    place = Place(tmp_path)
    tokens = text()
    writing = place.begin_write(tokens)
    next(writing)
    [unfinished] = place.held.path.iterdir()
    Place(tmp_path)
    assert unfinished.exists(), "its writer lives"
    finish(writing)
    unfinished.write_bytes(b"half")  # and now there is none
    Place(tmp_path)
    assert not unfinished.exists()
    assert place.store.count_stored(tokens) == tokens.size


def test_a_writer_with_the_same_process_id_does_not_end_the_writing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path)
    tokens = text(NODE)
    [name] = split(tokens, cuts=True)
    other = place.held.path / f"{os.getpid()}-1-{name.digest.hex()}.safetensors-unfinished"
    with other.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert place.write(tokens) == 0
        assert other.exists()
        assert place.write(tokens) == 1
    assert not caplog.records


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        place = Place(tmp_path / "new")
        place.write(text())
    finally:
        os.umask(old)
    assert place.folder.path.stat().st_mode & 0o777 == 0o700
    assert place.held.path.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in place.files)
