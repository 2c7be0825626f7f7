"""The command line: `mlxsrv` and `python -m mlxsrv`.

Nearly all of a start is imports, so they are made in `main`, where Ctrl-C ends the process already.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from mlxsrv.server.process_end import interrupt


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command; without one, serve until a signal.

    Exit status: 0 after a shutdown, even if a second signal cut it short, or when the command has
    done its work; 1 if it could not; 130 if Ctrl-C ended it, or a start; 2 for a wrong setting; 3
    if the engine failed under `--exit-on-failure`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    before = signal.signal(signal.SIGINT, interrupt)
    from mlxsrv.commands import COMMANDS
    from mlxsrv.configuration import load_settings
    from mlxsrv.errors import ServeError
    from mlxsrv.options import SettingsError
    from mlxsrv.server.listening import ListenError
    from mlxsrv.server.serve import serve

    command = COMMANDS.get(arguments[0]) if arguments else None
    try:
        if command is None:
            sys.exit(serve(load_settings(arguments)))
        signal.signal(signal.SIGINT, before)
        _run(command, arguments[1:])
    except SettingsError as error:
        _fail(2, str(error))
    except ServeError as error:
        _fail(1, error.message)
    except ListenError as error:
        _fail(1, str(error))
    sys.exit(0)


def _run(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """Run a command. Ctrl-C, or a reader of its output that goes, ends it without a traceback."""
    try:
        command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _fail(130, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        sys.exit(1)


def _fail(status: int, message: str) -> NoReturn:
    print(f"mlxsrv: {message}", file=sys.stderr)
    sys.exit(status)
