"""Imports of mlx-lm and transformers without their side effects on the process.

Transformers: on import it looks through all of its 3,300 source files for the names that they
export: twice, since what it keeps for the second time is bounded to 128 of its 500 folders, and by
splitting each into lines for the one that begins with `__all__`. That is half of what a server
needs to start. `prepare` has it keep all, and look for that line only. The result is the same, to
the name; a test compares them. Other versions are left as they are.

mlx-lm: on import it sets the process's limit of open files to 2,048, of which a process without
privileges cannot get back more than 4,096, and fails where the limit is lower. A server needs a
descriptor for each connection, and an app that mounts this one has its own idea of the limit. So
that call, and no other, does nothing.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_SCANNER = "transformers.utils.import_utils"
_SCAN = "create_import_structure_from_path"
_FETCH = "fetch__all__"
_EXPORTS = "\n__all__"

_LIMITER = "mlx_lm.utils"

Execute = Callable[[ModuleType], None]


def prepare() -> None:
    """Have transformers imported quickly and mlx-lm harmlessly, if they have not been yet."""
    for name, change in ((_SCANNER, _scan_once), (_LIMITER, _keep_limits)):
        if name not in sys.modules:
            sys.meta_path.insert(0, _Finder(name, change))


class _Finder(MetaPathFinder):
    """Finds one module, once, and has it executed in another way."""

    def __init__(self, name: str, change: Callable[[ModuleType, Execute], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, self._change)
        return spec


class _Changing(Loader):
    def __init__(self, loader: Loader, change: Callable[[ModuleType, Execute], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._change(module, self._loader.exec_module)


# Transformers.


def _scan_once(module: ModuleType, execute: Execute) -> None:
    execute(module)
    names = vars(module)
    scan, fetch = names.get(_SCAN), names.get(_FETCH)
    if callable(fetch) and (whole := getattr(scan, "__wrapped__", None)) is not None:
        names[_SCAN] = functools.cache(whole)
        names[_FETCH] = functools.partial(_fetch_last, fetch)


def _fetch_last(fetch: Callable[[str], list[str]], content: str) -> list[str]:
    """The names in the last list of exports of a source file; as `fetch` finds them there."""
    start = content.rfind(_EXPORTS)
    return fetch(content if start < 0 else content[start + 1 :])


# mlx-lm.


def _keep_limits(module: ModuleType, execute: Execute) -> None:
    with _deaf_to(module.__name__):
        execute(module)


@contextmanager
def _deaf_to(name: str) -> Iterator[None]:
    """While the block runs, the module of this name cannot set limits of the process; others, in
    whatever thread, can."""
    set_limit = resource.setrlimit

    def set_for_others(which: int, limits: tuple[int, int]) -> None:
        if sys._getframe(1).f_globals.get("__name__") != name:
            set_limit(which, limits)

    resource.setrlimit = set_for_others
    try:
        yield
    finally:
        resource.setrlimit = set_limit
