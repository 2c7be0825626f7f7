"""mlxsrv: a lean, streaming-first ASGI server for MLX language models."""

from contextlib import AbstractAsyncContextManager

from mlxsrv.settings import Settings
from mlxsrv.version import __version__
from mlxsrv.web.app import App, create_app

__all__ = ["Settings", "__version__", "create_app", "lifespan"]


def lifespan(app: App) -> AbstractAsyncContextManager[None]:
    """Start a mounted app with its parent and stop it with it; see `App.lifespan`."""
    return app.lifespan()
