"""Tiny models for all tests of the engine, with the products that a server has."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.patches.openblas import bind_openblas
from tests.support.fixtures import ModelFolder

# Before any test computes: one that compares two results is to have both from the same BLAS.
bind_openblas()


@pytest.fixture(scope="session")
def models(model_folder: ModelFolder) -> Any:
    """Loads a family's tiny model, once a session."""

    @cache
    def load(family: str) -> Any:
        return load_model(model_folder(family))[0]

    return load
