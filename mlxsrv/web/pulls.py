"""The download of a model, as Ollama's API has it: whole, or with its progress."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxsrv.errors import ServeError
from mlxsrv.models.catalogue.progress import PulledFile
from mlxsrv.models.catalogue.pulls import PullWatch
from mlxsrv.web.reading import read_request, service_of
from mlxsrv.web.responses import (
    STREAM_HEADERS,
    JSONResponse,
    cancel_on_disconnect,
    refusal,
    unless_gone,
)
from mlxsrv.wire.ndjson import MEDIA_TYPE, line
from mlxsrv.wire.ollama.answers import ollama_error
from mlxsrv.wire.ollama.pulls import PULL_BEGINS, PULL_ENDS, file_progress
from mlxsrv.wire.ollama.requests import OLLAMA_PULLS


async def pull_model(request: Request) -> Response:
    service = service_of(request)
    asked, headers = await read_request(request, OLLAMA_PULLS)
    watch = await service.pull(asked.named)
    if asked.stream is not False:
        if watch is not None:
            return PullStream(watch, service.settings.keepalive, headers=headers)
        lines = line(PULL_BEGINS) + line(PULL_ENDS[-1])
        return Response(lines, headers={**STREAM_HEADERS, **headers}, media_type=MEDIA_TYPE)
    if watch is not None:
        await unless_gone(request.receive, _finish(watch))
    return JSONResponse(PULL_ENDS[-1], headers=headers)


async def _finish(watch: PullWatch) -> bool:
    """Wait for the end of a download. Raises ServeError."""
    with watch:
        while await watch.changes():
            pass
    return True


class PullStream(StreamingResponse):
    """The progress of a download.

    Status 200 goes out with the first progress or, if that takes long, with the first keep-alive. A
    failure before that is answered with its own status.
    """

    def __init__(self, watch: PullWatch, keepalive: float, *, headers: Mapping[str, str]) -> None:
        super().__init__(
            self._lines(), headers={**STREAM_HEADERS, **headers}, media_type=MEDIA_TYPE
        )
        self._watch = watch
        self._keepalive = keepalive
        self._first: list[PulledFile] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watch:
            async with anyio.create_task_group() as group:
                group.start_soon(cancel_on_disconnect, receive, group.cancel_scope)
                try:
                    self._first = await self._changes()
                except ServeError as error:
                    await refusal(scope, error)(scope, receive, send)
                else:
                    await self.stream_response(send)
                group.cancel_scope.cancel()

    async def _changes(self) -> list[PulledFile] | None:
        """Return the files that have changed; None if none has for the time of a keep-alive."""
        with anyio.move_on_after(self._keepalive):
            return await self._watch.changes()
        return None

    async def _lines(self) -> AsyncIterator[bytes]:
        last = line(PULL_BEGINS)
        yield last
        changed = self._first
        try:
            while changed is None or changed:
                lines = [line(file_progress(f.checksum, f.size, f.done)) for f in changed or ()]
                last = lines[-1] if lines else last
                yield b"".join(lines) or last
                changed = await self._changes()
            yield b"".join(map(line, PULL_ENDS))
        except ServeError as error:
            yield line(ollama_error(error))
