"""A value in a file: the format in which functions are sent to ranks, and return values back.

    magic | pickle, protocol 5 | buffers, each aligned to 64 bytes | table, JSON |
    trailer: where the table is

cloudpickle makes the pickle. The memory of tensors and numpy arrays follows as buffers, written
without a copy, once for those that share it; `load` memory-maps them (writable; changes stay
private). Tensors are always loaded on the CPU. A file that was cut off has no trailer. With
`beside`, large values are in separate files in that folder, which the table names (see
side_files.py).

Functions and classes of `__main__` are pickled by value. With `namespace`, `load` adds them and
their globals to it; without, they get a separate namespace, and classes that this process has
already stay unchanged.

cloudpickle, torch and numpy are only imported if a value needs them.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import secrets
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmagic.remote.records.atomic_file import atomic_write, discard
from distmagic.remote.values import by_name, side_files, unpicklable
from distmagic.remote.values.pickling import Packer, Refuse
from distmagic.remote.values.reductions.classes import hash_again, hashed, known_classes
from distmagic.remote.values.reductions.source_form import SourceForm
from distmagic.remote.values.seen import Seen
from distmagic.remote.values.storages import (
    ALIGN,
    CHUNK_BYTES,
    TensorLoader,
    Window,
    joined,
)
from distmagic.remote.values.unpickling import Loader
from distmagic.remote.wire.parts import Blob

MAGIC = b"distmagic parcel 1\n".ljust(ALIGN, b"\0")
# Offset and size of the table, and the end mark.
_TRAILER = struct.Struct("<QQ16s")
_END = b"end of parcel 1\n"


class ParcelError(Exception):
    """A value can't be put into a parcel or taken out of one.

    `hint` has a cure, "" if there is none.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.message = message
        self.hint = hint


class Unpicklable(ParcelError):
    """Some part of the value can't be pickled; `cause` is the smallest such part."""

    def __init__(self, cause: unpicklable.UnpicklablePart) -> None:
        super().__init__(
            f"{cause.sentence}.",
            "Return only what can be pickled: numbers, tensors, a state_dict().",
        )
        self.cause = cause


class TooLarge(ParcelError):
    """The parcel exceeds the limit; `size_bytes` is its size so far."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"The value takes {size_bytes:,} bytes; {limit_bytes:,} are allowed."
        )
        self.size_bytes = size_bytes


def dump(  # noqa: PLR0913  # all that a parcel is made of
    value: object,
    path: str | os.PathLike[str] | None,
    *,
    seen: Seen | None = None,
    refuse: Refuse | None = None,
    limit_bytes: int | None = None,
    name: str = "result",
    beside: Path | None = None,
    source: SourceForm | None = None,
    namespace: Mapping[str, object] | None = None,
) -> int:
    """Write `value` to `path`, atomically and readable by its owner only; return the size of the
    file in bytes. None for `path` writes nothing: `seen` has the parcel's hash.

    `source`: without byte code. `beside` is the folder for large values in separate files; `load`
    expects them in the parcel's folder. `namespace` is the notebook's: small values of it are
    included for lookups by name (see by_name.py). `seen` collects notes about the parcel, and its
    SHA-256. Raises `Unpicklable`, which names the part starting from `name`, `TooLarge` before any
    buffer is written, and OSError if the disk is full. A DistributedDataParallel module is replaced
    by its inner module, because its process group ends with the run.
    """
    writing = nullcontext() if path is None else atomic_write(Path(path))
    with writing as file:
        sink = _Sink(
            file=file, sha256=seen.sha256 if seen else None, limit_bytes=limit_bytes
        )
        sink.write(MAGIC)
        sink.omitted = None if beside is None else []
        seen = seen or Seen()
        packer = Packer(sink, seen, refuse, source)
        try:
            packer.pickle(value, namespace)
        except (ParcelError, MemoryError):
            raise
        except Exception as error:
            if sink.error is not None:
                raise sink.error from None
            find_out = functools.partial(why_not, refuse=refuse, source=source)
            cause = unpicklable.find(value, name, error, find_out)
            raise Unpicklable(cause) from error
        _write_values(packer, sink, beside, seen)
    return sink.size


def dump_bytes(
    value: object, limit_bytes: int, source: SourceForm | None = None, may_read: Callable[[set[Any]], bool] | None = None,
) -> bytes:  # fmt: skip
    """Return the parcel of a value.

    Tensors of other devices than the CPU are only read if `may_read` of their devices is True.
    Raises `TooLarge`, `ParcelError` for a tensor that is not read, and the errors of pickling.
    """
    file = io.BytesIO()
    sink = _Sink(file=file, limit_bytes=limit_bytes)
    sink.write(MAGIC)
    seen = Seen()
    packer = Packer(sink, seen, None, source)
    packer.pickle(value)
    sink.check(_size_bytes(packer, sink))
    _, windows, _ = packer.plan()
    devices = {one.storage.device for one in windows}
    devices = {one for one in devices if one.type != "cpu"}
    if devices and may_read is not None and not may_read(devices):
        raise ParcelError("The device of a tensor is at work.")
    _write_values(packer, sink, None, seen)
    return file.getvalue()


def measure(
    value: object, *, refuse: Refuse | None = None, source: SourceForm | None = None
) -> int:
    """Return how many bytes `value` takes in a parcel, or raise the error of pickling it.

    Copies and writes nothing.
    """
    sink = _Sink()
    packer = Packer(sink, Seen(), refuse, source)
    packer.pickle(value)
    return _size_bytes(packer, sink)


def _size_bytes(packer: Packer, sink: _Sink) -> int:
    """Return the size of a parcel whose pickle the sink has, without its table."""
    buffers, windows, _ = packer.plan()
    stored, _ = joined([*buffers, *windows])
    return sink.size + sum(one.nbytes for one in stored)


def _write_values(packer: Packer, sink: _Sink, beside: Path | None, seen: Seen) -> None:
    """Write the values after the pickle, and the table with their positions."""
    buffers, windows, rows = packer.plan()
    omitted = sink.omitted or []
    sink.omitted = None  # from here on the sink writes everything
    values: list[memoryview | Window] = [memoryview(data) for _, data in omitted]
    values += [*buffers, *windows]
    stored, places = joined(values)
    sizes = [value.nbytes for value in stored]
    sink.check(sink.size + sum(sizes))

    # Where a value is: [offset], or [offset, number of the side file].
    starts: list[list[int]] = [[] for _ in stored]
    if beside is not None:
        for group in side_files.grouped(sizes):
            side_file, offsets = _write_side_file([stored[n] for n in group], beside)
            for n, offset in zip(group, offsets, strict=True):
                starts[n] = [offset, len(seen.side_files)]
            seen.side_files.append(side_file)
    for n, value in enumerate(stored):
        if not starts[n]:
            starts[n] = [sink.write_value(value)]

    # [offset, bytes] in the parcel, or [offset, bytes, number of the side file].
    spans = []
    for value, (n, at) in zip(values, places, strict=True):
        start, *where = starts[n]
        spans.append([start + at, value.nbytes, *where])
    of_tensors = len(values) - len(windows)
    table: dict[str, list[Any]] = {
        "buffers": spans[len(omitted) : of_tensors],
        "windows": spans[of_tensors:],
        "rows": rows,
        "side_files": [[one.sha256, one.size_bytes] for one in seen.side_files],
        "omitted": [[at, spans[n]] for n, (at, _) in enumerate(omitted)],
    }
    sink.align()
    offset = sink.size
    length = sink.write(json.dumps(table, separators=(",", ":")).encode())
    sink.write(_TRAILER.pack(offset, length, _END))


def _write_side_file(
    values: Sequence[memoryview | Window], folder: Path
) -> tuple[Blob, list[int]]:
    """Write a file with these values; return it, and the position of each in it.

    Its name is the hash of its bytes, which is only known at the end: `atomic_write` needs the name
    before.
    """
    aside = folder / f".side-file-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        # A file server may report errors only when the file is closed.
        with open(descriptor, "wb") as file:
            sink = _Sink(file=file, sha256=hashlib.sha256())
            offsets = [sink.write_value(value) for value in values]
        blob = Blob(sha256=sink.sha256.hexdigest(), size_bytes=sink.size)
        aside.replace(folder / blob.sha256)
    finally:
        discard(aside)
    return blob, offsets


def why_not(
    value: object, refuse: Refuse | None = None, source: SourceForm | None = None
) -> Exception | None:
    """Return why `value` can't be pickled, None if it can."""
    try:
        measure(value, refuse=refuse, source=source)
    except Exception as error:  # noqa: BLE001 - pickling runs anybody's code
        return error
    return None


@dataclass
class _Sink:
    """Receives a parcel's bytes: writes them to a file, or only counts them.

    If `omitted` is a list, large data is added to it instead of the file: (its offset, bytes). So
    the pickle of a large text or byte array stays short, and the data gets a separate file.
    """

    file: Any = None
    sha256: Any = None
    limit_bytes: int | None = None
    size: int = 0
    error: OSError | None = None
    omitted: list[tuple[int, Any]] | None = None
    omitted_bytes: int = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if self.omitted is not None and len(view) >= side_files.LARGE_BYTES:
            self.omitted.append((self.size, data))
            self.omitted_bytes += len(view)
            self.check(self.size + self.omitted_bytes)
            return len(view)
        self.size += len(view)
        self.check(self.size)
        try:
            for at in range(0, len(view), CHUNK_BYTES):
                part = view[at : at + CHUNK_BYTES]
                if self.file is not None:
                    self.file.write(part)
                if self.sha256 is not None:
                    self.sha256.update(part)
        except OSError as error:
            # Recorded separately, because pickling an object may raise an OSError as well.
            self.error = error
            raise
        return len(view)

    def write_value(self, value: memoryview | Window) -> int:
        """Write a value, aligned, and return its offset."""
        self.align()
        at = self.size
        for chunk in value.chunks() if isinstance(value, Window) else (value,):
            self.write(chunk)
        return at

    def align(self) -> None:
        self.write(bytes(-self.size % ALIGN))

    def check(self, size: int) -> None:
        if self.limit_bytes is not None and size > self.limit_bytes:
            raise TooLarge(size, self.limit_bytes)


def load(path: str | os.PathLike[str], namespace: dict[str, Any] | None = None) -> Any:
    """Return the value in the parcel at `path`.

    The file may be removed afterwards; it must not be changed. `namespace` is the `__dict__` of the
    `__main__` for functions and classes. Raises `ParcelError` for an incomplete or invalid parcel,
    and for a value that can't be rebuilt in this process.
    """
    memory = side_files.mapped(path)
    return _load(memory, str(path), Path(path).parent, namespace)


def load_bytes(data: bytes, name: str) -> Any:
    """Return the value of a parcel in memory without side files; no file stays open.

    `name` is its name in errors. Raises `ParcelError` as `load`.
    """
    memory = memoryview(bytearray(data))  # the value is writable
    return _load(memory, name, Path(), None)


def _load(
    memory: memoryview, name: str, folder: Path, namespace: dict[str, Any] | None
) -> Any:
    try:
        table: dict[str, Any] = json.loads(_table_bytes(memory, name))
        memories = _Memories(memory, table["side_files"], folder)
        pickled = memories.pickled(table["omitted"])
        buffers = iter([memories.view(span) for span in table["buffers"]])
        windows = [memories.view(span) for span in table["windows"]]
        tensors = TensorLoader(windows, table["rows"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ParcelError(f"{name} is damaged: {error}.") from error
    home = {"__name__": "__main__"} if namespace is None else namespace
    kept = known_classes() if namespace is None else frozenset()
    before = [] if namespace is None else hashed(namespace)
    asides: dict[str, by_name.Aside] = {}

    def loaded(file: Any) -> object:
        loader = Loader(file, buffers, tensors, home, kept)
        value, definitions = loader.load(), loader.load()
        for one, defined in definitions.items():
            if isinstance(defined, by_name.Aside):
                asides[one] = defined
            else:
                home.setdefault(one, defined)
        return value

    try:
        value = loaded(pickled)
    except MemoryError:
        raise
    except Exception as error:
        raise _not_here(error) from error
    if namespace is not None:
        hash_again(namespace, before)
    if asides and namespace is not None:
        by_name.offer(asides, home, loaded)
    return value


def _table_bytes(memory: memoryview, name: str) -> bytes:
    """Return the table of a parcel, with the positions of its values.

    Raises `ParcelError` for an incomplete parcel.
    """
    size = len(memory)
    if memory[: len(MAGIC)] != MAGIC:
        raise ParcelError(f"{name} is not a stored value.")
    cut = ParcelError(f"{name} is incomplete: it was cut off, or its disk was full.")
    if size < len(MAGIC) + _TRAILER.size:
        raise cut
    offset, length, end = _TRAILER.unpack_from(memory, size - _TRAILER.size)
    if end != _END or offset + length + _TRAILER.size != size:
        raise cut
    return bytes(memory[offset : offset + length])


class _Memories:
    """The memory of a loaded parcel and of its side files.

    A span is [offset, bytes] in the parcel, or [offset, bytes, number of the side file].
    """

    def __init__(
        self, memory: memoryview, found: Sequence[tuple[str, int]], folder: Path
    ) -> None:
        self._memories = [memory]
        for name, size in found:
            part = memoryview(b"")
            with suppress(OSError):
                part = side_files.mapped(folder / os.path.basename(name))
            if len(part) != size:
                raise ParcelError(
                    f"A file of the stored value is missing, incomplete or unreadable: {name}.",
                    "Run the cell again.",
                )
            self._memories.append(part)

    def view(self, span: Sequence[int]) -> memoryview:
        """Return the bytes of a span; they are writable.

        Raises ValueError for one outside of the parcel.
        """
        offset, size, *side_file = span
        number = side_file[0] + 1 if side_file else 0
        if number in range(len(self._memories)):
            memory = self._memories[number]
            if 0 <= offset <= offset + size <= len(memory):
                return memory[offset : offset + size]
        raise ValueError("its table points outside of it")

    def pickled(
        self, omitted: Sequence[tuple[int, Sequence[int]]]
    ) -> io.BufferedReader:
        """Return the original pickle, with the omitted data inserted again."""
        main = self._memories[0]
        pieces = []
        at = len(MAGIC)
        for offset, span in omitted:
            pieces += [main[at:offset], self.view(span)]
            at = offset
        pieces.append(main[at:])
        return io.BufferedReader(side_files.JoinedPieces(pieces), 1 << 16)


def _not_here(error: Exception) -> ParcelError:
    """Return the error for a value that can't be rebuilt in this process."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return ParcelError(f"The value needs the module {error.name!r}, which this Python lacks.",
                           f"Install {error.name.partition('.')[0]} for {sys.executable}.")  # fmt: skip
    if isinstance(error, (pickle.UnpicklingError, EOFError)):
        words = str(error).removesuffix(".")
        return ParcelError(f"The parcel is damaged: {words}.")
    return ParcelError(
        f"The value can't be rebuilt in this process: {type(error).__name__}: {error}"
    )
