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
    StoredItem,
    StoredResponse,
    no_item,
    no_previous,
    no_response,
)
from mlxsrv.settings import Settings
from mlxsrv.web.security.rates import Allowance, grant

BUSY = 5.0
"""Seconds that a call waits for other replicas' calls, unless it says another time."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous TEXT, body BLOB, input BLOB, output BLOB, size INTEGER, used REAL
);
CREATE INDEX IF NOT EXISTS recent ON responses (used, size);
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY, response TEXT, body BLOB
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_response ON items (response);
CREATE TABLE IF NOT EXISTS rates (client TEXT PRIMARY KEY, full_at REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, subject TEXT, replica TEXT, change BLOB
);
"""

_items_in = msgspec.msgpack.Decoder(list[StoredItem]).decode
_items_out = msgspec.msgpack.Encoder().encode


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


class SharedResponses:
    """Responses, as `ResponseStore` keeps them, for all replicas together."""

    def __init__(self, file: _Database, most: int, most_bytes: int) -> None:
        self._file = file
        self._most = most
        self._most_bytes = most_bytes

    def put(self, response: StoredResponse) -> None:
        if response.size > self._most_bytes:
            return
        items = {item.id: item for item in (*response.input, *response.output)}
        with self._file.transaction():
            self._file.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    response.id,
                    response.previous,
                    response.body,
                    _items_out(response.input),
                    _items_out(response.output),
                    response.size,
                    time.time(),
                ),
            )
            self._file.execute_many(
                "INSERT OR REPLACE INTO items VALUES (?, ?, ?)",
                [(item.id, response.id, item.body) for item in items.values()],
            )
            self._make_room()

    def _make_room(self) -> None:
        [(count, size)] = self._file.execute("SELECT COUNT(*), SUM(size) FROM responses")
        while count > self._most or size > self._most_bytes:
            oldest = "SELECT id, size FROM responses ORDER BY used LIMIT 1"
            [(id, own)] = self._file.execute(oldest)
            self._forget(id)
            count, size = count - 1, size - own

    def get(self, id: str) -> StoredResponse:
        response = self._find(id)
        if response is None:
            raise no_response(id)
        return response

    def delete(self, id: str) -> None:
        self.get(id)
        with self._file.transaction():
            self._forget(id)

    def conversation(self, id: str | None) -> list[StoredItem]:
        chain: list[StoredResponse] = []
        while id is not None:
            response = self._find(id)
            if response is None:
                raise no_previous(id)
            chain.append(response)
            id = response.previous
        return [item for each in reversed(chain) for item in (*each.input, *each.output)]

    def item(self, id: str, path: str) -> StoredItem:
        rows = self._file.execute("SELECT body FROM items WHERE id = ?", (id,))
        if not rows:
            raise no_item(id, path)
        return StoredItem(id, rows[0][0])

    def _find(self, id: str) -> StoredResponse | None:
        query = "UPDATE responses SET used = ? WHERE id = ? RETURNING previous, body, input, output"
        rows = self._file.execute(query, (time.time(), id))
        if not rows:
            return None
        previous, body, given, made = rows[0]
        return StoredResponse(
            id=id, body=body, input=_items_in(given), output=_items_in(made), previous=previous
        )

    def _forget(self, id: str) -> None:
        self._file.execute("DELETE FROM responses WHERE id = ?", (id,))
        self._file.execute("DELETE FROM items WHERE response = ?", (id,))


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
