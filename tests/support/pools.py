"""A pool of tiny models for the tests: open it, use it, wait for it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.formats.sae_files import read_sae
from mlxsrv.models.catalogue.catalogue import Catalogue, ModelEntry
from mlxsrv.models.pool.attachments import Attachments
from mlxsrv.models.pool.lease import Lease
from mlxsrv.models.pool.model import Attachment
from mlxsrv.models.pool.pool import Pool
from mlxsrv.settings import Settings
from tests.support.saes import write_sae
from tests.support.tiny import write_model

PATIENCE = 20.0
Fields = dict[str, Any]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 3 * PATIENCE))


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[Pool]:
    """A pool of the models in `folder`. At the end nothing may be held, and it is closed."""
    models = [f"{name}={folder / name}" for name in ("a", "b", "c", "broken")]
    settings = Settings(model=tuple(models), hf_cache=False, **options)
    pool = Pool(Catalogue(settings), settings)
    try:
        yield pool
        check_idle(pool)
    finally:
        await pool.shut_down()


def check_idle(pool: Pool) -> None:
    for model in pool:
        assert (model.leases, model.users, model.waiting) == (0, 0, 0)
        assert (model.running, model.queued) == (set(), {})
        assert model.status in ("loaded", "loading")
    assert pool.statistics().queue == ()


def entry(pool: Pool, name: str) -> ModelEntry:
    found = pool.catalogue.known(name)
    assert found is not None
    return found


@asynccontextmanager
async def using(pool: Pool, name: str) -> AsyncIterator[Lease]:
    """A lease that has entered."""
    lease = pool.lease(entry(pool, name))
    try:
        await lease.enter()
        yield lease
    finally:
        lease.release()


async def use(pool: Pool, *names: str) -> None:
    for name in names:
        async with using(pool, name):
            pass


def ask(pool: Pool, name: str) -> asyncio.Task[None]:
    """Start a request that leaves as soon as it has entered."""
    return asyncio.create_task(use(pool, name))


async def until(what: Callable[[], object], why: str) -> None:
    """Wait until `what()` is true; `why` says what for."""
    async with asyncio.timeout(PATIENCE):
        # The pool tells its log and its requests, and a test has no more to ask it to tell.
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def queued(pool: Pool, *names: str) -> None:
    """Wait until these models have asked for room, in this order."""
    await until(lambda: pool.statistics().queue == names, f"{names} wait for their turn")


def loaded(pool: Pool) -> set[str]:
    return {model.name for model in pool if model.loaded is not None}


async def size(pool: Pool) -> int:
    """The bytes that one of the models needs, with a short row."""
    async with using(pool, "a") as lease:
        assert lease.model.files is not None
        return lease.model.files.base + lease.model.short_row


class Log(logging.Handler):
    """The lines that the pool has logged, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, Fields]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), getattr(record, "mlxsrv_fields", {})))

    def of(self, event: str) -> list[Fields]:
        return [fields for name, fields in self.lines if name == event]

    def models(self, event: str) -> list[str]:
        return [fields["model"] for fields in self.of(event)]

    @property
    def moves(self) -> list[str]:
        """Loads and unloads: `+a`, `-a`."""
        signs = {"model loaded": "+", "model unloaded": "-"}
        return [signs[event] + fields["model"] for event, fields in self.lines if event in signs]


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sae(tmp_path_factory.mktemp("sae"))


async def attach(
    saes: Attachments, pool: Pool, name: str, sae: Path, *, layer: int = 1
) -> Attachment:
    return await saes.attach(entry(pool, name), "s", sae, read_sae(sae), layer, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of one size, and `broken`: its weights are incomplete, which only its load notices."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc"):
        write_model(root / name, "qwen3", seed=seed)
    config = write_model(root / "broken", "qwen3") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    return root


@pytest.fixture
def log() -> Iterator[Log]:
    logger, log = logging.getLogger("mlxsrv.models"), Log()
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    yield log
    logger.setLevel(level)
    logger.removeHandler(log)
