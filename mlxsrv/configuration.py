"""Read the settings from flags, variables and a TOML file; write the table of options.

A flag overrides a variable, a variable overrides the file, and the file overrides the default.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from mlxsrv.arguments import did_you_mean, server_arguments
from mlxsrv.options import ENV_PREFIX, Option, SettingsError
from mlxsrv.settings import Settings, options

_log = logging.getLogger("mlxsrv.server")

_OTHERS = ("CONFIG", "PATCHES")
"""Variables that are no options."""


def load_settings(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Make settings from flags, variables, the `--config` file and defaults, in this precedence.

    Args:
        argv: None reads no flags, because a mounted app does not own the command line.

    Raises:
        SettingsError: a value, a name or the file is wrong; the message is one line.
    """
    return settings_from(server_arguments().read(argv) if argv is not None else {}, environ)


def settings_from(flags: dict[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """As `load_settings`, with flags that `Arguments` has read. Raises SettingsError."""
    if (first := flags.pop("first_model", None)) is not None:
        flags["model"] = [first, *(flags.get("model") or ())]
    path = flags.get("config") or environ.get(ENV_PREFIX + "CONFIG")
    values = _from_file(path) if path else {}
    values |= _from_environment(environ)
    values |= _from_flags(flags)
    return Settings(**values)


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--config {path}: {error}") from None
    known = {option.name: option for option in options()}
    values = {}
    for key, value in table.items():
        option = known.get(key.replace("-", "_"))
        if option is None:
            near = did_you_mean(key, [name.replace("_", "-") for name in known])
            raise SettingsError(f"{path}: there is no option {key!r}{near}")
        values[option.name] = _named(f"{path}: {key}", option.check, value)
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        option.name: _named(option.variable, option.parse, text)
        for option in options()
        if (text := environ.get(option.variable)) or (option.guards and text is not None)
    }


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        option.name: _named(
            option.flag,
            option.check if option.repeatable or option.switch else option.parse,
            value,
        )
        for option in options()
        if (value := flags.get(option.name)) is not None
    }


def _named(where: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None


def warn_of_variables() -> None:
    """Log the variables that look like an option's and are none."""
    for told in wrong_variables():
        _log.warning(told)


def wrong_variables(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A sentence about each variable that looks like an option's and is none."""
    known = {option.variable for option in options()} | {f"{ENV_PREFIX}{name}" for name in _OTHERS}
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            yield f"the variable {name} means nothing{did_you_mean(name, known)}"


def options_table() -> str:
    """The tables of options in docs/options.md, in Markdown: one for each group."""
    lines: list[str] = []
    for title, members in groupby(options(), key=lambda option: option.group):
        lines += [f"### {title}", ""]
        lines += ["| option | variable | default | what |", "|---|---|---|---|"]
        for option in members:
            default = f"`{option.shown_default}`" if option.shown_default else ""
            also = (
                f" Also: {', '.join(f'`{flag}`' for flag in option.also)}." if option.also else ""
            )
            text = (_choices(option) + option.help + also).replace("|", "\\|")
            lines.append(f"| `{option.flag}` | `{option.variable}` | {default} | {text} |")
        lines.append("")
    return "\n".join(lines)


def _choices(option: Option) -> str:
    return f"{{{','.join(option.choices)}}} " if option.choices else ""
