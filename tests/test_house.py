"""The rules of the house: who may import whom, and what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlxsrv

ROOT = Path(mlxsrv.__file__).parent

FLOORS = {
    "settings": 0,
    "errors": 0,
    "events": 0,
    "logs": 0,
    "version": 0,
    "text": 1,
    "wire": 1,
    "engine": 2,
    "models": 3,
    "service": 4,
    "web": 5,
    "commands": 6,
    "descriptors": 0,
    "framing": 1,
    "connection": 6,
    "cli": 6,
    "__main__": 6,
    "__init__": 6,
}

# Where a library may be imported: a floor, or one file.
LIBRARIES = {
    "mlx": {"engine"},
    "mlx_lm": {"engine"},
    "starlette": {"web"},
    "uvicorn": {"cli", "connection"},
}

# A tool that makes the demo model: it is run, not imported, and trains with MLX.
TOOLS = "models/demo/"


def modules() -> Iterator[Path]:
    return ROOT.rglob("*.py")


def imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module


def room(path: Path) -> str:
    """The file's or package's place in FLOORS."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_file_has_a_floor() -> None:
    assert {room(path) for path in modules()} == set(FLOORS)


def test_no_import_runs_up() -> None:
    for path in modules():
        here = room(path)
        for name in imports(path):
            package, *rest = name.split(".")
            if package != "mlxsrv" or TOOLS in path.as_posix():
                continue
            there = rest[0] if rest else "__init__"
            inside = here == there and path.parent != ROOT
            entry = (here, there) in {
                ("__main__", "cli"),
                ("cli", "commands"),
                ("cli", "connection"),
            }
            assert inside or entry or FLOORS[there] < FLOORS[here] or here == "__init__", (
                f"{path.relative_to(ROOT)} on floor {FLOORS[here]} imports {name}"
            )


def test_libraries_stay_in_their_rooms() -> None:
    for path in modules():
        if TOOLS in path.as_posix():
            continue
        for name in imports(path):
            allowed = LIBRARIES.get(name.split(".")[0])
            assert allowed is None or room(path) in allowed, f"{path} imports {name}"


def test_nothing_imports_the_tools() -> None:
    for path in modules():
        if TOOLS not in path.as_posix():
            assert not [name for name in imports(path) if name.startswith("mlxsrv.models.demo")]


def test_files_stay_readable() -> None:
    for path in modules():
        if TOOLS not in path.as_posix():
            assert len(path.read_text().splitlines()) <= 550, f"{path} has two reasons to change"


def test_public_names() -> None:
    assert sorted(mlxsrv.__all__) == ["Settings", "__version__", "create_app", "lifespan"]
    for name in mlxsrv.__all__:
        assert getattr(mlxsrv, name) is not None


def test_importing_mlxsrv_imports_no_mlx() -> None:
    """`--help` and apps that only mount the server must not pay for MLX and transformers."""
    heavy = "('mlx', 'mlx_lm', 'transformers')"
    code = f"import sys, mlxsrv.cli; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
