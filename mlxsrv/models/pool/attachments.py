"""SAEs attached to the models of a pool. Used on the event loop only."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from pathlib import Path

import msgspec

from mlxsrv.errors import InsufficientMemory, SAEAttached, SAENotAttached
from mlxsrv.formats.sae_files import SAEFile
from mlxsrv.models.catalogue.catalogue import ModelEntry
from mlxsrv.models.pool.lease import Lease
from mlxsrv.models.pool.model import Attachment, start_task
from mlxsrv.models.pool.pool import Pool


class Attachments:
    """Attaches SAEs, at most one to a model. A model that has one is not evicted."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._numbers = count(1)

    async def attach(
        self, entry: ModelEntry, sae_id: str, path: Path, file: SAEFile, layer: int, before: bool
    ) -> Attachment:
        """Attach an SAE to a model, and load the model if need be. Both stay until `detach`.

        A caller that is cancelled does not stop it.

        Raises:
            SAEAttached: the model has one.
            SAEIncompatible: it does not fit; the message says why.
            InsufficientMemory, ModelNotLoaded, Overloaded, EngineFailed: one cannot be loaded.
        """
        attachment = Attachment(
            number=next(self._numbers),
            model=entry.name,
            sae_id=sae_id,
            path=path,
            file=file,
            layer=layer,
            before=before,
            bytes=file.bytes,
            since=time.time(),
        )
        work = self._attach(self._pool.lease(entry), attachment)
        return await asyncio.shield(start_task(work))

    async def _attach(self, lease: Lease, attachment: Attachment) -> Attachment:
        model = lease.model
        try:
            await lease.enter()
            if model.attachment is not None:
                raise SAEAttached(f"{model.name} has an SAE already; detach it first")
            limit, used = self._pool.memory
            if used + attachment.bytes > limit:
                raise InsufficientMemory(
                    f"the SAE needs {attachment.bytes} bytes; the limit is {limit}, of which "
                    f"models with a short row of each need {used} (--memory-limit)"
                )
            # Before the order to attach it: nobody else attaches one meanwhile, and rows make room.
            self._pool.reserve(model, attachment)
            try:
                attached = await self._pool.engine.attach(attachment.order)
            except BaseException:
                self._pool.reserve(model, None)
                raise
            ready = msgspec.structs.replace(attachment, bytes=attached.bytes, ready=True)
            self._pool.reserve(model, ready)
            return ready
        finally:
            lease.release()

    def detach(self, name: str) -> Attachment:
        """Take the SAE off a model, which may then be evicted. Raises SAENotAttached."""
        model = self._pool.model(name)
        attachment = self._pool.attachments.get(name)
        if model is None or attachment is None:
            raise SAENotAttached(f"{name} has no SAE attached")
        model.attachment = None
        self._pool.engine.detach(name)
        self._pool.allow_eviction(model)
        return attachment
