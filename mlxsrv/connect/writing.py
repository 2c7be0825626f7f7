"""Change a configuration file: show the difference, ask, keep a copy, write."""

from __future__ import annotations

import difflib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from mlxsrv.connect.formats import CannotMerge, merged_text
from mlxsrv.connect.setup import ConfigFile
from mlxsrv.options import SettingsError

_LARGEST = 1_000_000
"""Bytes. A configuration file has thousands; to compare millions of lines takes minutes."""


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
    return _plan(file.path(), lambda text: merged_text(file.format, text, file.content))


def plan_text(path: Path, text: str) -> FileChange:
    """Read the file, which shall have this text alone. Raises SettingsError if it cannot be."""
    return _plan(path, lambda _: text)


def _plan(place: Path, change: Callable[[str], str]) -> FileChange:
    path = Path(os.path.realpath(place))
    try:
        before = _read(path)
        return FileChange(path, before, change(before or ""))
    except CannotMerge as error:
        message = f"{path} stays as it is: {error}; put the lines there yourself"
        raise SettingsError(message) from None
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
    """The file's text; None if it is not there. Raises CannotMerge if it is no usual file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise CannotMerge("it is not a file")
    if status.st_size > _LARGEST:
        raise CannotMerge(f"it has more than {_LARGEST:,} bytes")
    return path.read_bytes().decode()


def _copy(path: Path) -> Path:
    """Copy the file to a name beside it that is free."""
    number = 1
    while (copy := path.with_name(f"{path.name}.bak{number}")).exists():
        number += 1
    shutil.copy2(path, copy)
    return copy


def _replace(path: Path, text: str) -> None:
    descriptor, new = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
