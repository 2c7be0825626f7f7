"""Tiny models, written once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.tiny import write_model

ModelFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The folder of a family's tiny model."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def write(family: str, *, plain: bool = False) -> Path:
        return write_model(root / f"{family}-{plain}", family, plain=plain)

    return write
