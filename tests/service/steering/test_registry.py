"""The registry tells the engine what rows have added, and notices when SAEs and vectors go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsrv.errors import InvalidRequest, SAENotAttached
from mlxsrv.generation.parameters import Steering
from mlxsrv.generation.spec import SteeringWishes
from mlxsrv.service.service import Service
from mlxsrv.settings import Settings
from tests.support.saes import write_sae
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steering")
    write_model(folder / "model", "qwen3", plain=True)
    write_sae(folder / "saes" / "one", d_in=64, d_sae=128)
    mx.save_safetensors(str(folder / "calm.safetensors"), {"direction.0": mx.ones((64,))})
    return folder


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[Service]:
    settings = {"sae_dir": (str(folder / "saes"),), "hf_cache": False, **options}
    service = Service(
        Settings(model=(f"t={folder / 'model'}",), data_dir=str(folder / "data"), **settings)
    )
    try:
        yield service
    finally:
        await service.close()


def asking(**fields: Any) -> SteeringWishes:
    return SteeringWishes(**fields)


def run(folder: Path, work: Callable[[Service], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with serving(folder, **options) as service:
            await work(service)

    asyncio.run(main())


def test_what_the_engine_is_told(folder: Path) -> None:
    async def work(service: Service) -> None:
        registry = service.steering
        assert await registry.resolve(asking(), "t") is None
        assert await registry.resolve(asking(features={}), "t") is None
        await service.saes.attach("one", None, None)
        number = registry.get("t").attachment.number
        assert await registry.resolve(asking(), "t") is None
        told = await registry.resolve(asking(features={9: 2.0, 5: -1.0, 7: 0.0}), "t")
        assert told == Steering(number, "additive", ((5, -1.0), (9, 2.0)))
        told = await registry.resolve(asking(features={7: 0.0}, mode="clamp"), "t")
        assert told == Steering(number, "clamp", ((7, 0.0),))
        assert await registry.resolve(asking(features={7: 0.0}), "t") is None
        registry.get("t").set_features({3: 1.0}, None, "steering")
        assert await registry.resolve(asking(), "t") == Steering(number, values=((3, 1.0),))
        assert await registry.resolve(asking(features={}), "t") is None
        registry.get("t").enabled = False
        assert await registry.resolve(asking(), "t") is None

    run(folder, work)


def test_control_vectors_and_features_go_together(folder: Path) -> None:
    async def work(service: Service) -> None:
        registry = service.steering
        usual = Steering(vectors=(("calm", 0.5),))
        assert await registry.resolve(asking(), "t") == usual
        assert await registry.resolve(asking(control_vector={}), "t") is None
        assert await registry.resolve(asking(control_vector={"calm": 0}), "t") is None
        await service.saes.attach("one", None, None)
        number = registry.get("t").attachment.number
        told = await registry.resolve(asking(features={5: 1.0}, control_vector={"calm": -2}), "t")
        assert told == Steering(number, values=((5, 1.0),), vectors=(("calm", -2.0),))
        assert registry.confirm(asking(), told, "t") == told
        with pytest.raises(InvalidRequest, match="'calm'"):
            registry.confirm(asking(), Steering(vectors=(("nothing", 1.0),)), "t")

    run(folder, work, control_vector=(f"{folder / 'calm.safetensors'}:0.5",))


def test_a_request_does_not_meet_another_sae_than_it_asked_for(folder: Path) -> None:
    async def work(service: Service) -> None:
        registry = service.steering
        await service.saes.attach("one", None, None)
        request = asking(features={5: 1.0})
        told = await registry.resolve(request, "t")
        assert registry.confirm(request, told, "t") == told
        assert registry.confirm(request, None, "t") is None
        await service.saes.detach("one", None)
        with pytest.raises(SAENotAttached):
            registry.confirm(request, told, "t")
        await service.saes.attach("one", None, None)
        with pytest.raises(SAENotAttached):
            registry.confirm(request, told, "t")
        assert registry.confirm(asking(), told, "t") is None  # it was the default's

    run(folder, work)


def test_a_server_that_closes_while_it_attaches_lets_those_who_wait_go(folder: Path) -> None:
    async def work(service: Service) -> None:
        waiting = [asyncio.create_task(service.saes.begin()) for _ in range(2)]
        await asyncio.sleep(0)
        await service.close()
        assert await asyncio.gather(*waiting) == [None, None]

    run(folder, work, attach_sae=("one",))
