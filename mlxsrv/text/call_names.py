"""Names of tools in the forms that models write."""

from __future__ import annotations

import re

from mlxsrv.text.calls import Tools

_SCOPES = re.compile(r"[.:/]")


def offered_name(written: str, tools: Tools) -> str:
    """Return the name of the tool that is meant: models write `functions.f`, `api:f` or `f()`."""
    bare = written.strip().removesuffix("()")
    candidates = (written, bare, bare.removeprefix("functions."), _SCOPES.split(bare)[-1])
    return next((name for name in candidates if name in tools), written)
