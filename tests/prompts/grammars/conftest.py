"""The sandbox without its process, for tests of what it finds out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest.mock import patch

import llguidance
import msgspec
import pytest

from mlxsrv.prompts.grammars import sandbox


@pytest.fixture(scope="module")
def near_sandbox() -> Iterator[None]:
    """The sandbox's own code tries grammars in this process: a process for each takes ten times as
    long. Nothing may hang or crash here; test_grammar_refusals.py tries that in real ones."""
    spec = spec_from_file_location("sandbox_process", sandbox._PROCESS)
    assert spec is not None
    assert spec.loader is not None
    process = module_from_spec(spec)
    arguments = [str(sandbox._PROCESS), str(Path(llguidance.__file__).parents[1])]
    with patch.object(sys, "argv", arguments), patch.object(sys, "path", [*sys.path]):
        spec.loader.exec_module(process)

    def run(request: object, *, type: Any) -> Any:
        asked = msgspec.json.decode(msgspec.json.encode(request))
        if "keys" in asked:
            answer = [process._match_keys(**keys) for keys in asked["keys"]]
        else:
            answer = [*process._failures(asked["grammars"])]
        return msgspec.json.decode(json.dumps(answer), type=type)

    with patch.object(sandbox, "_run", run):
        yield
