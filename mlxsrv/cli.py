"""The command line: `mlxsrv` and `python -m mlxsrv`.

Nearly all of a start is imports, so they are made in `main`, where Ctrl-C ends the process already.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from mlxsrv.server.process_end import interrupt

_SERVE = "serve"
_DEMO = "demo"
_ELSEWHERE = {
    "list": "models",
    "ls": "models",
    "show": "models",
    "info": "models",
    "start": "serve",
    "up": "serve",
    "download": "pull",
    "remove": "rm",
    "delete": "rm",
    "status": "ps",
    "down": "stop",
    "kill": "stop",
}
"""Words that other programs have for our commands."""

_FLAGS = {"help": "--help", "version": "--version"}
"""Words for which there is a flag."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command; without one, serve until a signal. See `mlxsrv --help`.

    Exit status: 0 after a shutdown, even if a second signal cut it short, or when the command has
    done its work; 1 if it could not; 130 if Ctrl-C ended it, or a start; 2 for a wrong setting; 3
    if the engine failed under `--exit-on-failure`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    before = signal.signal(signal.SIGINT, interrupt)
    from mlxsrv.commands import COMMANDS
    from mlxsrv.configuration import wrong_variables
    from mlxsrv.errors import ServeError
    from mlxsrv.options import SettingsError
    from mlxsrv.server.listening import ListenError

    try:
        name, rest = _find_command(arguments, COMMANDS)
        if name != _SERVE:
            signal.signal(signal.SIGINT, before)
            for told in wrong_variables():
                print(f"mlxsrv: {told}", file=sys.stderr)
        _run(COMMANDS[name].run, rest)
    except SettingsError as error:
        _fail(2, str(error))
    except ServeError as error:
        _fail(1, error.message)
    except ListenError as error:
        _fail(1, f"{error}{_who_listens(error.taken)}")


def _who_listens(port: int | None) -> str:
    """The end of a sentence about a port that another mlxsrv has; empty if it is none."""
    from mlxsrv.terminal.processes import listening_process

    process = None if port is None else listening_process(port)
    if process is None or not process.is_server:
        return ""
    shown, stopped = (f"mlxsrv {command} --port {port}" for command in ("ps", "stop"))
    return f"; mlxsrv runs there already (process {process.pid}): {shown}, {stopped}"


def _find_command(arguments: Sequence[str], commands: Collection[str]) -> tuple[str, Sequence[str]]:
    """The name of the command, and its arguments. Without a command the server is meant.

    Raises SettingsError if the first argument can be neither a command nor a model.
    """
    from mlxsrv.arguments import did_you_mean
    from mlxsrv.options import SettingsError

    first, *rest = arguments or ("",)
    if first in _FLAGS:
        asked = rest[0] if rest and rest[0] in commands else _SERVE
        return asked, [_FLAGS[first]]
    if first in commands:
        return first, rest
    if first.isidentifier() and first != _DEMO and not os.path.isdir(first):
        meant = _ELSEWHERE.get(first, first)
        near = did_you_mean(meant, [*commands, *_FLAGS]) or "; mlxsrv --help lists them"
        raise SettingsError(f"there is no command {first!r}{near}")
    return _SERVE, arguments


def _run(command: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> NoReturn:
    """Run a command, and exit. Ctrl-C, or a reader of its output that goes, leaves no traceback."""
    try:
        status = command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _fail(130, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        status = 1
    sys.exit(status or 0)


def _fail(status: int, message: str) -> NoReturn:
    print(f"mlxsrv: {message}", file=sys.stderr)
    sys.exit(status)
