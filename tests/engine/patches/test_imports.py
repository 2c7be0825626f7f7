"""The quicker import of transformers finds the same names, and leaves nothing behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType

import pytest

from mlxsrv.engine.patches import imports

_SCAN = """\
    import hashlib, sys
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    import transformers

    def digest(value):
        if isinstance(value, dict):
            return sorted((digest(key), digest(each)) for key, each in value.items())
        # Lists are made of sets, and their order is another each time.
        return sorted(value) if isinstance(value, (set, frozenset, list)) else value

    models = transformers.models
    for module in (transformers, models):
        for name in ("_import_structure", "_class_to_module", "_object_missing_backend"):
            found = getattr(module, name)
            assert found
            print(hashlib.sha256(repr(digest(found)).encode()).hexdigest())
    print(len(dir(transformers)), AutoTokenizer.__module__)
    assert not any("quick" in repr(finder) or "mlxsrv" in repr(finder) for finder in sys.meta_path)
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_all_names_are_found() -> None:
    both = "    import mlx_lm.utils\n"  # which imports transformers
    quick = run(
        "    from mlxsrv.engine.patches.imports import patch_imports; patch_imports()\n"
        + both
        + _SCAN
    )
    assert len(quick.split()) == 8
    assert quick == run(both + _SCAN)


def test_the_scan_is_kept_whole() -> None:
    """Guards the gain: another version of transformers may have other functions."""
    out = run("""
        from mlxsrv.engine.patches.imports import patch_imports; patch_imports()
        from transformers.utils.import_utils import create_import_structure_from_path as scan
        from transformers import AutoTokenizer
        import transformers.models
        found = scan.cache_info()
        print(found.maxsize, found.hits > 200)
    """)
    assert out == "None True\n"


@pytest.mark.long
def test_once_they_are_there_nothing_is_done() -> None:
    out = run("""
        import sys
        import transformers, mlx_lm.utils
        from mlxsrv.engine.patches.imports import patch_imports
        before = list(sys.meta_path)
        patch_imports()
        print(sys.meta_path == before)
    """)
    assert out == "True\n"


CLASHES = sys.version_info[:2] == (3, 11) and sys.version_info < (3, 11, 8)


@pytest.mark.skipif(not CLASHES, reason="this Python's threads parse without harm")
def test_threads_that_parse_code_at_once_do_not_make_each_other_fail() -> None:
    out = run("""
        import ast, gc, sys, threading, time
        from mlxsrv.engine.patches.imports import patch_imports
        patch_imports()
        gc.callbacks.append(lambda *_: time.sleep(0))  # lets another thread run in the middle
        sys.setswitchinterval(1e-5)
        code, failed = "f(a, [b, (c, {d: e + -1})])\\n" * 1000, []

        def parse():
            try:
                for _ in range(5):
                    ast.parse(code)
            except SystemError as error:
                failed.append(error)

        threads = [threading.Thread(target=parse) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        print(failed)
    """)
    assert out == "[]\n"


@pytest.mark.parametrize(
    ("chosen", "applied"),
    [
        ("", {"transformers", "mlx-lm"}),
        ("openblas, transformers", {"transformers"}),
        pytest.param("off", set(), marks=pytest.mark.long),
        pytest.param("openblas", set(), marks=pytest.mark.long),
        pytest.param("mlx-lm", {"mlx-lm"}, marks=pytest.mark.long),
    ],
)
def test_each_patch_has_a_switch_and_a_log_line(chosen: str, applied: set[str]) -> None:
    out = run(
        """
        import logging, resource, sys
        logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 4096))
        from mlxsrv.engine.patches.imports import patch_imports
        patch_imports()
        import mlx_lm.utils
        from transformers.utils.import_utils import create_import_structure_from_path as scan
        print("scanned once", scan.cache_info().maxsize is None)
        print("limit kept", resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 3000)
        """,
        MLXSRV_PATCHES=chosen,
    )
    logged = {line.split()[1].rstrip(":") for line in out.splitlines() if line[:6] == "patch "}
    assert logged - {"python"} == applied
    assert ("python" in logged) == (CLASHES and not chosen)
    assert f"scanned once {'transformers' in applied}\n" in out
    assert f"limit kept {'mlx-lm' in applied}\n" in out


@pytest.mark.parametrize(
    "source",
    [
        "",
        "x = 1\n",
        '__all__ = ["A", "B"]',
        'import a\n\n__all__ = ["A"]\n',
        '__all__ = ["A"]\nx = 1\n__all__ = [\n    "B",\n    "C",\n]\n',
        '    __all__ = ["A"]\n',
        "def f():\n    return __all__\n",
        '\n__all__ = [\n    "A",\n]\n\nmore = """\n    __all__ = 1\n"""\n',
    ],
)
def test_the_last_list_of_exports_counts(source: str) -> None:
    from transformers.utils.import_utils import fetch__all__

    [whole] = getattr(fetch__all__, "args", [fetch__all__])  # it may be quick already
    assert imports._fetch_last(whole, source) == whole(source)


def test_a_version_without_the_scan_is_left_as_it_is() -> None:
    class Empty(Loader):
        def exec_module(self, module: ModuleType) -> None:
            module.__dict__["kept"] = 1

    module = ModuleType("transformers.utils.import_utils")
    imports._PatchingLoader(Empty(), imports._scan_once).exec_module(module)
    assert {name for name in vars(module) if not name.startswith("__")} == {"kept"}


@pytest.mark.parametrize(
    "limits",
    [
        (256, 4000),
        pytest.param((100, 100), marks=pytest.mark.long),
        pytest.param((3000, 3000), marks=pytest.mark.long),
    ],
)
def test_the_limit_of_open_files_stays_as_it_was(limits: tuple[int, int]) -> None:
    """Also where there is no privilege: then mlx-lm could neither raise it nor give it back."""
    out = run(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, {limits})
        set_limit = resource.setrlimit
        from mlxsrv.engine.backend import import_engine
        import_engine()
        import mlx_lm.utils
        print(resource.getrlimit(resource.RLIMIT_NOFILE) == {limits})
        print(resource.setrlimit is set_limit)
    """)
    assert out == "True\nTrue\n"


def test_others_may_set_limits_meanwhile() -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    with imports._ignoring_limits_of("mlx_lm.utils"):
        resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    resource.setrlimit(resource.RLIMIT_CORE, before)


def test_nothing_is_left_to_import_for_a_request() -> None:
    out = run("""
        import sys
        from mlxsrv import create_app
        from mlxsrv.engine.backend import import_engine
        import_engine()
        import pkgutil
        import mlxsrv.engine
        walk = pkgutil.walk_packages(mlxsrv.engine.__path__, "mlxsrv.engine.")
        engine = {each.name for each in walk} - {"mlxsrv.engine.recording.replay"}  # a command's
        wanted = engine | {"mlxsrv.prompts.grammars.grammar", "llguidance.hf"}
        print(wanted - {*sys.modules})
    """)
    assert out == "set()\n"
