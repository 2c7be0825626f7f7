"""`mlxsrv recommend`: models that fit into this machine's memory, from a table in `models.toml`."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mlxsrv.arguments import Arguments, command_arguments
from mlxsrv.configuration import settings_from
from mlxsrv.engine.backend import describe_device
from mlxsrv.engine.working_memory import SERVED_SHARE, find_working_memory
from mlxsrv.logs import sized
from mlxsrv.options import SettingsError
from mlxsrv.settings import options
from mlxsrv.terminal.screen import aligned

_TABLE = Path(__file__).with_name("models.toml")
_MOST = 6

_SMALL_MAC = 36 * 1024**3
_MAC_SHARES = (2 / 3, 3 / 4)
"""Shares of a Mac's memory that Metal recommends to use: of a small one, and of a larger one."""

_LEAST_CONTEXT = 8_192
"""Tokens; with less there is no room for a conversation."""

_ROOMY = 32_000
"""Tokens that are enough for agents as well."""


class KnownModel(msgspec.Struct, frozen=True):
    """A model of the table; the fields are explained there."""

    repository: str
    gigabytes: float
    context: int
    kv_bytes: int
    good_for: str
    fixed: int = 0

    def context_within(self, limit: int) -> int:
        """The tokens of context that one request has if all models may take `limit` bytes."""
        left = limit - self.gigabytes * 1e9 - self.fixed
        return max(min(self.context, int(left / self.kv_bytes)), 0)


def known_models() -> list[KnownModel]:
    """The models of the table, the smallest first."""
    table = tomllib.loads(_TABLE.read_text("utf-8"))
    return msgspec.convert(table["model"], list[KnownModel])


def recommend(arguments: Sequence[str]) -> None:
    """Print the largest models that fit, and the context that each would have."""
    flags = recommend_arguments().read(arguments)
    memory = flags.pop("memory")
    settings = settings_from(flags)
    limit = settings.memory_limit or int(SERVED_SHARE * _working_memory(memory))
    fitting = [
        (model, context)
        for model in reversed(known_models())
        if (context := model.context_within(limit)) >= _LEAST_CONTEXT
    ]
    of = "this machine" if memory is None else f"a Mac with {memory}"
    estimated = "Sizes and contexts are estimates." if fitting else ""
    print(f"Models may take {sized(limit)} on {of} (--memory-limit). {estimated}".rstrip())
    if not fitting:
        print("None of the models in the table fits; the demo model runs anywhere: mlxsrv")
        return
    rows = [(m.repository, f"{m.gigabytes:g} GB", f"{c:,}", m.good_for) for m, c in fitting[:_MOST]]
    print(aligned([("MODEL", "SIZE", "CONTEXT", "GOOD FOR"), *rows]))
    if memory is None and describe_device().get("kind") == "cpu":
        print("\nMLX computes on the CPU here: the smaller the model, the better.")
        fitting.reverse()
    best = next((model for model, context in fitting if context >= _ROOMY), fitting[0][0])
    print(f"\nTry one: mlxsrv chat {best.repository}")


def recommend_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = command_arguments(
        "recommend",
        "List models that fit into the memory of this machine, the largest first, with the "
        "context that one request has beside them. Nothing is downloaded.",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="Memory of another Mac, such as 64GB, instead of this one."
    )
    return parser


def _working_memory(memory: str | None) -> int:
    """Bytes that MLX can work in: here, or on a Mac with so much memory, whose gigabytes are those
    of 1024 megabytes. Raises SettingsError."""
    if memory is None:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return find_working_memory(describe_device(), held=0, ram=ram)
    size = next(option for option in options() if option.name == "memory_limit")
    if memory.isdigit():
        raise SettingsError(f"--memory: {memory!r} has no unit, such as 64GB")
    try:
        bytes = int(size.parse(re.sub(r"([KMGT])B$", r"\1iB", memory, flags=re.IGNORECASE)))
    except SettingsError as error:
        raise SettingsError(f"--memory: {error}") from None
    return int(_MAC_SHARES[bytes > _SMALL_MAC] * bytes)
