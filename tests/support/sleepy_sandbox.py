"""The sandbox's process. For a grammar with `ASLEEP` in it, it sleeps until its server has gone;
with `LATE`, as long as on a machine that is busy. For one with `KILLED` and the name of a file, it
is killed as often as the file has characters."""

from __future__ import annotations

import io
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

ASLEEP = "sleep, please"
LATE = "be late, please"
KILLED = "be killed, please:"
_LATE_SECONDS = 1.5

_REAL = Path(__file__).parents[2] / "mlxsrv" / "prompts" / "sandbox_process.py"


def main() -> None:
    server = os.getppid()
    request = sys.stdin.read()
    while ASLEEP in request and os.getppid() == server:
        time.sleep(0.1)
    if LATE in request:
        time.sleep(_LATE_SECONDS)
    if found := re.search(rf"{KILLED} ([^\s\"]+)", request.replace("\\", "")):
        left = Path(found[1])
        if text := left.read_text():
            left.write_text(text[1:])
            os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin = io.StringIO(request)
    runpy.run_path(str(_REAL), run_name="__main__")


if __name__ == "__main__":
    main()
