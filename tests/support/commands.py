"""Commands of `mlxsrv`, run in this process as its user runs them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
from huggingface_hub import constants

from mlxsrv.cli import main
from tests.support.serving import environment


class Done(NamedTuple):
    """As subprocess.run tells it."""

    returncode: int | str | None
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; what programs print that it starts counts too."""
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", environment()["HF_HUB_CACHE"])

    def run(*arguments: str, **variables: str) -> Done:
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main(arguments)
        return Done(end.value.code, *capfd.readouterr())

    return run
