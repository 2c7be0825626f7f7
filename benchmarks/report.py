"""The report that every benchmark prints: where its figures were taken, and tables of them."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

BIAS = (
    "Bias: the load generator runs on the same cores as the server, and takes its share of them "
    "from whichever of the two is measured."
)
_PACKAGES = ("mlx", "mlx-lm", "mlxsrv", "uvicorn")
_ACCELERATORS = ("uvloop", "scipy-openblas32")  # used where they are installed


class Machine(msgspec.Struct, frozen=True):
    """Where and with what the figures were taken."""

    day: str
    cpu: str
    cores: int
    system: str
    python: str
    packages: dict[str, str]


def describe_machine() -> Machine:
    return Machine(
        day=date.today().isoformat(),
        cpu=_name_cpu(),
        cores=os.cpu_count() or 0,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: _find_version(name) for name in _PACKAGES + _ACCELERATORS},
    )


def format_machine(machine: Machine) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"{machine.day}: {machine.cores} x {machine.cpu}, {machine.system}\n"
        f"Python {machine.python}, {packages}"
    )


def format_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines) + "\n"


def write_json(path: Path, result: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def _name_cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.check_output(command, text=True, timeout=5).strip()
    return platform.processor() or "unknown processor"


def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
