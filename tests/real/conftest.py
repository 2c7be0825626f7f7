"""A server with real models, and mlx-lm's own models to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlx_lm.utils import load

from mlxsrv.engine.patches.openblas import bind_openblas
from tests.real.material import FORMATS, ROOT
from tests.support.serving import Server, serving

Load = Callable[[str], Any]

bind_openblas()  # as servers do: a prompt of 600 tokens takes seconds, not minutes


def real(name: str) -> Path:
    """The folder of a model or tokenizer; skips the test if it could not be had."""
    if not (ROOT / name).exists():
        pytest.skip(f"{name} could not be had: `make test-real` says why")
    return ROOT / name


@pytest.fixture(scope="session")
def mlx_lm() -> Load:
    """mlx-lm's model and tokenizer."""

    @cache
    def find(name: str) -> Any:
        return load(str(real(name)))

    return find


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [*(f"smollm2-{kind}" for kind in FORMATS), "gemma3-float32"]
    named = [f"{name}={ROOT / name}" for name in models if (ROOT / name).exists()]
    if not named:
        pytest.skip("no model could be had: `make test-real` says why")
    options = [option for name in named for option in ("--model", name)]
    with serving(tmp_path_factory.mktemp("server"), *options, cold=True) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=600) as client:
        yield client
