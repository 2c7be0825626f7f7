"""The rules of the house: who may import whom, and what is public."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import mlxsrv

ROOT = Path(mlxsrv.__file__).parent

FLOORS = {
    "errors": 0,
    "generation": 0,
    "logs": 0,
    "states": 0,
    "version": 0,
    "wording": 0,
    "options": 1,
    "settings": 2,
    "arguments": 3,
    "configuration": 4,
    "text": 1,
    "formats": 1,
    "wire": 1,
    "prompts": 2,
    "engine": 3,
    "models": 4,
    "service": 5,
    "web": 6,
    "connect": 6,
    "server": 7,
    "replicas": 8,
    "terminal": 8,
    "commands": 9,
    "cli": 10,
    "__init__": 10,
    "__main__": 11,
}
"""A file imports from floors below its own, or from its own package."""

LIBRARIES = {
    "mlx": {"engine"},
    "mlx_lm": {"engine", "prompts/tokenizer", "prompts/token_texts"},
    "ray": {"replicas"},
    "starlette": {"web", "replicas"},
    "uvicorn": {"server"},
}
"""Where a library may be imported: a package, or one file."""

WITHOUT_MLX = {
    "engine/client",
    "engine/device",
    "engine/events",
    "engine/faults",
    "engine/live_row",
    "engine/orders",
    "engine/outcomes",
    "engine/plans",
    "engine/ranks/follower",
    "engine/ranks/leader",
    "engine/ranks/messages",
    "engine/recording",
    "engine/scheduling",
    "engine/runner",
    "engine/storage",
    "engine/watchdog",
}
"""Parts of the engine that decide or carry, and touch no array."""

HIGH_FOLDERS = {"engine/scheduling"}
"""Folders with more than seven floors of files, each of which uses the one below."""

PUBLIC_ROOMS = {"replicas"}
"""Rooms that have public names of their own, which their `__init__.py` imports."""

TRAINING = "models/demo/training/"
"""It makes the demo model: it is run, not imported, and trains with MLX."""


@cache
def modules() -> Mapping[str, Path]:
    """Every module by its name inside the package: `engine/device`; a package by its own."""
    return {name(path): path for path in sorted(ROOT.rglob("*.py"))}


def name(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    return (relative.parent if relative.name == "__init__" else relative).as_posix().lstrip(".")


def served() -> Iterator[str]:
    """The modules that are not the demo model's training."""
    return (module for module in modules() if not module.startswith(TRAINING))


@cache
def imports(module: str) -> frozenset[str]:
    """The modules that a module imports, wherever in it, by their dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if local(inner) in modules() else node.module)
    return frozenset(found)


def local(dotted: str) -> str:
    """A dotted name inside the package as `modules` has it; others stay as they are."""
    return dotted.removeprefix("mlxsrv").lstrip(".").replace(".", "/")


def imported(module: str) -> set[str]:
    """The modules of the package that a module imports."""
    return {
        local(dotted)
        for dotted in imports(module)
        if dotted == "mlxsrv" or dotted.startswith("mlxsrv.")
    }


def floor(module: str) -> int:
    return FLOORS[module.split("/")[0] or "__init__"]


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The nodes of one circle of a graph; empty if there is none."""
    finished: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in finished:
            return []
        for following in graph.get(node, ()):
            if found := search(following, [*path, node]):
                return found
        finished.add(node)
        return []

    return next((found for node in graph if (found := search(node, []))), [])


def test_every_file_has_a_floor() -> None:
    assert {module.split("/")[0] or "__init__" for module in modules()} == set(FLOORS)


def test_no_import_runs_up() -> None:
    for module in served():
        for other in imported(module):
            public = module in PUBLIC_ROOMS
            inside = (public or "/" in module) and module.split("/")[0] == other.split("/")[0]
            assert inside or floor(other) < floor(module), (
                f"{module} on floor {floor(module)} imports {other} on floor {floor(other)}"
            )


def test_no_modules_import_each_other() -> None:
    assert circle({module: imported(module) for module in served()}) == []


def test_no_rooms_import_each_other() -> None:
    """A room is a package; files of a package that has rooms of its own belong to none."""
    graph: dict[str, set[str]] = {}
    for module in served():
        here = room(module)
        there = {room(other) for other in imported(module)}
        graph.setdefault(here, set()).update(there - {here})
    assert circle(graph) == []


def test_a_folder_has_few_floors() -> None:
    """A reader goes from the lowest file of a folder to its highest in at most seven steps."""
    floors: dict[str, int] = {}

    def climb(module: str) -> int:
        if module not in floors:
            folder = module.rpartition("/")[0]
            below = {other for other in imported(module) if other.rpartition("/")[0] == folder}
            floors[module] = 1 + max(map(climb, below - {module}), default=0)
        return floors[module]

    high = {module.rpartition("/")[0] for module in served() if "/" in module and climb(module) > 7}
    assert high == HIGH_FOLDERS


def room(module: str) -> str:
    """The package that a module is in; a file beside rooms is a room for itself."""
    package = module.rpartition("/")[0]
    beside = any(
        other.startswith(f"{package}/") and "/" in other[len(package) + 1 :] for other in modules()
    )
    return module if beside else package or module


def test_circle_finds_one() -> None:
    assert circle({"a": ["b"], "b": ["c"], "c": []}) == []
    assert circle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c"]
    assert circle({"a": ["a"]}) == ["a"]


def test_rooms_say_what_they_are_for() -> None:
    for module, path in modules().items():
        if path.name == "__init__.py" and module:
            text = ast.get_docstring(ast.parse(path.read_text()))
            assert text, f"{module} has no sentence"
            code = ast.parse(path.read_text()).body[1:]
            assert not code or module in PUBLIC_ROOMS, f"{module}/__init__.py holds code"


def test_libraries_stay_in_their_rooms() -> None:
    for module in served():
        for dotted in imports(module):
            library = dotted.split(".")[0]
            allowed = LIBRARIES.get(library)
            if allowed is None:
                continue
            assert within(module, allowed), f"{module} imports {dotted}"
            if library in ("mlx", "mlx_lm"):
                assert not within(module, WITHOUT_MLX), f"{module} imports {dotted}"


def test_wire_types_stay_in_wire_and_web() -> None:
    """All other rooms know requests and answers in no dialect, as `generation/` has them."""
    for module in served():
        if not within(module, {"wire", "web"}):
            assert not [other for other in imported(module) if within(other, {"wire"})], module


def within(module: str, places: Iterable[str]) -> bool:
    return any(module == place or module.startswith(f"{place}/") for place in places)


def test_nothing_imports_the_training() -> None:
    for module in served():
        assert not [other for other in imported(module) if other.startswith(TRAINING)]


def test_docstrings_begin_with_their_subject() -> None:
    """A docstring says what something is or does: it is no question, and no part of a sentence."""
    words = "What|Of|Who|Whose|Those|Which|How|That"
    opening = re.compile(rf'^ *[rR]?"""\s*(?:{words})\b.*', re.MULTILINE)
    for room in ("mlxsrv", "tests", "benchmarks"):
        for path in (ROOT.parent / room).rglob("*.py"):
            assert opening.findall(path.read_text()) == [], path


def test_a_name_means_one_thing() -> None:
    """No two modules give a public class, type or function the same name.

    A route's handler in `web/` is called like what it calls.
    """
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            names = types_of(node)
            if not module.startswith(("web/", TRAINING)):
                names += functions_of(node)
            for name in names:
                places.setdefault(name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_method_name_stands_on_few_classes() -> None:
    """A public method name stands on at most six classes; an override counts with its base."""
    methods: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for module in served():
        for node in ast.walk(ast.parse(modules()[module].read_text())):
            if isinstance(node, ast.ClassDef):
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                methods[node.name] = {
                    each.name for each in node.body if isinstance(each, functions)
                }
                bases[node.name] = [
                    ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases
                ]

    def inherits(kind: str, method: str) -> bool:
        return any(
            method in methods[base] or inherits(base, method)
            for base in bases[kind]
            if base in methods and base != kind
        )

    places: dict[str, list[str]] = {}
    for kind, names in methods.items():
        for method in names:
            if not method.startswith("_") and not inherits(kind, method):
                places.setdefault(method, []).append(kind)
    assert {name: kinds for name, kinds in places.items() if len(kinds) > 6} == {}


def functions_of(node: ast.stmt) -> list[str]:
    """The public name of the function that a statement defines, but for a program's `main`."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [] if name.startswith("_") or name == "main" else [name]
    return []


def types_of(node: ast.stmt) -> list[str]:
    """The public names of types that a statement defines."""
    match node:
        case ast.ClassDef(name=name):
            names = [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            names = [] if name.isupper() else [name]
        case _:
            names = []
    return [name for name in names if name[:1].isupper()]


def test_public_names() -> None:
    assert sorted(mlxsrv.__all__) == ["Settings", "__version__", "create_app", "lifespan"]
    for name in mlxsrv.__all__:
        assert getattr(mlxsrv, name) is not None


@pytest.mark.served
def test_importing_mlxsrv_imports_no_mlx() -> None:
    """`--help` and apps that only mount the server must not pay for MLX and transformers."""
    heavy = "('mlx', 'mlx_lm', 'transformers')"
    ours = "mlxsrv, mlxsrv.commands, mlxsrv.server.serve, mlxsrv.web.app"
    code = f"import sys, {ours}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
