"""The sandbox's process: runs one script, which may hang or crash, within limits.

This file is run, not imported. Neither it nor the script imports anything of this package, since
that takes a while. Its arguments are the script, the folder of the library that the script needs,
and the seconds of processor time after which SIGXCPU ends it, also if its server is gone by then.
"""

from __future__ import annotations

import resource
import runpy
import signal
import sys
import threading

_STACK = 2 << 20
"""Bytes; a quarter of the least default for threads. What compiles with it compiles in the server
too."""

_MEMORY = 4 << 30
"""Bytes of address space, where the system keeps such a limit."""


def main() -> None:
    script, library, seconds = sys.argv[1:]
    sys.path.append(library)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # a parent may have had it ignored
    _limit(resource.RLIMIT_CPU, int(seconds))
    if sys.platform == "linux":
        _limit(resource.RLIMIT_AS, _MEMORY)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK)
    thread = threading.Thread(
        target=runpy.run_path, args=(script,), kwargs={"run_name": "__main__"}
    )
    thread.start()
    thread.join()


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(what, (most, hard))


if __name__ == "__main__":
    main()
