"""`mlxsrv models`: which models a server would serve, and why not the others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import msgspec

from mlxsrv.arguments import Arguments, command_arguments
from mlxsrv.configuration import settings_from
from mlxsrv.logs import sized
from mlxsrv.models.catalogue.catalogue import DEMO, Catalogue, ModelEntry
from mlxsrv.terminal.screen import aligned


class ModelLine(msgspec.Struct, frozen=True, kw_only=True):
    """A model as `mlxsrv models --json` prints it.

    `place` is its folder or its id on the hub; `problem` says why it cannot be served, None if it
    can; `size` is in bytes.
    """

    id: str
    aliases: tuple[str, ...]
    default: bool
    place: str
    problem: str | None
    type: str | None = None
    context_length: int | None = None
    parameter_size: str | None = None
    quantization_level: str | None = None
    size: int | None = None
    capabilities: tuple[str, ...] = ()


def models(arguments: Sequence[str]) -> int:
    """Print which models a server with these options would serve, and why not the others.

    No model is loaded. Returns 1 if the default model cannot be served.
    """
    flags = models_arguments().read(arguments)
    as_json = flags.pop("json")
    catalogue = Catalogue(settings_from(flags))
    catalogue.scan()
    lines = [_line(entry, default=entry.name == catalogue.default) for entry in catalogue]
    lines.sort(key=lambda line: (line.problem is not None, line.id))
    print(msgspec.json.encode(lines).decode() if as_json else _table(lines))
    if [line.id for line in lines if line.problem is None] == [DEMO] and sys.stdout.isatty():
        print("To get a real one: mlxsrv recommend, then mlxsrv pull ORG/NAME.", file=sys.stderr)
    return int(any(line.default and line.problem is not None for line in lines))


def models_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = command_arguments(
        "models",
        "List the models that a server with the same options would serve, and why others "
        "cannot be. Exit status 1: the default model cannot be.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, one list of objects.")
    return parser


def _line(entry: ModelEntry, *, default: bool) -> ModelLine:
    line = ModelLine(
        id=entry.name,
        aliases=entry.aliases,
        default=default,
        place=str(entry.source),
        problem=entry.problem,
    )
    known = entry.description
    if known is None:
        return line
    return msgspec.structs.replace(
        line,
        type=known.type,
        context_length=known.context_length,
        parameter_size=known.parameter_size,
        quantization_level=known.quantization_level,
        size=known.size,
        capabilities=known.capabilities,
    )


def _table(lines: Iterable[ModelLine]) -> str:
    rows: list[tuple[str, ...]] = [
        ("MODEL", "TYPE", "CONTEXT", "PARAMETERS", "WEIGHTS", "SIZE", "")
    ]
    for line in lines:
        name = line.id + (" (default)" if line.default else "")
        if line.aliases:
            name += f" = {', '.join(line.aliases)}"
        note = ""
        if line.problem is not None:
            note = f"cannot be served: {line.problem}"
        elif line.type is None:
            note = "is downloaded on first use"
        values = (line.type, line.context_length, line.parameter_size, line.quantization_level)
        shown = ["-" if value is None else str(value) for value in values]
        rows.append((name, *shown, "-" if line.size is None else sized(line.size), note))
    return aligned(rows)
