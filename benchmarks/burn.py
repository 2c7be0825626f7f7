"""Takes a share of a processor and does nothing with it: `python -m benchmarks.burn 0.25`.

What runs beside an in-process generator, so that it has no more of the machine to itself than a
server beside a load generator.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.servers import stop

_REST = 0.001  # a load generator wakes about as often: once for each step of the server's


@contextlib.contextmanager
def burning(share: float) -> Iterator[None]:
    """While the block runs, another process takes `share` seconds of processor time a second."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.burn", str(share)])
    try:
        yield
    finally:
        stop(process)


def burn(share: float) -> None:
    """Until the parent stops this process, or is gone itself."""
    parent = os.getppid()
    started, busy = time.perf_counter(), time.process_time()
    while os.getppid() == parent:
        due = busy + share * (time.perf_counter() - started)
        while time.process_time() < due:
            pass
        time.sleep(_REST)


if __name__ == "__main__":
    burn(float(sys.argv[1]))
