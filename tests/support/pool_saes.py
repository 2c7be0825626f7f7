"""An SAE to attach to the models of a pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsrv.formats.sae_files import read_sae
from mlxsrv.models.pool.attachments import Attachments
from mlxsrv.models.pool.model import Attachment
from mlxsrv.models.pool.pool import Pool
from tests.support.pools import entry
from tests.support.saes import write_sae


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sae(tmp_path_factory.mktemp("sae"))


async def attach(
    saes: Attachments, pool: Pool, name: str, sae: Path, *, layer: int = 1
) -> Attachment:
    return await saes.attach(entry(pool, name), "s", sae, read_sae(sae), layer, False)
