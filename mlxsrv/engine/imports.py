"""A quicker import of transformers, which mlx-lm needs for its tokenizers.

On import transformers looks through all of its 3,300 source files for the names that they export:
twice, since what it keeps for the second time is bounded to 128 of its 500 folders, and by
splitting each into lines for the one that begins with `__all__`. That is half of what a server
needs to start. `quicken` has it keep all, and look for that line only.

The result is the same, to the name; a test compares them. Other versions are left as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MODULE = "transformers.utils.import_utils"
_SCAN = "create_import_structure_from_path"
_FETCH = "fetch__all__"
_EXPORTS = "\n__all__"


def quicken() -> None:
    """Have transformers imported quickly, if it has not been yet."""
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the module with the scan, once, and has it changed when it is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader)
        return spec


class _Changing(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        names = vars(module)
        scan, fetch = names.get(_SCAN), names.get(_FETCH)
        if callable(fetch) and (whole := getattr(scan, "__wrapped__", None)) is not None:
            names[_SCAN] = functools.cache(whole)
            names[_FETCH] = functools.partial(_fetch_last, fetch)


def _fetch_last(fetch: Callable[[str], list[str]], content: str) -> list[str]:
    """The names in the last list of exports of a source file; as `fetch` finds them there."""
    start = content.rfind(_EXPORTS)
    return fetch(content if start < 0 else content[start + 1 :])
