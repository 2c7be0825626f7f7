"""The switch of the patches: the environment variable MLXSRV_PATCHES.

Unset or `on`: all patches are applied. `off`: none. Else a list of those to apply, separated by
commas: `openblas,transformers`. A variable and no option, for a patch holds for the process, not
for an app in it.
"""

from __future__ import annotations

import logging
import os
from functools import cache

VARIABLE = "MLXSRV_PATCHES"
PATCHES = frozenset({"openblas", "transformers", "mlx-lm", "attention", "python"})

_log = logging.getLogger("mlxsrv.engine")


def enabled(patch: str) -> bool:
    """Whether the patch of this name may be applied."""
    assert patch in PATCHES
    return patch in _parse(os.environ.get(VARIABLE, ""))


@cache  # so that a wrong name is reported once
def _parse(text: str) -> frozenset[str]:
    names = {name.strip().lower() for name in text.split(",")} - {""}
    if not names or names == {"on"}:
        return PATCHES
    if unknown := names - PATCHES - {"off"}:
        _log.warning(
            "%s names no patch: %s; there are %s",
            VARIABLE,
            ", ".join(sorted(unknown)),
            ", ".join(sorted(PATCHES)),
        )
    return PATCHES & names


def log_applied(patch: str, effect: str) -> None:
    """The one log line of a patch, at level debug."""
    _log.debug("patch %s: %s", patch, effect)
