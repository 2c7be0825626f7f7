"""mlxsrv: a lean, streaming-first ASGI server for MLX language models."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxsrv.version import __version__

if TYPE_CHECKING:
    from mlxsrv.settings import Settings
    from mlxsrv.web.app import App, create_app

__all__ = ["Settings", "__version__", "create_app", "lifespan"]

_PLACES = {"Settings": "mlxsrv.settings", "create_app": "mlxsrv.web.app"}


def lifespan(app: App) -> AbstractAsyncContextManager[None]:
    """Start a mounted app with its parent and stop it with it; see `App.lifespan`."""
    return app.lifespan()


if not TYPE_CHECKING:  # type checkers would take any name for one of the package's

    def __getattr__(name: str) -> Any:
        """Import what is public on first use: the command line does without, so that Ctrl-C ends
        its own imports."""
        if name not in _PLACES:
            raise AttributeError(f"module 'mlxsrv' has no attribute {name!r}")
        return getattr(import_module(_PLACES[name]), name)
