"""The sandbox without its process, for tests of what it finds out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from mlxsrv.prompts.grammars import trial


@pytest.fixture(scope="module")
def near_sandbox() -> Iterator[None]:
    """The sandbox's own code tries grammars in this process: a process for each takes ten times as
    long. Nothing may hang or crash here; test_grammar_refusals.py tries that in real ones."""
    spec = spec_from_file_location("trial_process", trial._SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    process = module_from_spec(spec)
    spec.loader.exec_module(process)

    def run(request: object, *, type: Any) -> Any:
        asked = msgspec.json.decode(msgspec.json.encode(request))
        if "keys" in asked:
            answer = [process._match_keys(**keys) for keys in asked["keys"]]
        else:
            answer = [*process._failures(asked["grammars"])]
        return msgspec.json.decode(json.dumps(answer), type=type)

    with patch.object(trial, "_run", run):
        yield
