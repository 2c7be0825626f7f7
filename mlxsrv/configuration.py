"""Read the settings from flags, variables and a TOML file; write the help and the table of options.

A flag overrides a variable, a variable overrides the file, and the file overrides the default.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxsrv.options import ENV_PREFIX, Option, SettingsError
from mlxsrv.settings import Settings, options
from mlxsrv.version import __version__


def load_settings(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Make settings from flags, variables, the `--config` file and defaults, in this precedence.

    Args:
        argv: None reads no flags, because a mounted app does not own the command line.

    Raises:
        SettingsError: a value, a name or the file is wrong; the message is one line.
    """
    return settings_from(
        vars(option_parser().parse_args(argv)) if argv is not None else {}, environ
    )


def settings_from(flags: dict[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """As `load_settings`, with flags that `option_parser` has parsed. Raises SettingsError."""
    path = flags.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
    values = _from_file(path) if path else {}
    values |= _from_environment(environ)
    values |= _from_flags(flags)
    return Settings(**values)


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from None
    known = {option.name: option for option in options()}
    values = {}
    for key, value in table.items():
        option = known.get(key.replace("-", "_"))
        if option is None:
            raise SettingsError(f"{path}: there is no option {key!r}")
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


def option_parser(
    command: str = "",
    does: str = "Serve MLX language models over OpenAI's, Anthropic's and Ollama's APIs.\n"
    "Other commands: mlxsrv models (list what would be served), mlxsrv pull (download a model), "
    "mlxsrv connect (set up a client), mlxsrv replay (show a record), mlxsrv replicas (serve with "
    "several processes).",
) -> argparse.ArgumentParser:
    """Make the parser of all options, for the server or for another command.

    Args:
        command: its name; "" for the server.
        does: the description in its help.
    """
    parser = argparse.ArgumentParser(
        prog=f"mlxsrv {command}".rstrip(),
        description=does,
        epilog=f"Each option is also a variable ({ENV_PREFIX}PORT=9000) and a key of the TOML file "
        "that --config names. A flag overrides a variable, and a variable overrides the file. "
        f"{ENV_PREFIX}PATCHES=off leaves MLX, mlx-lm and transformers unpatched.",
        allow_abbrev=False,
    )
    if not command:
        version = f"mlxsrv {__version__}"
        parser.add_argument(
            "--version", action="version", version=version, help="Print the version."
        )
    parser.add_argument("--config", metavar="FILE.toml", help="Read options from a TOML file.")
    for option in options():
        shown = f" (default: {option.shown_default})" if option.shown_default else ""
        # argparse expands % in help texts.
        text = (_choices(option) + option.help + shown).replace("%", "%%")
        if option.switch:
            parser.add_argument(
                option.flag,
                dest=option.name,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=text,
            )
            continue
        parser.add_argument(
            option.flag,
            *option.also,
            dest=option.name,
            action="append" if option.repeatable else "store",
            metavar=option.metavar or option.name.rsplit("_", 1)[-1].upper(),
            help=text,
        )
    parser.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="Changes nothing: vLLM needs it to call tools.",
    )
    return parser


def _choices(option: Option) -> str:
    return f"{{{','.join(option.choices)}}} " if option.choices else ""


def options_table() -> str:
    """The table of options in docs/options.md, in Markdown."""
    rows = ["| option | variable | default | what |", "|---|---|---|---|"]
    for option in options():
        default = f"`{option.shown_default}`" if option.shown_default else ""
        also = f" Also: {', '.join(f'`{flag}`' for flag in option.also)}." if option.also else ""
        text = (_choices(option) + option.help + also).replace("|", "\\|")
        rows.append(f"| `{option.flag}` | `{option.variable}` | {default} | {text} |")
    return "\n".join(rows)
