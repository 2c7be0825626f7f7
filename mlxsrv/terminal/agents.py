"""`mlxsrv run`: a coding agent with a server for one session; nothing that its user set changes."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from mlxsrv.arguments import Arguments, command_arguments, no_such, one_of
from mlxsrv.configuration import settings_from
from mlxsrv.connect.address import NO_KEY, address_of
from mlxsrv.connect.clients import CLIENTS
from mlxsrv.connect.formats import new_text
from mlxsrv.connect.setup import FILE, KEY, ClientSetup, Session
from mlxsrv.connect.url import KEY_VARIABLE
from mlxsrv.options import SettingsError
from mlxsrv.terminal.starting import running_server

_LOOK = 1.0
"""Seconds between two looks whether a signal has come."""


def run_agent(arguments: Sequence[str]) -> int:
    """Run an agent until it ends, and return its exit status."""
    ours, theirs = _divide(arguments)
    flags = run_agent_arguments().read(ours)
    client, asked, url = (flags.pop(name) for name in ("client", "asked", "url"))
    program = _program(client)
    with running_server(settings_from(flags), flags, url=url, model=asked) as (server, name):
        address = address_of(server.url, server.model(name), key=server.key is not None)
        setup = CLIENTS[client](address)
        print(f"mlxsrv: {setup.title} with {address.model} at {server.url}", file=sys.stderr)
        for warning in address.warnings:
            print(f"mlxsrv: {warning}", file=sys.stderr)
        return _run(program, setup, server.key, theirs)


def run_agent_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = command_arguments(
        "run",
        "Run a coding agent that uses this server, with settings for this session only: nothing "
        "that you have set is changed. Uses the server that runs at the address of the options, "
        "else starts one and stops it at the end. What follows -- is for the agent.",
        operands="AGENT [MODEL] [-- ARGUMENTS]",
    )
    agents = [*_runnable()]
    parser.add_argument(
        "client",
        metavar="AGENT",
        nargs="?",
        choices=agents,
        type=_agent,
        help=f"One of: {', '.join(agents)}.",
    )
    parser.add_argument("asked", metavar="MODEL", nargs="?", help="Model; else the default one.")
    parser.add_argument("--url", help="Address of the server, if not http://HOST:PORT.")
    return parser


def _divide(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The arguments before `--`, and those behind it."""
    if "--" not in arguments:
        return arguments, ()
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _runnable() -> dict[str, str]:
    """The agents that can be run, each with its program."""
    anywhere = address_of(
        "http://127.0.0.1", {"id": "", "context_length": None, "capabilities": ()}, key=False
    )
    setups = {name: setup(anywhere) for name, setup in CLIENTS.items()}
    return {name: setup.session.program for name, setup in setups.items() if setup.session}


def _agent(text: str) -> str:
    """Read an agent's name, for `type` of an argument."""
    agents = _runnable()
    if text in CLIENTS and text not in agents:
        raise argparse.ArgumentTypeError(f"{text} is set up, not run: mlxsrv connect {text}")
    return one_of("an agent", agents)(text)


def _program(client: str | None) -> str:
    """The path of the agent's program. Raises SettingsError if there is none."""
    agents = _runnable()
    if client is None:
        raise no_such("an agent", None, agents)
    program = shutil.which(agents[client])
    if program is None:
        raise SettingsError(
            f"{client} is not installed here: there is no program {agents[client]!r}"
        )
    return program


def _run(program: str, setup: ClientSetup, key: str | None, arguments: Sequence[str]) -> int:
    assert setup.session is not None
    with tempfile.TemporaryDirectory(prefix="mlxsrv-") as folder:
        file = ""
        if setup.file is not None:
            path = Path(folder, Path(setup.file.name).name)
            path.write_text(new_text(setup.file.format, setup.file.content), "utf-8")
            file = str(path)
        first = [each.replace(FILE, file) for each in setup.session.arguments]
        command = [program, *first, *arguments]
        environment = _environment(setup.session, file, key)
        status = _run_to_its_end(command, environment)
    return status if status >= 0 else 128 - status


def _run_to_its_end(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the agent, and return its status. What would end this command ends the agent first, which
    may have something to save. Ctrl-C is for the agent alone, which has it from the terminal."""
    asked: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:
            asked.append(number)
            for agent in running:
                agent.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        with subprocess.Popen(command, env=environment) as agent:
            running.append(agent)
            for number in asked:  # while it was started
                agent.send_signal(number)
            while True:
                # Python handles a signal that comes just before a wait only when the wait is over,
                # so each wait is short.
                with suppress(subprocess.TimeoutExpired):
                    return agent.wait(_LOOK)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(session: Session, file: str, key: str | None) -> Mapping[str, str]:
    """This command's, with the variables of the session."""
    own = {
        name: value.replace(FILE, file).replace(KEY, key or NO_KEY)
        for name, value in session.variables.items()
    }
    return {**os.environ, **own, **({} if key is None else {KEY_VARIABLE: key})}
