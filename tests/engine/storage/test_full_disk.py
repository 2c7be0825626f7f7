"""A disk that takes no more prompts, until it does."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from mlxsrv.engine.storage.node_file import NODE, Text
from mlxsrv.engine.storage.prompt_store import HandedCache, PromptStore, Transfer
from mlxsrv.engine.storage.store_folder import StoreFolder
from tests.support.stored import full

FINGERPRINT = "0" * 32
STOPS, GOES_ON = "prompts are not stored for now", "prompts are stored again"


def text(seed: int) -> Text:
    """The tokens of one file."""
    return np.random.default_rng(seed).integers(0, 500, NODE).astype(np.uint32)


class Disk:
    """The store of one model, without a thread."""

    def __init__(self, path: Path) -> None:
        self.store = PromptStore(StoreFolder(path, 1 << 40), FINGERPRINT, cuts=True)

    def write(self, seed: int) -> Transfer:
        handed = HandedCache({"0.0": np.ones((1, 4, NODE, 16), np.float32)}, {"0.0": 0}, None)
        transfer = Transfer(handed=handed)
        for _ in self.store.write(text(seed), transfer):
            pass
        return transfer

    def finds(self, seed: int) -> bool:
        return len([*self.store.fetch(text(seed), Transfer())]) > 0


def test_a_full_disk_ends_the_writing_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And it begins again, which the log says as well, with the first prompt that is taken."""
    caplog.set_level(logging.INFO)
    disk = Disk(tmp_path)
    disk.write(1)
    kept = sorted(disk.store.held.path.iterdir())
    with full():
        assert disk.write(2).full
        assert disk.write(3).full
    assert sorted(disk.store.held.path.iterdir()) == kept
    assert disk.finds(1), "what is there is of use still"
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [("WARNING", STOPS)]
    assert disk.write(2).files == disk.write(3).files == 1
    assert [each.getMessage() for each in caplog.records] == [STOPS, GOES_ON]
