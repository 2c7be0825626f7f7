"""The control vectors that `--control-vector` names."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mlxsrv.formats.control_vectors import VectorFile, read_vector
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings

_LARGEST_SCALE = 100
_LONGEST_NAME = 100  # characters


class ControlVector(msgspec.Struct, frozen=True):
    """A control vector under the name that requests use."""

    name: str
    file: VectorFile
    scale: float
    """Its strength in requests that name no control vector."""


def control_vectors(settings: Settings) -> tuple[ControlVector, ...]:
    """All control vectors, in the order of the command line. Reads the headers of their files.

    Raises:
        SettingsError: a file is not there or holds no control vector, or a name or a scale is
            not allowed.
    """
    found: dict[str, ControlVector] = {}
    for text in settings.control_vector:
        name, path, scale = parse_control_vector(text)
        if name in found:
            raise SettingsError(f"control_vector: two are called {name!r}; use NAME=FILE")
        try:
            found[name] = ControlVector(name, read_vector(path), scale)
        except ValueError as error:
            raise SettingsError(f"control_vector: {error}") from None
    return tuple(found.values())


def parse_control_vector(text: str) -> tuple[str, Path, float]:
    """Read `[NAME=]FILE[:SCALE]`: the name, the file and the scale.

    A path may hold ":" and "=", too, so there are several ways to read the text. They are tried
    from the one with the longest path on, and the first whose file exists is taken.

    Raises:
        SettingsError: there is no such file, or the name or the scale is not allowed.
    """
    readings = list(_readings(text))
    for name, file, scale in readings:
        path = Path(file).expanduser()
        if os.path.isfile(path):  # Path.is_file raises on names that are too long
            return _checked_name(name or path.stem), path, _checked_scale(scale)
    raise SettingsError(f"control_vector: there is no file {readings[-1][1]!r}")


def _readings(text: str) -> Iterator[tuple[str, str, float]]:
    """The ways to read the text: name ("" if there is none), file and scale."""
    named, _, rest = text.partition("=")
    for name, whole in (("", text), (named, rest)) if named and rest else (("", text),):
        yield name, whole, 1.0
        file, _, number = whole.rpartition(":")
        if file and (scale := _number(number)) is not None:
            yield name, file, scale


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _checked_name(name: str) -> str:
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise SettingsError(f"control_vector: {name[:_LONGEST_NAME]!r} is no name; use NAME=FILE")
    return name


def _checked_scale(scale: float) -> float:
    if not math.isfinite(scale) or abs(scale) > _LARGEST_SCALE:
        most = _LARGEST_SCALE
        raise SettingsError(f"control_vector: a scale is between -{most} and {most}, not {scale:g}")
    return scale
