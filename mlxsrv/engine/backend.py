"""The MLX back end of this machine: whether there is one, and its imports.

MLX is imported when a function here is called, not before: an app that is only imported does not
pay for it.
"""

from __future__ import annotations

from contextlib import suppress

from mlxsrv.engine.patches.imports import patch_imports
from mlxsrv.errors import BackendMissing

_LEFT_OUT = ("resource_limit", "uuid", "pci_bus_id")


def require_backend() -> None:
    """Raises BackendMissing if MLX is installed without a back end for this machine."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise BackendMissing(
            "MLX has no back end here. On Linux install one of mlxsrv's extras: "
            "pip install 'mlxsrv[cpu]' or pip install 'mlxsrv[cuda]'"
        ) from error


def import_engine() -> None:
    """Import all that serving needs. Called by the device thread, which alone calls MLX.

    All at once: an import that fails later, for want of a file descriptor, may leave a module half
    imported, and fail for ever. Raises ImportError.
    """
    patch_imports()
    import mlxsrv.engine.loading.loader
    import mlxsrv.engine.ranks.joining
    import mlxsrv.prompts.grammars.grammar  # noqa: F401

    with suppress(ImportError):  # an optional library
        import llguidance.hf  # noqa: F401


def describe_device() -> dict[str, str | int]:
    """The device that MLX computes on, in MLX's words and without what names this one card; empty
    where it has no back end."""
    try:
        import mlx.core as mx
    except ImportError:
        return {}
    described = {name: value for name, value in mx.device_info().items() if name not in _LEFT_OUT}
    return {"kind": mx.default_device().type.name, **described}
