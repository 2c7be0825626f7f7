"""Headers of safetensors files: the tensors of a file, without their numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from mlxsrv.formats.files import LONGEST_TEXT, UnusableFile, check_content

_MOST_DIMENSIONS = 32

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of one number, by its type in safetensors."""

_Size = Annotated[int, Meta(ge=0)]


class Tensor(msgspec.Struct, frozen=True):
    """One entry of a safetensors header; its offsets are bytes from the header's end."""

    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]

    @property
    def bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]

    @property
    def numbers(self) -> int:
        """The count of its numbers; of its bytes, if the type is not known."""
        return self.bytes * 8 // _BITS.get(self.dtype, 8)

    @property
    def consistent(self) -> bool:
        """Whether its shape and its bytes agree."""
        bits = _BITS.get(self.dtype)
        return self.bytes >= 0 and (bits is None or math.prod(self.shape) * bits == self.bytes * 8)


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TENSOR = msgspec.json.Decoder(Tensor)


def read_header(path: Path, *, limit: int = LONGEST_TEXT) -> tuple[dict[str, Tensor], bool]:
    """Return a file's tensors by name, and whether the file says that MLX has written it.

    Raises:
        UnusableFile: the file is no safetensors or cut short, or its header has more than `limit`
            bytes.
    """
    size = check_content(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(limit, size - 8):
            raise UnusableFile(f"{path.name!r} is cut short, or not safetensors")
        text = file.read(length)
    try:
        fields = _HEADER.decode(text)
        metadata = msgspec.json.decode(fields.pop("__metadata__", b"{}"))
        tensors = {name: _TENSOR.decode(field) for name, field in fields.items()}
    except (ValueError, RecursionError):
        raise UnusableFile(f"{path.name!r} has no header of safetensors") from None
    if not all(tensor.consistent for tensor in tensors.values()):
        raise UnusableFile(f"{path.name!r} has a tensor whose shape is not that of its bytes")
    whole = 8 + length + max((t.data_offsets[1] for t in tensors.values()), default=0)
    if size < whole:
        raise UnusableFile(f"{path.name!r} is cut short: {size} of {whole} bytes")
    return tensors, isinstance(metadata, dict) and metadata.get("format") == "mlx"
