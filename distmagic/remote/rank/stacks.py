"""The stack traces of a rank's threads, written by Python's faulthandler: it answers a signal even
while C code hangs.

    a rank   --answer-->       faulthandler's text, in a file next to the agent's sockets
    text     --threads_of-->   Threads, with frames named as the user knows them

Pure, except `answer`, which the rank calls, and `is_ready`, which the agent calls.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.remote.system import processes
from distmagic.remote.wire.parts import Frame, Thread

# Used by no known library; real-time signals are queued, so none is lost.
SIGNAL = signal.SIGRTMAX - 3
MAX_FRAMES = 60  # innermost frames of the main thread that are kept
_MAX_OTHERS = 8  # number of other threads that are kept
_MAX_OTHERS_FRAMES = 20  # frames of each other thread that are kept
# Limit for the name of a file, the name of a function, a line of source.
_MAX_CHARS = 200

_THREAD = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)\b.*:$")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(.+)$")
_LIBRARY = re.compile(r".*/lib(?:32|64)?/python\d+\.\d+/(.+)$")

# Code that programs generate, such as torch.compile's; a cell of IPython is none.
_GENERATED = re.compile(r"^<(?!ipython-input)|/torchinductor_")


def file_of(run_dir: Path, pid: int) -> Path:
    """Return the file to which faulthandler writes in the process `pid`."""
    return run_dir / f"stacks-{pid}"


def answer(run_dir: Path) -> None:
    """Make this process write the stacks of its threads to a file whenever it gets `SIGNAL`.

    A failure is ignored.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(file_of(run_dir, os.getpid()), flags, 0o600)
        # Only a handler that calls the previous one restores errno. Without that, a system call
        # that fails at that moment raises `OSError: [Errno 0]` in the user's code.
        signal.signal(SIGNAL, signal.SIG_IGN)
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=True)


def is_ready(run_dir: Path, pid: int) -> bool:
    """Whether that process would write its stacks at the signal.

    Otherwise the signal could kill it, or make it write to another file. A process stops answering
    when it becomes another program (exec), or when its code closes all descriptors. While it
    finishes an answer, it ignores the signal.
    """
    # The kernel's names have no symbolic links, such as /tmp itself may be.
    wanted = os.path.realpath(file_of(run_dir, pid))
    return processes.catches(pid, SIGNAL) and wanted in processes.open_files(pid)


@frozen
class Sources:
    """The user's names of files."""

    # labels of cells, by file name
    labels: Mapping[str, str] = field(default_factory=dict)
    # texts of cells and scripts, by file name
    texts: Mapping[str, str] = field(default_factory=dict)
    modules: str = ""  # the directory of the user's own modules
    own: str = ""  # names of distmagic's own files start with this


def is_whole(text: str, own: str) -> bool:
    """Whether faulthandler has finished: the main thread comes last, and its outermost frame is the
    worker's `main`.

    The frames outside of `main` are not needed. For very deep stacks and very many threads,
    faulthandler writes "..." instead of the rest.
    """
    begin = max(text.rfind("\nThread 0x"), text.rfind("\nCurrent thread 0x"), 0)
    last = text[begin:]
    outermost = re.compile(
        rf'^  File "{re.escape(own)}/distmagic/remote/rank/worker\.py", line \d+ in main$',
        re.MULTILINE,
    )
    if text.endswith("...\n"):
        return True
    return text.endswith("\n") and outermost.search(last) is not None


def threads_of(text: str, sources: Sources) -> tuple[Thread, ...]:
    """Return the threads in faulthandler's text: first the main thread, then others that run the
    user's code.

    Innermost frames come last. Lines that are not faulthandler's are ignored, so no text raises an
    error.
    """
    stacks = [_as_shown(frames, sources) for frames in _blocks(text)]
    if not stacks:
        return ()
    *others, main = stacks  # faulthandler writes the oldest thread, the main one, last
    threads = [Thread(frames=_innermost(main, MAX_FRAMES))]
    with_user_code = [
        frames for frames in others if any(frame.mine for frame in frames)
    ]
    for frames in with_user_code[-_MAX_OTHERS:]:
        threads.append(Thread(frames=_innermost(frames, _MAX_OTHERS_FRAMES)))
    return tuple(threads)


def is_users(file: str) -> bool:
    """Whether the file of a frame is no library's: a cell's, a script's or a module's."""
    if file.startswith(f"{Path(__file__).parents[2]}/") or _GENERATED.search(file):
        return False
    return not (_PACKAGES.match(file) or _LIBRARY.match(file))


def renamed(frame: Frame, sources: Sources) -> Frame:
    """Return a frame with the user's name for its file, and its source line if known."""
    name = frame.file
    text = ""
    if name in sources.texts:
        lines = sources.texts[name].split("\n")
        if 0 < frame.line <= len(lines):
            text = lines[frame.line - 1].strip()[:_MAX_CHARS]
    if name in sources.labels or name in sources.texts:
        label = sources.labels.get(name, name)
        return replace(frame, file=label[-_MAX_CHARS:], mine=True, text=text)
    if sources.modules and name.startswith(sources.modules):
        module = name.removeprefix(sources.modules).lstrip("/")
        return replace(frame, file=module[-_MAX_CHARS:], mine=True)
    found = _PACKAGES.match(name) or _LIBRARY.match(name)
    if found:
        return replace(frame, file=found[1][-_MAX_CHARS:])
    return replace(frame, file=name[-_MAX_CHARS:], mine=name.startswith("/"))


def _blocks(text: str) -> list[list[Frame]]:
    """Return the frames of each thread, innermost first, of the last dump in the text."""
    blocks: list[list[Frame]] = []
    seen: set[str] = set()
    for line in text.split("\n"):
        thread = _THREAD.match(line)
        frame = _FRAME.match(line)
        if thread:
            if thread[2] in seen:  # the same thread again: another dump begins
                blocks = []
                seen = set()
            seen.add(thread[2])
            blocks.append([])
        elif blocks and frame:
            number = int(frame[2]) if frame[2].isdecimal() else 0
            blocks[-1].append(
                Frame(file=frame[1], line=number, function=frame[3][:_MAX_CHARS])
            )
    return blocks


def _as_shown(frames: list[Frame], sources: Sources) -> list[Frame]:
    """Return the frames, outermost first, with the user's names, without those of distmagic."""
    if sources.own:
        frames = [frame for frame in frames if not frame.file.startswith(sources.own)]
    shown = [renamed(frame, sources) for frame in reversed(frames)]
    for i, frame in enumerate(shown):
        if frame.mine:
            # Without the outer frames that start every Python program.
            return shown[i:]
    return shown


def _innermost(frames: list[Frame], limit: int) -> tuple[Frame, ...]:
    """Return the innermost frames.

    If none of them is the user's, the user's innermost frame replaces the first.
    """
    kept = frames[-limit:]
    mine = [frame for frame in frames if frame.mine]
    if mine and not any(frame.mine for frame in kept):
        kept[0] = mine[-1]
    return tuple(kept)
