"""Options as the fields of a Struct: their types, bounds, texts, and how their values are read.

The annotation of a field has everything about its option. `settings` has the Struct; the command
line, the variables and the TOML file are made from what `options_of` says about it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, inspect

from mlxsrv.wording import type_in_words

ENV_PREFIX = "MLXSRV_"

# `$` alone also matches before a newline at the end.
Key = Annotated[str, Meta(pattern=r"^[!-~]+(?!\n)$", title="of printable ASCII without spaces")]
Origin = Annotated[
    str,
    Meta(
        pattern=r"^(\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+/?)(?!\n)$",
        title="an origin such as https://app.example, * or null",
    ),
]
HostName = Annotated[
    str,
    Meta(
        pattern=r"^(\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?!\n)$",
        title="a host name without a port, or *",
    ),
]
URLPath = Annotated[str, Meta(pattern=r"^(/[^/?#\s]+)*/?(?!\n)$", title="a path such as /llm")]

# A variable's text for a switch; a flag has none, and a TOML file has booleans.
_SWITCH = {
    **dict.fromkeys(("true", "1", "on", "yes"), True),
    **dict.fromkeys(("false", "0", "off", "no"), False),
}
_METAVARS = {
    **dict.fromkeys(("TIMEOUT", "KEEPALIVE", "GAP", "GRACE"), "SECONDS"),
    **dict.fromkeys(("CONTEXT", "BUDGET", "CHUNK", "START", "SIZE"), "TOKENS"),
    **dict.fromkeys(("CONCURRENCY", "QUEUE", "CHOICES", "RESPONSES", "MODELS"), "N"),
}
"""Words for values, by the last word of the option's name."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B?", re.IGNORECASE)


class SettingsError(ValueError):
    """A setting has a wrong name or value; the message says where it comes from."""


class Option(msgspec.Struct, frozen=True):
    """One field of the Struct: as a flag, a variable, a key of the file and a row of the table."""

    name: str
    type: Any
    default: Any
    help: str
    metavar: str
    """A word for its value in help."""
    choices: tuple[str, ...]
    bytes: bool
    secret: bool
    guards: bool
    """Whether it protects the server: if it is given but empty, that is an error."""
    also: tuple[str, ...]
    """Names of the flag in other servers."""
    group: str
    """The title under which help and documents have it."""
    common: bool
    """Whether the short help has it."""

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

    def shown(self, settings: msgspec.Struct) -> str:
        value = getattr(settings, self.name)
        return f"<{len(value)} secrets>" if self.secret else repr(value)

    def parse(self, text: str) -> Any:
        """Read the text of a flag or a variable. Raises SettingsError."""
        if self.repeatable:
            return self.check([part for part in text.split(",") if part.strip()])
        if self.switch:
            return self.check(_SWITCH.get(text.strip().lower(), text))
        return self.check(text, strict=False)

    def check(self, value: Any, *, strict: bool = True) -> Any:
        """Return the value with the option's type. Raises SettingsError."""
        if self.guards and not value:
            raise SettingsError("given, but empty; leave it out to serve without keys")
        if self.bytes and isinstance(value, str):
            return self.convert(_in_bytes(value), strict=False, given=value)
        return self.convert(value, strict=strict)

    def convert(self, value: Any, *, strict: bool = True, given: object = None) -> Any:
        """Return the value with the option's type; units and empty secrets are `check`'s.

        Args:
            given: the value as it was written, if that is another.

        Raises:
            SettingsError: the message says what the value must be.
        """
        try:
            return msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError:
            raise SettingsError(self._refuse(value if given is None else given)) from None

    def _refuse(self, value: object) -> str:
        """The sentence that says what the value must be. That of a secret is not repeated."""
        kind = self.type
        if self.repeatable:
            kind = get_args(get_args(kind)[0])[0]
            if not isinstance(value, (list, tuple)):
                return f"{value!r} is not a list"
            value = next(each for each in value if not _fits(each, kind))
        shown = "the key" if self.secret else repr(value)
        if self.bytes and not _in_bytes(str(value)).isdigit():
            return f"{shown} is no size: 8GB, 512MB or bytes"
        if self.choices:
            return f"{shown} is not one of {', '.join(self.choices)}"
        if self.switch:
            return f"{shown} is not on or off"
        return f"{shown} is not {type_in_words(inspect.type_info(kind))}"


@cache
def options_of(settings: type[msgspec.Struct]) -> tuple[Option, ...]:
    """The fields of a Struct, in order.

    Args:
        settings: each of its fields is `Annotated` with a `Meta` at the end, whose `extra` may have
            a `metavar`, other names of the flag in `also`, the title of the `group` that begins
            with it, and the flags `common` (shown in the short help), `bytes` (a size, which may
            have a unit), `secret` (never shown) and `guards`.
    """
    hints = get_type_hints(settings, include_extras=True)
    found: list[Option] = []
    for field in msgspec.structs.fields(settings):
        found.append(_option(field, hints[field.name], found[-1].group if found else ""))
    return tuple(found)


def _option(field: msgspec.structs.FieldInfo, annotation: Any, group: str) -> Option:
    base, *_, meta = get_args(annotation)
    extra = meta.extra or {}
    choices = _choices(base)
    repeatable = " Repeatable." if isinstance(field.default, tuple) else ""
    return Option(
        name=field.name,
        type=annotation,
        default=field.default,
        help=meta.description + repeatable,
        metavar=extra.get("metavar") or _metavar(field, choices),
        choices=choices,
        bytes=extra.get("bytes", False),
        secret=extra.get("secret", False),
        guards=extra.get("guards", False),
        also=extra.get("also", ()),
        group=extra.get("group", group),
        common=extra.get("common", False),
    )


def _fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _choices(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, also of one that may be None."""
    kinds = (kind, *get_args(kind))
    found = next((get_args(each) for each in kinds if get_origin(each) is Literal), ())
    return tuple(map(str, found))


def _metavar(field: msgspec.structs.FieldInfo, choices: Sequence[str]) -> str:
    if choices:
        return f"{{{','.join(choices)}}}"
    word = field.name.rsplit("_", 1)[-1].upper()
    return _METAVARS.get(word, word)


def _in_bytes(text: str) -> str:
    """Return `1.5GiB`, `12GB` or `12g` as a number of bytes, and any other text unchanged."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return text
    number, prefix, binary = found.groups()
    return str(
        int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix.upper()) + 1))
    )
