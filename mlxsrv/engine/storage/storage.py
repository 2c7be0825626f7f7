"""All stored prompts of the process: the stores of its models, and what is under way.

Used on the device thread only, but for the tasks, which the storage thread does. What it has done
comes back as an order, through the queue that all orders come through, so that a record has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from mlxsrv.engine.orders import Fetched, Load, Written
from mlxsrv.engine.storage.fingerprint import make_fingerprint
from mlxsrv.engine.storage.node_file import StoredNode, Text
from mlxsrv.engine.storage.prompt_store import HandedCache, PromptStore, Transfer
from mlxsrv.engine.storage.storage_thread import StorageThread
from mlxsrv.engine.storage.store_folder import StoreFolder
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

_FLUSH_SECONDS = 5.0  # that writes may take at the end of a model, or of the process

PromptKey = tuple[int, int]
"""A model's number, and that of the entry of a cached prompt."""


class Storage:
    """The stores of all models.

    Args:
        post: puts an order into the queue of the device thread; called on the storage thread.
    """

    def __init__(self, post: Callable[[Fetched | Written], None]) -> None:
        self._post = post
        self._thread = StorageThread()
        self._folders: dict[str, StoreFolder] = {}
        self._reads: dict[PromptKey, Transfer] = {}
        self._given_up: list[Transfer] = []  # that the storage thread may still be at
        self._fetched: dict[PromptKey, list[StoredNode]] = {}
        # In the order of writes. The numbers of a model's entries may begin anew meanwhile.
        self._writes: dict[PromptKey, list[Transfer]] = {}

    # Stores.

    def open(self, order: Load, kind: str, *, cuts: bool) -> Future[PromptStore | None]:
        """Begin to open the store of a model that is being loaded. It is None if it cannot be used;
        the log says why.

        Args:
            order: the load's; it names the directory.
            kind: what the model's KV caches are made of.
            cuts: they can be cut anywhere.
        """
        assert order.prompt_cache_dir is not None
        path = str(Path(order.prompt_cache_dir).expanduser().absolute())
        if path not in self._folders:
            self._folders[path] = StoreFolder(Path(path), order.prompt_cache_disk_bytes)
        opened: Future[PromptStore | None] = Future()
        self._thread.add_read(_open(opened, self._folders[path], order, kind, cuts=cuts))
        return opened

    # Writing.

    def write(
        self, store: PromptStore, key: PromptKey, text: Text, handed: HandedCache, arrays: object
    ) -> None:
        """Have a KV cache stored; the order Written reports the end.

        Args:
            store: the model's.
            key: of the cached prompt.
            text: tokens that it has seen.
            handed: views of `arrays`; the storage thread's from now on.
            arrays: kept until it is over, so that nobody changes them.
        """
        transfer = Transfer(arrays, handed)
        self._writes.setdefault(key, []).append(transfer)
        self._thread.add_write(self._write(store, key, text, transfer))

    def _write(
        self, store: PromptStore, key: PromptKey, text: Text, transfer: Transfer
    ) -> Iterator[None]:
        try:
            yield from store.write(text, transfer)
        finally:
            # Before the report: after it the device thread drops the arrays, and must be the last
            # to.
            transfer.handed = None
            held = store.held
            there = len(held.files), held.bytes
            self._post(Written(*key, transfer.files, transfer.full, *there))

    # Reading.

    def fetch(self, store: PromptStore, key: PromptKey, text: Text, seconds: float) -> None:
        """Have the KV cache of `text` read, as far as it is stored; the order Fetched reports the
        end, after so many seconds at the latest.

        It is over at once while the storage thread is at a read that was given up: the disk may
        hang, and prompts are not to wait for it in turn.
        """
        self._drop_over()
        transfer = self._reads[key] = Transfer(until=time.monotonic())
        if self._given_up:
            transfer.over = True
        else:
            transfer.until += seconds
            self._thread.add_read(self._fetch(store, key, text, transfer))

    def _fetch(
        self, store: PromptStore, key: PromptKey, text: Text, transfer: Transfer
    ) -> Iterator[None]:
        try:
            yield from store.fetch(text, transfer)
        finally:
            transfer.over = True
            self._post(Fetched(*key, tokens=sum(node.tokens.size for node in transfer.nodes)))

    def pop_fetched(self, key: PromptKey) -> list[StoredNode]:
        """Take what was read."""
        return self._fetched.pop(key, [])

    @property
    def seconds_left(self) -> float | None:
        """The time that the next read may still take; None if none is under way."""
        if not self._reads:
            return None
        return min(read.until for read in self._reads.values()) - time.monotonic()

    def give_up(self) -> list[Fetched]:
        """Give up reads that have taken too long. Returns the orders that report it."""
        late = [key for key, read in self._reads.items() if read.late]
        for key in late:
            self._given_up.append(self._reads.pop(key))
        return [Fetched(*key, tokens=0) for key in late]

    def _drop_over(self) -> None:
        """Drop reads that were given up and are over, with what they have read."""
        self._given_up = [each for each in self._given_up if not each.over]

    def accept(self, order: Fetched | Written) -> bool:
        """Take a report of the storage thread. Returns whether anybody waits for it."""
        key = order.model, order.entry
        if isinstance(order, Written):
            self._writes[key].pop(0)
            if not self._writes[key]:
                del self._writes[key]
            return True
        read = self._reads.pop(key, None)
        if read is None:
            self._drop_over()
            return False
        if read.nodes:
            self._fetched[key] = read.nodes
        return True

    # The end.

    def forget(self, model: int) -> None:
        """Drop what was read for a model that goes. What is to be written is written at once, for
        some seconds: others want the memory."""
        for key in [key for key in self._reads if key[0] == model]:
            self._reads[key].until = 0.0
            self._given_up.append(self._reads.pop(key))
        writes = [each for key, many in self._writes.items() if key[0] == model for each in many]
        for each in writes:
            each.until = time.monotonic() + _FLUSH_SECONDS
        if writes:
            self._thread.hurry(_FLUSH_SECONDS)
        for key in [key for key in self._fetched if key[0] == model]:
            del self._fetched[key]

    def finish_writes(self) -> None:
        """Wait until all is written, but not for long."""
        if not self._thread.flush(_FLUSH_SECONDS):
            log(_log, logging.WARNING, "not all prompts were stored", seconds=_FLUSH_SECONDS)


def _open(
    opened: Future[PromptStore | None], folder: StoreFolder, order: Load, kind: str, *, cuts: bool
) -> Iterator[None]:
    store = None
    try:
        fingerprint = make_fingerprint(
            order.path, order.adapter, kind, code=order.trust_remote_code
        )
        store = PromptStore(folder, fingerprint, cuts=cuts)
        yield
    except OSError as error:
        what, reason = "prompts are not stored", error.strerror or str(error)
        path = str(folder.path)
        log(_log, logging.WARNING, what, model=order.model, folder=path, reason=reason)
    finally:
        opened.set_result(store)
