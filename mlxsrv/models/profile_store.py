"""Steering profiles, kept in one SQLite file under `--data-dir`.

The rules of the file:

- The first write makes the file and its folder. If there is no file, or a process was killed while
  it made one, there are no profiles.
- SQLite changes the file only if it is known to be ours: the header names the program
  (`application_id`) and the schema (`user_version`). Any other file is left as it is.
- SQLite itself reads that header, with `immutable`, which writes and locks nothing. The file must
  not be opened in another way: closing it would drop the locks of all threads of this process. The
  read may meet a write in progress, but the first page has the header from the beginning.
- A connection lasts for one call, so threads and processes share only the file. A write begins by
  taking the lock (`BEGIN IMMEDIATE`), and waits while another one holds it.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from mlxsrv.errors import ProfileExists, ProfileNotFound, StoreFailed
from mlxsrv.generation.steering import ProfileObject

_NAME = "profiles.sqlite3"
_APPLICATION = int.from_bytes(b"mlxs")
_VERSION = 1
_SMALLEST = 512  # bytes of the smallest page; the header is in the first one
_BUSY = 10.0  # seconds that a call waits for other calls

_DAMAGED = "it is damaged, or no database; put a sound copy in its place, or move it away"
_FORBIDDEN = "it cannot be opened or written; see who may write there, or choose another --data-dir"
_TAKEN = "another process keeps it locked; try again"
_REASONS = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write it; see its free space and its health",
    **dict.fromkeys((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB), _DAMAGED),
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL), _TAKEN),
    **dict.fromkeys(
        (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM), _FORBIDDEN
    ),
}
"""The trouble and its remedy, for each primary result code of SQLite."""

_SCHEMA = """\
CREATE TABLE profiles (
    id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    description TEXT NOT NULL,
    steering TEXT NOT NULL,  -- JSON: from features to values
    mode TEXT NOT NULL,
    model_id TEXT NOT NULL,
    sae_id TEXT NOT NULL,
    layer INTEGER NOT NULL,
    created_at REAL NOT NULL,  -- seconds since 1970
    updated_at REAL NOT NULL
)"""


def new_id() -> str:
    return f"prof_{secrets.token_hex(6)}"


_STEERING = msgspec.json.Decoder(dict[int, float])
_COLUMNS = tuple(field.name for field in msgspec.structs.fields(ProfileObject))
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM profiles"
_INSERT = f"INSERT INTO profiles ({', '.join(_COLUMNS)}) VALUES (:{', :'.join(_COLUMNS)})"
_UPDATE = f"UPDATE profiles SET {', '.join(f'{c} = :{c}' for c in _COLUMNS[1:])} WHERE id = :id"


class ProfileStore:
    """All profiles. Each method blocks and may be called in any thread.

    Raises:
        StoreFailed: by any method, if the file cannot be used; the message says what helps.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def profiles(self) -> list[ProfileObject]:
        """All profiles, sorted by name."""
        return self._select(f"{_SELECT} ORDER BY name")

    def profile(self, id: str) -> ProfileObject:
        """The profile of this id. Raises ProfileNotFound."""
        return self._one(self._select(f"{_SELECT} WHERE id = ?", id), id)

    def named(self, name: str) -> ProfileObject:
        """The profile of this name. Raises ProfileNotFound."""
        return self._one(self._select(f"{_SELECT} WHERE name = ?", name), name)

    def add(self, profile: ProfileObject) -> None:
        """Add a profile. Raises ProfileExists if its name or its id is taken."""
        with self._transaction() as connection, _unique(profile):
            connection.execute(_INSERT, _row(profile))

    def replace(self, profile: ProfileObject) -> None:
        """Replace the profile with the same id. Raises ProfileNotFound, ProfileExists."""
        self.profile(profile.id)  # checked first: the transaction would make a file for nothing
        with self._transaction() as connection, _unique(profile):
            if connection.execute(_UPDATE, _row(profile)).rowcount == 0:
                raise _unknown(profile.id)

    def remove(self, id: str) -> None:
        """Remove a profile. Raises ProfileNotFound."""
        self.profile(id)
        with self._transaction() as connection:
            if connection.execute("DELETE FROM profiles WHERE id = ?", (id,)).rowcount == 0:
                raise _unknown(id)

    def _one(self, found: list[ProfileObject], asked: str) -> ProfileObject:
        if not found:
            raise _unknown(asked)
        return found[0]

    def _select(self, query: str, *values: str) -> list[ProfileObject]:
        with _explained():
            path = self._path()
            if not _is_ours(path):
                return []
            with closing(_connect(path, "mode=rw")) as connection:
                connection.execute("BEGIN")
                if not _has_schema(connection):
                    return []
                return [_profile(row) for row in connection.execute(query, values)]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all that the block does or, if it raises, nothing."""
        with _explained():
            path = self._path()
            _is_ours(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(_connect(path, "mode=rwc")) as connection:
                _prepare(connection)
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")

    def _path(self) -> Path:
        try:
            return self._folder.expanduser() / _NAME
        except RuntimeError:
            reason = "this user has no home directory; choose another --data-dir"
            raise _failed(reason) from None


def _connect(path: Path, options: str) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(address, uri=True, timeout=_BUSY, isolation_level=None)


def _is_ours(path: Path) -> bool:
    """Whether the file is there and is not empty. Changes nothing.

    Raises StoreFailed if it is not ours.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
        raise _failed("it is not a file; move it away, or choose another --data-dir")
    if found.st_size == 0:
        return False
    if found.st_size < _SMALLEST:  # SQLite would take it for an empty file
        raise _failed(_DAMAGED)
    with closing(_connect(path, "immutable=1")) as connection:
        # During a write the file may be shorter than its header says. SQLite must not take that
        # for damage.
        connection.execute("PRAGMA writable_schema = ON")
        return _has_schema(connection)


def _has_schema(connection: sqlite3.Connection) -> bool:
    """Whether the database has our schema; if not, it is empty. Raises StoreFailed if it is
    another program's, or a newer version's."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if (application, version) == (_APPLICATION, _VERSION):
        return True
    if application == _APPLICATION:
        raise _failed(
            f"it is a newer mlxsrv's (schema {version}; known here is {_VERSION}); "
            "use that one, or choose another --data-dir"
        )
    marked = (application, version) != (0, 0)
    if marked or connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise _failed("it is another program's database; choose another --data-dir")
    return False


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the table if it is not there. The transaction is so small that SQLite writes its pages
    in order."""
    connection.execute("BEGIN IMMEDIATE")
    if not _has_schema(connection):
        connection.execute(_SCHEMA)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    connection.execute("COMMIT")
    # Not WAL, as of former versions: there a reader makes a file too, which a full disk refuses. It
    # cannot be changed while others use the file; then the next write changes it.
    with suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA journal_mode = DELETE")


def _row(profile: ProfileObject) -> dict[str, object]:
    steering = msgspec.json.encode(profile.steering).decode()
    return msgspec.structs.asdict(profile) | {"steering": steering}


def _profile(row: tuple[object, ...]) -> ProfileObject:
    values = dict(zip(_COLUMNS, row, strict=True))
    try:
        values["steering"] = _STEERING.decode(str(values["steering"]))
        return msgspec.convert(values, ProfileObject)
    except msgspec.MsgspecError:
        raise _failed(_DAMAGED) from None


@contextmanager
def _unique(profile: ProfileObject) -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY:
            raise ProfileExists(f"there is a profile {profile.id!r}", param="id") from None
        if error.sqlite_errorcode == sqlite3.SQLITE_CONSTRAINT_UNIQUE:
            text = f"there is a profile named {profile.name!r}"
            raise ProfileExists(text, param="name") from None
        raise


@contextmanager
def _explained() -> Iterator[None]:
    """Turn every error of SQLite and of the file system into a StoreFailed."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        # The lowest byte is the primary code; the bytes above it give details.
        raise _failed(_REASONS.get(code & 0xFF, f"SQLite says {str(error)!r}")) from error
    except PermissionError as error:
        raise _failed(_FORBIDDEN) from error
    except OSError as error:
        reason = f"{os.strerror(error.errno or 0)}; see what is there, or choose another --data-dir"
        raise _failed(reason) from error


def _failed(reason: str) -> StoreFailed:
    return StoreFailed(f"{_NAME!r} under --data-dir cannot be used: {reason}")


def _unknown(asked: str) -> ProfileNotFound:
    return ProfileNotFound(f"there is no profile {asked!r:.200}")
