"""The server as a service of its user: the file for launchd or for systemd, and their commands."""

from __future__ import annotations

import os
import plistlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

_NAME = "mlxsrv"
_MARGIN = 10.0
"""Seconds beyond `--shutdown-grace` after which a server that does not end is killed."""

_WRONG_SETTING = 2
"""The exit status for a wrong setting: another start would end with it as well."""

Steps = tuple[tuple[str, ...], ...]


class Unit(msgspec.Struct, frozen=True):
    """A service.

    Attributes:
        path: of its file.
        text: that the file shall have.
        program: that manages services here.
        enable: commands that have it start at each login; its file alone may do.
        start: commands that start it now; it may run already.
        stop: commands that stop it for good.
        forget: commands once its file is gone.
        state: the command whose status says whether it runs.
        logs: how to read what it logs.
        note: a sentence for its user.
    """

    path: Path
    text: str
    program: str
    enable: Steps
    start: Steps
    stop: Steps
    forget: Steps
    state: tuple[str, ...]
    logs: str
    note: str


def unit(command: Sequence[str], variables: Mapping[str, str], folder: Path, grace: float) -> Unit:
    """The service of this system that runs a command.

    Args:
        folder: that the command's relative paths begin at.
        grace: seconds that it may take to end.
    """
    make = _launchd if sys.platform == "darwin" else _systemd
    return make(command, variables, folder, grace)


def _launchd(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, grace: float
) -> Unit:
    domain = f"gui/{os.getuid()}"
    log = Path("~/Library/Logs/mlxsrv.log").expanduser()
    path = Path(f"~/Library/LaunchAgents/{_NAME}.plist").expanduser()
    content = {
        "Label": _NAME,
        "ProgramArguments": list(command),
        "EnvironmentVariables": dict(variables),
        "WorkingDirectory": str(folder),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": int(grace + _MARGIN),
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    return Unit(
        path=path,
        text=plistlib.dumps(content, sort_keys=False).decode(),
        program="launchctl",
        enable=(),
        # An earlier version of it must go first; bootout fails where there is none.
        start=(
            ("launchctl", "bootout", f"{domain}/{_NAME}"),
            ("launchctl", "bootstrap", domain, str(path)),
        ),
        stop=(("launchctl", "bootout", f"{domain}/{_NAME}"),),
        forget=(),
        state=("launchctl", "print", f"{domain}/{_NAME}"),
        logs=f"tail -f {log}",
        note="It runs while you are logged in.",
    )


def _systemd(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, grace: float
) -> Unit:
    manage = ("systemctl", "--user")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    lines = [
        "[Unit]",
        "Description=mlxsrv, a server for MLX language models",
        "",
        "[Service]",
        # A dollar begins a variable here, and nowhere else.
        f"ExecStart={' '.join(_quoted(each).replace('$', '$$') for each in command)}",
        f"WorkingDirectory={str(folder).replace('%', '%%')}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()),
        "Restart=on-failure",
        "RestartSec=10",
        f"RestartPreventExitStatus={_WRONG_SETTING}",
        f"TimeoutStopSec={grace + _MARGIN:g}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return Unit(
        path=config / "systemd" / "user" / f"{_NAME}.service",
        text="\n".join(lines) + "\n",
        program="systemctl",
        enable=((*manage, "daemon-reload"), (*manage, "enable", _NAME)),
        start=((*manage, "restart", _NAME),),
        stop=((*manage, "disable", "--now", _NAME),),
        forget=((*manage, "daemon-reload"),),
        state=(*manage, "is-active", "--quiet", _NAME),
        logs=f"journalctl --user -u {_NAME} -f",
        note="It runs while you are logged in; to run it always: loginctl enable-linger",
    )


def _quoted(text: str) -> str:
    """An argument as systemd reads it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if escaped != text or not text or set(text) & set(" '\t;") else text
