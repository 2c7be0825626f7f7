"""The memory that MLX can work in, by what each of its back ends says of its device."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxsrv.engine.backend import describe_device
from mlxsrv.engine.loading.device_memory import working_memory
from mlxsrv.engine.working_memory import find_working_memory

GIB = 1024**3

METAL: dict[str, str | int] = {
    "device_name": "Apple M4 Pro",
    "architecture": "applegpu_g16s",
    "memory_size": 48 * GIB,
    "max_buffer_length": 28 * GIB,
    "max_recommended_working_set_size": 36 * GIB,
    "resource_limit": 499000,
}
CUDA: dict[str, str | int] = {
    "device_name": "NVIDIA GeForce RTX 4090",
    "architecture": "sm_89",
    "uuid": "GPU-5f1c2d9e-0000-4d6b-9a51-3f0e8a7c1b22",
    "pci_bus_id": "0000:01:00.0",
    "compute_capability_major": 8,
    "compute_capability_minor": 9,
    "total_memory": 24 * GIB,
    "free_memory": 23 * GIB,
}
CPU: dict[str, str | int] = {"device_name": "AMD EPYC", "architecture": "x86_64"}


def test_the_memory_is_that_of_the_device() -> None:
    cases: list[tuple[str, dict[str, str | int], int, int, float]] = [
        # device, bytes that MLX holds, RAM, expected: all in GiB
        ("what Metal recommends", METAL, 0, 48, 36),
        ("whatever MLX holds", METAL, 30, 48, 36),
        ("a card in a large machine", CUDA, 0, 128, 21.6),
        ("a card in a small machine", CUDA, 0, 16, 21.6),
        ("a card that another process shares", CUDA | {"free_memory": 9 * GIB}, 0, 128, 9),
        ("what MLX has taken of it is its own", CUDA | {"free_memory": GIB}, 12, 128, 13),
        ("most of a card that MLX fills", CUDA | {"free_memory": GIB}, 22, 128, 21.6),
        ("a full card", CUDA | {"free_memory": 0}, 0, 128, 0),
        ("a card that says its size only", {"total_memory": 24 * GIB}, 0, 128, 21.6),
        ("RAM", CPU, 0, 96, 80),
        ("nothing", {}, 50, 96, 80),
    ]
    for name, device, held, ram, expected in cases:
        found = find_working_memory(device, held=held * GIB, ram=ram * GIB)
        assert found == int(expected * GIB), name


def test_the_memory_of_this_device_is_told() -> None:
    assert working_memory() >= GIB


def test_a_record_does_not_tell_which_card_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: METAL | CUDA)
    reported = describe_device()
    assert reported["device_name"] == "NVIDIA GeForce RTX 4090"
    assert reported["total_memory"] == 24 * GIB
    assert not reported.keys() & {"uuid", "pci_bus_id", "resource_limit"}
