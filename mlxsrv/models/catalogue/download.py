"""Downloads of models, or of single files, from the Hugging Face hub into its cache.

huggingface-hub signs the requests, explains refusals, and makes the snapshot.
Its release 2.4 does not do three things, which are done here:

- A broken download continues where it stopped, also if its process was killed.
- A file becomes a blob only if its checksum is the one that the hub gives.
- The snapshot and the ref are written last. So a model in the cache can be served while a newer
  revision of it is downloaded, even if that fails; and the cache never shows half a revision.

Files are downloaded one at a time, in the thread of the caller: nothing goes on without it. Import
this module on first use only: its own imports take 0.1 s.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
from huggingface_hub import HfApi, constants, errors, hf_hub_url, snapshot_download
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
    tqdm,
)
from msgspec import Meta

from mlxsrv.errors import ModelNotFound, ModelNotLoaded, ServeError
from mlxsrv.formats.files import UnusableFile
from mlxsrv.formats.model_folder import describe_model
from mlxsrv.generation.status import ByteProgress
from mlxsrv.models.catalogue.hub_cache import Repository, cached, matches, read_ref
from mlxsrv.models.catalogue.progress import DownloadReport, PulledFile, open_bar
from mlxsrv.version import __version__

_Choose = Callable[[Sequence[str]], Sequence[str]]
"""Gets the paths on the hub and returns those to download; or raises."""

_WEIGHTS = ("model*.safetensors", "?_Dense/model.safetensors")
_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md", *_WEIGHTS)
"""The files that serving may need: never code, and weights only in the format that is read."""

_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each new try while no bytes arrive; after the last one the download fails."""

_LOOK = 0.5
"""Seconds between two looks at a file that another process brings."""

_CLIENT = {"library_name": "mlxsrv", "library_version": __version__}

_NETWORK = "look at the network and at HTTPS_PROXY"

_HEADER = b'{"stand-in": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
_STAND_IN = len(_HEADER).to_bytes(8, "little") + _HEADER + b"\0"
"""A valid file of weights that holds one number."""


class HubFile(msgspec.Struct, frozen=True):
    """A file on the hub. The checksum of a large one is SHA-256, that of others is git's."""

    path: str
    size: Annotated[int, Meta(ge=0)]
    checksum: Annotated[str, Meta(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})\Z")]

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{self.path!r} leads elsewhere")

    def is_at(self, path: Path) -> bool:
        """Whether the local file at `path` is this one. Reads all of it."""
        if path.stat().st_size != self.size:
            return False
        with path.open("rb") as file:
            if len(self.checksum) == 64:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.checksum
            git = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
            git.update(file.read())
            return git.hexdigest() == self.checksum


class Commit(msgspec.Struct, frozen=True):
    """A repository's revision as the hub has it: its hash, and the files that serving needs."""

    hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")]
    weights: list[HubFile]
    others: list[HubFile]


def _report_nothing(file: PulledFile, arrived: ByteProgress) -> None:
    return


def fetch(
    repository: Repository,
    *,
    progress: bool = False,
    check: Callable[[], None] = lambda: None,
    report: DownloadReport = _report_nothing,
) -> Path:
    """Download what is missing of the repository's revision, as the hub has it now.

    Blocks. Files in the cache are compared with the hub's checksums; damaged ones are downloaded
    again.

    Args:
        progress: show a bar on stderr.
        check: called while bytes arrive; it stops the download by raising.
        report: called while bytes arrive.

    Returns:
        The folder of the snapshot.

    Raises:
        ModelNotFound: no such repository or revision, no right to read it, or nothing to serve.
        ModelNotLoaded: the network, the disk or a checksum; the same call may succeed later.
    """
    return _run(_Download(repository, check, progress=progress, report=report))


def fetch_files(repository: Repository, choose: _Choose, *, check: Callable[[], None]) -> Path:
    """Download some files of a repository, as `fetch` does; they need not make a model.

    Args:
        choose: gets the paths on the hub, returns those to download.
        check: as for `fetch`.

    Raises:
        ServeError: as `fetch`; and whatever `choose` raises.
    """
    return _run(_Download(repository, check, choose))


def _run(download: _Download) -> Path:
    try:
        return download.run()
    except (errors.HTTPError, OSError, ValueError) as error:
        raise _explain(error, download.repository) from error


class _Download:
    """One call's download: of a model or, with `choose`, of files that need not make one."""

    def __init__(
        self,
        repository: Repository,
        check: Callable[[], None],
        choose: _Choose | None = None,
        *,
        progress: bool = False,
        report: DownloadReport = _report_nothing,
    ) -> None:
        self.repository = repository
        self._report = report
        self._progress = progress
        self._check = check
        self._choose = choose
        self._blobs = repository.root / "blobs"
        self._brought: list[Path] = []  # blobs that were not in the cache before
        self._here: dict[str, int] = {}  # bytes that have arrived, by checksum
        self._total = 0
        self._bar: Any = None

    def run(self) -> Path:
        model = self._choose is None
        commit = self._ask()
        if model:
            self._require_files(commit)
        files = [*commit.others, *commit.weights]
        self._require_space(files)
        with self._counting(files):
            for file in commit.others:
                self._bring(file, commit.hash)
            if model:
                self._require_model(commit)
            for file in commit.weights:
                self._bring(file, commit.hash)
        folder = self._link(commit)
        if model:
            self._describe(folder)
        # A complete model may be served from this revision's commit, which then must stay.
        if model or cached(self.repository) is None:
            self._write_ref(commit.hash)
        return folder

    def _ask(self) -> Commit:
        info = HfApi(**_CLIENT).model_info(
            self.repository.id,
            revision=self.repository.ref,
            files_metadata=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        )
        siblings = info.siblings or ()
        paths = [found.rfilename for found in siblings]
        chosen = {path for path in paths if matches(path, _FILES)}
        if self._choose is not None:
            chosen = {*self._choose(paths)}
        listed = [
            {
                "path": found.rfilename,
                "size": found.size,
                "checksum": found.lfs.sha256 if found.lfs else found.blob_id,
            }
            for found in siblings
            if found.rfilename in chosen
        ]
        weights = [file for file in listed if matches(file["path"], _WEIGHTS)]
        others = [file for file in listed if file not in weights]
        # Validated, because the hash and the checksums become names of files.
        return msgspec.convert({"hash": info.sha, "weights": weights, "others": others}, Commit)

    def _require_files(self, commit: Commit) -> None:
        paths = [file.path for file in (*commit.others, *commit.weights)]
        for needed in ("config.json", "model*.safetensors"):
            if not any(matches(path, (needed,)) for path in paths):
                raise self._refuse(f"it has no {needed}")

    def _require_space(self, files: Sequence[HubFile]) -> None:
        missing = sum(
            file.size - _size(self._partial(file))
            for file in files
            if not self._blob(file).exists()
        )
        there = next(path for path in self._blobs.absolute().parents if path.exists())
        free = shutil.disk_usage(there).free
        if missing > free:
            raise ModelNotLoaded(
                f"{str(self.repository)!r} does not fit on the disk of the Hugging Face cache: "
                f"it needs {missing / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
            )

    def _require_model(self, commit: Commit) -> None:
        """Refuse a model that cannot be served before its weights are downloaded, and remove what
        has been downloaded of it.

        Describes a folder as it would be, with tiny files in place of the weights.
        """
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for file in (*commit.others, *commit.weights):
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            for file in commit.others:
                (folder / file.path).symlink_to(self._blob(file).absolute())
            for file in commit.weights:
                (folder / file.path).write_bytes(_STAND_IN)
            try:
                self._describe(folder, stand_ins=True)
            except ModelNotFound:
                self._discard()
                raise

    def _describe(self, folder: Path, *, stand_ins: bool = False) -> None:
        try:
            describe_model(folder, name=self.repository.id, stand_ins=stand_ins)
        except UnusableFile as error:
            raise self._refuse(str(error)) from None

    def _refuse(self, reason: str) -> ModelNotFound:
        name = str(self.repository)
        return ModelNotFound(f"{name!r} cannot be served: {reason}", param="model")

    def _discard(self) -> None:
        """Remove the blobs that this call has added, and the folders if they are empty then."""
        for blob in self._brought:
            blob.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._blobs.rmdir()
            self.repository.root.rmdir()

    def _blob(self, file: HubFile) -> Path:
        return self._blobs / file.checksum

    def _partial(self, file: HubFile) -> Path:
        return self._blobs / f"{file.checksum}.incomplete"

    def _bring(self, file: HubFile, commit: str) -> None:
        """Make sure that the file is among the blobs, with the right checksum."""
        blob, partial = self._blob(file), self._partial(file)
        root = self.repository.root
        # huggingface-hub uses the same lock for this file.
        lock = root.parent / ".locks" / root.name / f"{file.checksum}.lock"
        for path in (blob, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            self._wait_for(lock, file, stack)
            if blob.exists() and file.is_at(blob):
                self._note(file, file.size)
                return
            self._receive(file, commit, partial)
            if not file.is_at(partial):
                partial.unlink()
                raise ModelNotLoaded(
                    f"{file.path!r} of {str(self.repository)!r} arrived damaged: its checksum is "
                    "not the one that the hub gives; it was removed"
                )
            partial.replace(blob)
            self._brought.append(blob)

    def _wait_for(self, lock: Path, file: HubFile, stack: contextlib.ExitStack) -> None:
        """Take the lock of a file; as long as another process brings the file, say how far it is.
        If that process ends, this one goes on where it was."""
        while True:
            self._check()
            with contextlib.suppress(TimeoutError):
                stack.enter_context(WeakFileLock(lock, timeout=_LOOK))
                return
            # The other process may just look whether what it has brought is whole.
            self._note(file, _size(self._partial(file)) or _size(self._blob(file)))

    def _receive(self, file: HubFile, commit: str, partial: Path) -> None:
        """Download what is missing of a file, and try again as long as more bytes arrive."""
        url = hf_hub_url(self.repository.id, file.path, revision=commit)
        partial.touch()
        if _size(partial) > file.size:
            os.truncate(partial, 0)
        waits = iter(_WAITS)
        while (had := _size(partial)) < file.size:
            self._note(file, had)
            self._check()
            try:
                self._append(url, partial, file)
            except errors.HTTPError as error:
                if isinstance(error, errors.HfHubHTTPError) and not _may_pass(error):
                    raise
                if _size(partial) > had:
                    waits = iter(_WAITS)
                wait = next(waits, None)
                if wait is None:
                    raise
                time.sleep(wait)

    @contextlib.contextmanager
    def _counting(self, files: Sequence[HubFile]) -> Iterator[None]:
        """Count the bytes that arrive, and show a bar if one is wanted."""
        sizes = {file.checksum: file.size for file in files}
        for file in files:
            here = _size(self._blob(file)) or _size(self._partial(file))
            self._here[file.checksum] = min(here, file.size)
        self._total = sum(sizes.values())
        here, disable = sum(self._here.values()), not self._progress
        name = str(self.repository)
        with open_bar(name, self._total, initial=here, disable=disable) as self._bar:
            yield

    def _note(self, file: HubFile, done: int) -> None:
        """Report how many bytes of a file are here now; there may be fewer than before."""
        self._bar.update(done - self._here[file.checksum])
        self._here[file.checksum] = done
        arrived = ByteProgress(sum(self._here.values()), self._total)
        self._report(PulledFile(file.checksum, file.size, done), arrived)

    def _append(self, url: str, partial: Path, wanted: HubFile) -> None:
        """Request the rest of a file once. Raises HTTPError, also if it ends early."""
        had = _size(partial)
        headers = build_hf_headers(**_CLIENT) | {"Accept-Encoding": "identity"}
        if had:
            headers["Range"] = f"bytes={had}-"
        with http_stream_backoff(
            "GET",
            url,
            headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            retry_on_exceptions=(),
            retry_on_status_codes=429,  # the answer says how long to wait
        ) as response:
            hf_raise_for_status(response)
            if had and response.status_code != 206:  # the hub ignored the range: all comes again
                had = 0
            with partial.open("r+b") as file:
                file.truncate(had)
                file.seek(had)
                for chunk in response.iter_bytes():
                    self._check()
                    had += file.write(chunk)
                    self._note(wanted, had)
                    if had > wanted.size:
                        return
        if had < wanted.size:
            raise errors.HTTPError("the connection ended early")

    def _link(self, commit: Commit) -> Path:
        """Make the snapshot. All the blobs that it links to are there already."""
        files = (*commit.others, *commit.weights)
        folder = snapshot_download(
            self.repository.id,
            revision=commit.hash,
            allow_patterns=[glob.escape(file.path) for file in files],
            cache_dir=self.repository.root.parent,
            tqdm_class=_NoBar,
            **_CLIENT,
        )
        return Path(folder)

    def _write_ref(self, commit: str) -> None:
        """Write that the revision is this commit."""
        root, ref = self.repository.root, self.repository.ref
        path = root / "refs" / ref
        if commit in (ref, read_ref(path)):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = root / f"{uuid.uuid4().hex}.ref"
        new.write_text(commit, "ascii")
        new.replace(path)


class _NoBar(tqdm):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable": True}))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another process may just have moved it
        return 0


def _may_pass(error: errors.HfHubHTTPError) -> bool:
    status: int = error.response.status_code
    return status == 408 or status >= 500


def _explain(error: Exception, repository: Repository) -> ServeError:
    """The error for the client. It never repeats the original text, which may hold signed URLs."""
    name, id = repr(str(repository)), repr(repository.id)
    log_in = "run: hf auth login"
    match error:
        case errors.GatedRepoError():
            text = f"{name} is gated: ask for access on its page on the hub, then {log_in}"
            return ModelNotFound(text, param="model")
        case errors.RevisionNotFoundError():
            text = f"the repository {id} has no revision {repository.ref!r}"
            return ModelNotFound(text, param="model")
        case errors.RepositoryNotFoundError() | errors.DisabledRepoError():
            text = f"the hub has no repository {id} that may be read; if it is private, {log_in}"
            return ModelNotFound(text, param="model")
        case errors.HfHubHTTPError(response=response) if response.status_code in (401, 403):
            text = f"the hub does not let {name} be read; {log_in}"
            return ModelNotFound(text, param="model")
        case errors.HfHubHTTPError(response=response):
            reason = f"the hub answered with status {response.status_code}"
        case errors.OfflineModeIsEnabled():
            reason = "HF_HUB_OFFLINE is set"
        case errors.LocalEntryNotFoundError():
            reason = f"the hub cannot be reached; {_NETWORK}"
        case errors.HTTPError():
            reason = f"the connection to the hub failed ({type(error).__name__}); {_NETWORK}"
        case OSError():
            reason = error.strerror or type(error).__name__
        case _:
            reason = "the hub's answer cannot be read"
    return ModelNotLoaded(f"{name} could not be downloaded: {reason}")
