"""Errors of the SQLite files under `--data-dir`, in words that say what helps."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from mlxsrv.errors import StoreFailed

DAMAGED = "it is damaged, or no database; put a sound copy in its place, or move it away"

_FORBIDDEN = "it cannot be opened or written; see who may write there, or choose another --data-dir"
_TAKEN = "another process keeps it locked; try again"
_REASONS = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write it; see its free space and its health",
    **dict.fromkeys((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB), DAMAGED),
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL), _TAKEN),
    **dict.fromkeys(
        (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM), _FORBIDDEN
    ),
}
"""The trouble and its remedy, for each primary result code of SQLite."""


def store_failed(name: str, reason: str) -> StoreFailed:
    """The error for the file of this name."""
    return StoreFailed(f"{name!r} under --data-dir cannot be used: {reason}")


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn every error of SQLite and of the file system into a StoreFailed that names the file."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        # The lowest byte is the primary code; the bytes above it give details.
        reason = _REASONS.get(code & 0xFF, f"SQLite says {str(error)!r}")
        raise store_failed(name, reason) from error
    except PermissionError as error:
        raise store_failed(name, _FORBIDDEN) from error
    except OSError as error:
        reason = f"{os.strerror(error.errno or 0)}; see what is there, or choose another --data-dir"
        raise store_failed(name, reason) from error
