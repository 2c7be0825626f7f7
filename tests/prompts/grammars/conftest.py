"""The sandbox without its process, for tests of what it finds out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from mlxsrv.prompts.grammars import checks


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
