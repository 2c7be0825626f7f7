"""Downloads that clients ask for, each with all who wait for it.

A download runs once, however many ask for it, and as long as one of them waits: who cancels it
cancels it for nobody else. What has arrived is kept, so the next one continues there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Self

import anyio
import anyio.to_thread

from mlxsrv.errors import ActionNotAllowed, ModelNotFound, ModelNotLoaded, ServeError, ShuttingDown
from mlxsrv.logs import log
from mlxsrv.models.catalogue.catalogue import Catalogue
from mlxsrv.models.catalogue.hub_cache import Repository
from mlxsrv.models.catalogue.progress import DownloadProgress, PulledFile
from mlxsrv.settings import Settings

_log = logging.getLogger("mlxsrv.models")

_MOST = 4  # downloads at a time; others wait
_HUB = ("https://", "hf.co/", "huggingface.co/")
"""Beginnings that clients put before the name of a repository."""


class _Pull:
    """One download. Its thread calls `check`; the rest is the event loop's."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.progress = DownloadProgress(str(repository), changed=self._wake)
        self.watchers = 0
        self.over = False
        self.error: ServeError | None = None  # read by the thread, which then stops
        self.changed = asyncio.Event()  # a new one after each change

    def finish_with(self, error: ServeError | None) -> None:
        """Note that it is over. Only the first call counts."""
        if not self.over:
            self.over, self.error = True, error
            self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class PullWatch:
    """One client's view of a download, which goes on at least until the block is left.

    Args:
        leave: called once when the block is left.
    """

    def __init__(self, pull: _Pull, leave: Callable[[_Pull], None]) -> None:
        self._pull = pull
        self._leave = leave
        self._seen: dict[str, PulledFile] = {}

    def __enter__(self) -> Self:
        self._pull.watchers += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self._pull.watchers -= 1
        self._leave(self._pull)

    async def changes(self) -> list[PulledFile]:
        """Return the files that have changed since the last call, waited for; nothing at the end.

        Raises:
            ServeError: the download failed.
        """
        pull = self._pull
        while True:
            changed = [f for f in pull.progress.files.values() if self._seen.get(f.checksum) != f]
            if changed:
                self._seen.update({file.checksum: file for file in changed})
                return changed
            if pull.error is not None:
                raise pull.error
            if pull.over:
                return []
            await pull.changed.wait()


class Pulls:
    """The downloads of an app. Used on the event loop."""

    def __init__(self, catalogue: Catalogue, settings: Settings) -> None:
        self._catalogue = catalogue
        self._allowed = settings.allow_download
        self._running: dict[Repository, tuple[_Pull, asyncio.Task[None]]] = {}
        self._limiter = anyio.CapacityLimiter(_MOST)
        self._closed = False

    async def watch(self, name: str) -> PullWatch | None:
        """Return a view of the download of this model, which begins if it is not under way; None if
        the model is here.

        Raises:
            ModelNotFound: the name cannot be that of a repository of the hub.
            ActionNotAllowed: the operator does not allow downloads.
        """
        repository = await self._missing(name)
        if repository is None:
            return None
        if self._closed:
            raise ShuttingDown("the server is shutting down")
        if repository not in self._running:
            pull = _Pull(repository)
            self._running[repository] = pull, asyncio.create_task(self._run(pull))
        return PullWatch(self._running[repository][0], self._leave)

    async def _missing(self, name: str) -> Repository | None:
        """The repository to download; None if the model is here."""
        for beginning in _HUB:
            name = name.removeprefix(beginning)
        await self._catalogue.refresh()
        entry = self._catalogue.known(name)
        if entry is not None and entry.description is not None:
            return None
        try:
            repository = Repository.parse(self._catalogue.name(name))
        except ValueError as error:
            raise ModelNotFound(
                f"model: it is neither served here nor a repository of the Hugging Face hub: "
                f"{error}",
                param="model",
            ) from None
        if not self._allowed:
            raise ActionNotAllowed(
                "this server does not download models; its operator can allow that with "
                f"--allow-download, or run: mlxsrv pull {repository}"
            )
        return repository

    async def _run(self, pull: _Pull) -> None:
        # Imported on first use: this takes 0.1 s, and most servers never download.
        from mlxsrv.models.catalogue.download import fetch

        work = partial(fetch, pull.repository, check=pull.check, report=pull.progress.report)
        error: ServeError | None = None
        name = str(pull.repository)
        try:
            await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
            await self._catalogue.refresh()
            log(_log, logging.INFO, "model pulled", model=name)
        except ServeError as failure:
            error = failure
            log(_log, logging.WARNING, "pull failed", model=name, reason=failure.message)
        except Exception:
            error = ModelNotLoaded(f"{name!r} could not be downloaded; the server's log says why")
            log(_log, logging.ERROR, "pull failed", traceback=True, model=name)
        pull.finish_with(error)
        self._forget(pull)

    def _leave(self, pull: _Pull) -> None:
        if pull.watchers == 0:
            pull.finish_with(ModelNotLoaded("nobody waits for the download any more"))
            self._forget(pull)

    def _forget(self, pull: _Pull) -> None:
        if self._running.get(pull.repository, (None,))[0] is pull:
            del self._running[pull.repository]

    def stop_all(self) -> None:
        """End all downloads."""
        self._closed = True
        for pull, task in list(self._running.values()):
            pull.finish_with(ShuttingDown("the server is shutting down"))
            task.cancel()
