"""Patches of mlx-lm and transformers that take effect while these are imported.

`transformers`: on import it looks through all of its 3,300 source files for the names that they
export. It does so twice, since it keeps the result of 128 of its 500 folders only, and it splits
each file into lines to find the one that begins with `__all__`. That is half of what a server needs
to start. The patch keeps all results and looks for that line only. The names found are the same; a
test compares them. Other versions of transformers are left as they are.

`mlx-lm`: on import it sets the process's limit of open files to 2,048. A process without privileges
cannot raise it beyond 4,096 afterwards, and the import fails where the limit is lower. But a server
needs a descriptor for each connection, and an app that mounts this one may have set its own limit.
With the patch, that call does nothing.

`python`: both parse Python code while a model is loaded. In Python 3.11 before 3.11.8, threads that
do so at once make each other fail (`SystemError: AST constructor recursion depth mismatch`,
cpython issue 106905). With the patch they take turns. Other versions are left as they are.
"""

from __future__ import annotations

import ast
import functools
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from mlxsrv.engine.patches.switch import enabled, log_applied

_SCANNER = "transformers.utils.import_utils"
_SCAN = "create_import_structure_from_path"
_FETCH = "fetch__all__"
_EXPORTS = "\n__all__"

_LIMITER = "mlx_lm.utils"

Execute = Callable[[ModuleType], None]
"""Runs a module's code."""


def patch_imports() -> None:
    """Patch mlx-lm and transformers when they are imported, if they have not been yet; and Python's
    parser."""
    if enabled("python") and sys.version_info[:2] == (3, 11) and sys.version_info < (3, 11, 8):
        _parse_in_turn()
    for patch, module, execute in (
        ("transformers", _SCANNER, _scan_once),
        ("mlx-lm", _LIMITER, _keep_limits),
    ):
        if enabled(patch) and module not in sys.modules:
            sys.meta_path.insert(0, _Finder(module, execute))


class _Finder(MetaPathFinder):
    """Finds one module, once, and has its code run by a function of ours.

    Args:
        name: the module's.
        execute: called with the module, and with what runs its code.
    """

    def __init__(self, name: str, execute: Callable[[ModuleType, Execute], None]) -> None:
        self._name = name
        self._execute = execute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self._execute)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader, execute: Callable[[ModuleType, Execute], None]) -> None:
        self._loader = loader
        self._execute = execute

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._execute(module, self._loader.exec_module)


# Transformers.


def _scan_once(module: ModuleType, execute: Execute) -> None:
    execute(module)
    names = vars(module)
    scan, fetch = names.get(_SCAN), names.get(_FETCH)
    if callable(fetch) and (uncached := getattr(scan, "__wrapped__", None)) is not None:
        names[_SCAN] = functools.cache(uncached)
        names[_FETCH] = functools.partial(_fetch_last, fetch)
        log_applied("transformers", "each of its source files is scanned once")


def _fetch_last(fetch: Callable[[str], list[str]], content: str) -> list[str]:
    """The names in the last list of exports of a source file; the same as `fetch` finds."""
    start = content.rfind(_EXPORTS)
    return fetch(content if start < 0 else content[start + 1 :])


# Python.


def _parse_in_turn() -> None:
    parse, turn = ast.parse, threading.RLock()  # collecting garbage within may parse again
    if hasattr(parse, "__wrapped__"):
        return

    @functools.wraps(parse)
    def parse_in_turn(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return parse(*args, **kwargs)

    ast.parse = parse_in_turn
    log_applied("python", "threads parse Python code one after the other")


# mlx-lm.


def _keep_limits(module: ModuleType, execute: Execute) -> None:
    with _ignoring_limits_of(module.__name__):
        execute(module)
    log_applied("mlx-lm", "its import leaves the limit of open files as it is")


@contextmanager
def _ignoring_limits_of(name: str) -> Iterator[None]:
    """Within the block, the module of this name cannot set limits of the process. Others can, in
    whatever thread."""
    set_limit = resource.setrlimit

    def set_for_others(which: int, limits: tuple[int, int]) -> None:
        if sys._getframe(1).f_globals.get("__name__") != name:
            set_limit(which, limits)

    resource.setrlimit = set_for_others
    try:
        yield
    finally:
        resource.setrlimit = set_limit
