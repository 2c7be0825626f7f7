"""The commands of `mlxsrv`, in one table.

Each takes its arguments, prints, and raises SettingsError or ServeError. Its module is imported
when it runs: all of them together take a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mlxsrv.arguments import Arguments, one_of, server_arguments
from mlxsrv.configuration import settings_from
from mlxsrv.options import SettingsError


def run_server(arguments: Sequence[str]) -> int:
    """Serve until a signal. Returns the exit status."""
    settings = settings_from(run_server_arguments().read(arguments))
    from mlxsrv.server.serve import serve

    return serve(settings)


def run_server_arguments() -> Arguments:
    """Make the parser of the command."""
    return server_arguments({name: command.does for name, command in COMMANDS.items()})


def replay(arguments: Sequence[str]) -> None:
    """Run a record again: print what is in it, and whether the scheduler plans the same."""
    record = replay_arguments().read(arguments)["record"]
    from mlxsrv.engine.recording.record_file import RecordError
    from mlxsrv.engine.recording.replay import replay_record

    try:
        replay_record(record)
    except RecordError as error:
        raise SettingsError(str(error)) from None


def replay_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = Arguments(
        "replay",
        "Give the orders and outcomes of a record (mlxsrv --record FILE) to the "
        "scheduler, and compare its plans with those that were recorded. It needs no model. Exit "
        "status 1: something differs.",
        operands="FILE",
    )
    parser.add_argument("record", metavar="FILE", help="The record, which may be a .gz file.")
    return parser


def completion(arguments: Sequence[str]) -> None:
    """Print the script that has a shell complete all this."""
    from mlxsrv.terminal.completion import CompletedCommand, completion_script

    shell = completion_arguments().read(arguments)["shell"]
    commands = [CompletedCommand("help", "show the help of a command", {}, [], [*COMMANDS])]
    for name, command in COMMANDS.items():
        parser = command.arguments()
        common = [*parser.flags(rare=False)]
        commands.append(
            CompletedCommand(name, command.does, parser.flags(), common, parser.words())
        )
    print(completion_script(shell, commands, "serve"), end="")


def completion_arguments() -> Arguments:
    """Make the parser of the command."""
    from mlxsrv.terminal.completion import SHELLS

    parser = Arguments(
        "completion",
        "Print a script for a shell, which then completes commands and options with Tab. For "
        "bash, put this line into ~/.bashrc: source <(mlxsrv completion bash)",
        operands="SHELL",
    )
    parser.add_argument(
        "shell",
        metavar="SHELL",
        choices=[*SHELLS],
        type=one_of("a shell", SHELLS),
        help="bash, zsh or fish.",
    )
    return parser


class Command(NamedTuple):
    """A command.

    Attributes:
        place: of its function, as MODULE:NAME below the package. NAME_arguments makes its parser.
        does: the line about it in the help of `mlxsrv`.
    """

    place: str
    does: str

    def run(self, arguments: Sequence[str]) -> int | None:
        """Run it. Returns the exit status; None is 0."""
        status: int | None = self._find("")(arguments)
        return status

    def arguments(self) -> Arguments:
        """Make its parser."""
        parser: Arguments = self._find("_arguments")()
        return parser

    def _find(self, ending: str) -> Callable[..., Any]:
        module, _, name = self.place.partition(":")
        found: Callable[..., Any] = getattr(import_module(f"mlxsrv.{module}"), name + ending)
        return found


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
