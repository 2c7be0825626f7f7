"""A small Hugging Face hub on loopback, for real clients: what they ask of it when they download.

It does what the hub does: large files are named by their SHA-256 and come from another address,
ranges are served, errors have their `X-Error-Code`. And it does what a test asks for: connections
that end early, files that are not what they should be, gates. Point a client at it with
`HF_ENDPOINT`, or a process with `environment`.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.support.serving import environment, hosted

_CHUNK = 16 * 1024
_LOOK = 0.02  # seconds between two bytes of an answer that is held


class File(msgspec.Struct, frozen=True):
    """A file of a repository. Those of weights are large, whatever their size."""

    path: str
    content: bytes

    @property
    def git(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def is_large(self) -> bool:
        return self.path.endswith(".safetensors")

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.git

    @property
    def sibling(self) -> dict[str, object]:
        """As a model's information lists it."""
        lfs = {"sha256": self.sha256, "size": len(self.content), "pointerSize": 130}
        listed = {"rfilename": self.path, "size": len(self.content), "blobId": self.git}
        return listed | ({"lfs": lfs} if self.is_large else {})

    @property
    def leaf(self) -> dict[str, object]:
        """As a tree lists it."""
        lfs = {"oid": self.sha256, "size": len(self.content), "pointerSize": 130}
        listed = {"type": "file", "path": self.path, "size": len(self.content), "oid": self.git}
        return listed | ({"lfs": lfs} if self.is_large else {})


class Snapshot(msgspec.Struct, frozen=True):
    """A commit's files by path."""

    commit: str
    files: dict[str, File]


class Sent(msgspec.Struct):
    """One answer to a GET of a file: from which byte, and how many bytes of it were sent."""

    path: str
    start: int
    count: int = 0


class Fault(msgspec.Struct):
    """A fault of a file, for so many answers; None: for good."""

    drop_at: int | None = None
    hold_at: int | None = None
    still: bool = False
    silent: bool = False
    pause: float = 0.0
    content: bytes | None = None
    status: int | None = None
    whole: bool = False
    times: int | None = None

    def take(self) -> bool:
        """Whether it concerns one more answer."""
        if self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True

    def hurry(self) -> None:
        self.pause, self.hold_at = 0.0, None

    def holds(self, end: int) -> bool:
        """Whether to send nothing behind this byte for now."""
        return self.hold_at is not None and end >= self.hold_at


class Hub:
    """The hub, from `with Hub() as hub` on; it may be filled and changed at any time."""

    url: str

    def __init__(self) -> None:
        self.asked: list[str] = []
        """Method and path of all requests."""
        self.sent: list[Sent] = []
        self._snapshots: dict[str, dict[str, Snapshot]] = {}
        self._refs: dict[tuple[str, str], str] = {}
        self._faults: dict[str, Fault] = {}
        self._gated: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Hub:
        self.url = self._stack.enter_context(hosted(self._app()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the environment of a process that downloads from here, into a cache of its own."""
        mine = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
        theirs = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        kept = {name: value for name, value in environment().items() if name not in theirs}
        return kept | mine

    # What it has.

    def add(self, repo_id: str, folder: Path, revision: str = "main") -> str:
        """Have a folder's files as a commit of a repository; the branch leads there. The commit."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {
            path.relative_to(folder).as_posix(): File(
                path.relative_to(folder).as_posix(), path.read_bytes()
            )
            for path in paths
        }
        names = json.dumps([(file.path, file.etag) for file in files.values()])
        commit = hashlib.sha1(names.encode()).hexdigest()
        self._snapshots.setdefault(repo_id, {})[commit] = Snapshot(commit, files)
        self._refs[repo_id, revision] = commit
        return commit

    # What is wrong with it.

    def gate(self, repo_id: str) -> None:
        """Show what the repository has, and give nothing of it."""
        self._gated.add(repo_id)

    def drop(
        self, path: str, after: int, times: int | None = None, *, silent: bool = False
    ) -> None:
        """End answers at byte `after` of the file; a silent end looks like that of the file."""
        self._faults[path] = Fault(drop_at=after, times=times, silent=silent)

    def drip(self, path: str, pause: float) -> None:
        """Wait so many seconds after each 16 KiB."""
        self._faults[path] = Fault(pause=pause)

    def hold(self, path: str, at: int, *, still: bool = False) -> None:
        """Send the file up to about this byte, and the rest once `hurry` or `mend` is called. Until
        then a byte comes now and then, for a client looks whether it is to stop when some come; or
        none comes where it is `still`."""
        self._faults[path] = Fault(hold_at=at, still=still)

    def hurry(self, path: str) -> None:
        """Wait no more, in answers under way as well."""
        self._faults[path].hurry()

    def corrupt(self, path: str) -> None:
        """Serve as many bytes, one of them wrong."""
        files = [s.files[path] for all in self._snapshots.values() for s in all.values()]
        content = bytearray(files[0].content)
        content[-1] ^= 1
        self._faults[path] = Fault(content=bytes(content))

    def fail(self, path: str, status: int, times: int | None = None) -> None:
        self._faults[path] = Fault(status=status, times=times)

    def ignore_ranges(self, path: str) -> None:
        """Serve the whole file, whatever part was asked for."""
        self._faults[path] = Fault(whole=True)

    def empty(self) -> None:
        """Have nothing."""
        self.mend()
        self._snapshots.clear()
        self._refs.clear()

    def mend(self) -> None:
        """Have nothing wrong any more, and forget what was asked."""
        for fault in self._faults.values():
            fault.hurry()
        self._faults.clear()
        self._gated.clear()
        self.asked.clear()
        self.sent.clear()

    # What it answers.

    def _app(self) -> Starlette:
        name = "{org}/{name}"
        methods = ["GET", "HEAD"]
        return Starlette(
            routes=[
                Route(f"/api/models/{name}", self._info),
                Route(f"/api/models/{name}/revision/{{revision:path}}", self._info),
                Route(f"/api/models/{name}/tree/{{revision:path}}", self._tree),
                Route(
                    f"/{name}/resolve/{{revision}}/{{path:path}}", self._resolve, methods=methods
                ),
                Route(f"/large/{name}/{{revision}}/{{path:path}}", self._large, methods=methods),
            ]
        )

    def _find(self, request: Request) -> tuple[str, Snapshot] | Response:
        """The repository and the revision that a request is about."""
        self.asked.append(f"{request.method} {request.url.path}")
        id = f"{request.path_params['org']}/{request.path_params['name']}"
        revision = request.path_params.get("revision", "main")
        if id not in self._snapshots:
            return _error(401, "RepoNotFound")  # the hub's way not to tell what is private
        commit = self._refs.get((id, revision), revision)
        if commit not in self._snapshots[id]:
            return _error(404, "RevisionNotFound")
        return id, self._snapshots[id][commit]

    async def _info(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        id, snapshot = found
        siblings = [file.sibling for file in snapshot.files.values()]
        if "blobs" not in request.query_params:
            siblings = [{"rfilename": sibling["rfilename"]} for sibling in siblings]
        return JSONResponse({"id": id, "sha": snapshot.commit, "siblings": siblings})

    async def _tree(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        return JSONResponse([file.leaf for file in found[1].files.values()])

    async def _resolve(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        id, snapshot = found
        if id in self._gated:
            return _error(403, "GatedRepo")
        file = snapshot.files.get(request.path_params["path"])
        if file is None:
            return _error(404, "EntryNotFound")
        if not file.is_large:
            return self._serve(request, file, snapshot)
        headers = {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
        headers["X-Repo-Commit"] = snapshot.commit
        place = f"/large/{id}/{snapshot.commit}/{file.path}?Signature=secret"
        return RedirectResponse(place, 302, headers)

    async def _large(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        snapshot = found[1]
        return self._serve(request, snapshot.files[request.path_params["path"]], snapshot)

    def _serve(self, request: Request, file: File, snapshot: Snapshot) -> Response:
        fault = self._faults.get(file.path)
        if request.method == "HEAD" or fault is None or not fault.take():
            fault = Fault()
        if fault.status is not None:
            return Response(status_code=fault.status)
        content = file.content if fault.content is None else fault.content
        start = 0 if fault.whole else _start(request.headers.get("Range"))
        headers = {
            "ETag": f'"{file.etag}"',
            "X-Repo-Commit": snapshot.commit,
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(content) - start),
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if request.method == "HEAD":
            return Response(headers=headers)
        sent = Sent(file.path, start)
        self.sent.append(sent)
        return _Bytes(content[start:], headers, sent, fault)


class _Bytes(Response):
    """A file's bytes, counted as they go; with less of them than it says if that is its fault."""

    def __init__(self, content: bytes, headers: dict[str, str], sent: Sent, fault: Fault) -> None:
        super().__init__(status_code=206 if sent.start else 200, headers=headers)
        if fault.silent:
            del self.headers["Content-Length"]
        self._content = content
        self._sent = sent
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        if await self._send_all(receive, send):
            return
        if self._fault.drop_at is None or self._fault.silent:
            await send({"type": "http.response.body", "body": b""})

    async def _send_all(self, receive: Receive, send: Send) -> bool:
        """Send the bytes at the pace that the fault allows. Returns whether the client has left."""
        content, at, fault = self._content, 0, self._fault
        if fault.drop_at is not None:
            content = content[: max(fault.drop_at - self._sent.start, 0)]
        while at < len(content):
            held = fault.holds(self._sent.start + at)
            if not (held and fault.still):
                chunk = content[at : at + (1 if held else _CHUNK)]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                at += len(chunk)
                self._sent.count += len(chunk)
            pause = _LOOK if held else fault.pause
            if pause and await _has_left(receive, pause):
                return True
        return False


async def _has_left(receive: Receive, seconds: float) -> bool:
    """Whether the client hangs up within these seconds."""
    with anyio.move_on_after(seconds):
        while (await receive())["type"] != "http.disconnect":
            pass
        return True
    return False


def _start(header: str | None) -> int:
    return 0 if header is None else int(header.removeprefix("bytes=").removesuffix("-"))


def _error(status: int, code: str) -> Response:
    return Response(status_code=status, headers={"X-Error-Code": code})
