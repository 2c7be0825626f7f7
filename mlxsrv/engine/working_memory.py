"""The memory that MLX can work in, by the device's own numbers: short, for it imports no MLX."""

from __future__ import annotations

from collections.abc import Mapping

SERVED_SHARE = 0.9
"""Share of the working memory that models may take without `--memory-limit`; a step's arrays and
free buffers need some, too."""

_SHARE_OF_CARD = 0.9  # of a CUDA device; the driver, kernels and libraries need the rest
_SHARE_OF_RAM = 5 / 6  # where MLX computes on the CPU; the system and the process need the rest


def find_working_memory(device: Mapping[str, str | int], *, held: int, ram: int) -> int:
    """The bytes that MLX can work in: those that Metal recommends; on CUDA most of the card, if
    other processes leave as much; else most of the machine's memory.

    Args:
        device: what MLX's `device_info` returns.
        held: bytes that MLX has taken, in use and free.
        ram: bytes of the machine.
    """
    recommended = int(device.get("max_recommended_working_set_size", 0))
    if recommended:
        return recommended
    total = int(device.get("total_memory", 0))
    if total:
        share = int(_SHARE_OF_CARD * total)
        return min(share, int(device["free_memory"]) + held) if "free_memory" in device else share
    return int(_SHARE_OF_RAM * ram)
