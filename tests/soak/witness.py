"""The server, and a witness in its process: `python -m tests.soak.witness [options of mlxsrv]`.

On SIGUSR1 it writes one line of JSON to stderr: what the process holds. The server is the command's
own; nothing of it knows of the witness.
"""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

import anyio.to_thread
import msgspec

from mlxsrv import cli
from mlxsrv.server import serve
from mlxsrv.settings import Settings
from mlxsrv.web.app import App, create_app


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """The holdings of the server's process, by its own account."""

    event: str = "witness"
    tasks: int
    """asyncio's tasks, without the witness's."""
    threads: dict[str, int]
    """Python's, by their names without numbers."""
    borrowed: dict[str, int]
    """Tokens of limiters by their names."""
    claims: dict[str, int]
    """Leases, requests and questions that are not over."""
    objects: dict[str, int]
    """Instances of mlxsrv's classes that were made since the server was ready, and still live."""


def take(app: App, tasks: int) -> Holdings:
    service = app.service
    pool, engine = service.pool, service.pool.engine
    models, state = list(pool), pool.statistics()
    gc.collect()
    return Holdings(
        tasks=tasks,
        threads=dict(Counter(re.sub(r"[-_]?\d+", "", t.name) for t in threading.enumerate())),
        borrowed={
            "rows": sum(len(model.running) + len(model.queued) for model in models),
            "tokenizers": sum(model.tokenizing.borrowed_tokens for model in models),
            "compilers": sum(model.compiling.borrowed_tokens for model in models),
            "threads": int(anyio.to_thread.current_default_thread_limiter().borrowed_tokens),
        },
        claims={
            "leases": sum(model.leases for model in models),
            "users": sum(model.users for model in models),
            "waiting": sum(model.waiting for model in models),
            "turns": len(state.queue),
            "replies": len(service._replies),
            "work": len(service._work),
            "receivers": len(engine._receivers),
            "questions": len(engine._questions),
        },
        objects=_count_objects(),
    )


def _count_objects() -> dict[str, int]:
    kinds = (type(thing) for thing in gc.get_objects())
    ours = (kind for kind in kinds if kind.__module__.startswith("mlxsrv."))
    return dict(Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in ours))


class Witness:
    """Makes the app for the command, and answers the signal in the app's loop."""

    def __init__(self) -> None:
        self._app: App | None = None

    def create(self, settings: Settings | None = None, **options: Any) -> App:
        self._app = create_app(settings, **options)
        return self._app

    def called(self, number: int, frame: FrameType | None) -> None:
        if self._app is not None and self._app._loop is not None:
            self._app._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        assert self._app is not None
        tasks = len(asyncio.all_tasks())
        self._telling = asyncio.ensure_future(self._write(self._app, tasks))

    async def _write(self, app: App, tasks: int) -> None:
        print(msgspec.json.encode(take(app, tasks)).decode(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    witness = Witness()
    signal.signal(signal.SIGUSR1, witness.called)
    assert serve.create_app is create_app  # type: ignore[attr-defined]  # or nobody would tell
    setattr(serve, "create_app", witness.create)  # noqa: B010
    cli.main()
