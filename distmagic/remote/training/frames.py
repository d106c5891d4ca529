"""The frames of an exception with the values of their variables, in a file: a debugger opens them
on the notebook machine, after the rank has ended.

A value that is too large, or that can't be pickled, is only described. The innermost frames come
first, because the file has little room. A tensor of a GPU that still computes is not read: that
could wait forever, as for a collective whose other ranks have ended.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from distmagic.remote.frozen import frozen
from distmagic.remote.training import inventory
from distmagic.remote.values import call, parcel
from distmagic.remote.values.reductions.source_form import SourceForm

# Size limit of a file of frames, as of a result that is sent at once.
LARGEST_BYTES = 1 << 20
_ROOM_BYTES = 800_000  # for all values; one may take half of what is left
_SOURCE_BYTES = 100_000  # for all sources
_MOST_FRAMES = 40  # the innermost ones
_MOST_NAMES = 200  # of one frame
_MOST_LINES = 100  # of a source before and after the frame's line
_LONGEST_LINE = 300
_PATIENCE_S = 1.5  # for all values; a GPU may take half of it
_PAUSE_S = 0.01  # how often a GPU is asked whether it still computes


@frozen
class KeptFrame:
    """A call: its place in the source, and its names with the numbers of their values."""

    name: str
    file: str  # as tracebacks show it: a path, or the label of a cell
    line: int
    first_line: int
    source: str  # from its first line
    local_names: Mapping[str, int]
    global_names: Mapping[str, int]  # those that its code uses


@frozen
class Frames:
    """The calls from the outermost one to the place of the exception.

    `values` are parcels, or descriptions of values that were not kept.
    """

    frames: tuple[KeptFrame, ...]
    values: tuple[bytes | str, ...]


def of(
    calls: TracebackType | None, name_of: Callable[[str], str], form: SourceForm | None
) -> Frames:
    """Return the frames of the user's calls.

    `name_of` is how a file is shown. With `form`, code in values is pickled as source.
    """
    keeper = _Keeper(form)
    found = [_frame(one, name_of, keeper) for one in reversed(list(_last(calls)))]
    return Frames(frames=tuple(reversed(found)), values=tuple(keeper.values))


def _last(calls: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the innermost calls."""
    found = []
    while calls is not None:
        found.append(calls)
        calls = calls.tb_next
    yield from found[-_MOST_FRAMES:]


class _Keeper:
    """Pickles values, each once, as long as there are room and time."""

    def __init__(self, form: SourceForm | None) -> None:
        self.values: list[bytes | str] = []
        self._form = form
        self._room = _ROOM_BYTES
        now_s = time.monotonic()
        self._until_s = now_s + _PATIENCE_S
        self._until_of_device_s = now_s + _PATIENCE_S / 2
        # With the values: the number of one that is gone could become that of another one.
        self._numbers: dict[int, tuple[int, object]] = {}
        self._sources: dict[tuple[str, int, int], str] = {}
        self._source_room = _SOURCE_BYTES

    def number(self, value: object) -> int:
        """Return the number of a value among all values."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.values), value
            self.values.append(self._kept(value))
        return self._numbers[id(value)][0]

    def source(self, file: str, first: int, last: int, names: dict[str, Any]) -> str:
        """Return these lines of a file, "" where there is no room for them."""
        key = file, first, last
        if key not in self._sources:
            lines = linecache.getlines(file, names)[first - 1 : last]
            text = "".join(f"{line.rstrip()[:_LONGEST_LINE]}\n" for line in lines)
            size = len(text.encode(errors="replace"))
            fits = size <= self._source_room
            self._source_room -= size if fits else 0
            self._sources[key] = text if fits else ""
        return self._sources[key]

    def _kept(self, value: object) -> bytes | str:
        # Pickling runs anybody's code, and an exit of it is none of the rank's.
        with contextlib.suppress(BaseException):
            if time.monotonic() < self._until_s:
                data = parcel.dump_bytes(
                    value, self._room // 2, self._form, self._may_read
                )
                self._room -= len(data)
                return data
        with contextlib.suppress(BaseException):
            return inventory.described(value)[0]
        return "a value"

    def _may_read(self, devices: Iterable[Any]) -> bool:
        """Whether these devices have done all that was asked of them. Waits for that."""
        for device in devices:
            module = getattr(sys.modules["torch"], device.type)  # such as torch.cuda
            while not module.current_stream(device).query():
                if time.monotonic() > self._until_of_device_s:
                    return False
                time.sleep(_PAUSE_S)
        return True


def _frame(
    one: TracebackType, name_of: Callable[[str], str], keeper: _Keeper
) -> KeptFrame:
    frame, code = one.tb_frame, one.tb_frame.f_code
    at = one.tb_lineno or code.co_firstlineno
    names = dict(frame.f_locals)
    used = {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}  # fmt: skip
    first = max(code.co_firstlineno, at - _MOST_LINES)
    last = max([at, *(line for *_, line in code.co_lines() if line)])
    last = min(last, at + _MOST_LINES)
    return KeptFrame(
        name=code.co_name,
        file=name_of(code.co_filename),
        line=at,
        first_line=first,
        source=keeper.source(code.co_filename, first, last, frame.f_globals),
        local_names=_numbers(names, keeper),
        global_names=_numbers(
            {} if frame.f_locals is frame.f_globals else used, keeper
        ),
    )


def _numbers(values: Mapping[str, object], keeper: _Keeper) -> dict[str, int]:
    """Return the user's names with the numbers of their values."""
    names = [name for name in values if call.is_of_user(name)][:_MOST_NAMES]
    return {name: keeper.number(values[name]) for name in names}
