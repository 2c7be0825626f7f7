"""`mlxsrv ps` and `mlxsrv stop`: see a running server, and end it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxsrv.arguments import Arguments, command_arguments
from mlxsrv.configuration import settings_from
from mlxsrv.logs import sized
from mlxsrv.options import SettingsError
from mlxsrv.terminal.client import RequestFailed, client_of
from mlxsrv.terminal.processes import ListeningProcess, listening_process
from mlxsrv.terminal.screen import aligned


def ps(arguments: Sequence[str]) -> None:
    """Print the models, requests and memory of a running server."""
    flags = ps_arguments().read(arguments)
    url, as_json = flags.pop("url"), flags.pop("json")
    client = client_of(settings_from(flags), url)
    state = client.health(verbose=True)
    print(json.dumps(state, indent=2) if as_json else "\n".join(_lines(client.url, state)))


def ps_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = command_arguments(
        "ps",
        "Show a running server: its models, running and waiting requests, and memory.",
    )
    parser.add_argument("--url", help="Address of the server, if not http://HOST:PORT.")
    parser.add_argument("--json", action="store_true", help="Print /health?verbose=1 as it is.")
    return parser


def _lines(url: str, state: Mapping[str, Any]) -> Iterator[str]:
    reason = f" ({state['reason']})" if "reason" in state else ""
    yield f"{url}: {state['status']}{reason}"
    if "memory" not in state:
        yield "The device is busy, and does not say what it holds."
        return
    if state["models"]:
        head = ("MODEL", "STATE", "RUNNING", "WAITING", "MEMORY", "IDLE")
        yield aligned([head, *map(_row, state["models"])])
    else:
        yield "No model is loaded."
    memory, requests = state["memory"], state["requests"]
    held = {"weights": "weights", "rows": "running requests", "kept": "cached prompts"}
    parts = (f"{sized(memory[name])} of {words}" for name, words in held.items())
    yield f"Memory: {', '.join(parts)}; the limit is {sized(memory['limit'])}."
    yield (
        f"Requests since the start: {requests['ended']}, of which {requests['failed']} failed; "
        f"{requests['prompt_tokens']:,} tokens read ({requests['cached_tokens']:,} from the prompt "
        f"cache), {requests['completion_tokens']:,} written."
    )


def _row(model: Mapping[str, Any]) -> tuple[str, ...]:
    arrived, idle = model["download"], model["idle_seconds"]
    done = f" {arrived['completed'] / max(arrived['total'], 1):.0%}" if arrived else ""
    return (
        model["id"],
        model["state"] + done,
        str(model["rows"]),
        str(model["waiting_for_load"] + model["waiting_for_row"]),
        "-" if model["bytes"] is None else sized(model["bytes"]),
        "-" if idle is None else f"{idle:.0f} s",
    )


def stop(arguments: Sequence[str]) -> None:
    """End the server that listens at this machine's port, as SIGTERM does."""
    settings = settings_from(stop_arguments().read(arguments))
    if settings.port == 0:
        raise SettingsError("port 0 is any free one; give the --port of the server")
    process = _server_process(settings.port)
    print(f"Stopping the server on port {settings.port} (process {process.pid}).", flush=True)
    process.end_and_wait()
    print("It has stopped.")


def stop_arguments() -> Arguments:
    """Make the parser of the command."""
    return command_arguments(
        "stop",
        "Stop the server of this user that listens on --port of this machine. Running requests "
        "may finish, for at most its --shutdown-grace seconds.",
    )


def _server_process(port: int) -> ListeningProcess:
    """The server's process. Raises RequestFailed if none may be stopped."""
    process = listening_process(port)
    if process is None:
        raise RequestFailed(f"no server of this user listens on port {port} of this machine")
    if not process.is_server:
        raise RequestFailed(f"port {port} is that of another program, which stays ({process})")
    return process
