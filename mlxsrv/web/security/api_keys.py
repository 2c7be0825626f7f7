"""API keys: where they come from, and which of them a request carries."""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from collections.abc import Iterable
from pathlib import Path

from mlxsrv.errors import InvalidAPIKey
from mlxsrv.logs import log
from mlxsrv.settings import Settings, SettingsError
from mlxsrv.web.security.headers import RequestHeaders

_log = logging.getLogger("mlxsrv.security")


class APIKeys:
    """The valid keys. Only their digests are kept, so nothing here can reveal a key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = sorted({_digest(key.encode()) for key in keys})

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, headers: RequestHeaders) -> bytes | None:
        """Return the digest of the valid key that a request carries; None if it carries none.

        The time this takes does not depend on how much of a key is right, nor on which key it is.
        """
        found = None
        for given in _given_keys(headers):
            digest, valid = _digest(given), False
            for known in self._digests:
                valid |= hmac.compare_digest(digest, known)
            found = digest if valid else found
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
    keys = [*settings.api_key]
    if settings.api_key_file is not None:
        keys += _read_keys(Path(settings.api_key_file).expanduser())
    return APIKeys(keys)


def _read_keys(path: Path) -> list[str]:
    try:
        readable_by_all = path.stat().st_mode & stat.S_IROTH
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SettingsError(f"--api-key-file {path}: {reason}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key, _, rest = line.strip().partition(" ")
        if not key or key.startswith("#"):
            continue
        printable = key.isascii() and key.isprintable()
        if not printable or not (not rest.strip() or rest.strip().startswith("#")):
            raise SettingsError(f"--api-key-file {path}: line {number} is not a key")
        keys.append(key)
    if not keys:
        raise SettingsError(f"--api-key-file {path}: there is no key in it")
    if readable_by_all:
        log(_log, logging.WARNING, "api key file can be read by every user", path=str(path))
    return keys
