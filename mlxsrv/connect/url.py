"""The server's URL, and the variable of its key, as its clients need them.

A short file beside `address`, whose imports take a third of a second: commands that ask the server
for its model need only this.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings

KEY_VARIABLE = "MLXSRV_API_KEY"
"""The variable that clients read the key from. The server reads its keys from it too."""


def server_url(settings: Settings, given: str | None = None) -> str:
    """The address without `/v1`. Raises SettingsError if there is none to tell.

    Args:
        given: the address where clients reach the server, if it is another than `http://HOST:PORT`.
    """
    if given is not None:
        if not _is_url(given):
            raise SettingsError(f"--url: {given!r} is not a URL such as http://127.0.0.1:8000")
        return given.rstrip("/").removesuffix("/v1")
    if settings.port == 0:
        raise SettingsError("port 0 is any free one; give --port, or the server's --url")
    host = settings.host or "0.0.0.0"
    return reachable(f"http://{f'[{host}]' if ':' in host else host}:{settings.port}")


def reachable(url: str) -> str:
    """The URL by which this machine reaches a server that may listen on all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _is_url(text: str) -> bool:
    try:
        urlsplit(text).port  # noqa: B018 - both raise for what cannot be an address
    except ValueError:
        return False
    return re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text) is not None
