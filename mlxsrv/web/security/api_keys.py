"""API keys: where they come from, and which of them a request carries."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from mlxsrv.errors import InvalidAPIKey
from mlxsrv.logs import log
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from mlxsrv.web.security.headers import RequestHeaders

_log = logging.getLogger("mlxsrv.security")


class APIKey(msgspec.Struct, frozen=True):
    """A valid key.

    Attributes:
        digest: of the key, which is not kept itself, so nothing here can reveal it.
        priority: the best that requests with this key may have, if it has one; a lower number is
            served earlier.
    """

    digest: bytes
    priority: int | None = None


class APIKeys:
    """The valid keys.

    Raises:
        SettingsError: a key is given twice, with two priorities.
    """

    def __init__(self, keys: Iterable[APIKey]) -> None:
        known: dict[bytes, APIKey] = {}
        for key in keys:
            if known.setdefault(key.digest, key) != key:
                raise SettingsError("an API key is given twice, with different priorities")
        self._keys = [known[digest] for digest in sorted(known)]

    def __len__(self) -> int:
        return len(self._keys)

    def key_of(self, headers: RequestHeaders) -> APIKey | None:
        """Return the valid key that a request carries; None if it carries none.

        The time this takes does not depend on how much of a key is right, nor on which key it is.
        """
        found = None
        for given in _given_keys(headers):
            digest = _digest(given)
            for known in self._keys:
                found = known if hmac.compare_digest(digest, known.digest) else found
        return found


def invalid_key(headers: RequestHeaders) -> InvalidAPIKey:
    """The error for a request without a valid key."""
    return InvalidAPIKey(
        "the API key of this request is not one of this server's"
        if _given_keys(headers)
        else "this server needs an API key: Authorization: Bearer KEY"
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _given_keys(headers: RequestHeaders) -> list[bytes]:
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    bearer = credentials.strip() if scheme.lower() == b"bearer" else b""
    return [key for key in (bearer, headers.get(b"x-api-key", b"")) if key]


def load_keys(settings: Settings) -> APIKeys:
    """Load the keys that the settings give or name.

    Raises:
        SettingsError: the file cannot be read, holds no key, or has a line that is not a key. The
            message does not show the line.
    """
    keys = [APIKey(_digest(key.encode())) for key in settings.api_key]
    if settings.api_key_file is not None:
        keys += _read_keys(Path(settings.api_key_file).expanduser())
    return APIKeys(keys)


def _read_keys(path: Path) -> list[APIKey]:
    """Read a file with one key per line. A key may be followed by its priority and a comment:
    `KEY priority=5 # the batch jobs`."""
    try:
        readable_by_all = path.stat().st_mode & stat.S_IROTH
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SettingsError(f"--api-key-file {path}: {reason}") from None
    keys = list(_parse_keys(path, lines))
    if not keys:
        raise SettingsError(f"--api-key-file {path}: there is no key in it")
    if readable_by_all:
        log(_log, logging.WARNING, "api key file can be read by every user", path=str(path))
    return keys


def _parse_keys(path: Path, lines: Iterable[str]) -> Iterator[APIKey]:
    for number, line in enumerate(lines, start=1):
        key, _, rest = line.strip().partition(" ")
        if not key or key.startswith("#"):
            continue
        options = rest.partition("#")[0].strip()
        priority = _PRIORITY.fullmatch(options)
        printable = key.isascii() and key.isprintable()
        if not printable or (options and priority is None):
            raise SettingsError(
                f"--api-key-file {path}: line {number} is not a key, or a key and priority=NUMBER"
            )
        yield APIKey(_digest(key.encode()), None if priority is None else int(priority[1]))


_PRIORITY = re.compile(r"priority=(-?[0-9]{1,9})")
