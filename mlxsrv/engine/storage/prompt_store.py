"""The stored prompts of one model: which there are, how they are written and read.

The device thread asks and hands over; the storage thread does the rest, in the tasks that are made
here. Who owns what:

- `find` reads names that the storage thread puts in and takes out one at a time. What it finds may
  be gone when it is read: that is a miss.
- A HandedCache belongs to the storage thread until its task calls `told`. Its arrays are views of
  memory that MLX has computed and does not change, since the device thread holds them meanwhile.
- A FetchedCache belongs to the storage thread until its task calls `told`, then to the device
  thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from mlxsrv.engine.storage.storage_thread import Task
from mlxsrv.engine.storage.store_folder import Shelf, StoreFolder
from mlxsrv.engine.storage.stored_file import (
    CARRIERS,
    VERSION,
    ArrayKind,
    DamagedFile,
    Stored,
    StoredHeader,
    decode,
    encode,
)
from mlxsrv.engine.storage.stored_names import CHUNK, StoredName, Text, digests, split, whole
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

_HEADER_ROOM = 16 * 1024  # bytes that a header takes, at most, or about

HostArray = np.ndarray[Any, Any]


class HandedCache(msgspec.Struct, frozen=True):
    """A KV cache to be stored, as the host sees it.

    Attributes:
        arrays: of all layers. Where the KV cache is stored in chunks, their last axis but one is
            that of the tokens.
        types: those of the arrays, in MLX's words.
        layers: how the arrays make layers; None where the KV cache is stored in chunks.
    """

    arrays: tuple[HostArray, ...]
    types: tuple[str, ...]
    layers: Any = None


class FetchedCache(msgspec.Struct):
    """A KV cache that was read, of the first `tokens` of a text; attributes as of HandedCache."""

    tokens: int
    arrays: list[HostArray]
    types: tuple[str, ...]
    layers: Any = None


class StoreCounts(msgspec.Struct):
    """Files written, and bytes of these; `failed`: the disk took no more."""

    files: int = 0
    bytes: int = 0
    failed: bool = False


class Abandoned:
    """Set by the device thread when nobody waits for a read any more."""

    def __init__(self) -> None:
        self.now = False


class PromptStore:
    """The stored prompts of one model.

    Args:
        folder: where they are.
        shelf: the files of the fingerprint.
        fingerprint: of the model.
        cuts: KV caches can be cut anywhere, so they are stored in chunks.
    """

    def __init__(self, folder: StoreFolder, shelf: Shelf, fingerprint: str, *, cuts: bool) -> None:
        self.folder = folder
        self.shelf = shelf
        self._fingerprint = fingerprint
        self._cuts = cuts
        self._full = False  # the disk took no more; the storage thread's

    # On the device thread.

    def find(self, text: Text) -> int:
        """How many of the first tokens of `text` are stored."""
        names = self._chain(text)
        return names[-1].end if names else 0

    def write(self, text: Text, cache: HandedCache, told: Callable[[StoreCounts], None]) -> Task:
        """Make the task that stores a KV cache.

        Args:
            text: the tokens that it has seen.
            cache: belongs to the task from now on.
            told: called by the storage thread at the end, whatever came of it.
        """
        return self._write(text, [cache], told)

    def fetch(
        self, text: Text, abandoned: Abandoned, told: Callable[[FetchedCache | None], None]
    ) -> Task:
        """Make the task that reads as much as is stored of the KV cache of `text`.

        Args:
            text: tokens.
            abandoned: the task ends early once nobody waits.
            told: called by the storage thread at the end, with what was read.
        """
        return self._fetch(text, abandoned, told)

    # On both threads.

    def _chain(self, text: Text) -> list[StoredName]:
        """The files that together hold the longest beginning of `text`."""
        if not self.shelf.files:
            return []
        ends = sorted(end for end in list(self.shelf.ends) if end <= text.size)
        if not self._cuts:
            found = zip(digests(text, ends), ends, strict=True)
            names = [StoredName(digest, 0, end) for digest, end in found]
            return [name for name in names if self.shelf.holds(name)][-1:]
        chain = self._follow(text)
        last = chain[-1].end if chain else 0
        tails = [end for end in ends if last < end < last + CHUNK]
        for digest, end in reversed([*zip(digests(text, tails), tails, strict=True)]):
            if self.shelf.holds(tail := StoredName(digest, last, end)):
                return [*chain, tail]
        return chain

    def _follow(self, text: Text) -> list[StoredName]:
        """The chunks that are there, from the first on."""
        ends = range(CHUNK, text.size + 1, CHUNK)
        chain: list[StoredName] = []
        for digest, end in zip(digests(text, ends), ends, strict=True):
            name = StoredName(digest, end - CHUNK, end)
            if not self.shelf.holds(name):
                break
            chain.append(name)
        return chain

    # On the storage thread: writing.

    def _write(
        self, text: Text, caches: list[HandedCache], told: Callable[[StoreCounts], None]
    ) -> Iterator[None]:
        counts = StoreCounts()
        try:
            self.folder.refresh()
            names = split(text) if self._cuts else [whole(text)]
            for i, name in enumerate(names):
                if self.shelf.holds(name):
                    self.folder.touch(self.shelf, name)
                elif self._full or self._find_nan(name, caches[0]):
                    break
                else:
                    parent = names[i - 1].digest.hex() if i else ""
                    yield from self._write_file(name, parent, text, caches[0], counts)
        except FileNotFoundError:  # another process was faster, or emptied the folder
            _log.debug("a prompt was not stored", exc_info=True)
        except OSError as error:
            self._full = counts.failed = True
            log(
                _log,
                logging.WARNING,
                "prompts are no longer stored",
                folder=str(self.folder.path),
                reason=error.strerror or str(error),
            )
        finally:
            # Before it is told: the device thread then drops the arrays, and must be the last.
            caches.clear()
            told(counts)

    def _find_nan(self, name: StoredName, cache: HandedCache) -> bool:
        """Whether the model has computed NaN: nobody knows it before a token is drawn from it, and
        no other process is to go on from there."""
        for array, kind in zip(cache.arrays, cache.types, strict=True):
            part = array[..., name.begin : name.end, :] if self._cuts else array
            if kind == "bfloat16":
                found = bool(((part & 0x7FFF) > 0x7F80).any())
            else:
                found = kind.startswith("float") and bool(np.isnan(part).any())
            if found:
                return True
        return False

    def _write_file(
        self, name: StoredName, parent: str, text: Text, cache: HandedCache, counts: StoreCounts
    ) -> Generator[None, None, None]:
        arrays: Sequence[HostArray] = cache.arrays
        if self._cuts:
            arrays = [array[..., name.begin : name.end, :] for array in arrays]
        kinds = tuple(
            ArrayKind(kind, array.shape) for kind, array in zip(cache.types, arrays, strict=True)
        )
        header = StoredHeader(
            version=VERSION,
            fingerprint=self._fingerprint,
            begin=name.begin,
            end=name.end,
            parent=parent,
            arrays=kinds,
            layers=cache.layers,
        )
        tokens = text[name.begin : name.end]
        room = _HEADER_ROOM + tokens.nbytes + sum(kind.bytes for kind in kinds)
        pieces = encode(header, tokens, arrays)
        written = yield from self.folder.write(self.shelf, name, room, pieces)
        counts.files += written > 0
        counts.bytes += written

    # On the storage thread: reading.

    def _fetch(
        self, text: Text, abandoned: Abandoned, told: Callable[[FetchedCache | None], None]
    ) -> Iterator[None]:
        found: FetchedCache | None = None
        try:
            names = self._chain(text)
            for i, name in enumerate(names):
                if abandoned.now:
                    break
                parent = names[i - 1].digest.hex() if i else ""
                stored = self._read(name, parent, text)
                if stored is None or (found is not None and not _continues(found, stored)):
                    break
                if found is None:
                    found = _begin(stored, names[-1].end, chunks=self._cuts)
                if self._cuts:
                    _put(found, stored)
                yield
        except (OSError, MemoryError) as error:
            _log.debug("a stored prompt cannot be read: %s", error)
        finally:
            if found is not None and self._cuts:
                found.arrays = [array[..., : found.tokens, :] for array in found.arrays]
            told(found if found is not None and found.tokens else None)

    def _read(self, name: StoredName, parent: str, text: Text) -> Stored | None:
        """A file, if it is sound and holds these tokens. One that is not sound is removed."""
        data = self.folder.read(self.shelf, name)
        if data is None:
            return None
        try:
            stored = decode(data)
            header = stored.header
            if (header.begin, header.end) != (name.begin, name.end):
                raise DamagedFile("its name is that of another")
            tokens = (name.end - name.begin,)
            if self._cuts and any(array.shape[-2:-1] != tokens for array in header.arrays):
                raise DamagedFile("its arrays are not those of its tokens")
        except DamagedFile as error:
            reason, file = str(error), name.file
            log(_log, logging.WARNING, "a stored prompt is removed", file=file, reason=reason)
            self.folder.remove(self.shelf, name)
            return None
        same = (header.fingerprint, header.parent) == (self._fingerprint, parent)
        same &= np.array_equal(stored.tokens, text[name.begin : name.end])
        return stored if same else None


def _begin(stored: Stored, tokens: int, *, chunks: bool) -> FetchedCache:
    """A KV cache like this one: room for so many tokens, where there are chunks to come."""
    types = tuple(array.type for array in stored.header.arrays)
    if not chunks:
        return FetchedCache(stored.header.end, list(stored.arrays), types, stored.header.layers)
    shapes = [(*array.shape[:-2], tokens, array.shape[-1]) for array in stored.header.arrays]
    arrays = [np.empty(shape, CARRIERS[kind]) for shape, kind in zip(shapes, types, strict=True)]
    return FetchedCache(0, arrays, types)


def _continues(found: FetchedCache, stored: Stored) -> bool:
    """Whether a chunk has the same arrays as those before it."""
    kinds = zip(found.arrays, found.types, strict=True)
    wanted = [(kind, array.shape[:-2], array.shape[-1]) for array, kind in kinds]
    return wanted == [(a.type, a.shape[:-2], a.shape[-1]) for a in stored.header.arrays]


def _put(found: FetchedCache, stored: Stored) -> None:
    header = stored.header
    for into, array in zip(found.arrays, stored.arrays, strict=True):
        into[..., header.begin : header.end, :] = array
    found.tokens = header.end
