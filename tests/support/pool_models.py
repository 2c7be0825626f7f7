"""Models for a pool, and the lines that it logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pools import Log
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of one size, and `broken`: its weights are incomplete, which only its load notices."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc"):
        write_model(root / name, "qwen3", seed=seed)
    config = write_model(root / "broken", "qwen3") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    return root


@pytest.fixture
def log() -> Iterator[Log]:
    logger, log = logging.getLogger("mlxsrv.models"), Log()
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    yield log
    logger.setLevel(level)
    logger.removeHandler(log)
