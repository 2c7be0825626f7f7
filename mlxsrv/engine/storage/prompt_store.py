"""The stored prompts of one model: which there are, how they are written and read.

The device thread asks and hands over; the storage thread does the rest, in the tasks that are made
here. Who owns what:

- `find_nodes` reads names that the storage thread puts in and takes out one at a time. What it
  finds may be gone when it is read: that is a miss.
- The KV cache of a Transfer belongs to the storage thread until that is over. One that is written
  is views of memory that MLX has computed and does not change, since the device thread holds it
  meanwhile.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterable, Iterator
from itertools import takewhile
from typing import Any

import msgspec

from mlxsrv.engine.storage.node_file import (
    DamagedFile,
    HostArray,
    NodeName,
    NotANumber,
    StoredNode,
    Text,
    decode,
    encode,
    name_nodes,
    split,
)
from mlxsrv.engine.storage.store_folder import StoredFiles, StoreFolder
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

_HEADER_ROOM = 64 * 1024  # bytes that a header takes, at most, or about


class HandedCache(msgspec.Struct, frozen=True):
    """A KV cache to be stored, as the host sees it.

    Attributes:
        arrays: of all layers, by name.
        starts: of arrays whose last axis but one is that of the tokens: the first of these.
        states: what else the layers note.
    """

    arrays: dict[str, HostArray]
    starts: dict[str, int]
    states: Any

    def cut_out(self, begin: int, end: int) -> dict[str, HostArray]:
        """The arrays for these tokens of a text; not those without any."""
        found = dict(self.arrays)
        for name, start in self.starts.items():
            found[name] = found[name][..., max(begin - start, 0) : max(end - start, 0), :]
            if not found[name].shape[-2]:
                del found[name]
        return found


class Transfer:
    """A transfer of one cached prompt to disk, or back.

    Args:
        arrays: those of MLX that must live until it is over. Nothing here looks into them.
        handed: the KV cache that is to be written, as views of them. The storage thread drops it.
        until: when it ends whether it is done or not, by time.monotonic. The device thread may
            change it.

    Attributes:
        files: that were written.
        full: the disk took no more.
        nodes: those that were read.
        over: the storage thread has done with it.
    """

    def __init__(
        self,
        arrays: object = None,
        handed: HandedCache | None = None,
        until: float = math.inf,
    ) -> None:
        self.arrays = arrays
        self.handed = handed
        self.until = until
        self.files = 0
        self.full = False
        self.nodes: list[StoredNode] = []
        self.over = False

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.until


class PromptStore:
    """The stored prompts of one model.

    Args:
        folder: where they are.
        fingerprint: of the model.
        cuts: KV caches can be cut anywhere, so they are stored in many nodes.

    Attributes:
        held: the files of the fingerprint.
    """

    def __init__(self, folder: StoreFolder, fingerprint: str, *, cuts: bool) -> None:
        self.held: StoredFiles = folder.open(fingerprint)
        self._folder = folder
        self._fingerprint = fingerprint
        self._cuts = cuts
        self._full = False  # the storage thread's

    def find_nodes(self, text: Text) -> list[NodeName]:
        """The nodes that together hold the longest beginning of `text`. Called on both threads."""
        if self._cuts:
            return [*takewhile(self.held.holds, split(text, cuts=True))]
        ends = self.held.list_ends(text.size)
        return [*filter(self.held.holds, name_nodes(text, ends, cuts=False))][-1:]

    def count_stored(self, text: Text) -> int:
        """Return how many of the first tokens of `text` are stored."""
        names = self.find_nodes(text)
        return names[-1].end if names else 0

    # On the storage thread.

    def _touch(self, names: Iterable[NodeName]) -> None:
        """Note that these nodes of a text were of use just now. The first has the latest time, so
        that of what was not used for long the ends go first: without them beginnings are of use."""
        now = time.time_ns()
        for place, name in enumerate(names):
            self._folder.touch(self.held, name, now - place)

    def write(self, text: Text, transfer: Transfer) -> Iterator[None]:
        """Store a KV cache, yielding between pieces.

        Args:
            text: the tokens that it has seen.
            transfer: has the KV cache.
        """
        names = [*split(text, cuts=self._cuts)]
        try:
            self._folder.refresh()
            for name in names:
                if self.held.holds(name):
                    continue
                if transfer.late or not (yield from self._write_node(name, text, transfer)):
                    break
                transfer.files += 1
            self._touch(filter(self.held.holds, names))
        # Another process may have emptied the folder, or be at the same file: in containers all
        # have the same process id.
        except (FileNotFoundError, FileExistsError, NotANumber):
            _log.debug("a prompt was not stored", exc_info=True)
        except OSError as error:
            transfer.full = True
            self._note_full(error)

    def _write_node(
        self, name: NodeName, text: Text, transfer: Transfer
    ) -> Generator[None, None, bool]:
        """Returns whether it was written."""
        handed = transfer.handed
        assert handed is not None, "the task is not over"
        tokens, arrays = text[name.begin : name.end], handed.cut_out(name.begin, name.end)
        room = _HEADER_ROOM + tokens.nbytes + sum(array.nbytes for array in arrays.values())
        pieces = encode(StoredNode(self._fingerprint, tokens, arrays, handed.states))
        if not (yield from self._folder.write(self.held, name, room, pieces)):
            return False
        if self._full:
            self._full = False
            log(_log, logging.INFO, "prompts are stored again", folder=str(self._folder.path))
        return True

    def _note_full(self, error: OSError) -> None:
        """Have the log say that nothing is written, when that begins."""
        if not self._full:
            reason = error.strerror or str(error)
            what, folder = "prompts are not stored for now", str(self._folder.path)
            log(_log, logging.WARNING, what, folder=folder, reason=reason)
        self._full = True

    def fetch(self, text: Text, transfer: Transfer) -> Iterator[None]:
        """Read the nodes that are stored of the KV cache of `text`, yielding between them."""
        names = self.find_nodes(text)
        try:
            for name in names:
                if transfer.late or (node := self._read(name, text)) is None:
                    break
                transfer.nodes.append(node)
                yield
            self._touch(names[: len(transfer.nodes)])
        except (OSError, MemoryError) as error:
            _log.debug("a stored prompt cannot be read: %s", error)

    def _read(self, name: NodeName, text: Text) -> StoredNode | None:
        """A node, if it is sound and of `text`. The file of one that is not sound is removed."""
        if (file := self._folder.open_file(self.held, name)) is None:
            return None
        try:
            with file:
                node = decode(file)
        except DamagedFile as error:
            what = "a stored prompt is removed"
            log(_log, logging.WARNING, what, file=name.file, reason=str(error))
            self._folder.remove(self.held, name.file)
            return None
        tokens = text[name.begin : name.end]
        same = node.tokens.size == tokens.size and bool((node.tokens == tokens).all())
        return node if same and node.fingerprint == self._fingerprint else None
