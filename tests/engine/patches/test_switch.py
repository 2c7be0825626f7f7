"""MLXSRV_PATCHES says which patches are left on."""

from __future__ import annotations

import pytest

from mlxsrv.engine.patches.switch import PATCHES, enabled


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        (None, PATCHES),
        ("", PATCHES),
        ("on", PATCHES),
        ("off", set()),
        (" OpenBLAS , mlx-lm,", {"openblas", "mlx-lm"}),
        ("blas", set()),
    ],
)
def test_the_variable_chooses(
    text: str | None, chosen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is None:
        monkeypatch.delenv("MLXSRV_PATCHES", raising=False)
    else:
        monkeypatch.setenv("MLXSRV_PATCHES", text)
    assert {patch for patch in PATCHES if enabled(patch)} == chosen


def test_a_name_that_is_no_patch_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLXSRV_PATCHES", "openblas,no-such-patch")
    assert enabled("openblas")
    assert not enabled("transformers")
    [message] = [record.getMessage() for record in caplog.records]
    assert "no-such-patch" in message
    assert "attention, mlx-lm, openblas, python, transformers" in message
