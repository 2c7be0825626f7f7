"""Every option of the server, once.

A field's annotation is its whole story: type, bounds and help. The command line, the environment
(`MLXSRV_PORT`), the TOML file and the README's table are all read off the Struct, so an option
cannot exist in one of them only. Flag wins over variable, variable over file, file over default.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

ENV_PREFIX = "MLXSRV_"


class SettingsError(ValueError):
    """A setting has a wrong name or value; the message names where it came from."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All options. Values are checked when the Struct is made: SettingsError names the field."""

    model: Annotated[
        tuple[str, ...],
        Meta(
            description="Model to serve: a folder, a Hugging Face id, or NAME=either for an alias. "
            "Repeatable; the first is the default model. None: the built-in demo.",
            extra={"metavar": "ID_OR_PATH"},
        ),
    ] = ()
    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes a free one.")] = 8000
    max_concurrency: Annotated[
        int, Meta(ge=1, le=1024, description="Rows decoded together, per model.")
    ] = 32
    max_queue: Annotated[
        int,
        Meta(ge=0, description="Requests that may wait for a row, per model; beyond that: 503."),
    ] = 128
    max_choices: Annotated[
        int, Meta(ge=1, description="Answers to one request: its prompts times `n`.")
    ] = 128
    default_max_tokens: Annotated[
        int, Meta(ge=1, description="`max_tokens` of a chat that names none.")
    ] = 4096
    request_timeout: Annotated[
        float, Meta(gt=0, description="Seconds a request may take, waiting included.")
    ] = 300.0
    keepalive: Annotated[
        float, Meta(gt=0, description="Seconds of silence before a stream gets a comment line.")
    ] = 15.0
    max_body: Annotated[
        int, Meta(ge=1024, description="Largest request body, in bytes; beyond that: 413.")
    ] = 32 * 1024 * 1024
    prefill_chunk: Annotated[
        int, Meta(ge=16, description="Prompt tokens read between two decode steps.")
    ] = 512
    max_gap: Annotated[
        float,
        Meta(gt=0, description="Seconds a stream may wait for a slice of somebody's prompt."),
    ] = 0.2
    prompt_cache_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Memory per model for prompts read before; 0 keeps none. "
            "Default: an eighth of the device's.",
        ),
    ] = None
    shutdown_grace: Annotated[
        float, Meta(ge=0, description="Seconds that running requests have to finish at shutdown.")
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe log line.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Log lines as text or as JSON objects.")
    ] = "text"

    def __post_init__(self) -> None:
        for option in options():
            try:
                msgspec.convert(getattr(self, option.name), option.type, strict=True)
            except msgspec.ValidationError as error:
                raise SettingsError(f"{option.name}: {error}") from None


class Option(msgspec.Struct, frozen=True):
    """One field of Settings as the outside sees it."""

    name: str
    type: Any
    default: Any
    help: str
    metavar: str | None
    choices: tuple[str, ...] | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def repeatable(self) -> bool:
        return isinstance(self.default, tuple)

    @property
    def shown_default(self) -> str:
        if self.repeatable or self.default is None:
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def parse(self, text: str) -> Any:
        """The value that `text`, from a flag or a variable, stands for."""
        if self.repeatable:
            return self.check([part for part in text.split(",") if part])
        return self.check(text, strict=False)

    def check(self, value: Any, *, strict: bool = True) -> Any:
        try:
            return msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError as error:
            raise SettingsError(f"{error}, got {value!r}") from None


@cache
def options() -> tuple[Option, ...]:
    """The fields of Settings, in order."""
    hints = get_type_hints(Settings, include_extras=True)
    return tuple(_option(field, hints[field.name]) for field in msgspec.structs.fields(Settings))


def _option(field: msgspec.structs.FieldInfo, annotation: Any) -> Option:
    base, meta = get_args(annotation)
    return Option(
        name=field.name,
        type=annotation,
        default=field.default,
        help=meta.description,
        metavar=(meta.extra or {}).get("metavar"),
        choices=get_args(base) if get_origin(base) is Literal else None,
    )


def load_settings(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Settings from flags over variables over the `--config` file over defaults.

    `argv` None reads no flags (an app mounted elsewhere does not own the command line).

    Raises:
        SettingsError: a value, a name or the file itself is wrong; one line that says where.
    """
    flags = vars(_parser().parse_args(argv)) if argv is not None else {}
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
        if (text := environ.get(option.variable))
    }


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        option.name: _named(option.flag, option.check if option.repeatable else option.parse, value)
        for option in options()
        if (value := flags.get(option.name)) is not None
    }


def _named(where: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlxsrv",
        description="Serve MLX language models over an OpenAI-compatible HTTP API.",
        epilog=f"Each option is also a variable ({ENV_PREFIX}PORT=9000) and a key of the TOML file "
        "that --config names; a flag wins over a variable, a variable over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.toml", help="Read options from a TOML file.")
    for option in options():
        shown = f" (default: {option.shown_default})" if option.shown_default else ""
        parser.add_argument(
            option.flag,
            dest=option.name,
            action="append" if option.repeatable else "store",
            metavar=option.metavar or option.name.rsplit("_", 1)[-1].upper(),
            # argparse expands % in help texts
            help=(_choices(option) + option.help + shown).replace("%", "%%"),
        )
    return parser


def _choices(option: Option) -> str:
    return f"{{{','.join(option.choices)}}} " if option.choices else ""


def readme_table() -> str:
    """The README's table of options, in Markdown."""
    rows = ["| option | variable | default | what |", "|---|---|---|---|"]
    for option in options():
        default = f"`{option.shown_default}`" if option.shown_default else ""
        text = (_choices(option) + option.help).replace("|", "\\|")
        rows.append(f"| `{option.flag}` | `{option.variable}` | {default} | {text} |")
    return "\n".join(rows)
