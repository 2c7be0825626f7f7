"""The models that this server may serve, by the names that requests use.

There are four sources: the command line, `--models-dir`, the Hugging Face cache, and the demo. Each
adds the models that the sources before it do not name. The command line is read at once; a worker
thread scans the others, again whenever they have changed. Only files are read: nothing is loaded,
and no text of a request is ever used as a path.
"""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from mlxsrv.errors import ModelNotFound, ModelNotLoaded
from mlxsrv.formats.adapters import adapter_bytes
from mlxsrv.formats.answer_formats import FormatWords
from mlxsrv.formats.files import UnusableFile, signature
from mlxsrv.formats.format_names import FormatKind, UnknownFormat, find_names
from mlxsrv.formats.model_folder import ModelDescription, describe_model
from mlxsrv.logs import log, on_terminal
from mlxsrv.models.catalogue import hub_cache
from mlxsrv.models.catalogue.progress import DownloadReport
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings

_log = logging.getLogger("mlxsrv.models")

DEMO = "demo"
NGRAM = "ngram"
"""Stands for a draft model: tokens are looked up instead. A folder of that name is `./ngram`."""
_DEMO_FOLDER = Path(__file__).parents[1] / "demo"

_LONGEST_NAME = 200  # characters of a request's name that are repeated, and compared with others
_MOST_NAMES = 20  # names that a message lists


class ModelSource(msgspec.Struct, frozen=True):
    """The place of a model's files: a local folder, or a repository of the Hugging Face hub."""

    place: Path | hub_cache.Repository
    adapter: Path | None = None

    def __str__(self) -> str:
        return str(self.place) + (f"+{self.adapter}" if self.adapter is not None else "")

    def folder(self) -> Path | None:
        """The folder of the files, if they are on this disk. Reads the disk."""
        return self.place if isinstance(self.place, Path) else hub_cache.cached(self.place)

    def files(self) -> ModelSource:
        """Return the same, named by its real paths: however a folder is named, it is one model."""
        place = self.place.resolve() if isinstance(self.place, Path) else self.place
        return ModelSource(place, self.adapter and self.adapter.resolve())

    def fetch(self, check: Callable[[], None], report: DownloadReport) -> Path:
        """Download the repository if it is not on this disk, and return the folder. Blocks.

        Args:
            check: called during a download; it stops the download by raising.
            report: called during a download.

        Raises:
            ServeError: the download failed.
        """
        if isinstance(self.place, Path):
            return self.place
        if folder := hub_cache.cached(self.place):
            return folder
        # Imported on first use: this takes 0.1 s, and most servers never download.
        from mlxsrv.models.catalogue.download import fetch

        return fetch(self.place, progress=on_terminal(), check=check, report=report)


class ModelEntry(msgspec.Struct, frozen=True):
    """One model under its name. It has neither a description nor a problem until its files are on
    this disk and have been read."""

    name: str
    source: ModelSource
    created: int
    """Seconds since 1970."""
    aliases: tuple[str, ...] = ()
    description: ModelDescription | None = None
    """The description of its files."""
    problem: str | None = None
    """Why it cannot be served."""


class _Index(msgspec.Struct, frozen=True):
    """All models that one scan has found."""

    entries: dict[str, ModelEntry]
    names: dict[str, str]
    """From every name and alias to the entry's name."""
    state: Hashable = None
    """The state of the sources when they were scanned."""


class Catalogue:
    """All entries. The first one that `--model` names is the default; the demo is always there.

    It may be made anywhere; afterwards it belongs to the event loop.

    Raises:
        SettingsError: a folder is not there, a name is given to two models, or an option names a
            model that is not there.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._named = named_models(settings.model)
        self._seen: dict[tuple[Path, FormatWords], tuple[Hashable, ModelDescription | str]] = {}
        self._reported: set[tuple[str, str]] = set()
        self._refreshing = anyio.Lock()
        for folder in settings.models_dir:
            if not os.path.isdir(Path(folder).expanduser()):
                raise SettingsError(f"models_dir: there is no folder {folder!r}")
        demo = ModelSource(_DEMO_FOLDER)
        self._named.append(ModelEntry(DEMO, demo, _created(demo)))
        self._index = _make_index(self._named, ())
        self.default = next(iter(self._index.entries))
        self._aliases = [_split_alias(text) for text in settings.model_alias]
        self._calls = self._split_formats("tool_format", "calls")
        self._thoughts = self._split_formats("thinking_format", "thoughts")
        wanted = [*self._calls, *self._thoughts]
        wanted += [*settings.preload, *settings.pin, *(target for target, _ in self.drafts)]
        wanted += (self.name(target) for _, target in self._aliases)
        if any(name not in self._index.names for name in wanted):
            self.scan()
            self._require(wanted)

    def require_default(self) -> ModelEntry:
        """Return the default model, as its files describe it.

        Raises ModelNotLoaded if they are here and cannot be served.
        """
        entry = self._index.entries[self.default]
        entry = msgspec.structs.replace(entry, **self._look(entry))
        if entry.problem is not None:
            raise ModelNotLoaded(f"the model {self.default!r} cannot be served: {entry.problem}")
        return entry

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._index.entries.values())

    @property
    def drafts(self) -> list[tuple[str, ModelSource | None]]:
        """Names of models with their draft models, as `--draft-model` gives them; None: tokens are
        looked up in their texts instead."""
        pairs = [_split_draft(text) for text in self._settings.draft_model]
        return [(name or self.default, source) for name, source in pairs]

    def draft(self, entry: ModelEntry) -> ModelSource | None:
        """The draft model of this entry, if it has one."""
        return next(iter(self._drafts_of(entry)), None)

    def looks_up(self, entry: ModelEntry) -> bool:
        """Whether tokens are looked up in the texts of this entry."""
        return self._drafts_of(entry)[:1] == [None]

    def _drafts_of(self, entry: ModelEntry) -> list[ModelSource | None]:
        names = (entry.name, *entry.aliases)
        return [source for name, source in self.drafts if name in names]

    def format_words(self, entry: ModelEntry) -> FormatWords:
        """The formats of this entry, as `--tool-format` and `--thinking-format` give them."""
        names = (entry.name, *entry.aliases)
        calls, thoughts = (
            next((words[name] for name in names if name in words), None)
            for words in (self._calls, self._thoughts)
        )
        return FormatWords(calls, thoughts)

    def _split_formats(self, option: str, kind: FormatKind) -> dict[str, str]:
        """Read each `[MODEL=]FORMAT` of an option; return formats by the names of models."""
        words: dict[str, str] = {}
        for text in getattr(self._settings, option):
            name, _, word = text.rpartition("=")
            try:
                find_names(word, kind)
            except UnknownFormat as error:
                raise SettingsError(f"{option}: {error}") from None
            words.setdefault(name or self.default, word)
        return words

    def name(self, name: str | None) -> str:
        """The entry's name if this is a known name or alias; else the name as it is. Clients of
        Ollama put `:latest` after names that have no tag."""
        if name is None or name == "default":
            return self.default
        if name not in self._index.names:
            name = name.removesuffix(":latest")
        return self._index.names.get(name, name)

    def known(self, name: str | None) -> ModelEntry | None:
        return self._index.entries.get(self.name(name))

    def _known_or_aliased(self, name: str | None) -> ModelEntry | None:
        """The entry of this name, else the one that the first matching alias names."""
        entry = self.known(name)
        if entry is not None or name is None:
            return entry
        plain = self.name(name)
        targets = (target for pattern, target in self._aliases if fnmatchcase(plain, pattern))
        target = next(targets, None)
        return None if target is None else self.known(target)

    def answering(self, name: str | None) -> ModelEntry | None:
        """The entry that answers requests for `name`, aliases and `--any-model` included, as far as
        the last scan knows."""
        entry = self._known_or_aliased(name)
        if entry is None and self._settings.any_model:
            return self.known(None)
        return entry

    def label(self, name: str | None) -> str:
        """The name, for metrics and traces, of the entry that answers requests for `name`; "" if
        there is none, for clients can make up any number of names."""
        entry = self.answering(name)
        return "" if entry is None else entry.name

    async def find(self, name: str | None, *, download: bool = True) -> ModelEntry:
        """The entry that a request's `model` names.

        For an unknown name the sources are scanned again, since the model may have been added. With
        `--any-model` the default model stands for what is still unknown. With `--allow-download` an
        unknown name may also be a repository, unless `download` is false.

        Raises:
            ModelNotFound: the message has similar names, and says how to get the model.
        """
        entry = self._known_or_aliased(name)
        if entry is None or entry.problem is not None:
            await self.refresh()
            entry = self.answering(name)
        if entry is not None and (entry.problem is None or self._given(entry)):
            return entry
        name = self.name(name) if entry is None else entry.name
        repository = _repository(name)
        missing = entry is None or isinstance(entry.source.place, hub_cache.Repository)
        if missing and repository is not None and download and self._settings.allow_download:
            return ModelEntry(name, ModelSource(repository), int(time.time()))
        if entry is not None:
            raise ModelNotFound(
                f"the model {name!r} cannot be served: {entry.problem}", param="model"
            )
        raise ModelNotFound(self._unknown(name[:_LONGEST_NAME], repository), param="model")

    def _given(self, entry: ModelEntry) -> bool:
        """Whether the command line names it. Then its load fails with the problem as its reason."""
        return any(entry.name == named.name for named in self._named)

    def scan(self) -> None:
        """Scan the sources as `refresh` does, without a loop. Blocks."""
        self._index = self._scan()

    async def refresh(self) -> None:
        """Scan the sources again, if anything in them has changed.

        A worker thread reads the disk, one at a time. Only the loop puts the new index in place, as
        a whole, so readers on the loop never see half of a scan.
        """
        async with self._refreshing:
            self._index = await anyio.to_thread.run_sync(self._scan)
        for entry in self:
            self._report(entry)

    def _scan(self) -> _Index:
        state = self._state()
        if state == self._index.state:
            return self._index
        named = [msgspec.structs.replace(e, **self._look(e)) for e in self._named]
        found: list[ModelEntry] = []
        for folder, name in _folders(self._settings.models_dir):
            found.append(self._found(name, ModelSource(folder)))
        for cached in hub_cache.cached_models() if self._settings.hf_cache else ():
            repository = _repository(cached.name)
            if not cached.incomplete:
                found.append(self._found(cached.name, ModelSource(cached.folder)))
            elif repository is not None:
                problem = f"its download is not complete; run: mlxsrv pull {cached.name}"
                source = ModelSource(repository)
                found.append(ModelEntry(cached.name, source, _created(source), problem=problem))
        return _make_index(named, found, state)

    def _state(self) -> Hashable:
        """A value that changes when a source does."""
        folders = [
            *(folder for entry in self._named if (folder := entry.source.folder()) is not None),
            *(folder for folder, _ in _folders(self._settings.models_dir)),
        ]
        adapters = [entry.source.adapter for entry in self._named if entry.source.adapter]
        cache = hub_cache.cache_state() if self._settings.hf_cache else None
        return (cache, tuple((folder, signature(folder)) for folder in [*folders, *adapters]))

    def _found(self, name: str, source: ModelSource) -> ModelEntry:
        entry = ModelEntry(name, source, int(time.time()))
        return msgspec.structs.replace(entry, **self._look(entry))

    def _look(self, entry: ModelEntry) -> dict[str, Any]:
        """The fields of an entry that its files give. Files that have not changed are not read
        again."""
        folder = entry.source.folder()
        if folder is None:
            return {}
        stamp = signature(folder)
        words = self.format_words(entry)
        seen = self._seen.get((folder, words))
        if seen is None or seen[0] != stamp:
            seen = (stamp, self._describe(folder, entry.name, words))
            self._seen[folder, words] = seen
        described = seen[1]
        if isinstance(described, ModelDescription) and entry.source.adapter is not None:
            try:
                adapter_bytes(entry.source.adapter)
            except UnusableFile as error:
                described = f"its adapter: {error}"
        if isinstance(described, str):
            return {"problem": described}
        return {"description": described, "created": int(described.modified_at)}

    def _describe(self, folder: Path, name: str, words: FormatWords) -> ModelDescription | str:
        try:
            # The name says what kind of model it is; its revision does not.
            name = name.partition("@")[0]
            trust = self._settings.trust_remote_code
            return describe_model(folder, name=name, trust_remote_code=trust, words=words)
        except UnusableFile as error:
            return str(error)

    def _report(self, entry: ModelEntry) -> None:
        """Log a problem, once."""
        if entry.problem is None or (entry.name, entry.problem) in self._reported:
            return
        self._reported.add((entry.name, entry.problem))
        log(_log, logging.WARNING, "model left out", model=entry.name, reason=entry.problem)

    def _require(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._index.names:
                raise SettingsError(f"the model {name!r} is not served here; {self._hint(name)}")

    def _unknown(self, name: str, repository: hub_cache.Repository | None) -> str:
        text = f"the model {name!r} is not served here; {self._hint(name)}"
        if repository is not None:
            return f"{text}. To get it: mlxsrv pull {name}"
        if text.endswith("?"):
            return text
        return f"{text}. With --any-model the default model answers for every name"

    def _hint(self, name: str) -> str:
        names = [n for n, id in self._index.names.items() if not self._index.entries[id].problem]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        if near:
            return "did you mean " + " or ".join(map(repr, near)) + "?"
        return "served are: " + ", ".join(map(repr, names[:_MOST_NAMES]))


def named_models(models: Sequence[str]) -> list[ModelEntry]:
    """The entries of the command line. More names for the same files become aliases.

    Raises SettingsError if one can be no model.
    """
    entries: dict[ModelSource, ModelEntry] = {}
    taken: dict[str, ModelSource] = {}
    for text in models:
        name, source = _split(text, "model")
        name = name or _own_name(source)
        files = source.files()
        if taken.setdefault(name, files) != files:
            raise SettingsError(f"model: two models are called {name!r}; use NAME=PATH")
        entry = entries.get(files)
        if entry is None:
            entries[files] = ModelEntry(name, source, _created(source))
        elif name not in (entry.name, *entry.aliases):
            entries[files] = msgspec.structs.replace(entry, aliases=(*entry.aliases, name))
    return [
        _with_id(entry) if _own_name(entry.source) not in taken else entry
        for entry in entries.values()
    ]


def _with_id(entry: ModelEntry) -> ModelEntry:
    """Add a repository's id to its names."""
    if not isinstance(entry.source.place, hub_cache.Repository) or entry.source.adapter is not None:
        return entry
    return msgspec.structs.replace(entry, aliases=(*entry.aliases, _own_name(entry.source)))


def has_adapter(text: str) -> bool:
    """Whether a `--model` names an adapter. Raises SettingsError if it can be no model."""
    return _split(text, "model")[1].adapter is not None


def _split(text: str, option: str) -> tuple[str, ModelSource]:
    """Read `[NAME=]ID_OR_PATH[+ADAPTER_DIR]`. The name is empty if none is given."""
    name, equals, rest = text.partition("=")
    if not equals or os.path.exists(text):
        name, rest = "", text
    adapter = None
    if not os.path.isdir(os.path.expanduser(rest)) and "+" in rest:
        rest, _, directory = rest.rpartition("+")
        adapter = Path(directory).expanduser()
        if not os.path.isdir(adapter):
            raise SettingsError(f"{option}: there is no adapter folder {directory!r}")
    return name, ModelSource(_place(rest, option), adapter)


def _split_draft(text: str) -> tuple[str, ModelSource | None]:
    """Read `[MODEL=]ID_OR_PATH`, or `[MODEL=]ngram`, for which there is no source."""
    name, _, rest = text.rpartition("=")
    return (name, None) if rest == NGRAM else _split(text, "draft_model")


def _split_alias(text: str) -> tuple[str, str]:
    """Read `PATTERN=NAME`."""
    pattern, _, name = text.partition("=")
    if not pattern or not name:
        raise SettingsError(f"model_alias: {text!r} is not PATTERN=NAME")
    return pattern, name


def _place(text: str, option: str) -> Path | hub_cache.Repository:
    folder = Path(text).expanduser()
    if text and os.path.isdir(folder):  # Path.is_dir raises on names that are too long
        return folder
    if text == DEMO:
        return _DEMO_FOLDER
    if text and os.path.isfile(folder):
        what = "is a file, not a model's folder"
        if folder.suffix == ".gguf":
            what = "is a GGUF file: look for the model at mlx-community, or use mlx_lm.convert"
        raise SettingsError(f"{option}: {text!r} {what}")
    repository = _repository(text)
    if repository is None:
        raise SettingsError(f"{option}: there is no folder {text!r}, and it is no ORG/NAME")
    return repository


def _repository(text: str) -> hub_cache.Repository | None:
    if text.startswith((".", "/", "~")):
        return None
    try:
        return hub_cache.Repository.parse(text)
    except ValueError:
        return None


def _own_name(source: ModelSource) -> str:
    place = source.place
    name = place.resolve().name if isinstance(place, Path) else str(place)
    return name if source.adapter is None else f"{name}+{source.adapter.resolve().name}"


def _created(source: ModelSource) -> int:
    place = source.place
    return int(place.stat().st_mtime if isinstance(place, Path) else time.time())


def _make_index(
    named: Iterable[ModelEntry], found: Iterable[ModelEntry], state: Hashable = None
) -> _Index:
    """Index all entries; of several with the same name or the same files, only the first."""
    entries: dict[str, ModelEntry] = {}
    names: dict[str, str] = {}
    folders: set[Path] = set()
    for entry in [*named, *found]:
        place = entry.source.place
        folder = place.resolve() if isinstance(place, Path) else None
        again = entry.source.adapter is None and folder in folders
        if again or entry.name in names:
            continue
        if folder is not None and entry.source.adapter is None:
            folders.add(folder)
        entries[entry.name] = entry
        for name in (entry.name, *entry.aliases):
            names.setdefault(name, entry.name)
    return _Index(entries, names, state)


def _folders(roots: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Model folders below these, with their names: NAME or ORG/NAME."""
    for root in map(Path, roots):
        for one in _subfolders(root.expanduser()):
            if (one / "config.json").exists():
                yield one, one.name
                continue
            for two in _subfolders(one):
                if (two / "config.json").exists():
                    yield two, f"{one.name}/{two.name}"


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
