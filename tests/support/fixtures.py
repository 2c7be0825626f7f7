"""Tiny models and servers, each made once for all tests that can share it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import msgspec
import pytest

from mlxsrv.prompts.grammars import checks
from tests.support.serving import Server, serving
from tests.support.tiny import write_model

ModelFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The folder of a family's tiny model."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def write(family: str, *, plain: bool = False) -> Path:
        return write_model(root / f"{family}-{plain}", family, plain=plain)

    return write


CONTEXT = 4096
"""Tokens that fit the ordinary models."""

MAX_QUEUE = 3
"""Requests of one client that may wait at the narrow server, which answers one at a time."""


KEEPALIVE = 0.3
"""Seconds between comments at the narrow server."""


class Folders(msgspec.Struct, frozen=True):
    """Models on disk.

    - `plain`: says whole characters for ever; 4096 tokens of context.
    - `other`: the same under other names.
    - `endless`: the same weights with more context than a test lasts.
    - `thinking`: may end its answer, and thinks if asked to.
    """

    plain: Path
    other: Path
    endless: Path
    thinking: Path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    return Folders(
        plain=write_model(root / "plain", "qwen3", plain=True),
        other=write_model(root / "other", "qwen3", plain=True),
        endless=write_model(root / "endless", "qwen3", plain=True, max_position_embeddings=10**6),
        thinking=write_model(root / "thinking", "qwen3"),
    )


@pytest.fixture(scope="session")
def server(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An ordinary server: default options, several models."""
    models = [f"t={folders.plain}", f"thinking={folders.thinking}", f"org/name={folders.other}"]
    models += [f"endless={folders.endless}"]
    arguments = [argument for model in models for argument in ("--model", model)]
    with serving(tmp_path_factory.mktemp("server"), *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def narrow(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one row, a short queue and an impatient keep-alive, which logs all it does."""
    arguments = {
        "--model": f"t={folders.endless}",
        "--max-concurrency": "1",
        "--max-queue": str(MAX_QUEUE + 1),  # of which one is for other clients
        "--prefill-chunk": "16",
        "--keepalive": f"{KEEPALIVE}",
        "--log-level": "debug",
    }
    flat = [part for pair in arguments.items() for part in pair]
    with serving(tmp_path_factory.mktemp("narrow"), *flat) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def near_sandbox() -> Iterator[None]:
    """The sandbox's own code checks grammars in this process: a process for each takes ten times as
    long. Nothing may hang or crash here; test_grammar_refusals.py tries that in real ones."""
    spec = spec_from_file_location("check_process", checks._SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    process = module_from_spec(spec)
    spec.loader.exec_module(process)

    def run(script: Path, request: object, *, type: Any, **_: Any) -> Any:
        asked = msgspec.json.decode(msgspec.json.encode(request))
        return msgspec.json.decode(json.dumps([*process.failures(asked)]), type=type)

    with patch.object(checks, "run_apart", run):
        yield
