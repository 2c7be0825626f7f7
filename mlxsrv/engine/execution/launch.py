"""Launching: the device computes while Python goes on."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def launch(*arrays: Any) -> None:
    """Have the device compute these arrays, or nested lists of arrays, without waiting for it."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]  # mlx's stubs give it no types
