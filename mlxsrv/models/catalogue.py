"""The models that this server may serve, by the names that requests use."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from huggingface_hub import snapshot_download

from mlxsrv.errors import ModelNotFound, ModelNotLoaded
from mlxsrv.settings import SettingsError

DEMO = "demo"
_DEMO_FOLDER = Path(__file__).parent / "demo"

_LONGEST_NAME = 200  # characters that a message repeats and that near names are looked for

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"]


class Entry(msgspec.Struct, frozen=True):
    """One name and where its files are: a folder here, or a repository of the Hugging Face hub."""

    name: str
    source: Path | str
    created: int

    def fetch(self) -> Path:
        """The model's folder, downloading what is missing of a repository that the operator named.

        Blocks. Raises ModelNotLoaded with the reason.
        """
        if isinstance(self.source, Path):
            return self.source
        try:
            return Path(snapshot_download(self.source, allow_patterns=_HUB_FILES))
        except Exception as error:  # the hub's client raises many kinds, some of them requests'
            reason = str(error).strip().split("\n", 1)[0]
            raise ModelNotLoaded(f"cannot fetch {self.source}: {reason}") from error


class Catalogue:
    """All entries. The first that `--model` names is the default; the demo is always there.

    Args:
        models: as `--model` takes them: a folder, a repository id, or NAME=either.

    Raises:
        SettingsError: a folder that is not there, or a name given twice.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._entries: dict[str, Entry] = {}
        for text in models:
            entry = _parse(text)
            if entry.name in self._entries:
                raise SettingsError(f"model: two models are called {entry.name!r}; use NAME=PATH")
            self._entries[entry.name] = entry
        self._entries.setdefault(DEMO, Entry(DEMO, _DEMO_FOLDER, int(time.time())))
        self.default = next(iter(self._entries))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, name: str | None) -> Entry:
        """The entry that a request's `model` names. Raises ModelNotFound with near names."""
        if name is None or name == "default":
            name = self.default
        entry = self._entries.get(name)
        if entry is None:
            name = name[:_LONGEST_NAME]
            raise ModelNotFound(
                f"the model {name!r} is not served here; {self._hint(name)}", param="model"
            )
        return entry

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.5)
        if near:
            return "did you mean " + " or ".join(map(repr, near)) + "?"
        return "served are: " + ", ".join(map(repr, self._entries))


def _parse(text: str) -> Entry:
    name, equals, source = text.partition("=")
    if not equals or os.path.exists(text):
        name, source = "", text
    folder = Path(source).expanduser()
    if source and os.path.isdir(folder):  # Path.is_dir raises on names that are too long
        return Entry(name or folder.resolve().name, folder, int(folder.stat().st_mtime))
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise SettingsError(f"model: there is no folder {source!r}")
    return Entry(name or source, source, int(time.time()))
