"""The commands: `mlxsrv serve`, `mlxsrv models`, `mlxsrv pull`, `mlxsrv connect`, `mlxsrv replay`
and `mlxsrv replicas`.

Each takes its arguments, prints, and raises SettingsError or ServeError.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from mlxsrv.arguments import Arguments, command_arguments, server_arguments
from mlxsrv.configuration import settings_from
from mlxsrv.connect.address import find_address
from mlxsrv.connect.clients import CLIENTS
from mlxsrv.connect.setup import ClientSetup
from mlxsrv.connect.writing import plan_change, write_change
from mlxsrv.engine.recording.record_file import RecordError
from mlxsrv.engine.recording.replay import replay_record
from mlxsrv.models.catalogue import hub_cache
from mlxsrv.models.catalogue.catalogue import Catalogue, ModelEntry
from mlxsrv.options import SettingsError
from mlxsrv.replicas.command import replicas
from mlxsrv.server.serve import serve
from mlxsrv.terminal.agents import run_agent, runnable
from mlxsrv.terminal.chat import chat
from mlxsrv.terminal.completion import SHELLS, CompletedCommand, completion_script
from mlxsrv.terminal.doctor import doctor
from mlxsrv.terminal.recommending import recommend
from mlxsrv.terminal.removing import rm
from mlxsrv.terminal.screen import agreed, aligned, sized
from mlxsrv.terminal.services import ACTIONS, service
from mlxsrv.terminal.watching import ps, stop


def run_server(arguments: Sequence[str]) -> int:
    """Serve until a signal. Returns the exit status."""
    parser = server_arguments({name: command.does for name, command in COMMANDS.items()})
    return serve(settings_from(parser.read(arguments)))


class ModelLine(msgspec.Struct, frozen=True, kw_only=True):
    """A model as `mlxsrv models --json` prints it.

    `place` is its folder or its id on the hub; `problem` says why it cannot be served, None if it
    can; `size` is in bytes.
    """

    id: str
    aliases: tuple[str, ...]
    default: bool
    place: str
    problem: str | None
    type: str | None = None
    context_length: int | None = None
    parameter_size: str | None = None
    quantization_level: str | None = None
    size: int | None = None
    capabilities: tuple[str, ...] = ()


def models(arguments: Sequence[str]) -> None:
    """Print which models a server with these options would serve, and why not the others.

    No model is loaded.
    """
    parser = command_arguments(
        "models",
        "List the models that a server with the same options would serve, and why others "
        "cannot be.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, one list of objects.")
    flags = parser.read(arguments)
    as_json = flags.pop("json")
    catalogue = Catalogue(settings_from(flags))
    catalogue.scan()
    lines = [_line(entry, default=entry.name == catalogue.default) for entry in catalogue]
    lines.sort(key=lambda line: (line.problem is not None, line.id))
    print(msgspec.json.encode(lines).decode() if as_json else _table(lines))


def _line(entry: ModelEntry, *, default: bool) -> ModelLine:
    line = ModelLine(
        id=entry.name,
        aliases=entry.aliases,
        default=default,
        place=str(entry.source),
        problem=entry.problem,
    )
    known = entry.description
    if known is None:
        return line
    return msgspec.structs.replace(
        line,
        type=known.type,
        context_length=known.context_length,
        parameter_size=known.parameter_size,
        quantization_level=known.quantization_level,
        size=known.size,
        capabilities=known.capabilities,
    )


def _table(lines: Iterable[ModelLine]) -> str:
    rows: list[tuple[str, ...]] = [
        ("MODEL", "TYPE", "CONTEXT", "PARAMETERS", "WEIGHTS", "SIZE", "")
    ]
    for line in lines:
        name = line.id + (" (default)" if line.default else "")
        if line.aliases:
            name += f" = {', '.join(line.aliases)}"
        note = ""
        if line.problem is not None:
            note = f"cannot be served: {line.problem}"
        elif line.type is None:
            note = "is downloaded on first use"
        values = (line.type, line.context_length, line.parameter_size, line.quantization_level)
        shown = ["-" if value is None else str(value) for value in values]
        rows.append((name, *shown, "-" if line.size is None else sized(line.size), note))
    return aligned(rows)


def pull(arguments: Sequence[str]) -> None:
    """Download a model into the Hugging Face cache and print its folder."""
    parser = Arguments(
        "pull",
        "Download a model from the Hugging Face hub into its cache, where a server finds it. A "
        "download that was interrupted continues where it stopped.",
        operands="ORG/NAME[@REVISION]",
    )
    parser.add_argument("repository", metavar="ORG/NAME[@REVISION]", help="The model on the hub.")
    parser.add_argument("--quiet", action="store_true", help="Show no progress.")
    asked = parser.read(arguments)
    try:
        repository = hub_cache.Repository.parse(asked["repository"])
    except ValueError as error:
        raise SettingsError(str(error)) from None
    # Imported here, because the import takes 0.1 s and the other commands do not need it.
    from mlxsrv.models.catalogue.download import fetch

    print(fetch(repository, progress=not asked["quiet"] and sys.stderr.isatty()))


def connect(arguments: Sequence[str]) -> None:
    """Print what makes a client use the server with these options, or write it."""
    parser = command_arguments(
        "connect",
        f"Print the settings that a client needs to use this server. Give it the options that the "
        f"server has; no server need run. CLIENT is one of: {', '.join(CLIENTS)}.",
        operands="CLIENT",
    )
    parser.add_argument("client", metavar="CLIENT", nargs="?")
    parser.add_argument(
        "--for-model", metavar="NAME", help="Model that the client uses, if not the default one."
    )
    parser.add_argument(
        "--url", help="Address at which the client reaches the server, if not http://HOST:PORT."
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="Write the client's configuration file, after showing the difference and asking. "
        "A copy of the old file is kept beside it.",
    )
    parser.add_argument("--yes", action="store_true", help="Write without asking.")
    flags = parser.read(arguments)
    client, model, url = (flags.pop(name) for name in ("client", "for_model", "url"))
    write, yes = flags.pop("write"), flags.pop("yes")
    if client not in CLIENTS:
        wrong = "name a client" if client is None else f"there is no client {client!r}"
        raise SettingsError(f"{wrong}; there are: {', '.join(CLIENTS)}")
    server = find_address(settings_from(flags), url, model)
    setup = CLIENTS[client](server)
    print(setup.text(server))
    if write:
        print()
        _write(setup, lambda: yes or agreed("Write this?", remedy="add --yes to write"))


def _write(setup: ClientSetup, confirm: Callable[[], bool]) -> None:
    if setup.file is None:
        raise SettingsError(f"{setup.title} has no file to write; set it up as printed above")
    change = plan_change(setup.file)
    if not change.needed:
        print(f"{change.path} has all of this already.")
        return
    print(change.diff())
    copy = write_change(change, confirm)
    print(f"{change.path} is written" + (f"; the old one is {copy}" if copy else ""))


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
    try:
        replay_record(parser.read(arguments)["record"])
    except RecordError as error:
        raise SettingsError(str(error)) from None


def completion(arguments: Sequence[str]) -> None:
    """Print the script that has a shell complete all this."""
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
    """A command, and the line in the help of `mlxsrv` that says what it does.

    `run` returns the exit status; None is 0.
    """

    run: Callable[[Sequence[str]], int | None]
    does: str


COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "serve": Command(run_server, "serve models; mlxsrv without a command does the same"),
        "chat": Command(chat, "chat with a model in the terminal"),
        "run": Command(run_agent, "run a coding agent: codex, claude, opencode and others"),
        "connect": Command(connect, "set up a client: codex, claude, opencode and others"),
        "models": Command(models, "list the models that would be served, and why not others"),
        "recommend": Command(recommend, "list models that fit into this machine's memory"),
        "pull": Command(pull, "download a model"),
        "rm": Command(rm, "remove a model that was downloaded"),
        "ps": Command(ps, "show the models, requests and memory of a running server"),
        "stop": Command(stop, "stop a running server"),
        "service": Command(service, "run the server at each login: install, uninstall, status"),
        "doctor": Command(doctor, "check what a server needs on this machine"),
        "replicas": Command(replicas, "serve with several processes, under Ray Serve"),
        "replay": Command(replay, "run a record of a server again, for a bug report"),
        "completion": Command(completion, "complete all this in bash, zsh or fish"),
    }
)
