"""mlx-lm's code for a model: which classes it is built of."""

from __future__ import annotations

import logging
from pathlib import Path

from mlx_lm.utils import _get_classes, load_config

_log = logging.getLogger("mlxsrv.engine")


def import_model_code(path: str) -> None:
    """Import the code of the model in folder `path`. Errors are left to its load."""
    try:
        _get_classes(load_config(Path(path)))
    except Exception:
        _log.debug("no code for the model in %s", path, exc_info=True)
