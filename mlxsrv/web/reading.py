"""Read a request: its body within bounds, decoded, and the fields that were ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import anyio.to_thread
from msgspec import Struct
from starlette.requests import Request

from mlxsrv.service.observing import AskedOfModel
from mlxsrv.service.service import Service
from mlxsrv.web.bodies import read_body, share_of
from mlxsrv.web.observability.records import record_of
from mlxsrv.wire.decoding import LARGE, RequestDecoder, uncollected

T = TypeVar("T", bound=Struct)
V = TypeVar("V")


def service_of(request: Request) -> Service:
    service: Service = request.app.service
    return service


async def read_request(
    request: Request, decoder: RequestDecoder[T], *, most: int | None = None, empty: bytes = b""
) -> tuple[T, Mapping[str, str]]:
    """Read and decode the body.

    Args:
        most: a bound in bytes below the app's own.
        empty: the text that stands for an empty body.

    Returns:
        The request, and the headers that name the fields which were ignored.

    Raises:
        RequestTooLarge, Overloaded, InvalidRequest
    """
    limit: int = request.app.settings.max_body
    body = await read_body(request, limit if most is None else min(limit, most))
    asked, ignored = await read_aside(request, partial(decoder.decode, body or empty))
    # A request that does not wait for a row has no such field.
    if not request.app.settings.allow_priority and getattr(asked, "priority", None) is not None:
        ignored = sorted([*ignored, "priority"])
    return asked, request.app.ignored.header(ignored)


async def read_aside(request: Request, work: Callable[[], V]) -> V:
    """Return the result of `work`, which reads what a request says.

    A worker thread does it where there is much to read, so that streams go on; nobody else has the
    request meanwhile. Large requests are read one after the other: garbage is not collected
    meanwhile, and threads would only wait for each other."""
    size = share_of(request.scope).size
    if size <= LARGE:
        return work()
    async with service_of(request).reading:
        with uncollected(size):
            return await anyio.to_thread.run_sync(work)


def note_asked(request: Request, asked: AskedOfModel) -> None:
    """Note for the observers what a model is asked for."""
    record = record_of(request.scope)
    record.asked, record.model = asked, service_of(request).pool.catalogue.label(asked.model)
