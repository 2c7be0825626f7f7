"""Open files and sockets: how many the process may have, and how many of them connections may take.

Without a descriptor to spare nothing can be opened: no model's file, no download, and no connection
even to say so. So connections leave some to the rest of the process, and who comes then is told.
"""

from __future__ import annotations

import resource
from contextlib import suppress

_SPARE = 64
"""What connections leave: what is open anyway is about 20, a model has a file for each shard."""

_ENOUGH = 2**20
_DARWIN_MOST = 10_240  # OPEN_MAX, where the hard limit is none


def raise_limit() -> None:
    """Raise the process's limit of descriptors to what it may have. For who owns the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (_ENOUGH, _DARWIN_MOST):
        wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
        if _is_less(soft, wanted):
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                return


def most_connections() -> int:
    """How many connections there may be at a time; half the limit where that is low."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _ENOUGH
    return max(limit - _SPARE, limit // 2)


def _is_less(soft: int, wanted: int) -> bool:
    return soft != resource.RLIM_INFINITY and soft < wanted
