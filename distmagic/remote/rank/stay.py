"""A rank that stays alive: it runs one cell after the other in one `__main__`, until its agent
closes the connection.

The main thread runs cells. Another thread reads the agent's requests, and interrupts the main
thread. An exception in a cell, even `sys.exit`, only ends the cell.

    RunCell       --inbox-->   the main thread: CellBegan, the cell, CellEnded
    ParkAtStep    --steps-->   StepCount; the rank waits after its next step
    StopAtStep    --steps-->   KeyboardInterrupt, after that step
    InterruptCell --SIGINT-->  KeyboardInterrupt in that cell; every 2 s again, and its process
                               groups are broken. If this was for a failed rank, a later interrupt
                               of the user counts as the first
    OthersEnded   --a look-->  a call that waits for ranks which don't run the cell, or have ended
                               it, is interrupted likewise, and fails the cell. If the cell catches
                               that, its next such call is, too
    end of file   --inbox-->   the rank's own end
"""

from __future__ import annotations

import base64
import bdb
import contextlib
import gc
import itertools
import os
import queue
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

from distmagic.remote.rank import calls, ending, outbox, report, sources
from distmagic.remote.rank.ending import Rank
from distmagic.remote.records.atomic_file import discard
from distmagic.remote.system import threads
from distmagic.remote.training import groups, steps
from distmagic.remote.values import call, parcel, reloading
from distmagic.remote.wire import codec
from distmagic.remote.wire.cells import (
    MOST_NAMES,
    CellBegan,
    CellEnded,
    InterruptCell,
    OthersEnded,
    ParkAtStep,
    RunCell,
    StepCount,
    StopAtStep,
)
from distmagic.remote.wire.clipping import clipped, ranges, text_of
from distmagic.remote.wire.events import Ended
from distmagic.remote.wire.parts import GroupCalls

_MOST_SHOWN = 2000  # characters of a repr
# Size limit of a value that is sent with the end of its cell.
_MOST_VALUE_BYTES = 48_000
_MOST_NAMES_CHARS = 20_000
_BREAK_S = 2.0  # time for an interrupt to take effect before groups are broken
_ALONE_S = 0.5  # how often a cell's calls are looked at while other ranks don't run it
_MOST_GROUPS = 200
_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")
_STAYS = (
    "its value is large, or can't be pickled, and stays on the rank under the name _"
)


class PeerFailed(KeyboardInterrupt):
    """Raised in a cell when another rank of the cell has failed.

    `except Exception` does not catch it.
    """


class CellLoop:
    """The loop of one rank, whose agent is at the other end of `conn`.

    `labels` of cells are by file name.
    """

    def __init__(
        self, rank: Rank, conn: socket.socket, main: ModuleType, labels: dict[str, str]
    ) -> None:
        self._this, self._conn, self._main, self._labels = rank, conn, main, labels
        self._rank = rank.rank
        self._all = frozenset(range(int(os.environ["WORLD_SIZE"])))
        self._form = sources.form_of_results(rank.code)  # of values that are sent
        self._inbox: queue.SimpleQueue[RunCell | None] = queue.SimpleQueue()
        self._last = 0  # the number of the last received cell
        self._running = 0  # the number of the running cell, 0 between two
        self._lock = threading.Lock()
        self._cell = 0  # the number of the last cell that was begun
        # For that cell, and for one that waits.
        self._interrupts: dict[int, InterruptCell] = {}
        self._came = (
            threading.Event()
        )  # the interrupt has taken effect, or no cell runs
        self._over = threading.Event()  # no cell runs
        self._alone = ""  # why this cell waits for ranks that do not run it
        self._watched = 0  # the cell whose calls are looked at
        # For that cell, and for one that waits: ranks that do not run it, with their groups if they
        # have ended it.
        self._absent: dict[int, dict[int, tuple[GroupCalls, ...] | None]] = {}
        # When this cell was begun, or last interrupted: that has broken its calls so far.
        self._since_ns = 0
        self._own: set[str] = set()  # names that cells have assigned
        self._shown = self._value = ""  # of the last expression
        # Cells that a child process needs, by the names that they define: the newest of each.
        self._defining: dict[frozenset[str], Path] = {}
        self._main_file: Path | None = None  # names them
        self._pid = os.getpid()

    def run(self) -> None:
        """Run cells until the agent closes the connection."""
        signal.signal(signal.SIGINT, self._interrupt)
        # So NCCL aborts communicators without ending the process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        steps.install()
        sources.label_warnings(self._labels)
        reader = threads.begin("cells", self._read)
        while (request := self._inbox.get()) is not None:
            self._run_cell(request)
        _forget_failure()
        reader.join()

    def _send(self, message: codec.Message) -> None:
        outbox.send_for_sure(self._conn, message)

    # ---- the reading thread

    def _read(self) -> None:
        while True:
            try:
                packet = self._conn.recv(1 << 18)
                message = codec.decode(packet)[1] if packet else None
            except (OSError, codec.BadLine):
                message = None
            if message is None:
                self._inbox.put(None)
                return
            self._take(message)

    def _take(self, message: codec.Message) -> None:
        if isinstance(message, RunCell) and message.cell > self._last:
            with self._lock:
                self._last = message.cell
                self._absent[message.cell] = dict.fromkeys(self._all - {*message.ranks})
            self._inbox.put(message)
        elif isinstance(message, ParkAtStep) and self._running == message.cell:
            made = steps.ask()
            self._send(StepCount(cell=message.cell, rank=self._rank, **made))
        elif isinstance(message, StopAtStep) and self._running == message.cell:
            steps.stop_at(message.kind, message.step)
        elif isinstance(message, OthersEnded):
            with self._lock:
                absent = self._absent.get(message.cell)
                if absent is not None:  # the cell may still wait, or be loading
                    ended = dict.fromkeys(message.ended, message.groups)
                    self._absent[message.cell] = {**absent, **ended}
                    self._watch()
        elif isinstance(message, InterruptCell):
            with self._lock:
                before = self._interrupts.get(message.cell)
                # Not a repeat over a new connection. The cell may have caught PeerFailed.
                is_new = before is None or message.failed < 0 <= before.failed
                is_new = is_new or message.failed == self._rank
                if message.cell in (self._last, self._cell) and is_new:
                    self._interrupts[message.cell] = message
                if self._running != message.cell or not is_new:
                    return
                is_tried = before is not None and not self._came.is_set()
                self._came.clear()
                steps.go_on()
                _interrupt_main()
            # No thread can start: the signal alone must do.
            with contextlib.suppress(RuntimeError):
                if not is_tried:
                    threads.begin("break", self._break, message.cell)

    # ---- one thread for each interrupt

    def _break(self, cell: int) -> None:
        """Break the process groups in which a cell waits if the interrupt has no effect, and
        interrupt the cell again.

        A signal that comes just before a system call does not end that call: `time.sleep` would
        sleep to its end.
        """
        for attempt in itertools.count():
            if self._came.wait(_BREAK_S):
                return
            with self._lock:
                if self._running != cell:
                    return
                # A handler of the user's gets one signal an interrupt.
                if signal.getsignal(signal.SIGINT) == self._interrupt:
                    _interrupt_main()
            if attempt == 0:
                groups.break_all()

    # ---- a thread for each cell that some ranks do not run

    def _watch(self) -> None:
        """Look at the running cell's calls if some ranks make none from now on.

        The caller has the lock.
        """
        cell = self._running
        if cell and self._absent[cell] and self._watched != cell:
            self._watched = cell
            with contextlib.suppress(RuntimeError):  # no thread can start
                threads.begin("alone", self._look, cell)

    def _look(self, cell: int) -> None:
        """Interrupt the cell if it waits in a call for ranks that don't run it: between two cells
        they make no call.
        """
        before = None
        while not self._over.wait(_ALONE_S) and self._running == cell:
            if cell in self._interrupts and not self._came.is_set():
                continue  # that interrupt breaks its calls
            found = None
            # A torch with other records, or a group that just ends.
            with contextlib.suppress(Exception):
                found = calls.waiting(self._absent[cell], self._since_ns)
            # A call whose end nobody waits for yet lets the cell go on.
            look = found, _main_place()
            if found and look == before:
                name, _, missing = found
                word = "rank" if len(missing) == 1 else "ranks"
                cure = "Let all ranks of the process group make this call."
                if name in ("send", "recv"):
                    cure = "Let that rank make the matching call."
                self._alone = (
                    f"{name} waits for {word} {','.join(ranges(missing))}: not in this cell, or at its end already. "
                    f"{cure}"
                )
                self._take(InterruptCell(cell=cell, ranks=(), failed=self._rank))
            before = look

    # ---- the main thread

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in a cell; do nothing between two cells."""
        if self._running and os.getpid() == self._pid:
            self._since_ns = time.time_ns()
            self._came.set()
            found = self._interrupts.get(self._running)
            if found is not None and found.failed == self._rank:
                raise KeyboardInterrupt(self._alone)
            if found is not None and found.failed >= 0:
                raise PeerFailed(f"rank {found.failed} has failed")
            if _is_at_debugger(frame):
                raise bdb.BdbQuit
            raise KeyboardInterrupt

    def _run_cell(self, request: RunCell) -> None:
        with self._lock:
            self._interrupts.pop(self._cell, None)
            self._absent.pop(self._cell, None)
            self._cell = request.cell
            self._alone = ""
        text = request.text if self._rank == request.ranks[0] else ""
        self._send(
            CellBegan(
                cell=request.cell, rank=self._rank, is_users=bool(request.text), text=text,
                kernel=request.kernel,
            )
        )  # fmt: skip
        # Earlier cells may have set other handlers.
        signal.signal(signal.SIGINT, self._interrupt)
        send = partial(outbox.send, self._conn)
        report.begin(send, rank=self._rank, restart=self._this.restart)
        self._shown = self._value = ""
        work = partial(self._perform_watched, request)
        ended = ending.ended_after(self._this, self._labels, work)
        self._stop_running()
        if ended.failure and ended.failure.type in _OUT_OF_MEMORY:
            _free_memory()
        report.end()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if os.getpid() != self._pid:
            os._exit(
                ended.code & 0xFF
            )  # a child that the cell has forked, and that came to its end
        self._send(
            CellEnded(
                cell=request.cell, rank=self._rank, ended=ended, shown=self._shown, value=self._value,
                names=tuple(self._own_names()), groups=groups.calls()[:_MOST_GROUPS],
                holders=groups.holders(vars(self._main))[:_MOST_GROUPS], is_broken=groups.is_broken(),
            )
        )  # fmt: skip

    def _own_names(self) -> Iterator[str]:
        room = _MOST_NAMES_CHARS
        for name in sorted(self._own)[:MOST_NAMES]:
            room -= len(name)
            if room > 0:
                yield name

    def _stop_running(self) -> None:
        """Block further interrupts; one that has just come is dropped."""
        while self._running:
            with contextlib.suppress(KeyboardInterrupt), self._lock:
                self._running = 0
                self._came.set()
                self._over.set()

    def _perform_watched(self, request: RunCell) -> Ended:
        try:
            return self._perform(request)
        except KeyboardInterrupt as error:
            found = self._interrupts.get(request.cell)
            if found is None or found.failed != self._rank:
                raise
            raise RuntimeError(self._alone).with_traceback(_place(error)) from None

    def _perform(self, request: RunCell) -> Ended:
        names = vars(self._main)
        cell = self._load(request)
        # No values: the cell may free the memory of one by giving its name another.
        before = {name: id(value) for name, value in names.items()}
        try:
            groups.begin_cell(request.cell)
            steps.begin()
            self._since_ns = time.time_ns()
            with self._lock:
                self._came.clear()
                self._over.clear()
                self._running = request.cell
                self._watch()
            if request.cell in self._interrupts:  # before the cell started
                signal.raise_signal(signal.SIGINT)
            if request.anew:
                groups.make_anew()
            # The notebook machine has the modules.
            paths = self._this.paths if self._this.work_dir else ()
            reloading.bring(cell.modules, paths, names)
            value = _value_of(cell, self._main)
            self._own.update(
                name for name in call.assigned(cell) if call.is_of_user(name)
            )
            return self._valued(value, keeps=cell.keeps)
        except SystemExit:
            # Lightning reacts to an interrupt like this.
            if request.cell in self._interrupts or steps.has_stopped():
                raise KeyboardInterrupt from None
            raise
        except Exception as error:
            # It has left a debugger, or a process group was broken, on any rank.
            is_of_group = re.search("gloo|NCCL", text_of(error)) or calls.is_of_call(error)  # fmt: skip
            is_of_interrupt = isinstance(error, bdb.BdbQuit) or is_of_group
            if request.cell not in self._interrupts or not is_of_interrupt:
                raise
            raise KeyboardInterrupt from error
        finally:
            self._stop_running()
            for name, now in list(names.items()):
                if call.is_of_user(name) and before.get(name) != id(now):
                    self._own.add(name)
            self._own.intersection_update(names)

    def _valued(self, value: object, *, keeps: bool) -> Ended:
        """Return how a cell has ended whose last expression has this value.

        The repr, and the value itself if it is small, are stored for `CellEnded`.
        """
        ended = Ended(rank=self._rank, restart=0, outcome="returned", result_bytes=0)
        if value is None:
            return ended
        data = self._pickled(value)
        self._value = base64.b64encode(data).decode()
        if keeps and not data:
            return ending.keep(self._this, value, self._form)
        ended = replace(ended, result_bytes=len(data) or None)
        if keeps:
            return ended
        vars(self._main)["_"] = value
        self._shown = _shown(value)
        return ended if data else replace(ended, meaning=_STAYS)

    def _load(self, request: RunCell) -> call.Cell:
        """Return the cell, and assign the names that come with it, except those that cells on this
        rank assigned.
        """
        # A new file each time: values of earlier cells may be mapped from their own file.
        path = self._this.folder / f"rank{self._rank}.cell{request.cell}"
        if request.blob:
            # The blob's own name is removed once nothing has used it for minutes.
            blob = self._this.call.parent / request.blob
            try:
                os.link(blob, path)
            except OSError:  # a file system without hard links
                shutil.copyfile(blob, path)
        else:
            path.write_bytes(base64.b64decode(request.data))
        names = vars(self._main)
        own = {name: names[name] for name in self._own if name in names}
        try:
            cell = call.load(path, self._main)
        except BaseException:
            _forget_failure()
            raise
        assert isinstance(cell, call.Cell)
        if cell.is_users:
            _forget_failure()
        if cell.is_given:
            own = {}
            self._own.update(cell.names)
        names.update(cell.names)
        names.update(own)
        defined = call.defines(cell)
        if defined and not cell.is_given:
            old = self._defining.pop(defined, None)
            self._defining[defined] = path
            # A new file: a fork server has loaded the previous one, and does not read it again.
            main = self._this.folder / f"rank{self._rank}.main{request.cell}.py"
            self._main.__file__ = call.write_main(main, *self._defining.values())
            for file in (old, self._main_file):
                if file is not None:
                    discard(file)
            self._main_file = main
        else:
            discard(path)
        self._labels.update(cell.labels)
        sources.know(cell.texts)
        return cell

    def _pickled(self, value: object) -> bytes:
        """Return the parcel of a value, b"" if it is too large or can't be pickled."""
        try:
            return parcel.dump_bytes(value, _MOST_VALUE_BYTES, self._form)
        except Exception:  # noqa: BLE001 - pickling runs anybody's code
            return b""


def _value_of(cell: call.Cell, main: ModuleType) -> object:
    """Run a cell. If the user's one fails, `sys.last_traceback` has its frames, as at Python's own
    prompt.
    """
    try:
        return call.perform(cell, main)
    except BaseException as error:
        is_full = type(error).__name__ in _OUT_OF_MEMORY
        if cell.is_users and not is_full:
            sys.last_traceback = ending.user_frames(error.__traceback__)
        raise


def _forget_failure() -> None:
    """Free the memory of the variables in the frames of the last cell that failed."""
    failed: TracebackType | None = getattr(sys, "last_traceback", None)
    sys.last_traceback = None
    if failed is not None:
        traceback.clear_frames(failed)
        del failed
        gc.collect()  # a debugger has left a cycle that holds the frames


def _free_memory() -> None:
    """Free what the frames of a cell hold in reference cycles, and give it back to the GPU."""
    gc.collect()
    cuda: Any = sys.modules.get("torch.cuda")
    with contextlib.suppress(Exception):  # its module may be half imported
        if cuda is not None and cuda.is_initialized():
            cuda.empty_cache()


def post_mortem() -> None:
    """Open pdb where the last cell of the user's failed.

    Called by the cell of `%distributed debug`.
    """
    import pdb  # noqa: T100

    failed: TracebackType | None = getattr(sys, "last_traceback", None)
    if failed is None:
        sys.stdout.write("The frames of that exception are gone: memory ran out, or no line of the cell had run.\n")  # fmt: skip
    else:
        pdb.post_mortem(failed)


def _main_place() -> tuple[int, int]:
    """Return where the main thread is: two equal answers mean that it stands still."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]  # noqa: SLF001 - documented
    return id(frame), frame.f_lasti


def _place(error: BaseException) -> TracebackType | None:
    """Return the frames of an interrupted call; the signal's own exception may come after they are
    left.
    """
    while error.__context__ is not None and not ending.user_frames(error.__traceback__):
        error = error.__context__
    return error.__traceback__


def _is_at_debugger(frame: FrameType | None) -> bool:
    """Whether a debugger's prompt waits in this frame.

    It would catch KeyboardInterrupt, and go on waiting.
    """
    while frame is not None:
        if frame.f_code.co_name == "cmdloop":
            return isinstance(frame.f_locals.get("self"), bdb.Bdb)
        frame = frame.f_back
    return False


def _interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _shown(value: object) -> str:
    try:
        return clipped(repr(value), _MOST_SHOWN)
    except Exception as error:  # noqa: BLE001 - the user's own __repr__
        return f"<its repr() raised {type(error).__name__}: {text_of(error)[:200]}>"
