"""`mlxsrv service`: have the system run the server, at each login and after each failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxsrv.arguments import Arguments, add_model, command_arguments, one_of
from mlxsrv.configuration import settings_from
from mlxsrv.connect.writing import plan_text, write_change
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings, options
from mlxsrv.terminal.client import RequestFailed, client_of
from mlxsrv.terminal.screen import agreed
from mlxsrv.terminal.starting import as_arguments
from mlxsrv.terminal.units import Steps, Unit, unit

_HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "XDG_CACHE_HOME")
"""They say where models are. A token is no part of it: `hf auth login` keeps one in a file."""

_NO_ANSWER = 1
"""The status, with a reason, of a manager that knows nothing: of a service that does not run it is
another (systemctl: 3, launchctl: 113)."""

_ACTIONS = ("install", "uninstall", "status")


def service(arguments: Sequence[str]) -> None:
    """Install the service, take it away, or say how it is."""
    flags = service_arguments().read(arguments)
    action, yes = flags.pop("action"), flags.pop("yes")
    settings = settings_from(flags)
    described = unit(
        [sys.executable, "-m", "mlxsrv", "--exit-on-failure", *as_arguments(flags)],
        _variables(),
        Path.cwd(),
        settings.shutdown_grace,
    )
    if shutil.which(described.program) is None:
        raise SettingsError(f"there is no {described.program} here, which runs services")
    if action == "install":
        _install(described, flags, settings, yes=yes)
    elif action == "uninstall":
        _uninstall(described, yes=yes)
    else:
        _show(described, settings)


def service_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = command_arguments(
        "service",
        "Run the server as a service of yours: of launchd on macOS, of systemd on Linux. ACTION is "
        "install, uninstall or status. The options are those that the server shall have.",
        operands="ACTION [MODEL]",
    )
    parser.add_argument(
        "action",
        metavar="ACTION",
        choices=_ACTIONS,
        type=one_of("an action", _ACTIONS),
        help="install, uninstall or status.",
    )
    add_model(parser)
    parser.add_argument("--yes", action="store_true", help="Do it without asking.")
    return parser


def _install(described: Unit, flags: Mapping[str, Any], settings: Settings, *, yes: bool) -> None:
    """Show the file, ask, write it, and start the service. Raises SettingsError, ServeError."""
    # Imported here: the other actions need not know what is on the disk.
    from mlxsrv.models.catalogue.catalogue import Catalogue

    for option in (each for each in options() if each.secret):
        if flags.get(option.name):
            raise SettingsError(f"{option.flag} would stand in a file; give --api-key-file instead")
        if os.environ.get(option.variable) and settings.api_key_file is None:
            raise SettingsError(
                f"{option.variable} is not for a file, so the service would ask for no key; give "
                "--api-key-file, or unset it"
            )
    Catalogue(settings).require_default()
    change = plan_text(described.path, described.text)
    client = client_of(settings, None)
    if change.before is None and client.is_taken():
        raise SettingsError(f"{client.url} is in use; stop what runs there: mlxsrv stop")
    print(f"{change.path}:\n\n{change.after}")
    if change.needed:
        question = "Write this file and start the service?"
        copy = write_change(change, lambda: yes or agreed(question, remedy="add --yes to do it"))
        print(f"The file is written{f'; the old one is {copy}' if copy else ''}.")
    not_enabled = _run(described.enable)
    if failure := _run(described.start) or not_enabled:
        begins = "" if not_enabled else ", and begins at your next login"
        print(f"The service is installed{begins}, but {described.program} could not start it now.")
        without = "To run the server without it: mlxsrv serve"
        print(f"To take it away: mlxsrv service uninstall. {without}")
        raise RequestFailed(failure)
    print(f"The service is started: {client.url}. {described.note}")
    print(f"Its log: {described.logs}")


def _uninstall(described: Unit, *, yes: bool) -> None:
    """Ask, stop the service, and remove its file. Raises SettingsError, RequestFailed."""
    path = described.path
    if not path.exists():
        raise SettingsError(f"no service is installed: there is no {path}")
    if not yes and not agreed(f"Stop the service and remove {path}?", remedy="add --yes to do it"):
        raise SettingsError("the service stays")
    failure = _run(described.stop)
    if failure and _runs(described):  # else it had been stopped before
        raise RequestFailed(failure)
    path.unlink()
    _run(described.forget)
    print(f"The service has stopped, and {path} is removed. Models and settings stay.")
    if older := sorted(map(str, path.parent.glob(f"{path.name}.bak*"))):
        print(f"Copies of older files stay, too: {', '.join(older)}")


def _show(described: Unit, settings: Settings) -> None:
    if not described.path.exists():
        print("No service is installed. To install one: mlxsrv service install")
        return
    client = client_of(settings, None)
    print(f"Installed: {described.path}")
    asked = _ask(described)
    unknown = asked.returncode == _NO_ANSWER and asked.stderr.strip()
    state = "unknown" if unknown else "not running" if asked.returncode else "running"
    print(f"State: {state}; its log: {described.logs}")
    silent = "no answer; give the service's own --port here as well"
    print(f"{client.url}: {client.health()['status'] if client.is_there() else silent}")
    if unknown:
        raise RequestFailed(f"{' '.join(described.state)}: {unknown}")


def _runs(described: Unit) -> bool:
    return _ask(described).returncode == 0


def _ask(described: Unit) -> subprocess.CompletedProcess[str]:
    return subprocess.run(described.state, capture_output=True, text=True, check=False)


def _run(steps: Steps) -> str:
    """Run commands of the service manager; "" if the last one succeeds, else what it said."""
    said = ""
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        why = done.stderr.strip() or f"status {done.returncode}"
        said = f"{' '.join(step)}: {why}" if done.returncode else ""
    return said


def _variables() -> dict[str, str]:
    """The variables of this shell that the server shall have as well; no secret is among them."""
    wanted = [*(each.variable for each in options() if not each.secret), *_HUB_VARIABLES]
    return {name: os.environ[name] for name in (*wanted, "MLXSRV_CONFIG") if name in os.environ}
