"""All endpoints, as their handlers declare them."""

from __future__ import annotations

import mlxsrv
from mlxsrv.web.paths import OperationRoute
from mlxsrv.wire.operation import Operation


def every_operation() -> list[Operation]:
    """The operations of an app that has all routes that there are."""
    app = mlxsrv.create_app(mlxsrv.Settings(hf_cache=False, metrics=True, ollama_root=True))
    routes = [each for each in app.routes if isinstance(each, OperationRoute)]
    return [each.operation for each in routes if not each.unversioned]
