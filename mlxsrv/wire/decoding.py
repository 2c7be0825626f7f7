"""From the bytes of a body to a Struct, and to errors that name what is wrong in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from mlxsrv.errors import InvalidJSON, InvalidRequest, MissingParameter, UnsupportedParameter

T = TypeVar("T", bound=Struct)
D = TypeVar("D")


def _nothing_to_check(request: Struct) -> None:
    pass


def _nothing_idle(request: Struct) -> list[str]:
    return []


class RequestDecoder(Generic[T]):
    """Decodes bodies into one kind of request; made once, at module level.

    Args:
        check: raises InvalidRequest if the fields do not go together.
        neutral: fields that the kind does not have, and the values of theirs that do no harm.
        reasons: why other values of these fields are refused, where there is more to say.
        idle: the fields of a request that mean nothing beside its others.

    Raises:
        InvalidJSON, MissingParameter, InvalidRequest, UnsupportedParameter: `param` is the path.
    """

    def __init__(
        self,
        kind: type[T],
        *,
        check: Callable[[T], None] = _nothing_to_check,
        neutral: Mapping[str, tuple[Any, ...]] | None = None,
        reasons: Mapping[str, str] | None = None,
        idle: Callable[[T], list[str]] = _nothing_idle,
    ) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._honoured = frozenset(kind.__struct_encode_fields__)
        self._check = check
        self._neutral = neutral or {}
        self._reasons = reasons or {}
        self._idle = idle

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """The request, and the names of fields that were ignored."""
        request = _decode(self._decoder.decode, body)
        fields = _decode(self._fields.decode, body)
        ignored = []
        for name in fields.keys() - self._honoured:
            value = _decode(msgspec.json.decode, fields[name])
            if name in self._neutral:
                self._require_neutral(name, value)
            elif value is not None:
                ignored.append(name)
        self._check(request)
        return request, sorted(ignored + self._idle(request))

    def _require_neutral(self, name: str, value: Any) -> None:
        if not any(_same(value, neutral) for neutral in self._neutral[name]):
            reason = self._reasons.get(name, "not by this server, and not with this value")
            raise UnsupportedParameter(
                f"{name} is not supported ({reason}); leave it out", param=name
            )


def read_query(kind: type[T], values: Mapping[str, str]) -> T:
    """A URL's query as one kind of Struct; what it has no field for is ignored.

    Raises:
        InvalidRequest: `param` is the name.
    """
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def _decode(decode: Callable[[Any], D], data: bytes | msgspec.Raw) -> D:
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJSON(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidJSON("the body is nested too deeply") from None


def _same(value: Any, neutral: Any) -> bool:
    """Equality of JSON values: Python's has 1 equal True."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


# The path holds names of ours only; a value that is quoted before it may hold anything.
_PATH = re.compile(
    r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL
)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_LONGEST = 300


def _invalid(text: str) -> InvalidRequest:
    """msgspec's error with its path turned into `param`."""
    match = _PATH.match(text)
    assert match is not None  # the pattern matches any text
    what, path = match["what"], (match["path"] or "").replace("[...]", "") or None
    if missing := _MISSING.fullmatch(what):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return MissingParameter(f"missing required parameter: {name}", param=name)
    if len(what) > _LONGEST:
        what = f"{what[:_LONGEST]}..."
    where = f"{path}: " if path else ""
    key = "a key is wrong: " if match["key"] else ""
    return InvalidRequest(f"{where}{key}{what[:1].lower()}{what[1:]}", param=path)
