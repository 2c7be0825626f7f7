"""The server's address and model, as a client must give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mlxsrv.connect.url import KEY_VARIABLE, server_url
from mlxsrv.models.catalogue.catalogue import Catalogue
from mlxsrv.models.pool.model_files import capped
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings

NO_KEY = "none"
"""Sent by clients that insist on a key, to a server that wants none."""

_ROOMY = 32_000  # tokens: an agent's instructions and tools take 10,000 to 20,000


class ServerAddress(msgspec.Struct, frozen=True):
    """All that a client must know about the server.

    Attributes:
        url: without `/v1`.
        model: the name of the model that the client shall ask for.
        context_length: in tokens, where known.
        key: the server wants a key.
        capabilities: those of the model; of one whose files are not here, those of most.
        warnings: why the model may not do for an agent.
    """

    url: str
    model: str
    context_length: int | None
    key: bool
    capabilities: tuple[str, ...] = ("completion", "chat", "tools")
    warnings: tuple[str, ...] = ()

    @property
    def openai(self) -> str:
        """The base URL of clients of OpenAI's API."""
        return f"{self.url}/v1"

    @property
    def max_output(self) -> int | None:
        """Tokens that a client may ask for in one answer, so that the prompt has room too."""
        return None if self.context_length is None else min(self.context_length // 4, 32_000)

    @property
    def shell_key(self) -> str:
        """The key as a shell writes it; never the key itself."""
        return f'"${KEY_VARIABLE}"' if self.key else NO_KEY


def find_address(
    settings: Settings, url: str | None = None, model: str | None = None
) -> ServerAddress:
    """The address of the server that runs, or would run, with these settings.

    Args:
        url: the address where clients reach the server, if that is another.
        model: a name that the server answers for; None is the default model.

    Raises:
        SettingsError: the model is not known, or no port is.
    """
    catalogue = Catalogue(settings)
    catalogue.scan()
    entry = catalogue.answering(model)
    if entry is None:
        raise SettingsError(f"the model {model!r} is not served here; see: mlxsrv models")
    if entry.problem is not None:
        raise SettingsError(f"the model {entry.name!r} cannot be served: {entry.problem}")
    name = entry.name if model is None else model
    if not name.isprintable():
        raise SettingsError(f"configuration files cannot name {name!r}; use --model NAME=MODEL")
    known = entry.description
    context = capped(known.context_length if known else None, settings)
    return ServerAddress(
        url=server_url(settings, url),
        model=name,
        context_length=context,
        key=bool(settings.api_key or settings.api_key_file),
        **({} if known is None else {"capabilities": known.capabilities}),
        warnings=_warnings(None if known is None else known.capabilities, context),
    )


def address_of(url: str, model: Mapping[str, Any], *, key: bool) -> ServerAddress:
    """The address of a server that runs.

    Args:
        model: the one to ask for, as its `/v1/models` describes it.
        key: the server wants one.
    """
    capabilities = tuple(model["capabilities"]) or None
    return ServerAddress(
        url=url,
        model=model["id"],
        context_length=model["context_length"],
        key=key,
        **({} if capabilities is None else {"capabilities": capabilities}),
        warnings=_warnings(capabilities, model["context_length"]),
    )


def _warnings(capabilities: tuple[str, ...] | None, context: int | None) -> tuple[str, ...]:
    warnings = []
    if capabilities is not None and "tools" not in capabilities:
        warnings.append("this model calls no tools, or in an unknown format; agents need them")
    if context is not None and context < _ROOMY:
        warnings.append(
            f"its context of {context} tokens is short for an agent, whose instructions and tools "
            "alone take 10,000 to 20,000"
        )
    return tuple(warnings)
