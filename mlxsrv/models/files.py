"""The files of a model's folder: what the file system refuses, and where a text begins.

What is in them is read as all files are that come from anywhere: `mlxsrv.engine.headers`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxsrv.engine.headers import LONGEST_TEXT as LONGEST_TEXT
from mlxsrv.engine.headers import Object as Object
from mlxsrv.engine.headers import Tensor as Tensor
from mlxsrv.engine.headers import Unhealthy as Unhealthy
from mlxsrv.engine.headers import check_content as check_content
from mlxsrv.engine.headers import number as number
from mlxsrv.engine.headers import read_header as read_header
from mlxsrv.engine.headers import read_object as read_object


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Around all work on the files of a folder: what the file system refuses is a reason too."""
    try:
        if not folder.is_dir():
            raise Unhealthy("there is no such folder")
        yield
    except OSError as error:
        name = os.path.basename(str(error.filename or folder))
        raise Unhealthy(f"{name!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a path that no file can have
        raise Unhealthy(f"a name of a file is no path: {error}") from None


def read_start(path: Path, files: Iterable[str], limit: int) -> str:
    """The first `limit` bytes of a text; empty if it is not among `files`."""
    if path.name not in files or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(limit).decode(errors="replace")
