"""Requests that change what a process holds for all of its clients: which state each one sets.

Profiles are in a file of their own, which all replicas read. One that is changed or deleted may be
the default steering of a model, so these requests are repeated as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from mlxsrv.replicas.shared_file import StateChange

Subject = Callable[[str, str, bytes, bytes], StateChange | None]
"""Makes the change of a request: its method, path, query and body. None: it changes nothing."""

_Fields = Mapping[str, msgspec.Raw]
"""The fields of an object with their JSON texts. Nothing else is decoded: a body may be large."""

_REGISTER = "/api/saes"
_STEERING = re.compile(
    r"/api/saes(/.*)?|/api/monitoring(/.*)?|/api/profiles/deactivate"
    r"|/api/profiles/[^/]+(/activate|/deactivate)?"
)
_NO_CHANGE = ("/api/monitoring/statistics/top", "/api/profiles/import")
_NAMES = ("model", "feature_idx")  # what a change is about, beside its path
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "/api/generate": ("prompt", "suffix"),
    "/api/chat": ("messages",),
    "/api/embed": ("input",),
    "/api/embeddings": ("prompt",),
}
"""The fields of Ollama's requests without which a model is only loaded or unloaded."""

_EMPTY = re.compile(rb'null|""|\[\s*\]')
_NULL = msgspec.Raw(b"null")
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def subject_of(method: str, path: str) -> Subject | None:
    """Return what makes the change of such a request; None: it changes nothing for others."""
    if method in ("GET", "HEAD", "OPTIONS") or path in _NO_CHANGE:
        return None
    if _STEERING.fullmatch(path):
        return _steering
    return _loading if is_load(path) else None


def is_load(path: str) -> bool:
    """Whether a change with this path loads or unloads a model."""
    return path in _TEXTS


def _steering(method: str, path: str, query: bytes, body: bytes) -> StateChange | None:
    """A later change takes the place of one that names the same things and sets the same fields: a
    field that is left out stays as an earlier change has set it."""
    asked = _fields(body)
    named = asked if path == _REGISTER else {n: asked.get(n, _NULL) for n in _NAMES}
    what = [
        method,
        path,
        query.decode("latin-1"),
        named,
        sorted(name for name, value in asked.items() if bytes(value) != b"null"),
        sorted(_fields(asked.get("steering", b"{}"))),
    ]
    return StateChange(msgspec.json.encode(what).decode(), method, path, query, body)


def _loading(method: str, path: str, query: bytes, body: bytes) -> StateChange | None:
    """Ollama's requests without a text load a model or unload it."""
    asked = _fields(body)
    if "model" not in asked:
        return None
    if any(not _EMPTY.fullmatch(asked.get(name, _NULL)) for name in _TEXTS[path]):
        return None
    return StateChange(f"load {bytes(asked['model']).decode()}", method, path, query, body)


def _fields(text: bytes | msgspec.Raw) -> _Fields:
    """The fields of an object; none if the text is no object, which its replica refuses."""
    try:
        return _decode_fields(text or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
