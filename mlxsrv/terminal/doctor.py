"""`mlxsrv doctor`: look at all that a server needs here, and say what is wrong and what to do."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import msgspec
from huggingface_hub import constants

from mlxsrv.arguments import Arguments, command_arguments
from mlxsrv.configuration import settings_from
from mlxsrv.engine.backend import describe_device, require_backend
from mlxsrv.engine.working_memory import SERVED_SHARE, find_working_memory
from mlxsrv.errors import BackendMissing
from mlxsrv.logs import sized
from mlxsrv.models.catalogue.catalogue import Catalogue
from mlxsrv.settings import Settings
from mlxsrv.terminal.client import RequestFailed, client_of
from mlxsrv.terminal.processes import listening_process
from mlxsrv.terminal.starting import running_server
from mlxsrv.version import __version__

_LIBRARIES = ("mlx", "mlx-lm", "transformers", "huggingface-hub", "starlette", "uvicorn")
_LITTLE_DISK = 10e9
_HUB_PATIENCE = 5.0
_QUESTION = "Who are you?"

EXTRAS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fast": "a faster event loop",
        "structured": "structured output, forced tool calls",
        "connect": "connect --write into files of TOML and YAML",
        "metrics": "--metrics",
        "otel": "--otel",
        "ray": "mlxsrv replicas",
        **({"blas": "OpenBLAS, for MLX on the CPU"} if sys.platform == "linux" else {}),
    }
)
"""The extras of the package, with what each is for."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. A `note` is worth knowing; with a `fault` the server does not work,
    or not as it was told to."""

    state: Literal["ok", "note", "fault"]
    text: str


def doctor(arguments: Sequence[str]) -> int:
    """Print what is found. Returns 1 if something is wrong."""
    settings = settings_from(doctor_arguments().read(arguments))
    found = {"ok": 0, "note": 0, "fault": 0}
    for check in _CHECKS:
        for finding in check(settings):
            mark = {"ok": "ok   ", "note": "note ", "fault": "FAULT"}[finding.state]
            print(f"{mark}  {finding.text}", flush=True)
            found[finding.state] += 1
    if found["fault"]:
        print("What is marked FAULT needs you.")
        return 1
    notes = found["note"]
    print(f"No fault; {notes} note{'' if notes == 1 else 's'}." if notes else "All is well.")
    return 0


def doctor_arguments() -> Arguments:
    """Make the parser of the command."""
    return command_arguments(
        "doctor",
        "Check what a server with these options needs on this machine: MLX's back end, memory, "
        "disk, port, models, the hub, and one answer of the demo model.",
    )


def _software(_: Settings) -> Iterator[Finding]:
    python, system = platform.python_version(), platform.platform(terse=True)
    yield Finding("ok", f"mlxsrv {__version__}, Python {python}, {system}")
    versions = (f"{name} {_version(name) or 'missing'}" for name in _LIBRARIES)
    yield Finding("ok", ", ".join(versions))


def _back_end(_: Settings) -> Iterator[Finding]:
    try:
        require_backend()
    except BackendMissing as error:
        yield Finding("fault", error.message)
        return
    device = describe_device()
    name = device.get("device_name", "")
    yield Finding("ok", f"MLX computes on the {str(device['kind']).upper()} {name}".rstrip())


def _memory(settings: Settings) -> Iterator[Finding]:
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usable = find_working_memory(describe_device(), held=0, ram=ram)
    limit = settings.memory_limit or int(SERVED_SHARE * usable)
    text = f"{sized(ram)} of memory; models and their requests may take {sized(limit)}"
    if limit > usable:
        yield Finding("note", f"{text}, more than the {sized(usable)} that MLX can work in")
    else:
        yield Finding("ok", text)


def _disk(_: Settings) -> Iterator[Finding]:
    cache = Path(constants.HF_HUB_CACHE).absolute()
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(there).free
    state: Literal["ok", "note"] = "ok" if free > _LITTLE_DISK else "note"
    yield Finding(state, f"{sized(free)} free for downloads, in {cache}")
    if there == cache and not os.access(cache, os.W_OK):
        yield Finding("fault", f"{cache} cannot be written; HF_HOME names another place")


def _port(settings: Settings) -> Iterator[Finding]:
    if settings.port == 0:
        return
    client, process = client_of(settings, None), listening_process(settings.port)
    who = f" ({process})" if process else ""
    if client.is_there():
        yield Finding("ok", f"a server runs at {client.url}{who}")
    elif client.is_taken():
        yield Finding("fault", f"port {settings.port} is another program's{who}; give --port")
    else:
        yield Finding("ok", f"port {settings.port} is free")


def _extras(_: Settings) -> Iterator[Finding]:
    missing = {extra: use for extra, use in EXTRAS.items() if not _is_installed(extra)}
    there = ", ".join(extra for extra in EXTRAS if extra not in missing)
    yield Finding("ok", f"extras: {there or 'none'}")
    for extra, use in missing.items():
        yield Finding("note", f"without the extra {extra} ({use}): pip install 'mlxsrv[{extra}]'")


def _is_installed(extra: str) -> bool:
    needed = [
        re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        for requirement in metadata.requires("mlxsrv") or ()
        if re.search(rf"extra == ['\"]{extra}['\"]", requirement)
    ]
    return all(_version(name) for name in needed)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _models(settings: Settings) -> Iterator[Finding]:
    catalogue = Catalogue(settings)
    catalogue.scan()
    fine = [entry.name for entry in catalogue if entry.problem is None]
    yield Finding("ok", f"models: {', '.join(fine)}")
    default = catalogue.known(None)
    if default is not None and default.problem is None and default.description is None:
        yield Finding("note", f"{default.name} is not here: the server downloads it when it starts")
    for entry in catalogue:
        if entry.problem is not None:
            state: Literal["fault", "note"] = "fault" if entry.name == catalogue.default else "note"
            yield Finding(state, f"{entry.name} is left out: {entry.problem}")


def _hub(_: Settings) -> Iterator[Finding]:
    if constants.HF_HUB_OFFLINE:
        yield Finding("note", "HF_HUB_OFFLINE is set: nothing can be downloaded")
        return
    try:
        asked = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(asked, timeout=_HUB_PATIENCE).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield Finding("note", f"{constants.ENDPOINT} cannot be reached, for downloads: {reason}")
        return
    yield Finding("ok", f"{constants.ENDPOINT} can be reached, for downloads")


def _generation(_: Settings) -> Iterator[Finding]:
    pieces: list[str] = []
    began = time.monotonic()
    try:
        flags = {"model": ["demo"], "hf_cache": False}
        with running_server(Settings(port=0), flags, url=None) as (client, name):
            started = time.monotonic()
            body = {"model": name, "messages": [{"role": "user", "content": _QUESTION}]}
            with client.chat(body) as stream:
                pieces.extend(text for _, text in stream)
    except RequestFailed as error:
        yield Finding("fault", f"the demo model does not answer: {error.message}")
        return
    took = time.monotonic() - started
    answer = "".join(pieces)
    yield Finding("ok", f"a server started in {started - began:.1f} s and answered in {took:.1f} s")
    if "demo model" not in answer:
        yield Finding(
            "fault", f"the demo model's answer to {_QUESTION!r} is wrong: {answer!r:.200}"
        )


_CHECKS: Final[tuple[Callable[[Settings], Iterator[Finding]], ...]] = (
    *(_software, _back_end, _memory, _disk, _port),
    *(_extras, _models, _hub, _generation),
)
