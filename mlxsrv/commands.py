"""The commands of `mlxsrv`, in one table.

Each takes its arguments, prints, and raises SettingsError or ServeError. Its module is imported
when it runs: all of them together take a second.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from types import MappingProxyType
from typing import Final, NamedTuple

from mlxsrv.arguments import Arguments, server_arguments
from mlxsrv.configuration import settings_from
from mlxsrv.options import SettingsError


def run_server(arguments: Sequence[str]) -> int:
    """Serve until a signal. Returns the exit status."""
    parser = server_arguments({name: command.does for name, command in COMMANDS.items()})
    settings = settings_from(parser.read(arguments))
    from mlxsrv.server.serve import serve

    return serve(settings)


def replay(arguments: Sequence[str]) -> None:
    """Run a record again: print what is in it, and whether the scheduler plans the same."""
    parser = Arguments(
        "replay",
        "Give the orders and outcomes of a record (mlxsrv --record FILE) to the "
        "scheduler, and compare its plans with those that were recorded. It needs no model. Exit "
        "status 1: something differs.",
        operands="FILE",
    )
    parser.add_argument("record", metavar="FILE", help="The record, which may be a .gz file.")
    record = parser.read(arguments)["record"]
    from mlxsrv.engine.recording.record_file import RecordError
    from mlxsrv.engine.recording.replay import replay_record

    try:
        replay_record(record)
    except RecordError as error:
        raise SettingsError(str(error)) from None


def completion(arguments: Sequence[str]) -> None:
    """Print the script that has a shell complete all this."""
    from mlxsrv.connect.clients import CLIENTS
    from mlxsrv.terminal.agents import runnable
    from mlxsrv.terminal.completion import SHELLS, CompletedCommand, completion_script
    from mlxsrv.terminal.services import ACTIONS

    parser = Arguments(
        "completion",
        "Print a script for a shell, which then completes commands and options with Tab. For "
        "bash, put this line into ~/.bashrc: source <(mlxsrv completion bash)",
        operands="SHELL",
    )
    parser.add_argument("shell", metavar="SHELL", choices=[*SHELLS], help="bash, zsh or fish.")
    shell = parser.read(arguments)["shell"]
    words = {
        "connect": (*CLIENTS,),
        "run": (*runnable(),),
        "service": ACTIONS,
        "completion": (*SHELLS,),
    }
    commands = [
        CompletedCommand(name, command.does, _flags(command), words.get(name, ()))
        for name, command in COMMANDS.items()
    ]
    print(completion_script(shell, commands, "serve"), end="")


def _flags(command: Command) -> list[str]:
    """The options of a command, as its help shows them."""
    for flag in ("--help-all", "--help"):
        shown = io.StringIO()
        with suppress(SettingsError, SystemExit), redirect_stdout(shown):
            command.run([flag])
        options = re.findall(r"^  (-.+?)(?:  |$)", shown.getvalue(), re.MULTILINE)
        if options:
            return [flag for option in options for flag in re.findall(r"--[\w-]+", option)]
    return []


class Command(NamedTuple):
    """A command.

    Attributes:
        place: of its function, as MODULE:NAME below the package.
        does: the line about it in the help of `mlxsrv`.
    """

    place: str
    does: str

    def run(self, arguments: Sequence[str]) -> int | None:
        """Run it. Returns the exit status; None is 0."""
        module, _, name = self.place.partition(":")
        function = getattr(import_module(f"mlxsrv.{module}"), name)
        status: int | None = function(arguments)
        return status


COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        name: Command(place, does)
        for name, place, does in (
            ("serve", "commands:run_server", "serve models; so does mlxsrv without a command"),
            ("chat", "terminal.chat:chat", "chat with a model in the terminal"),
            ("run", "terminal.agents:run_agent", "run a coding agent for one session"),
            ("connect", "terminal.connecting:connect", "set up a client for good"),
            ("models", "terminal.listing:models", "list the models that would be served"),
            ("recommend", "terminal.recommending:recommend", "list models that fit this machine"),
            ("pull", "terminal.repositories:pull", "download a model"),
            ("rm", "terminal.repositories:rm", "remove a model that was downloaded"),
            ("ps", "terminal.watching:ps", "show a running server: models, requests, memory"),
            ("stop", "terminal.watching:stop", "stop a running server"),
            ("service", "terminal.services:service", "run the server at each login"),
            ("doctor", "terminal.doctor:doctor", "check what a server needs on this machine"),
            ("replicas", "replicas.command:replicas", "serve with several processes (Ray)"),
            ("replay", "commands:replay", "run a record of a server again, for a bug report"),
            ("completion", "commands:completion", "complete all this in bash, zsh or fish"),
        )
    }
)
