"""OpenBLAS in the place of the reference BLAS: what it computes, and when it is left alone.

In processes of their own: what is bound stays bound.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not list(distributions(name="mlx-cpu")),
    reason="MLX's back end here is not the CPU's of Linux",
)

_PRELUDE = """
import ctypes, logging, os, struct, sys
from pathlib import Path
import mlx.core as mx
import numpy as np
from mlxsrv.engine.patches import openblas

dice = np.random.default_rng(1)

def products():
    dice = np.random.default_rng(1)
    found = []
    for kind in (np.float32, np.complex64):
        for m, k, n in ((1, 64, 64), (8, 64, 512), (3, 500, 7), (65, 129, 257), (130, 200, 190)):
            a, b, c = (dice.normal(size=size).astype(kind) for size in ((m, k), (k, n), (n, k)))
            pairs = ((mx.array(a) @ mx.array(b), a @ b), (mx.array(a) @ mx.array(c).T, a @ c.T))
            found += [(np.array(ours), theirs) for ours, theirs in pairs]
    return found

def same_bits(some, others):
    return all((a == b).all() for (a, _), (b, _) in zip(some, others, strict=True))
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_products_are_openblas_s_and_right() -> None:
    out = run("""
        before = products()
        assert openblas.bind_openblas()
        after = products()
        for ours, theirs in after:
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        assert not same_bits(before, after), "rounded as before: nothing has changed"
        # Stacks of matrices and views of others go the same way.
        a = dice.normal(size=(3, 4, 9, 32)).astype(np.float32)
        b = dice.normal(size=(3, 4, 32, 33)).astype(np.float32)
        np.testing.assert_allclose(np.array(mx.array(a) @ mx.array(b)), a @ b, rtol=1e-4, atol=1e-4)
        x, y = mx.array(a), mx.array(b)
        np.testing.assert_allclose(
            np.array(x[:, ::2, 1:, 5:] @ y[:, ::2, 5:]), a[:, ::2, 1:, 5:] @ b[:, ::2, 5:],
            rtol=1e-4, atol=1e-4,
        )
        print("right")
    """)
    assert out == "right\n"


def test_once_is_as_good_as_twice() -> None:
    out = run("""
        class Kept(logging.Handler):
            def emit(self, record): print(record.getMessage())
        logging.getLogger("mlxsrv.engine").addHandler(Kept())
        logging.getLogger("mlxsrv.engine").setLevel(logging.DEBUG)
        assert openblas.bind_openblas()
        first = products()
        assert openblas.bind_openblas()
        assert same_bits(first, products())
    """)
    assert out == "patch openblas: MLX multiplies float32 matrices with OpenBLAS\n"


@pytest.mark.long
def test_a_variable_turns_it_off() -> None:
    code = """
        before = products()
        print(openblas.bind_openblas(), same_bits(before, products()))
    """
    assert run(code, MLXSRV_PATCHES="off") == "False True\n"
    assert run(code, MLXSRV_PATCHES="openblas") == "True False\n"


@pytest.mark.long
def test_what_is_not_as_expected_is_left_as_it_is() -> None:
    out = run("""
        from unittest.mock import patch

        def cut_off(path): raise struct.error("cut off")

        before = products()
        for change in (
            patch.dict(sys.modules, scipy_openblas32=None),
            patch.object(sys, "platform", "darwin"),
            patch.object(openblas, "_CALLER", "libother.so"),
            patch.object(openblas, "_REFERENCE", "libfast-"),
            patch.object(openblas, "_PREFIX", "other_"),
            patch.object(openblas, "_FUNCTIONS", frozenset({"zblas_zgemm"})),
            patch.object(openblas, "_find_calls", lambda _: [("cblas_sgemm", 0x40)]),  # read-only
            patch.object(openblas, "_find_calls", lambda path: [("cblas_sgemm", 1 << 40)]),
            patch.object(openblas, "_find_calls", cut_off),
        ):
            with change:
                assert not openblas.bind_openblas(), change.attribute
            assert same_bits(before, products())
        assert openblas.bind_openblas(), "it was for the changes"
        print("as before")
    """)
    assert out == "as before\n"


def test_it_takes_half_of_the_cores_unless_told() -> None:
    code = """
        assert openblas.bind_openblas()
        import scipy_openblas32
        path = Path(scipy_openblas32.get_lib_dir(), scipy_openblas32.get_library(fullname=True))
        print(ctypes.CDLL(str(path)).scipy_openblas_get_num_threads())
    """
    cores = len(os.sched_getaffinity(0))
    assert int(run(code)) == max(1, cores // 2)
    assert int(run(code, OPENBLAS_NUM_THREADS=str(cores))) == cores


def test_a_file_that_is_cut_off_is_refused() -> None:
    """Whatever the file holds, there is an answer or one of the errors that are expected."""
    out = run("""
        import tempfile
        mappings = openblas._read_mappings()
        whole = Path(next(each.path for each in mappings if each.name == "libmlx.so"))
        assert {name for name, _ in openblas._find_calls(whole)} == openblas._FUNCTIONS
        content = whole.read_bytes()
        with tempfile.NamedTemporaryFile() as cut:
            for length in (1, 0x28, 0x40, 4096, len(content) // 2):
                cut.truncate(0)
                cut.seek(0)
                cut.write(content[:length])
                cut.flush()
                try:
                    openblas._find_calls(Path(cut.name))
                except (LookupError, ValueError, struct.error):
                    print("refused")
    """)
    assert out == "refused\n" * 5
