"""File descriptors: how many the process may have, and how many of them connections may take.

Without a free descriptor nothing can be opened: no model file, no download, and not even a
connection to say so. So connections leave some descriptors free, and a client that comes when only
those are left gets a 503.
"""

from __future__ import annotations

import resource
from contextlib import suppress

_SPARE = 64
"""Descriptors that connections leave free. About 20 are open anyway, and a model has one file for
each shard."""

_ENOUGH = 2**20
_DARWIN_MOST = 10_240  # OPEN_MAX, which bounds an infinite hard limit


def raise_limit() -> None:
    """Raise the process's soft limit as far as it goes. Only who owns the process calls this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (_ENOUGH, _DARWIN_MOST):
        wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
        if _is_less(soft, wanted):
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                return


def most_connections() -> int:
    """The most connections that may be open: the limit less those left free, at least half."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _ENOUGH
    return max(limit - _SPARE, limit // 2)


def _is_less(soft: int, wanted: int) -> bool:
    return soft != resource.RLIM_INFINITY and soft < wanted
