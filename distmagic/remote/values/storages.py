"""Tensors in a parcel: every torch storage is stored once, after the pickle, and loaded on the CPU.

While pickling, `Storages` only records which bytes of which storage each tensor uses. `plan` then
decides what is stored:

- the stretches of a storage that some tensor uses, merged if they touch or overlap, so that tensors
  which share memory share it again and a small view of a large storage stays small;
- a stretch that only one tensor uses, and less than half of whose bytes are its elements (one
  column of a matrix), is stored as a contiguous copy.

numpy is not needed, because a host may lack it. `joined` finds numpy arrays that share memory with
each other or with tensors: they share it again. Stretches are written directly from the tensors'
memory; those of another device are copied to the CPU in pieces of `CHUNK_BYTES`.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distmagic.remote.frozen import frozen
from distmagic.remote.values.reductions import placeholders

ALIGN = 64
CHUNK_BYTES = 32 << 20
_SMALL_BYTES = 64 << 10

# How to build a tensor, in JSON: [window, dtype, offset, size, stride, requires_grad, conj, neg];
# the offset is in elements from the start of the window. Window -1: it has no elements.
TensorRow = list[Any]


@dataclass(kw_only=True)
class _Stretch:
    """Bytes that some values use; `users` are the numbers of these."""

    start: int
    stop: int
    users: list[int]


def _merged(spans: Mapping[int, tuple[int, int]], gap: int) -> list[_Stretch]:
    """Return the stretches that values use, in order: spans less than `gap` bytes apart are one.

    `spans` has start and stop of each value, by the value's number.
    """
    found: list[_Stretch] = []
    for number in sorted(spans, key=lambda n: spans[n][0]):
        start, stop = spans[number]
        if found and start < found[-1].stop + gap:
            found[-1].stop = max(found[-1].stop, stop)
            found[-1].users.append(number)
        else:
            found.append(_Stretch(start=start, stop=stop, users=[number]))
    return found


@frozen
class Window:
    """Bytes to store: `nbytes` from byte `start` of a torch storage, or the elements of `packed`, a
    tensor.
    """

    storage: Any = field(repr=False)
    start: int
    nbytes: int
    packed: Any = field(default=None, repr=False)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in order; CPU memory at once and without a copy."""
        torch = sys.modules["torch"]
        storage = self.storage
        start = self.start  # 0 for a packed one
        if self.packed is not None:
            with torch.no_grad():
                # The tensor as its memory has it, without its conjugate and negative bits.
                tensor = self.packed
                if tensor.is_conj():
                    tensor = tensor.conj()
                if tensor.is_neg():
                    tensor = torch._neg_view(tensor)  # noqa: SLF001
                storage = tensor.contiguous().untyped_storage()
        if storage.device.type == "cpu":
            yield _memory(storage.data_ptr() + start, self.nbytes)
        else:
            yield from _over_the_cpu(storage, start, start + self.nbytes)


def _over_the_cpu(storage: Any, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of a storage on another device, at most `CHUNK_BYTES` at a time."""
    flat = _flat(storage)
    for at in range(start, stop, CHUNK_BYTES):
        part = flat[at : min(stop, at + CHUNK_BYTES)].cpu()
        yield _memory(part.data_ptr(), part.numel())


def _flat(storage: Any) -> Any:
    """Return the bytes of a storage as a tensor."""
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(address: int, size_bytes: int) -> memoryview:
    """Return memory as bytes; the caller must keep its owner alive meanwhile."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def joined(
    values: Sequence[memoryview | Window],
) -> tuple[list[memoryview | Window], list[tuple[int, int]]]:
    """Return what to store so that values which overlap in memory share it again, and each value's
    place in it.

    A place is (the number of what is stored, the offset in it). The values must be kept alive until
    it is stored.
    """
    spans = {}
    for number, value in enumerate(values):
        start = _address(value)
        # One at an unknown address overlaps nothing.
        spans[number] = start, (start + value.nbytes if start else 0)
    stored: list[memoryview | Window] = []
    places = [(0, 0)] * len(values)
    for stretch in sorted(_merged(spans, gap=0), key=lambda one: min(one.users)):
        for number in stretch.users:
            places[number] = len(stored), spans[number][0] - stretch.start
        if len(stretch.users) == 1:
            stored.append(values[stretch.users[0]])
        else:
            stored.append(_memory(stretch.start, stretch.stop - stretch.start))
    return stored, places


def _address(value: memoryview | Window) -> int:
    """Return where a value is in this process's memory; 0 for one without bytes, and for one that
    `chunks` copies.
    """
    if isinstance(value, Window):
        is_copied = value.packed is not None or value.storage.device.type != "cpu"
        return 0 if is_copied else int(value.storage.data_ptr() + value.start)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not value.nbytes:
        return 0
    return int(numpy.asarray(value).__array_interface__["data"][0])


def reduced_array(array: Any) -> Any:
    """Return how to pickle a numpy array with gaps, as `__reduce__` does, so that it shares memory
    with others again.

    None for other objects. numpy copies such an array; so does this if the gaps are large.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or type(array) is not numpy.ndarray or not array.nbytes:
        return None
    owner = array
    while type(owner.base) is numpy.ndarray:
        owner = owner.base
    is_whole = array.flags.forc or not owner.flags.forc
    if is_whole or array.dtype.hasobject or owner.dtype.hasobject:
        return None
    # The public flag of a broadcast array warns.
    address, is_read_only = array.__array_interface__["data"]
    owners, is_read_only_there = owner.__array_interface__["data"]
    if is_read_only_there and not is_read_only:
        return None  # numpy could not make the copy's memory writable
    steps = [
        (n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)
    ]
    before = -sum(step for step in steps if step < 0)
    span = before + sum(step for step in steps if step > 0) + array.itemsize
    start = address - before - owners
    is_inside = 0 <= start <= start + span <= owner.nbytes
    if not is_inside or (span > _SMALL_BYTES and 2 * array.nbytes < span):
        return None
    used = owner.ravel(order="K").view("u1")[start : start + span]
    if is_read_only:
        used.flags.writeable = False
    return numpy.ndarray, (array.shape, array.dtype, used, before, array.strides)


class Storages:
    """The storages and tensors found while one value is pickled.

    They are kept alive until it is written.
    """

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        # {storage: {number of a tensor with elements: start and stop in the storage}}
        self._spans: dict[int, dict[int, tuple[int, int]]] = {}

    def reduced(self, obj: Any) -> Any:
        """Return how to pickle a tensor or a storage: as a number, under which it is recorded.

        None for a kind that torch's own reduction must take apart, and for any other object.
        """
        torch = sys.modules["torch"]
        if isinstance(obj, torch.storage.TypedStorage):
            storage = obj._untyped_storage  # noqa: SLF001 - the public way warns
            is_meta = storage.device.type == "meta"
            return None if is_meta else (_typed, (storage, obj.dtype))
        make, tensor = placeholders.tensor, obj
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            make, tensor = placeholders.storage, _flat(obj)
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        is_special = tensor.is_quantized or tensor.is_nested or tensor.__dict__
        if is_special or tensor.device.type == "meta":
            return None
        if not torch._C._has_storage(tensor):  # noqa: SLF001
            tensor = tensor.cpu()  # XLA and similar devices do not expose their memory
        start, stop = _span(tensor)
        storage = tensor.untyped_storage()
        if stop > storage.nbytes():
            return None
        number = len(self._tensors)
        self._tensors.append(tensor)
        if stop:
            spans = self._spans.setdefault(storage._cdata, {})  # noqa: SLF001
            # Every element stays aligned.
            spans[number] = start // ALIGN * ALIGN, stop
        return make, (number,)

    def plan(self) -> tuple[list[Window], list[TensorRow]]:
        """Return the windows to write, and for each number a row that describes how to build it
        from them.
        """
        windows: list[Window] = []
        rows = [_row(tensor) for tensor in self._tensors]
        for spans in self._spans.values():
            for stretch in _merged(spans, gap=ALIGN):
                for number in stretch.users:
                    tensor, row = self._tensors[number], rows[number]
                    first = stretch.start // tensor.element_size()
                    row[0], row[2] = len(windows), tensor.storage_offset() - first
                window = Window(
                    storage=tensor.untyped_storage(),  # all users have the same
                    start=stretch.start,
                    nbytes=stretch.stop - stretch.start,
                )
                start, stop = _span(tensor)
                if len(stretch.users) == 1 and 2 * tensor.nbytes < stop - start:
                    # Like the strides of a contiguous tensor: the last dimension has step 1.
                    sizes = row[3]
                    row[4] = [math.prod(sizes[n:]) for n in range(1, len(sizes) + 1)]
                    row[2] = 0
                    nbytes = tensor.nbytes
                    window = replace(window, start=0, nbytes=nbytes, packed=tensor)
                windows.append(window)
        return windows, rows


def _row(tensor: Any) -> TensorRow:
    """Return the row of a tensor without elements."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    flags = [tensor.requires_grad, tensor.is_conj(), tensor.is_neg()]
    return [-1, dtype, 0, list(tensor.size()), list(tensor.stride()), *flags]


def _span(tensor: Any) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor uses, and the one after the last."""
    if not tensor.numel():
        return 0, 0
    first = last = tensor.storage_offset()
    for n, step in zip(tensor.size(), tensor.stride(), strict=True):
        last += (n - 1) * step
    element_bytes = tensor.element_size()
    return first * element_bytes, (last + 1) * element_bytes


class TensorLoader:
    """Builds tensors and storages over the memory of a loaded parcel, without copies."""

    def __init__(
        self, windows: Sequence[memoryview], rows: Sequence[TensorRow]
    ) -> None:
        self._windows = windows
        self._rows = rows
        self._built: dict[int, Any] = {}

    def tensor(self, number: int) -> Any:
        """Return tensor `number`, on the CPU."""
        import torch

        window, dtype_name, offset, size, stride, requires_grad, conj, neg = self._rows[
            number
        ]
        dtype = getattr(torch, dtype_name)
        made = torch.empty(0, dtype=dtype).set_(
            self._storage(window), offset, size, stride
        )
        if conj:
            torch._C._set_conj(made, True)  # noqa: SLF001
        if neg:
            torch._C._set_neg(made, True)  # noqa: SLF001
        return made.requires_grad_(requires_grad)

    def storage(self, number: int) -> Any:
        """Return bare storage `number`, on the CPU."""
        return self._storage(self._rows[number][0])

    def _storage(self, window: int) -> Any:
        import torch

        if window < 0:
            return torch.UntypedStorage(0)
        if window not in self._built:
            flat = torch.frombuffer(self._windows[window], dtype=torch.uint8)
            self._built[window] = flat.untyped_storage()
        return self._built[window]


# Called by the pickle when it is loaded.


def _typed(storage: Any, dtype: Any) -> Any:
    """Return a storage in the typed form that torch's own reductions use."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
