"""Every option of the server, once.

A field's annotation is its whole story: type, bounds and help. The command line, the environment
(`MLXSRV_PORT`), the TOML file and the table in docs/options.md are all read off the Struct, so an
option cannot exist in one of them only. A flag overrides a variable, a variable the file, and the
file the default.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

ENV_PREFIX = "MLXSRV_"

_BYTES = {"metavar": "BYTES", "bytes": True}  # may be written as 512MB, 12GB, 1.5GiB
# `$` alone would let a newline follow.
Key = Annotated[str, Meta(pattern=r"^[!-~]+(?!\n)$")]
Origin = Annotated[str, Meta(pattern=r"^(\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+/?)(?!\n)$")]
HostName = Annotated[str, Meta(pattern=r"^(\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?!\n)$")]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B?", re.IGNORECASE)


class SettingsError(ValueError):
    """A setting has a wrong name or value; the message names where it came from."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All options. Values are checked when the Struct is made: SettingsError names the field."""

    model: Annotated[
        tuple[str, ...],
        Meta(
            description="Model to serve: a folder, a Hugging Face id, or demo. NAME=MODEL gives it "
            "a name, MODEL+ADAPTER_DIR adds a LoRA adapter. Repeatable; the first is the default "
            "model. Without this option: the built-in demo.",
            extra={"metavar": "[NAME=]ID_OR_PATH[+ADAPTER_DIR]"},
        ),
    ] = ()
    models_dir: Annotated[
        tuple[str, ...],
        Meta(
            description="Serve every model below this folder: DIR/NAME, DIR/ORG/NAME. Repeatable.",
            extra={"metavar": "DIR"},
        ),
    ] = ()
    hf_cache: Annotated[
        bool, Meta(description="Serve the models in the Hugging Face cache as well.")
    ] = True
    allow_download: Annotated[
        bool, Meta(description="Let a request for an unknown ORG/NAME download it.")
    ] = False
    preload: Annotated[
        tuple[str, ...],
        Meta(
            description="Load this model at start, like the default model. Repeatable.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    pin: Annotated[
        tuple[str, ...],
        Meta(
            description="Never unload this model once it is loaded. Repeatable.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    max_models: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Models loaded at once. The least recently used idle one is unloaded first."
        ),
    ] = None
    memory_limit: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Memory for the weights of all loaded models. "
            "Default: 80% of what MLX recommends, else of RAM.",
            extra=_BYTES,
        ),
    ] = None
    idle_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Unload a model that nobody has used for this many seconds."),
    ] = None
    max_context: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Upper bound for the context of every model, in tokens."),
    ] = None
    draft_model: Annotated[
        tuple[str, ...],
        Meta(
            description="Small model that proposes tokens for MODEL (else for the default model), "
            "which checks several at once. Used while few requests run, where it helps. "
            "Repeatable.",
            extra={"metavar": "[MODEL=]ID_OR_PATH"},
        ),
    ] = ()
    kv_bits: Annotated[
        Literal[2, 3, 4, 5, 6, 8] | None,
        Meta(
            description="Quantize KV caches to this many bits. Such requests run one at a time.",
            extra={"metavar": "BITS"},
        ),
    ] = None
    max_kv_size: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(
            description="Tokens that a KV cache keeps: the first four, and this many of the last.",
            extra={"metavar": "TOKENS"},
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, Meta(description="Run Python code that comes with a model's files.")
    ] = False
    allow_chat_template: Annotated[
        bool,
        Meta(
            description="Let a request bring its own chat_template. It runs in a sandbox, for at "
            "most 5 s, but may use much memory: for trusted clients only."
        ),
    ] = False
    sae_dir: Annotated[
        tuple[str, ...],
        Meta(
            description="Offer every sparse autoencoder (SAE) below this folder to /api/saes. "
            "Repeatable.",
            extra={"metavar": "DIR"},
        ),
    ] = ()
    attach_sae: Annotated[
        tuple[str, ...],
        Meta(
            description="Attach this SAE at start, to MODEL (else to the default model) and at "
            "LAYER (else at the layer that it was trained on). Repeatable.",
            extra={"metavar": "[MODEL=]SAE[@LAYER]"},
        ),
    ] = ()
    control_vector: Annotated[
        tuple[str, ...],
        Meta(
            description="Add this control vector, a .gguf or .safetensors file, to what the "
            "default model generates, times SCALE (1). With 0, only requests that name it use it. "
            "Repeatable.",
            extra={"metavar": "[NAME=]FILE[:SCALE]"},
        ),
    ] = ()
    data_dir: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder of the steering profiles; created on first use.",
            extra={"metavar": "DIR"},
        ),
    ] = "~/.mlxsrv"
    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes any free one.")] = 8000
    root_path: Annotated[
        str,
        Meta(
            pattern=r"^(/[^/?#\s]+)*/?(?!\n)$",
            description="Path that a proxy in front strips, such as /llm; /openapi.json names it.",
            extra={"metavar": "PATH"},
        ),
    ] = ""
    api_key: Annotated[
        tuple[Key, ...],
        Meta(
            description="Key that every request except /health must carry, as Authorization: "
            "Bearer KEY or x-api-key: KEY. Repeatable; any of them is accepted.",
            extra={"metavar": "KEY", "secret": True, "guards": True},
        ),
    ] = ()
    api_key_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="File with more keys, one per line; # begins a comment. Read at start.",
            extra={"metavar": "FILE", "guards": True},
        ),
    ] = None
    allowed_origin: Annotated[
        tuple[Origin, ...],
        Meta(
            description="Origin of web pages that may use this server from a browser, such as "
            "https://app.example; * allows all, null those without one. Repeatable.",
            extra={"metavar": "ORIGIN"},
        ),
    ] = ()
    allowed_host: Annotated[
        tuple[HostName, ...],
        Meta(
            description="Host name, without a port, that the Host header may have besides this "
            "machine's own; * allows all. Host is checked on loopback, and wherever this option "
            "is given. Repeatable.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    rate_limit: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Requests per minute for each key, or for each address if there are no "
            "keys; beyond that: 429.",
            extra={"metavar": "REQUESTS"},
        ),
    ] = None
    max_concurrency: Annotated[
        int, Meta(ge=1, le=1024, description="Rows decoded together, per model.")
    ] = 32
    max_queue: Annotated[
        int,
        Meta(ge=0, description="Requests that may wait for a row, per model; beyond that: 503."),
    ] = 128
    max_choices: Annotated[
        int, Meta(ge=1, description="Answers to one request at most: its prompts times `n`.")
    ] = 128
    default_max_tokens: Annotated[
        int, Meta(ge=1, description="`max_tokens` of a chat that names none.")
    ] = 4096
    queue_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds a request may wait for other requests: for a row, for memory and "
            "for earlier prompts; beyond that: 503. A load of its model does not count.",
        ),
    ] = 300.0
    stall_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without progress (no token is read or generated, or the client "
            "reads nothing) after which a request ends; 504 if there is no text yet.",
        ),
    ] = 300.0
    request_timeout: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Seconds a request may take in total, including waiting; 504 if there is "
            "no text yet. 0: no limit, the default.",
        ),
    ] = None
    keepalive: Annotated[
        float, Meta(gt=0, description="Seconds of silence after which a stream gets a comment.")
    ] = 15.0
    max_body: Annotated[
        int,
        Meta(ge=1024, description="Largest request body; beyond that: 413.", extra=_BYTES),
    ] = 32 * 1024 * 1024
    max_bodies: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Meta(
            description="Bytes of all request bodies held at once, from their arrival until they "
            "are tokens; beyond that: 503. Default: 4 times --max-body.",
            extra=_BYTES,
        ),
    ] = None
    body_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds within which the headers of a request must arrive, and then "
            "again its body; otherwise: 408.",
        ),
    ] = 30.0
    prefill_chunk: Annotated[
        int, Meta(ge=16, description="Prompt tokens read between two decode steps, at most.")
    ] = 512
    max_gap: Annotated[
        float,
        Meta(gt=0, description="Seconds a stream may wait for a slice of another prompt."),
    ] = 0.2
    prompt_cache_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Memory of the prompt cache, per model; 0: no prompt cache. "
            "Default: an eighth of the device's memory.",
            extra=_BYTES,
        ),
    ] = None
    step_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which the engine counts as stalled if one step is still "
            "running: the log says so, and /health and /health/live answer 503 until it ends.",
        ),
    ] = 120.0
    exit_on_failure: Annotated[
        bool,
        Meta(
            description="End the process with status 3 if the inference engine fails, so that a "
            "supervisor can restart it; otherwise the process stays and answers 503. A stall does "
            "not count, because it may end by itself: watch /health/live for that."
        ),
    ] = False
    shutdown_grace: Annotated[
        float, Meta(ge=0, description="Seconds that running requests have to finish at shutdown.")
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest level that is logged."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Log lines as text or as JSON objects.")
    ] = "text"
    metrics: Annotated[
        bool, Meta(description="Serve Prometheus metrics at /metrics (extra metrics).")
    ] = False
    otel: Annotated[
        bool,
        Meta(
            description="Trace requests with OpenTelemetry (extra otel); OTEL_* variables "
            "configure it."
        ),
    ] = False

    def __post_init__(self) -> None:
        for option in options():
            try:
                msgspec.convert(getattr(self, option.name), option.type, strict=True)
            except msgspec.ValidationError as error:
                raise SettingsError(f"{option.name}: {error}") from None
        if self.max_bodies is not None and self.max_bodies < self.max_body:
            raise SettingsError(
                f"max_bodies: less than max_body ({self.max_body}), so such a body would never fit"
            )

    def __repr__(self) -> str:
        """With secrets counted and not shown: a repr may end in a log or a traceback."""
        return f"Settings({', '.join(f'{o.name}={o.shown(self)}' for o in options())})"


class Option(msgspec.Struct, frozen=True):
    """One field of Settings as the outside sees it."""

    name: str
    type: Any
    default: Any
    help: str
    metavar: str | None
    choices: tuple[str, ...] | None
    bytes: bool
    secret: bool
    guards: bool
    """Whether the server is open without it: given but empty is then an error, and not none."""

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
    def switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def shown_default(self) -> str:
        if self.repeatable or self.default is None:
            return ""
        if self.switch:
            return "on" if self.default else "off"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def shown(self, settings: Settings) -> str:
        value = getattr(settings, self.name)
        return f"<{len(value)} secrets>" if self.secret else repr(value)

    def parse(self, text: str) -> Any:
        """The value that `text`, from a flag or a variable, stands for."""
        if self.repeatable:
            return self.check([part for part in text.split(",") if part.strip()])
        return self.check(_in_bytes(text) if self.bytes else text, strict=False)

    def check(self, value: Any, *, strict: bool = True) -> Any:
        if self.guards and not value:
            raise SettingsError("given, but empty; leave it out to serve without keys")
        if self.bytes and isinstance(value, str):
            value, strict = _in_bytes(value), False
        try:
            return msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError as error:
            got = "" if self.secret else f", got {value!r}"
            raise SettingsError(f"{error}{got}") from None


@cache
def options() -> tuple[Option, ...]:
    """The fields of Settings, in order."""
    hints = get_type_hints(Settings, include_extras=True)
    return tuple(_option(field, hints[field.name]) for field in msgspec.structs.fields(Settings))


def _option(field: msgspec.structs.FieldInfo, annotation: Any) -> Option:
    base, meta = get_args(annotation)
    extra = meta.extra or {}
    return Option(
        name=field.name,
        type=annotation,
        default=field.default,
        help=meta.description,
        metavar=extra.get("metavar"),
        choices=get_args(base) if get_origin(base) is Literal else None,
        bytes=extra.get("bytes", False),
        secret=extra.get("secret", False),
        guards=extra.get("guards", False),
    )


def _in_bytes(text: str) -> str:
    """`1.5GiB`, `12GB` or `12g` as a number; anything else as it is."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return text
    number, prefix, binary = found.groups()
    return str(
        int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix.upper()) + 1))
    )


def load_settings(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Settings from flags over variables over the `--config` file over defaults.

    `argv` None reads no flags (an app mounted elsewhere does not own the command line).

    Raises:
        SettingsError: a value, a name or the file itself is wrong; one line that says where.
    """
    return settle(vars(option_parser().parse_args(argv)) if argv is not None else {}, environ)


def settle(flags: dict[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """As `load_settings`, of flags that `option_parser` has parsed. Raises SettingsError."""
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
    does: str = "Serve MLX language models over an OpenAI-compatible HTTP API.\n"
    "Other commands: mlxsrv models (what would be served), mlxsrv pull (download a model).",
) -> argparse.ArgumentParser:
    """A parser of all options, for the server or for another command."""
    parser = argparse.ArgumentParser(
        prog=f"mlxsrv {command}".rstrip(),
        description=does,
        epilog=f"Each option is also a variable ({ENV_PREFIX}PORT=9000) and a key of the TOML file "
        "that --config names; a flag wins over a variable, a variable over the file. "
        f"{ENV_PREFIX}PATCHES=off leaves MLX, mlx-lm and transformers unpatched.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.toml", help="Read options from a TOML file.")
    for option in options():
        shown = f" (default: {option.shown_default})" if option.shown_default else ""
        # argparse expands % in help texts
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
            dest=option.name,
            action="append" if option.repeatable else "store",
            metavar=option.metavar or option.name.rsplit("_", 1)[-1].upper(),
            help=text,
        )
    return parser


def _choices(option: Option) -> str:
    return f"{{{','.join(option.choices)}}} " if option.choices else ""


def options_table() -> str:
    """The table of options in docs/options.md, in Markdown."""
    rows = ["| option | variable | default | what |", "|---|---|---|---|"]
    for option in options():
        default = f"`{option.shown_default}`" if option.shown_default else ""
        text = (_choices(option) + option.help).replace("|", "\\|")
        rows.append(f"| `{option.flag}` | `{option.variable}` | {default} | {text} |")
    return "\n".join(rows)
