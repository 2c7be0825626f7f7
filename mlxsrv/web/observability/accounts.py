"""Who watches, and what they are told of a request: gathered while it is answered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Scope

from mlxsrv.service.observing import Asked, Observer, Operation, RequestEnded
from mlxsrv.service.reply import Reply
from mlxsrv.settings import Settings, SettingsError
from mlxsrv.web.routing import find_route


class Account:
    """What is known of one request so far; who learns more writes it down."""

    __slots__ = ("asked", "begun", "error", "model", "operation", "reply", "time", "tokens")

    def __init__(self) -> None:
        self.time = time.time_ns()
        self.begun = time.monotonic()
        self.operation: Operation | None = None
        self.asked: Asked | None = None
        self.model = ""
        self.reply: Reply | None = None
        self.tokens: int | None = None
        self.error: str | None = None

    def end(self, scope: Scope, status: int, identity: str) -> RequestEnded:
        """What is told to who watches, now that the request is over."""
        generated = None if self.reply is None else self.reply.generated
        model, error = self.model, self.error
        if generated is not None:
            error = error or generated.error
            if generated.first_token is not None:
                model = generated.model  # what was downloaded for it was not known before
        return RequestEnded(
            method=scope["method"],
            route=find_route(scope),
            status=status,
            headers=Headers(scope=scope),
            id=identity,
            time=self.time,
            begun=self.begun,
            ended=time.monotonic(),
            operation=self.operation,
            model=model,
            asked=self.asked,
            generated=generated,
            tokens=self.tokens,
            error=error,
        )


_KEY = "mlxsrv.account"


def open_account(scope: Scope) -> Account:
    account = scope[_KEY] = Account()
    return account


def account_of(scope: Scope) -> Account:
    """What is known of the request so far; the middleware has opened it."""
    account: Account = scope[_KEY]
    return account


class Watchers(Struct, frozen=True):
    """Those who watch, and the routes by which they tell."""

    observers: tuple[Observer, ...]
    routes: tuple[Route, ...]


def make_watchers(settings: Settings) -> Watchers:
    """Those that the settings ask for; what the others need is not even imported.

    Raises SettingsError where an extra is not installed.
    """
    observers: list[Observer] = []
    routes: list[Route] = []
    if settings.metrics:
        with _extra("metrics"):
            from mlxsrv.web.observability.metrics import Metrics
        metrics = Metrics()
        observers.append(metrics)
        routes.append(Route("/metrics", metrics.scrape))
    if settings.otel:
        with _extra("otel"):
            from mlxsrv.web.observability.tracing import Tracing
        observers.append(Tracing())
    return Watchers(tuple(observers), tuple(routes))


@contextmanager
def _extra(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise SettingsError(
            f"--{name} needs {error.name}, which is not installed: pip install 'mlxsrv[{name}]'"
        ) from None
