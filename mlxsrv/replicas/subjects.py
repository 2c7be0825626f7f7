"""Requests that change what a process holds for all of its clients: which state each one sets.

Profiles are in a file of their own, which all replicas read. One that is changed or deleted may be
the default steering of a model, so these requests are repeated as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from mlxsrv.replicas.shared_file import StateChange

Subject = Callable[[str, str, bytes, bytes], StateChange | None]
"""Makes the change of a request: its method, path, query and body. None: it changes nothing."""

_STEERING = re.compile(
    r"/api/saes(/.*)?|/api/monitoring(/.*)?|/api/profiles/deactivate"
    r"|/api/profiles/[^/]+(/activate|/deactivate)?"
)
_NO_CHANGE = ("/api/monitoring/statistics/top", "/api/profiles/import")
_LOADING = ("/api/generate", "/api/chat", "/api/embed", "/api/embeddings")
_TEXT = ("prompt", "messages", "input", "suffix", "images")


def subject_of(method: str, path: str) -> Subject | None:
    """Return what makes the change of such a request; None: it changes nothing for others."""
    if method in ("GET", "HEAD", "OPTIONS") or path in _NO_CHANGE:
        return None
    if _STEERING.fullmatch(path):
        return _steering
    return _loading if path in _LOADING else None


def _steering(method: str, path: str, query: bytes, body: bytes) -> StateChange | None:
    asked = _object(body)
    features = asked.get("steering")
    what = [
        method,
        path,
        query.decode("latin-1"),
        asked.get("model"),
        asked.get("feature_idx"),
        sorted(features) if isinstance(features, dict) else None,
    ]
    return StateChange(msgspec.json.encode(what).decode(), method, path, query, body)


def _loading(method: str, path: str, query: bytes, body: bytes) -> StateChange | None:
    """Ollama's requests without a text load a model or unload it."""
    asked = _object(body)
    if not asked or any(asked.get(name) for name in _TEXT):
        return None
    return StateChange(f"load {asked.get('model') or asked.get('name')}", method, path, query, body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body or b"{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
