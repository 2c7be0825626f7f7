"""From the bytes of a body to a Struct, or to an error that says where the body is wrong."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct, inspect

from mlxsrv.errors import InvalidJSON, InvalidRequest, MissingParameter, UnsupportedParameter
from mlxsrv.wire.unknown import Fields
from mlxsrv.wording import error_in_words, values_at

T = TypeVar("T", bound=Struct)
D = TypeVar("D")


LARGE = 1024 * 1024
"""Bytes of a body that is read with more care: its reading would hold up streams."""


def _nothing_to_check(request: Struct) -> None:
    pass


def _nothing_idle(request: Struct) -> list[str]:
    return []


class RequestDecoder(Generic[T]):
    """Decodes bodies into one kind of request. Made once, at module level.

    Args:
        kind: the Struct.
        check: raises InvalidRequest if the fields do not go together.
        neutral: fields that the kind does not have, with their values that ask for nothing.
        reasons: why other values of these fields are refused, for the error message.
        idle: returns the fields of a request that have no effect, because of its other fields.
        parts: kinds of objects in it that are decoded apart, by what they say of their type.
    """

    def __init__(
        self,
        kind: type[T],
        *,
        check: Callable[[T], None] = _nothing_to_check,
        neutral: Mapping[str, tuple[Any, ...]] | None = None,
        reasons: Mapping[str, str] | None = None,
        idle: Callable[[T], list[str]] = _nothing_idle,
        parts: Sequence[type[Struct]] = (),
    ) -> None:
        self.kind = kind
        self.parts = parts
        self._decoder = msgspec.json.Decoder(kind)
        self._known = Fields(kind)
        self._check = check
        self.neutral = neutral or {}
        self._reasons = reasons or {}
        self._idle = idle

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """Return the request, and the names of the fields that were ignored.

        Raises:
            InvalidJSON, MissingParameter, InvalidRequest, UnsupportedParameter: `param` is the path
                of the field.
        """
        with uncollected(len(body)):
            try:
                return self._read(body)
            except InvalidJSON:
                mended = mend_surrogates(body)
                if mended == body:
                    raise
                return self._read(mended)

    def _read(self, body: bytes) -> tuple[T, list[str]]:
        request = _decode(self._decoder.decode, body, self.kind)
        unknown, ignored = _decode(self._known.unknown_in, body)
        for name, value in unknown.items():
            if name in self.neutral:
                self._require_neutral(name, _decode(msgspec.json.decode, value))
            else:
                ignored.append(name)
        self._check(request)
        return request, sorted(ignored + self._idle(request))

    def _require_neutral(self, name: str, value: Any) -> None:
        if not any(_same(value, neutral) for neutral in self.neutral[name]):
            reason = self._reasons.get(name, "not by this server, and not with this value")
            raise UnsupportedParameter(
                f"{name} is not supported ({reason}); leave it out", param=name
            )


@contextlib.contextmanager
def uncollected(size: int) -> Iterator[None]:
    """Switch the garbage collector off while a large body is read. Reading makes no garbage, and
    the collector would walk through millions of new objects again and again.

    Args:
        size: of the body, in bytes.
    """
    collects = size > LARGE and gc.isenabled()
    if collects:
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def read_query(kind: type[T], values: Mapping[str, str]) -> T:
    """Decode a URL's query. Names that the Struct does not have are ignored.

    Raises:
        InvalidRequest: a value is wrong; `param` is its name.
    """
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind=kind) from None


def decode_part(decode: Callable[[Any], D], data: bytes | msgspec.Raw, path: str) -> D:
    """Decode a part of a body that was left as it is, because its own field `type` says what it is.

    Args:
        path: of the part in the body.

    Raises:
        InvalidJSON, InvalidRequest, MissingParameter
    """
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(_placed(str(error), path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJSON(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidJSON("the body is nested too deeply") from None


def _placed(text: str, path: str) -> str:
    """msgspec's error about a part, with its path in the body."""
    match = _PATH.match(text)
    assert match is not None  # the pattern matches any text
    inner = match["path"] or ""
    dot = "." if inner and not inner.startswith("[") else ""
    return f"{match['what']} - at {match['key'] or ''}`$.{path}{dot}{inner}`"


def _decode(
    decode: Callable[[Any], D], data: bytes | msgspec.Raw, kind: type[Struct] | None = None
) -> D:
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), _wrong_key(str(error), decode, data), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJSON(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidJSON("the body is nested too deeply") from None


def _same(value: Any, neutral: Any) -> bool:
    """Whether two JSON values are equal. In Python 1 equals True, in JSON it does not."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


# The path has only names of fields. A value that is quoted before it may hold any text.
_PATH = re.compile(
    r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL
)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_ANY_KEY = "[...]"  # any key of an object, in msgspec's paths
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
_LONGEST = 300
_LONGEST_KEY = 64
_MOST_KEYS = 10_000


_layout = cache(inspect.type_info)  # it takes 10 ms


def missing(path: str) -> MissingParameter:
    """Return the error about a field that the request does not have."""
    return MissingParameter(f"missing required parameter: {path}", param=path)


def _invalid(
    text: str, wrong_key: str | None = None, kind: type[Struct] | None = None
) -> InvalidRequest:
    """msgspec's error in plain words, with its path as `param`.

    Args:
        wrong_key: the key that the error is about, if it is about a key of the object at the path.
            It is in the message only: OpenAI's `param` is the field.
        kind: what was to be decoded: where it lists the possible values, they are told.
    """
    match = _PATH.match(text)
    assert match is not None  # the pattern matches any text
    what, whole = match["what"], match["path"] or ""
    path = whole.replace(_ANY_KEY, "") or None
    if absent := _MISSING.fullmatch(what):
        return missing(f"{path}.{absent['name']}" if path else absent["name"])
    values: list[object] = []
    if kind is not None and what.startswith("Invalid "):
        values = [*dict.fromkeys(values_at(_layout(kind), _STEP.findall(whole)))]
    what = error_in_words(what, values)
    if len(what) > _LONGEST:
        what = f"{what[:_LONGEST]}..."
    where = f"{path}: " if path else ""
    if wrong_key is not None:
        shown = wrong_key if len(wrong_key) <= _LONGEST_KEY else f"{wrong_key[:_LONGEST_KEY]}..."
        where += f'the key "{shown}" is wrong: ' if match["key"] else f'at the key "{shown}": '
    elif match["key"]:
        where += "a key is wrong: "
    return InvalidRequest(f"{where}{what}", param=path)


def _wrong_key(text: str, decode: Callable[[Any], object], data: bytes | msgspec.Raw) -> str | None:
    """The key that an error is about, or whose value it is about.

    msgspec says only in which object the key is. So each entry of the object is decoded alone, in
    an otherwise empty body, until one gives the same error.

    Returns:
        None if the error is not about a key, the object is inside a list, or the object has too
        many entries to try.
    """
    match = _PATH.match(text)
    assert match is not None  # the pattern matches any text
    path = match["path"] or ""
    if not (match["key"] or path.endswith(_ANY_KEY)):
        return None
    names = path.removesuffix(_ANY_KEY).split(".")
    entries = _entries(data, names)
    for key in itertools.islice(entries, _MOST_KEYS):
        body: object = {key: entries[key]}
        for name in reversed(names):
            body = {name: body}
        try:
            decode(msgspec.json.encode(body))
        except msgspec.ValidationError as error:
            if str(error) == text:
                return key
        except RecursionError:  # the object is one level deeper here than in the body
            return None
    return None


def _entries(data: bytes | msgspec.Raw, names: list[str]) -> dict[str, msgspec.Raw]:
    """The object at this path of fields in a body; empty if there is none."""
    try:
        for name in names:
            data = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get(name, b"{}")
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}


# Halves of surrogate pairs, which are no characters.

_HALF = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# A sound part, and the half behind it. Possessive, so that a body of 30 MB is gone through once. A
# backslash takes what is escaped along.
_PART = re.compile(
    rb"((?:[^\\]++|" + _PAIR + rb"|(?!" + _HALF + rb")\\.)*+)(" + _HALF + rb")?", re.DOTALL
)


def mend_surrogates(body: bytes) -> bytes:
    """Return JSON with U+FFFD in place of each half of a surrogate pair.

    A program that cuts text in the middle of a character escapes one half of it. In a client's
    history it would come back with each request.
    """
    return _PART.sub(lambda part: part[1] + b"\\ufffd" if part[2] else part[1], body)
