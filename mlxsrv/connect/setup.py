"""A client's setup: the lines of its configuration file, its variables, and how to start it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from mlxsrv.connect.address import ServerAddress
from mlxsrv.connect.formats import new_text
from mlxsrv.connect.url import KEY_VARIABLE


class ConfigFile(msgspec.Struct, frozen=True):
    """The settings for a client's configuration file, and where that file is.

    Attributes:
        folder: the file's usual folder.
        name: the file's path below it.
        content: settings by their names, nested. An `Owned` table replaces the one that is there;
            others are merged with it. None removes a setting.
        variable: of the environment, which names another folder.
    """

    folder: str
    name: str
    format: Literal["toml", "json", "yaml"]
    content: Mapping[str, Any]
    variable: str | None = None

    def path(self, environ: Mapping[str, str] = os.environ) -> Path:
        """Where the file is for this user."""
        folder = environ.get(self.variable or "") or self.folder
        return Path(folder).expanduser() / self.name


FILE, KEY = "{file}", "{key}"
"""Stand in a session for the path of its file, and for the server's key."""


class Session(msgspec.Struct, frozen=True):
    """One run of a client with these settings, beside what its user has set.

    Attributes:
        program: its command.
        arguments: that come first; FILE is a file with the content of the setup's.
        variables: of its environment; FILE and KEY are put in.
    """

    program: str
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}


class ClientSetup(msgspec.Struct, frozen=True):
    """The setup that makes one client use the server.

    Attributes:
        title: the client's full name.
        file: its configuration file; None where it has none that another program may write.
        paste: lines for a file that only the client itself knows.
        variables: lines for a shell, in order.
        commands: that configure or start it.
        instead: lines for a shell that do for one session what the file does for all.
        notes: whatever else its user has to do or to know, each one sentence.
        session: how `mlxsrv run` runs it; None where it cannot.
    """

    title: str
    file: ConfigFile | None = None
    paste: str = ""
    variables: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    session: Session | None = None

    def text(self, server: ServerAddress) -> str:
        """All of it, as `mlxsrv connect` prints it."""
        return "\n\n".join(self._sections(server))

    def _sections(self, server: ServerAddress) -> Iterator[str]:
        yield f"{self.title} with the model {server.model!r} at {server.url}"
        if self.file is not None:
            yield f"In {self.file.path()} (--write puts it there):"
            yield _indent(new_text(self.file.format, self.file.content))
        if self.paste:
            yield _indent(self.paste)
        if server.key:
            yield f"Set {KEY_VARIABLE} to a key of the server before you start the client."
        if self.variables or self.commands:
            yield "In a shell:"
            yield _indent("\n".join((*self.variables, *self.commands)))
        if self.instead:
            yield "Or, without the file, for one session:"
            yield _indent("\n".join((*self.instead, *self.commands)))
        yield from self.notes
        yield from (f"Note: {warning}." for warning in server.warnings)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
