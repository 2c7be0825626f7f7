"""`python -m tests.support.interrupted` is the real command line, but Ctrl-C comes at a moment of
its start: at the first audit event of Python's (`import`, `open`, `socket.bind`, ...) that the
variable `AT` names, such as `AT="import mlx.core"`; the text is the end of the event's first value.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

_EVENT, _, _TEXT = os.environ["AT"].partition(" ")


def _interrupt_once(event: str, values: tuple[object, ...]) -> None:
    global _EVENT
    if event == _EVENT and str(values[0]).endswith(_TEXT):
        _EVENT = ""
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.addaudithook(_interrupt_once)
    runpy.run_module("mlxsrv", run_name="__main__", alter_sys=True)
