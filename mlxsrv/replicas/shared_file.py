"""The state that replicas share, in one SQLite file under `--data-dir`.

It has stored responses, the rates of clients, and the changes of what one process would hold for
all: steering, and models that were loaded or unloaded on purpose.

Calls are made on the event loop. A look takes 0.01 ms, counting a rate 0.05 ms, and storing a
response a copy of its bytes. A call waits for those of other replicas, 5 s at most (`BUSY`); then
it fails. A look before a request waits much less. None waits for the disk (`synchronous = OFF`),
for after a crash of the machine the file may go.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mlxsrv.models.sqlite_errors import explained
from mlxsrv.options import SettingsError
from mlxsrv.service.response_store import (
    Responses,
    StoredItem,
    StoredReference,
    StoredResponse,
)
from mlxsrv.settings import Settings
from mlxsrv.web.security.rates import Allowance, grant

BUSY = 5.0
"""Seconds that a call waits for other replicas' calls, unless it says another time."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS owned_responses (
    id TEXT PRIMARY KEY, owner TEXT, previous TEXT, body BLOB, inputs INTEGER, size INTEGER,
    used REAL
);
CREATE INDEX IF NOT EXISTS recently_owned ON owned_responses (owner, used, size);
CREATE TABLE IF NOT EXISTS owned_items (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT, id TEXT, response TEXT, source TEXT,
    body BLOB
);
CREATE INDEX IF NOT EXISTS of_owner ON owned_items (owner, id);
CREATE INDEX IF NOT EXISTS of_response ON owned_items (response, id);
CREATE TABLE IF NOT EXISTS rates (client TEXT PRIMARY KEY, full_at REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, subject TEXT, replica TEXT, change BLOB
);
"""


class StateChange(msgspec.Struct, frozen=True):
    """A request that has changed the state of one replica, and is repeated at the others.

    Attributes:
        subject: which of the state it sets; a later change of the same takes its place.
        after: the number of the last change that its replica had made when it began this one.
    """

    subject: str
    method: str
    path: str
    query: bytes
    body: bytes
    after: int = 0


class NotedChange(msgspec.Struct, frozen=True):
    """A change in the shared file. Changes with higher numbers came later.

    Attributes:
        own: the replica that asks has made it.
    """

    number: int
    own: bool
    change: StateChange


_change_in = msgspec.msgpack.Decoder(StateChange).decode


def shared_path(settings: Settings, name: str) -> Path:
    """Return the file of a deployment. Raises SettingsError if there is no home for it."""
    try:
        folder = Path(settings.data_dir).expanduser()
    except RuntimeError:
        raise SettingsError("--data-dir: this user has no home directory; choose another") from None
    return folder / f"replicas-{name}.sqlite3"


class _Database:
    """The open file. Each call does all of its work or, with a StoreFailed, nothing.

    Raises:
        OSError, sqlite3.Error: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # texts are for this user only
        self._connection = sqlite3.connect(
            path, timeout=BUSY, isolation_level=None, check_same_thread=False
        )
        self._prepare()

    def _prepare(self) -> None:
        """Make what is not there. Of two that do this to a new file at once, SQLite refuses one
        without a wait."""
        until = time.monotonic() + BUSY
        while True:
            try:
                # Not WAL: its readers and writers share memory, so they must be on one machine.
                self._connection.execute("PRAGMA journal_mode = DELETE")
                self._connection.execute("PRAGMA synchronous = OFF")
                self._connection.executescript(_SCHEMA)
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def execute(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        """Return the rows that a statement gives."""
        with explained(self._name):
            return self._connection.execute(statement, values).fetchall()

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Execute a statement for each row of values."""
        with explained(self._name):
            self._connection.executemany(statement, rows)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Do all of the block or nothing, while no other replica writes."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite itself ends it after some errors
                self.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Within the block, calls wait so many seconds for other replicas' calls."""
        self.execute(f"PRAGMA busy_timeout = {seconds * 1000:.0f}")
        try:
            yield
        finally:
            self.execute(f"PRAGMA busy_timeout = {BUSY * 1000:.0f}")

    def close(self) -> None:
        self._connection.close()


class SharedFile:
    """The shared file, for one replica, on its event loop.

    Attributes:
        made: the number of the last change that this replica has made.

    Raises:
        SettingsError: it cannot be opened.
        StoreFailed: by any method, if it cannot be used later; the message says what helps.
    """

    def __init__(self, path: Path, settings: Settings, replica: str) -> None:
        self.made = 0
        self._replica = replica
        self._unwritten: list[StateChange] = []  # that were made here
        try:
            self._file = _Database(path)
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"--data-dir: {path} cannot be used: {error}") from None
        self.responses = SharedResponses(
            self._file, settings.max_responses, settings.max_responses_bytes
        )
        limit = settings.rate_limit
        self.rates = None if limit is None else SharedRates(self._file, limit)

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def remove(path: Path) -> None:
        """Forget all that is shared; no replica may run."""
        for ending in ("", "-journal", "-wal", "-shm"):  # the last two are of former versions
            Path(f"{path}{ending}").unlink(missing_ok=True)

    def add_change(self, change: StateChange) -> None:
        """Have the other replicas repeat a change before their next requests. Where this fails, the
        change is written before the next call that can write."""
        self._unwritten.append(change)
        self._write()

    def _write(self) -> None:
        with self._file.transaction():
            for change in self._unwritten:
                self._file.execute("DELETE FROM changes WHERE subject = ?", (change.subject,))
                self._file.execute(
                    "INSERT INTO changes (subject, replica, change) VALUES (?, ?, ?)",
                    (change.subject, self._replica, msgspec.msgpack.encode(change)),
                )
        self._unwritten.clear()

    def changes_after(self, number: int, busy: float = BUSY) -> list[NotedChange]:
        """Return the changes since a number, in order.

        Args:
            busy: seconds to wait for other replicas' calls.
        """
        with self._file.waiting(busy):
            if self._unwritten:
                self._write()
            rows = self._file.execute(
                "SELECT number, replica, change FROM changes WHERE number > ? ORDER BY number",
                (number,),
            )
        return [
            NotedChange(number, replica == self._replica, _change_in(change))
            for number, replica, change in rows
        ]


class SharedResponses(Responses):
    """Responses of all replicas together."""

    def __init__(self, file: _Database, most: int, most_bytes: int) -> None:
        self._file = file
        self._most = most
        self._most_bytes = most_bytes

    def put(self, response: StoredResponse) -> None:
        if not self._most or response.size > self._most_bytes:
            return
        id, owner = response.id, response.owner
        row = (id, owner, response.previous, response.body, len(response.input), response.size)
        with self._file.transaction():
            self._file.execute(
                "INSERT INTO owned_responses VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, time.time())
            )
            self._file.execute_many(
                "INSERT INTO owned_items (owner, id, response, source, body) "
                "VALUES (?, ?, ?, ?, ?)",
                ((owner, each.id, id, each.response, _body(each)) for each in response.items),
            )
            self._make_room()

    def _make_room(self) -> None:
        owned = {
            owner: (count, size)
            for owner, count, size in self._file.execute(
                "SELECT owner, COUNT(*), SUM(size) FROM owned_responses GROUP BY owner"
            )
        }
        while (
            sum(count for count, _ in owned.values()) > self._most
            or sum(size for _, size in owned.values()) > self._most_bytes
        ):
            largest = max(owned, key=lambda owner: self._part(*owned[owner]))
            oldest = "SELECT id, size FROM owned_responses WHERE owner = ? ORDER BY used LIMIT 1"
            [(id, size)] = self._file.execute(oldest, (largest,))
            self._remove(id)
            owned[largest] = owned[largest][0] - 1, owned[largest][1] - size

    def _part(self, count: int, size: int) -> float:
        return max(count / self._most, size / self._most_bytes)

    def _follow(self, reference: StoredReference) -> StoredItem | None:
        return self._item("response = ? AND id = ?", reference.response, reference.id)

    def _newest(self, owner: str, id: str) -> StoredItem | None:
        return self._item("owner = ? AND id = ?", owner, id)

    def _item(self, where: str, *values: str) -> StoredItem | None:
        rows = self._file.execute(
            f"SELECT id, response, body FROM owned_items WHERE {where} AND body IS NOT NULL "
            "ORDER BY number DESC LIMIT 1",
            values,
        )
        return StoredItem(*rows[0]) if rows else None

    def _find(self, id: str) -> StoredResponse | None:
        with self._file.transaction():  # nobody removes it between the two
            rows = self._file.execute(
                "SELECT owner, previous, body, inputs FROM owned_responses WHERE id = ?", (id,)
            )
            items = [
                StoredReference(item, source) if content is None else StoredItem(item, id, content)
                for item, source, content in self._file.execute(
                    "SELECT id, source, body FROM owned_items WHERE response = ? ORDER BY number",
                    (id,),
                )
            ]
        if not rows:
            return None
        [(owner, previous, body, inputs)] = rows
        return StoredResponse(
            id=id,
            owner=owner,
            previous=previous,
            body=body,
            input=items[:inputs],
            output=[item for item in items[inputs:] if isinstance(item, StoredItem)],
        )

    def _touch(self, ids: Iterable[str]) -> None:
        now = time.time()
        with self._file.transaction():
            self._file.execute_many(
                "UPDATE owned_responses SET used = ? WHERE id = ?", ((now, id) for id in ids)
            )

    def _forget(self, id: str) -> None:
        with self._file.transaction():
            self._remove(id)

    def _remove(self, id: str) -> None:
        self._file.execute("DELETE FROM owned_responses WHERE id = ?", (id,))
        self._file.execute("DELETE FROM owned_items WHERE response = ?", (id,))


def _body(item: StoredItem | StoredReference) -> bytes | None:
    return item.body if isinstance(item, StoredItem) else None


class SharedRates:
    """Rates, as `RateLimit` counts them, for all replicas together; by the machines' clocks."""

    def __init__(self, file: _Database, limit: int) -> None:
        self._file = file
        self._limit = limit

    def take(self, client: Hashable) -> Allowance:
        now = time.time()
        name = client.hex() if isinstance(client, bytes) else str(client)
        with self._file.transaction():
            self._file.execute("DELETE FROM rates WHERE full_at < ?", (now,))
            query = "SELECT full_at FROM rates WHERE client = ?"
            rows = self._file.execute(query, (name,))
            allowance, full_at = grant(self._limit, now, rows[0][0] if rows else now)
            self._file.execute("INSERT OR REPLACE INTO rates VALUES (?, ?)", (name, full_at))
        return allowance
