"""The stored prompts of one model: which there are, how they are written and read.

The device thread asks and hands over; the storage thread does the rest, in the tasks that are made
here. Who owns what:

- `find` reads names that the storage thread puts in and takes out one at a time. What it finds may
  be gone when it is read: that is a miss.
- A HandedCache belongs to the storage thread until its task calls `report`. Its arrays are views of
  memory that MLX has computed and does not change, since the device thread holds them meanwhile.
- A FetchedCache belongs to the storage thread until its task calls `report`, then to the device
  thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from mlxsrv.engine.storage.storage_thread import Task
from mlxsrv.engine.storage.store_folder import StoredFiles, StoreFolder
from mlxsrv.engine.storage.stored_file import (
    CARRIERS,
    VERSION,
    ArrayKind,
    Columns,
    DamagedFile,
    NotANumber,
    Stored,
    StoredHeader,
    decode,
    encode,
    peek,
)
from mlxsrv.engine.storage.stored_names import (
    CHUNK,
    LEAST_TAIL,
    StoredName,
    Text,
    digests,
    split,
    whole,
)
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

_HEADER_ROOM = 64 * 1024  # bytes that a header takes, at most, or about
_RETRY_SECONDS = 60.0  # after which a disk that took no more is tried again
_MOST_LOOKS = 16  # files whose tokens are looked at, where several go on from the same text

HostArray = np.ndarray[Any, Any]


class HandedCache(msgspec.Struct, frozen=True):
    """A KV cache to be stored, as the host sees it.

    Attributes:
        arrays: of all layers. Where the KV cache is stored in chunks, their last axis but one is
            that of the tokens.
        types: those of the arrays, in MLX's words.
        layers: how the arrays make layers; None where the KV cache is stored in chunks.
        columns: of the arrays, in chunks; of all tokens, unless given.
    """

    arrays: tuple[HostArray, ...]
    types: tuple[str, ...]
    layers: Any = None
    columns: tuple[Columns, ...] = ()


class FetchedCache(msgspec.Struct):
    """A KV cache that was read, of the first `tokens` of a text; attributes as of HandedCache."""

    tokens: int
    arrays: list[HostArray]
    types: tuple[str, ...]
    layers: Any = None
    columns: tuple[Columns, ...] = ()


class StoreCounts(msgspec.Struct):
    """Files written, and bytes of these. `full`: the disk took no more, or is not asked for now,
    since it took no more before."""

    files: int = 0
    bytes: int = 0
    full: bool = False


class Abandoned:
    """When a task is to end whether it is done or not. The device thread sets it, once."""

    def __init__(self) -> None:
        self._at = math.inf  # by time.monotonic

    def within(self, seconds: float) -> None:
        """Have the task end in so many seconds, or soon after."""
        self._at = time.monotonic() + seconds

    @property
    def now(self) -> bool:
        return time.monotonic() >= self._at


class _FullDisk(msgspec.Struct, frozen=True):
    """A disk that took no more.

    Attributes:
        bytes: that all files in the folder had then.
        until: when it is tried again, even if none of them was removed.
    """

    bytes: int
    until: float


class PromptStore:
    """The stored prompts of one model.

    Args:
        folder: where they are.
        held: the files of the fingerprint.
        fingerprint: of the model.
        cuts: KV caches can be cut anywhere, so they are stored in chunks.
        clock: seconds, from any time on.
    """

    def __init__(
        self,
        folder: StoreFolder,
        held: StoredFiles,
        fingerprint: str,
        *,
        cuts: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.held = held
        self._fingerprint = fingerprint
        self._cuts = cuts
        self._clock = clock
        self._full: _FullDisk | None = None  # the storage thread's

    # On the device thread.

    def count_stored(self, text: Text) -> int:
        """Return how many of the first tokens of `text` are stored."""
        names = self._chain(text)
        return names[-1].end if names else 0

    def write(
        self,
        text: Text,
        cache: HandedCache,
        abandoned: Abandoned,
        report: Callable[[StoreCounts], None],
    ) -> Task:
        """Make the task that stores a KV cache.

        Args:
            text: the tokens that it has seen.
            cache: belongs to the task from now on.
            abandoned: the task ends early once the memory is wanted.
            report: called by the storage thread at the end, whatever came of it.
        """
        return self._write(text, [cache], abandoned, report)

    def fetch(
        self, text: Text, abandoned: Abandoned, report: Callable[[FetchedCache | None], None]
    ) -> Task:
        """Make the task that reads as much as is stored of the KV cache of `text`.

        Args:
            text: tokens.
            abandoned: the task ends early once nobody waits.
            report: called by the storage thread at the end, with what was read.
        """
        return self._fetch(text, abandoned, report)

    # On both threads.

    def _chain(self, text: Text) -> list[StoredName]:
        """The files that together hold the longest beginning of `text`."""
        if not self.held.files:
            return []
        if not self._cuts:
            ends = sorted(end for end in list(self.held.ends) if end <= text.size)
            found = zip(digests(text, ends), ends, strict=True)
            names = [StoredName(digest, b"", 0, end) for digest, end in found]
            return [name for name in names if self.held.holds(name)][-1:]
        chain = self._follow(text)
        tails = [name for name in self._children(chain) if name.end <= text.size]
        ends = sorted({name.end for name in tails})
        own = dict(zip(ends, digests(text, ends), strict=True))
        same = [name for name in tails if name.digest == own[name.end]]
        return [*chain, *sorted(same, key=lambda name: name.end)[-1:]]

    def _children(self, chain: Sequence[StoredName]) -> tuple[StoredName, ...]:
        """The files that go on from a chain."""
        return self.held.children.get(chain[-1].digest if chain else b"", ())

    def _follow(self, text: Text) -> list[StoredName]:
        """The chunks that are there, from the first on."""
        ends = range(CHUNK, text.size + 1, CHUNK)
        chain: list[StoredName] = []
        for digest, end in zip(digests(text, ends), ends, strict=True):
            parent = chain[-1].digest if chain else b""
            name = StoredName(digest, parent, end - CHUNK, end)
            if not self.held.holds(name):
                break
            chain.append(name)
        return chain

    # On the storage thread: writing.

    def _write(
        self,
        text: Text,
        caches: list[HandedCache],
        abandoned: Abandoned,
        report: Callable[[StoreCounts], None],
    ) -> Iterator[None]:
        counts = StoreCounts()
        try:
            self.folder.refresh()
            names = split(text) if self._cuts else [whole(text)]
            for name in names:
                if self.held.holds(name):
                    self.folder.touch(self.held, name)
                elif not self._may_write:
                    counts.full = True
                    break
                elif abandoned.now:
                    break
                else:
                    yield from self._write_file(name, text, caches[0], counts)
        # Another process may have emptied the folder, or be at the same file: in containers all
        # have the same process id.
        except (FileNotFoundError, FileExistsError, NotANumber):
            _log.debug("a prompt was not stored", exc_info=True)
        except OSError as error:
            counts.full = True
            self._note_full(error)
        finally:
            # Before the report: after it the device thread drops the arrays, and must be the last
            # to.
            caches.clear()
            report(counts)

    def _write_file(
        self, name: StoredName, text: Text, cache: HandedCache, counts: StoreCounts
    ) -> Generator[None, None, None]:
        arrays: Sequence[HostArray] = cache.arrays
        columns = cache.columns or (Columns(),) * len(arrays)
        if self._cuts:
            pairs = zip(arrays, columns, strict=True)
            arrays = [array[..., own.between(name.begin, name.end), :] for array, own in pairs]
        kinds = tuple(
            ArrayKind(kind, array.shape, own)
            for kind, array, own in zip(cache.types, arrays, columns, strict=True)
        )
        header = StoredHeader(
            version=VERSION,
            fingerprint=self._fingerprint,
            begin=name.begin,
            end=name.end,
            parent=name.parent.hex(),
            arrays=kinds,
            layers=cache.layers,
        )
        tokens = text[name.begin : name.end]
        room = _HEADER_ROOM + tokens.nbytes + sum(kind.bytes for kind in kinds)
        pieces = encode(header, tokens, arrays)
        written = yield from self.folder.write(self.held, name, room, pieces)
        counts.files += written > 0
        counts.bytes += written
        if written and self._full is not None:
            self._full = None
            log(_log, logging.INFO, "prompts are stored again", folder=str(self.folder.path))

    @property
    def _may_write(self) -> bool:
        """Whether the disk may take a file: it did, or a file was removed since, or time passed."""
        full = self._full
        return full is None or self.folder.nbytes < full.bytes or self._clock() >= full.until

    def _note_full(self, error: OSError) -> None:
        """Write no more for a while. The log says so when it begins."""
        if self._full is None:
            log(
                _log,
                logging.WARNING,
                "prompts are not stored for now",
                folder=str(self.folder.path),
                reason=error.strerror or str(error),
            )
        self._full = _FullDisk(self.folder.nbytes, self._clock() + _RETRY_SECONDS)

    # On the storage thread: reading.

    def _fetch(
        self, text: Text, abandoned: Abandoned, report: Callable[[FetchedCache | None], None]
    ) -> Iterator[None]:
        found: FetchedCache | None = None
        try:
            names = self._chain(text)
            names += self._find_partial(names, text)
            for name in names:
                if abandoned.now:
                    break
                stored = self._read(name, text)
                if stored is None or (found is not None and not _continues(found, stored)):
                    break
                if found is None:
                    found = _begin(stored, names[-1].end, chunks=self._cuts)
                if self._cuts:
                    _put(found, stored, _count_shared(stored, text))
                yield
        except (OSError, MemoryError) as error:
            _log.debug("a stored prompt cannot be read: %s", error)
        finally:
            if found is not None and self._cuts:
                pairs = zip(found.arrays, found.columns, strict=True)
                found.arrays = [array[..., : own.count(found.tokens), :] for array, own in pairs]
            report(found if found is not None and found.tokens else None)

    def _find_partial(self, chain: Sequence[StoredName], text: Text) -> list[StoredName]:
        """The file that goes on from a chain, and shares most with what follows in `text`, if not
        all: another answer to the same question."""
        if not self._cuts or not chain or chain[-1].end % CHUNK or chain[-1].end == text.size:
            return []
        best, most = [], LEAST_TAIL - 1
        for name in self._children(chain)[-_MOST_LOOKS:]:
            head = self.folder.read(self.held, name, _HEADER_ROOM + 4 * CHUNK)
            shared = 0 if head is None else _match(peek(head), text[name.begin :])
            if shared > most:
                best, most = [name], shared
        return best

    def _read(self, name: StoredName, text: Text) -> Stored | None:
        """A file, if it is sound and holds tokens of `text`. One that is not sound is removed."""
        data = self.folder.read(self.held, name)
        if data is None:
            return None
        try:
            stored = decode(data)
            header = stored.header
            if (header.begin, header.end) != (name.begin, name.end):
                raise DamagedFile("its name is that of another")
            if self._cuts and not all(_has_columns(array, name) for array in header.arrays):
                raise DamagedFile("its arrays are not those of its tokens")
        except DamagedFile as error:
            reason, file = str(error), name.file
            log(_log, logging.WARNING, "a stored prompt is removed", file=file, reason=reason)
            self.folder.remove_damaged(self.held, name)
            return None
        same = (header.fingerprint, header.parent) == (self._fingerprint, name.parent.hex())
        shared = _count_shared(stored, text)
        return stored if same and shared >= (1 if self._cuts else name.end) else None


def _has_columns(array: ArrayKind, name: StoredName) -> bool:
    """Whether an array has a column for each of a file's tokens that it should have."""
    own = array.columns.between(name.begin, name.end)
    return array.shape[-2:-1] == (own.stop - own.start,)


def _begin(stored: Stored, tokens: int, *, chunks: bool) -> FetchedCache:
    """A KV cache like this one: room for so many tokens, where there are chunks to come."""
    types = tuple(array.type for array in stored.header.arrays)
    if not chunks:
        return FetchedCache(stored.header.end, list(stored.arrays), types, stored.header.layers)
    columns = tuple(array.columns for array in stored.header.arrays)
    shapes = [
        (*array.shape[:-2], array.columns.count(tokens), array.shape[-1])
        for array in stored.header.arrays
    ]
    arrays = [np.empty(shape, CARRIERS[kind]) for shape, kind in zip(shapes, types, strict=True)]
    return FetchedCache(0, arrays, types, columns=columns)


def _continues(found: FetchedCache, stored: Stored) -> bool:
    """Whether a chunk has the same arrays as those before it."""
    kinds = zip(found.arrays, found.types, found.columns, strict=True)
    wanted = [(kind, array.shape[:-2], array.shape[-1], own) for array, kind, own in kinds]
    return wanted == [(a.type, a.shape[:-2], a.shape[-1], a.columns) for a in stored.header.arrays]


def _put(found: FetchedCache, stored: Stored, shared: int) -> None:
    """Add the first tokens of a file, so many of them."""
    begin = stored.header.begin
    for into, array, own in zip(found.arrays, stored.arrays, found.columns, strict=True):
        place = own.between(begin, begin + shared)
        into[..., place, :] = array[..., : place.stop - place.start, :]
    found.tokens = begin + shared


def _count_shared(stored: Stored, text: Text) -> int:
    """Return how many of a file's tokens are those of `text`, from the first on."""
    return _match(stored.tokens, text[stored.header.begin :])


def _match(one: Text, other: Text) -> int:
    """The length of the longest common prefix."""
    size = min(one.size, other.size)
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size
