"""Objects of which the type says what they are, also of types that the server does not know.

A tagged union of msgspec refuses a type that it does not have. Clients give back what other servers
have sent, so such an object is left out, not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from mlxsrv.wire.decoding import decode_part
from mlxsrv.wire.unknown import Fields, Search

T = TypeVar("T", bound=Struct)


class TaggedKinds(Generic[T]):
    """Reads objects of several tagged Structs. Made once, at module level.

    Args:
        place: the path of the objects without the indices of lists, with a dot at the end.
    """

    def __init__(self, kinds: Sequence[type[T]], place: str) -> None:
        self.kinds = kinds
        self._readers: dict[object, _Reader] = {
            kind.__struct_config__.tag: _Reader(kind, place) for kind in kinds
        }

    def decode(self, tag: str | None, data: bytes) -> T:
        """Return an object that `decode_new` has decoded before."""
        found: T = self._readers[tag].decode(data)
        return found

    def decode_new(self, tag: str, raw: Raw, path: str, search: Search) -> T | None:
        """Return an object; None if its tag is not known.

        Args:
            search: notes its unknown fields.

        Raises:
            InvalidRequest: the object is wrong; the error has its path.
        """
        reader = self._readers.get(tag)
        if reader is None:
            decode_part(_as_text, raw, path)  # what is ignored must be valid UTF-8, too
            return None
        found: T = decode_part(reader.decode, raw, path)
        reader.fields.look_at(raw, f"{path}.", search)
        return found


class _Reader:
    def __init__(self, kind: type[Struct], place: str) -> None:
        self.decode: Callable[[Raw | bytes], Any] = msgspec.json.Decoder(kind).decode
        self.fields = Fields(kind, place)


def _as_text(raw: Raw | bytes) -> str:
    return str(raw, "utf-8")
