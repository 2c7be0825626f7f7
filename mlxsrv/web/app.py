"""The ASGI app: its middleware, its lifespan, and errors in one shape.

An app that is mounted in another app needs nothing from its parent: its own lifespan does not run
there, so the service starts with the first request and ends with the process. A parent that wants
to start and stop it at a certain time enters `app.lifespan`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlxsrv.configuration import load_settings, warn_of_variables
from mlxsrv.errors import MethodNotAllowed, RouteNotFound, ServeError
from mlxsrv.service.response_store import ResponseStore
from mlxsrv.service.service import Service, check_models
from mlxsrv.settings import Settings
from mlxsrv.web.bodies import Bodies, IgnoredFields
from mlxsrv.web.middleware import RequestLog
from mlxsrv.web.observability.telemetry import make_telemetry
from mlxsrv.web.paths import place
from mlxsrv.web.responses import refusal
from mlxsrv.web.routes import make_routes
from mlxsrv.web.security.api_keys import load_keys
from mlxsrv.web.security.guard import Guard, TakeRequest
from mlxsrv.web.security.origins import AllowedOrigins, Cors


class Membership(msgspec.Struct, frozen=True):
    """An app's part in several replicas of one server.

    Attributes:
        replica: the id of this one.
        responses: stored for all of them.
        take: counts a request for all of them; None: nothing limits them.
    """

    replica: str
    responses: ResponseStore
    take: TakeRequest | None


class App(Starlette):
    """The ASGI app; `create_app` makes one.

    Args:
        membership: None: the app is the only one, so clients may change what it has.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        local: bool,
        membership: Membership | None = None,
    ) -> None:
        # A wrong model is an error now, not at the first request.
        self.default_model = check_models(settings)
        keys = load_keys(settings)
        self.key_count = len(keys)
        origins = AllowedOrigins(settings)
        telemetry = make_telemetry(settings)
        super().__init__(
            routes=make_routes(
                telemetry.routes, page=settings.page == "on", ollama_root=settings.ollama_root
            ),
            middleware=[
                *([Middleware(Cors, origins)] if settings.allowed_origin else []),
                Middleware(RequestLog, telemetry.observers),
                Middleware(
                    Guard,
                    settings,
                    keys,
                    origins,
                    local=local,
                    take=None if membership is None else membership.take,
                ),
            ],
            exception_handlers={ServeError: _serve_error, HTTPException: _http_error},
            lifespan=type(self).lifespan,
        )
        self.router.redirect_slashes = False  # a wrong path gets a 404 in our own shape
        self.settings = settings
        self.ignored = IgnoredFields()
        self.bodies = Bodies(settings.max_bodies or 4 * settings.max_body)
        self.totals = telemetry.totals
        self.metrics = telemetry.metrics
        self._observers = telemetry.observers
        self.membership = membership
        self._service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            share = self.bodies.share()
            scope = {**scope, **place(scope, self.settings.root_path), "mlxsrv.body": share}
            try:
                await super().__call__(scope, receive, send)
            finally:
                share.release()
        else:
            await super().__call__(scope, receive, send)

    @property
    def service(self) -> Service:
        """The service of the running event loop, made on first use.

        Its limiters and its engine client belong to one loop. A new loop, such as that of a test
        client, gets a new service, and the models of the old one are dropped.
        """
        loop = asyncio.get_running_loop()
        if self._service is None or self._loop is not loop:
            if self._service is not None:
                self._service.pool.abandon()
            responses = None if self.membership is None else self.membership.responses
            self._service = Service(self.settings, self._observers, responses)
            self._loop = loop
        return self._service

    @contextlib.asynccontextmanager
    async def lifespan(self, parent: object = None) -> AsyncIterator[None]:
        """Start loading the default model; on exit, end what runs and free what is loaded.

        It takes the parent app and ignores it, so it can be a parent's `lifespan=` as it is.
        """
        service = self.service
        self._loading = loading = asyncio.create_task(service.preload())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await service.close()
            for observer in self._observers:
                await observer.close()
            self._service = None

    async def loaded(self) -> None:
        """Within the lifespan, wait for all that is loaded, attached and activated at start."""
        assert self._loading is not None
        await self._loading

    @property
    def failed(self) -> bool:
        """Whether the inference engine has failed; only a new process can recover from that."""
        return self._service is not None and self._service.pool.failure is not None

    async def drain(self) -> None:
        """Refuse new requests and wait for running ones, at most `shutdown_grace` seconds."""
        if self._service is not None:
            await self._service.drain()


def create_app(settings: Settings | None = None, *, local: bool = False) -> App:
    """Make the server's ASGI app, to run or to mount.

    Args:
        settings: None reads the `MLXSRV_*` variables, as `uvicorn --factory mlxsrv:create_app`
            needs it.
        local: the server that runs the app listens on loopback only, so Host must name this
            machine.

    Raises:
        SettingsError: a setting is wrong; the message names it.
    """
    if settings is None:
        warn_of_variables()
        settings = load_settings()
    return App(settings, local=local)


async def _serve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    return refusal(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer with our own shape where Starlette finds no route."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 405:
        cause: ServeError = MethodNotAllowed(f"{path} does not answer {method}")
    else:
        cause = RouteNotFound(f"there is no {method} {path} here")
    return refusal(request.scope, cause, error.headers)
