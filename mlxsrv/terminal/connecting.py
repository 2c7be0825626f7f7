"""`mlxsrv connect`: what makes a client use the server, printed or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxsrv.arguments import Arguments, command_arguments, no_such, one_of
from mlxsrv.configuration import settings_from
from mlxsrv.connect.address import find_address
from mlxsrv.connect.clients import CLIENTS
from mlxsrv.connect.setup import ClientSetup
from mlxsrv.connect.writing import plan_change, write_change
from mlxsrv.options import SettingsError
from mlxsrv.terminal.client import client_of
from mlxsrv.terminal.screen import agreed


def connect(arguments: Sequence[str]) -> None:
    """Print what makes a client use the server with these options, or write it."""
    flags = connect_arguments().read(arguments)
    client, model, url = (flags.pop(name) for name in ("client", "for_model", "url"))
    write, yes = flags.pop("write"), flags.pop("yes")
    if client is None:
        raise no_such("a client", None, CLIENTS)
    settings = settings_from(flags)
    server = find_address(settings, url, model)
    setup = CLIENTS[client](server)
    print(setup.text(server))
    if url is None and settings.port and not (asked := client_of(settings, None)).is_taken():
        print(f"\nNo server runs at {asked.url}: start one first, with mlxsrv.")
    if write:
        print()
        _write(setup, lambda: yes or agreed("Write this?", remedy="add --yes to write"))


def connect_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = command_arguments(
        "connect",
        f"Print the settings that a client needs to use this server. Give it the options that the "
        f"server has; no server need run. CLIENT is one of: {', '.join(CLIENTS)}.",
        operands="CLIENT",
    )
    parser.add_argument(
        "client",
        metavar="CLIENT",
        nargs="?",
        choices=[*CLIENTS],
        type=one_of("a client", CLIENTS),
    )
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
    return parser


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
