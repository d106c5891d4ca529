"""Files that appear under their name whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path, *, is_buffered: bool = True) -> Iterator[BinaryIO]:
    """Give a new file to write and to read, readable by its owner only, which becomes `path` when the block is over.

    Where the block raises, the file is removed and `path` stays as it was. The file has a name of its own until then, in
    the folder of `path`: other processes, also of other hosts, may write the same at the same time. Raises OSError.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(
            aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "w+b", buffering=-1 if is_buffered else 0) as file:
            yield file
        os.replace(aside, path)
    finally:
        with contextlib.suppress(OSError):  # it has its name by now
            aside.unlink()
