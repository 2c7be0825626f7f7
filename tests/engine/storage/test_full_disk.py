"""A disk that takes no more prompts, until it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxsrv.engine.storage.node_file import NODE, Text, split
from mlxsrv.engine.storage.prompt_store import HandedCache, PromptStore, StoreCounts, Transfer
from mlxsrv.engine.storage.store_folder import StoreFolder
from tests.support.stored import full

FINGERPRINT = "0" * 32
FULL = StoreCounts(full=True)
STOPS, GOES_ON = "prompts are not stored for now", "prompts are stored again"


def text(seed: int) -> Text:
    """The tokens of one file."""
    return np.random.default_rng(seed).integers(0, 500, NODE).astype(np.uint32)


class Disk:
    """The store of one model, without a thread. Its clock stands unless it is set to `now`."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        self.folder = StoreFolder(path, 1 << 40)
        self.store = PromptStore(self.folder, FINGERPRINT, cuts=True, clock=lambda: self.now)
        self.held = self.store.held

    def write(self, seed: int) -> StoreCounts:
        handed = HandedCache({"0.0": np.ones((1, 4, NODE, 16), np.float32)}, {"0.0": 0}, None)
        writing = self.store.write(text(seed), Transfer(handed=handed))
        while True:
            try:
                next(writing)
            except StopIteration as over:
                counts: StoreCounts = over.value
                return counts

    def finds(self, seed: int) -> bool:
        return len([*self.store.fetch(text(seed), Transfer())]) > 0


def test_a_full_disk_ends_the_writing_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path)
    disk.write(1)
    kept = sorted(disk.held.path.iterdir())
    with full():
        assert disk.write(2) == FULL
    assert disk.write(3) == FULL, "it is not asked"
    assert sorted(disk.held.path.iterdir()) == kept
    assert disk.finds(1), "what is there is of use still"
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [("WARNING", STOPS)]


def test_a_full_disk_is_tried_again_after_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    disk = Disk(tmp_path)
    with full():
        assert disk.write(1) == FULL
    disk.now = 59.0
    assert disk.write(1) == FULL
    disk.now = 60.0
    with full():
        assert disk.write(1) == FULL
    disk.now = 119.0
    assert disk.write(1) == FULL, "it was tried in vain, so another minute passes"
    disk.now = 120.0
    assert disk.write(1).files == 1
    assert disk.write(2).files == 1
    assert [each.getMessage() for each in caplog.records] == [STOPS, GOES_ON]


@pytest.mark.parametrize("remover", ["this process", "another process"])
def test_a_full_disk_is_tried_again_when_a_file_was_removed(tmp_path: Path, remover: str) -> None:
    disk = Disk(tmp_path)
    disk.write(1)
    with full():
        assert disk.write(2) == FULL
    assert disk.write(2) == FULL
    [name] = split(text(1), cuts=True)
    if remover == "this process":
        disk.folder.remove(disk.held, name)
    else:
        (disk.held.path / name.file).unlink()
    assert disk.write(2).files == 1
