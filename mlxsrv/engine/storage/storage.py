"""All stored prompts of the process: the stores of its models, and what is under way.

Used on the device thread only. What the storage thread has done comes back as an order, through the
queue that all orders come through, so that a record has it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mlxsrv.engine.orders import Fetched, Load, Written
from mlxsrv.engine.storage.fingerprint import make_fingerprint
from mlxsrv.engine.storage.prompt_store import (
    Abandoned,
    FetchedCache,
    HandedCache,
    PromptStore,
    StoreCounts,
)
from mlxsrv.engine.storage.storage_thread import StorageThread
from mlxsrv.engine.storage.store_folder import StoreFolder
from mlxsrv.engine.storage.stored_names import Text
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

_FLUSH_SECONDS = 5.0  # that writes may take at the end of a model, or of the process

PromptKey = tuple[int, int]
"""A model's number, and that of the entry of a cached prompt."""


class _Read:
    """A read under way. `cache` and `over` are set by the storage thread before it posts the
    order."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.abandoned = Abandoned()
        self.cache: FetchedCache | None = None
        self.over = False


class Opening:
    """A store that is being opened, by the storage thread. `store` is None once it is `done` if it
    cannot be used; the log says why."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.store: PromptStore | None = None


class _Handed(NamedTuple):
    """The arrays of MLX's that must live until a write is over. Nothing here looks into them."""

    arrays: Any
    abandoned: Abandoned


class Storage:
    """The stores of all models.

    Args:
        post: puts an order into the queue of the device thread; called on the storage thread.
    """

    def __init__(self, post: Callable[[Fetched | Written], None]) -> None:
        self._post = post
        self._thread = StorageThread()
        self._folders: dict[str, StoreFolder] = {}
        self._reads: dict[PromptKey, _Read] = {}
        self._given_up: list[_Read] = []  # that the storage thread may still be at
        self._fetched: dict[PromptKey, FetchedCache] = {}
        # In the order of writes. The numbers of a model's entries may begin anew meanwhile.
        self._handed: dict[PromptKey, list[_Handed]] = {}

    # Stores.

    def open(self, order: Load, kind: str, *, cuts: bool) -> Opening:
        """Begin to open the store of a model that is being loaded.

        Args:
            order: the load's; it names the directory.
            kind: what the model's KV caches are made of.
            cuts: they can be cut anywhere.
        """
        assert order.prompt_cache_dir is not None
        path = str(Path(order.prompt_cache_dir).expanduser().absolute())
        if path not in self._folders:
            self._folders[path] = StoreFolder(Path(path), order.prompt_cache_disk_bytes)
        opening = Opening()
        self._thread.add_read(_open(opening, self._folders[path], order, kind, cuts=cuts))
        return opening

    # Writing.

    def write(
        self, store: PromptStore, key: PromptKey, text: Text, cache: HandedCache, arrays: object
    ) -> None:
        """Have a KV cache stored; the order Written reports the end.

        Args:
            store: the model's.
            key: of the cached prompt.
            text: tokens that it has seen.
            cache: views of `arrays`; the storage thread's from now on.
            arrays: kept until it is over, so that nobody changes them.
        """
        abandoned = Abandoned()
        self._handed.setdefault(key, []).append(_Handed(arrays, abandoned))

        def report(counts: StoreCounts) -> None:
            held = store.held
            self._post(
                Written(
                    *key,
                    files=counts.files,
                    bytes=counts.bytes,
                    full=counts.full,
                    held_files=len(held.files),
                    held_bytes=held.bytes,
                )
            )

        self._thread.add_write(store.write(text, cache, abandoned, report))

    # Reading.

    def fetch(self, store: PromptStore, key: PromptKey, text: Text, seconds: float) -> None:
        """Have the KV cache of `text` read, as far as it is stored; the order Fetched reports the
        end, after so many seconds at the latest.

        It is over at once while the storage thread is at a read that was given up: the disk may
        hang, and prompts are not to wait for it in turn.
        """
        self._drop_over()
        now = time.monotonic()
        if self._given_up:
            self._reads[key] = read = _Read(now)
            read.over = True
            return
        read = self._reads[key] = _Read(now + seconds)

        def report(cache: FetchedCache | None) -> None:
            read.cache, read.over = cache, True
            self._post(Fetched(*key, tokens=0 if cache is None else cache.tokens))

        self._thread.add_read(store.fetch(text, read.abandoned, report))

    def pop_fetched(self, key: PromptKey) -> FetchedCache | None:
        """Take what was read."""
        return self._fetched.pop(key, None)

    @property
    def busy(self) -> bool:
        """Whether the storage thread has yet to report something."""
        return bool(self._reads or self._handed)

    @property
    def seconds_left(self) -> float | None:
        """The time that the next read may still take; None if none is under way."""
        if not self._reads:
            return None
        return min(read.deadline for read in self._reads.values()) - time.monotonic()

    def give_up(self) -> list[Fetched]:
        """Give up reads that have taken too long. Returns the orders that report it."""
        now = time.monotonic()
        late = [key for key, read in self._reads.items() if read.deadline <= now]
        for key in late:
            self._abandon(key)
        return [Fetched(*key, tokens=0) for key in late]

    def _abandon(self, key: PromptKey) -> None:
        read = self._reads.pop(key)
        read.abandoned.within(0.0)
        self._given_up.append(read)

    def _drop_over(self) -> None:
        """Drop reads that were given up and are over, with what they have read."""
        self._given_up = [each for each in self._given_up if not each.over]

    def accept(self, order: Fetched | Written) -> bool:
        """Take a report of the storage thread. Returns whether anybody waits for it."""
        key = order.model, order.entry
        if isinstance(order, Written):
            self._handed[key].pop(0)
            if not self._handed[key]:
                del self._handed[key]
            return True
        read = self._reads.pop(key, None)
        if read is None:
            self._drop_over()
            return False
        if read.cache is not None:
            self._fetched[key] = read.cache
        return True

    # The end.

    def forget(self, model: int) -> None:
        """Drop what was read for a model that goes. What is to be written is written at once, for
        some seconds: others want the memory."""
        for key in [key for key in self._reads if key[0] == model]:
            self._abandon(key)
        handed = [each for key, many in self._handed.items() if key[0] == model for each in many]
        for each in handed:
            each.abandoned.within(_FLUSH_SECONDS)
        if handed:
            self._thread.hurry(_FLUSH_SECONDS)
        for key in [key for key in self._fetched if key[0] == model]:
            del self._fetched[key]

    def finish_writes(self) -> None:
        """Wait until all is written, but not for long."""
        if not self._thread.flush(_FLUSH_SECONDS):
            log(_log, logging.WARNING, "not all prompts were stored", seconds=_FLUSH_SECONDS)


def _open(
    opening: Opening, folder: StoreFolder, order: Load, kind: str, *, cuts: bool
) -> Iterator[None]:
    try:
        fingerprint = make_fingerprint(
            order.path, order.adapter, kind, code=order.trust_remote_code
        )
        held = folder.open(fingerprint)
        opening.store = PromptStore(folder, held, fingerprint, cuts=cuts)
        yield
    except OSError as error:
        log(
            _log,
            logging.WARNING,
            "prompts are not stored",
            model=order.model,
            folder=str(folder.path),
            reason=error.strerror or str(error),
        )
    finally:
        opening.done.set()
