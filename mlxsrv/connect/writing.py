"""FileChange a configuration file: show the difference, ask, keep a copy, write."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from mlxsrv.connect.formats import CannotMerge, merged_text
from mlxsrv.connect.setup import ConfigFile
from mlxsrv.settings import SettingsError


class FileChange(msgspec.Struct, frozen=True):
    """A file before and after: None where it is not there yet."""

    path: Path
    before: str | None
    after: str

    @property
    def needed(self) -> bool:
        return self.after != self.before

    def diff(self) -> str:
        """The difference, as `diff -u` shows it."""
        name = str(self.path)
        before, after = (self.before or "").splitlines(), self.after.splitlines()
        old = name if self.before is not None else "/dev/null"
        return "\n".join(difflib.unified_diff(before, after, old, name, lineterm=""))


def plan_change(file: ConfigFile) -> FileChange:
    """Read the file, through links to it, and put the settings into its text.

    Raises:
        SettingsError: the file cannot be read, or not be changed safely.
    """
    path = file.path().resolve()
    try:
        before = _read(path)
        return FileChange(path, before, merged_text(file.format, before or "", file.content))
    except CannotMerge as error:
        told = f"{path} stays as it is: {error}; put the lines there yourself"
        raise SettingsError(told) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None


def write_change(change: FileChange, confirm: Callable[[], bool]) -> Path | None:
    """Write the file if the user agrees, and return where the copy of the old one is.

    The file is replaced as a whole, so that no program reads half of it.

    Args:
        confirm: asks the user; not called where nothing would change.

    Raises:
        SettingsError: the user does not agree, the file has changed meanwhile, or it cannot be
            written.
    """
    if not confirm():
        raise SettingsError(f"{change.path} stays as it is")
    path = change.path
    try:
        if _read(path) != change.before:
            raise SettingsError(f"{path} has changed meanwhile; it stays as it is")
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = None if change.before is None else _copy(path)
        _replace(path, change.after)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error}") from None
    return copy


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None


def _copy(path: Path) -> Path:
    """Copy the file to a name beside it that is free."""
    number = 1
    while (copy := path.with_name(f"{path.name}.bak{number}")).exists():
        number += 1
    shutil.copy2(path, copy)
    return copy


def _replace(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as new:
        new.write(text)
    try:
        if path.exists():
            shutil.copymode(path, new.name)
        os.replace(new.name, path)
    except OSError:
        os.unlink(new.name)
        raise
