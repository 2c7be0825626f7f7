"""The progress of a download, as Ollama's API tells it."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class OllamaProgress(Struct, frozen=True, kw_only=True):
    """A line. Those of a file have its digest, its bytes, and those that are here."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


PULL_BEGINS = OllamaProgress(status="pulling manifest")
PULL_ENDS = (
    OllamaProgress(status="verifying sha256 digest"),
    OllamaProgress(status="writing manifest"),
    OllamaProgress(status="success"),
)


def file_progress(checksum: str, size: int, done: int) -> OllamaProgress:
    """Return the progress of a file. The checksum of a small file is git's."""
    kind = "sha256" if len(checksum) == 64 else "sha1"
    return OllamaProgress(
        status=f"pulling {checksum[:12]}",
        digest=f"{kind}:{checksum}",
        total=size,
        completed=done,
    )
