"""The stored prompts of one model on the runner's side: KV caches are handed to the storage thread,
and made of what it has read.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import wait

import numpy as np

from mlxsrv.engine.cache.host_arrays import CacheBuilder, describe_kind, share
from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.row_cache import RowCache, is_known, list_layers
from mlxsrv.engine.faults import note
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.orders import Job, Load
from mlxsrv.engine.outcomes import StoreFacts
from mlxsrv.engine.storage.node_file import Text
from mlxsrv.engine.storage.prompt_store import PromptStore
from mlxsrv.engine.storage.storage import Storage

_OPENING_SECONDS = 10.0  # that a load waits for the folder, at most
_WAIT_SECONDS = 0.005  # of it in one slice, so that streams of other models go on


class StoredPrompts:
    """Writes cached prompts to disk, and makes KV caches of what is there.

    Rows that are steered have no part in it: their SAEs and control vectors are known by names that
    mean nothing to another process.

    Args:
        storage: of the process.
        model: the model's number.
        store: the model's.
        caches: makes its KV caches.
    """

    def __init__(
        self, storage: Storage, model: int, store: PromptStore, caches: KVCacheFactory
    ) -> None:
        self._storage = storage
        self._model = model
        self._store = store
        self._caches = caches
        self._texts: dict[int, Text] = {}  # of cached prompts that may be written
        self._builders: dict[int, CacheBuilder] = {}

    @property
    def facts(self) -> StoreFacts:
        """The prompts that are on disk already."""
        held = self._store.held
        return StoreFacts(len(held.files), held.bytes)

    # To disk.

    def note(self, entry: int, row: LiveRow | None, tokens: int) -> None:
        """Note that the KV cache of the first `tokens` of a row's text is cached as `entry`."""
        if row is not None and row.job.steering is None:
            self._texts[entry] = np.array(row.seen[:tokens], dtype=np.uint32)

    def drop_text(self, entry: int) -> None:
        """Note that the prompt `entry` has left the prompt cache."""
        self._texts.pop(entry, None)

    def hand_over(self, entry: int, cache: RowCache) -> bool:
        """Have a cached prompt written. Returns False if it cannot be, or is of a steered row."""
        text = self._texts.get(entry)
        if text is None:
            return False
        try:
            handed, arrays = share(cache)
        except Exception as error:
            note(error, "a prompt cannot be stored")
            return False
        self._storage.write(self._store, (self._model, entry), text, handed, arrays)
        return True

    # From disk.

    def count_stored(self, job: Job) -> int:
        """Return how many of the first tokens of a job's prompt are stored.

        The last token is not looked for: it is the first input of the row.
        """
        if job.steering is not None or not self._store.held.files:
            return 0
        return self._store.count_stored(np.array(job.prompt[:-1], dtype=np.uint32))

    def fetch(self, entry: int, text: Text, seconds: float) -> None:
        """Have the KV cache of `text` read from disk, to be the cached prompt `entry`, within so
        many seconds."""
        self._storage.fetch(self._store, (self._model, entry), text, seconds)

    def restore(self, entry: int, limit: int) -> tuple[bool, RowCache | None]:
        """Bring about `limit` bytes of what was read into the device's memory.

        Returns:
            Whether that was all; and then the KV cache, if it can be used.
        """
        builder = self._builders.pop(entry, None)
        if builder is None:
            nodes = self._storage.pop_fetched((self._model, entry))
            if not nodes:
                return True, None
            builder = CacheBuilder(self._caches, nodes)
        builder.go_on(limit)
        if not builder.done:
            self._builders[entry] = builder
            return False, None
        try:
            return True, builder.build()
        except ValueError as error:
            note(error, "a stored prompt cannot be used")
            return True, None

    def reset(self) -> None:
        """Forget what is under way, but for writes."""
        self._texts.clear()
        self._builders.clear()
        self._storage.forget(self._model)


def open_stored(
    storage: Storage | None, model: int, order: Load, caches: KVCacheFactory
) -> Generator[None, None, tuple[StoredPrompts | None, tuple[str, ...]]]:
    """Open the folder of stored prompts for a model that is being loaded, yielding between waits.

    Returns:
        The stored prompts; or None, and a note if there should be some.
    """
    if storage is None or order.prompt_cache_dir is None or not order.prompt_cache_disk_bytes:
        return None, ()
    layers = list_layers(caches.make().layers)
    unknown = sorted({type(layer).__name__ for layer in layers if not is_known(layer)})
    if unknown:
        why = f"KV caches of this model's own kind ({', '.join(unknown)}) cannot be stored"
        return None, (f"prompt_cache_dir: {why}",)
    opened = storage.open(order, describe_kind(caches), cuts=caches.cuts)
    for _ in range(round(_OPENING_SECONDS / _WAIT_SECONDS)):
        if wait([opened], _WAIT_SECONDS).done:
            break
        yield
    if not opened.done() or (store := opened.result()) is None:
        return None, ("prompt_cache_dir: it cannot be used, so prompts are not stored",)
    return StoredPrompts(storage, model, store, caches), ()
