"""Where a rank's threads are, by Python's own faulthandler: it answers a signal also while the main thread hangs in C.

    a rank   --answer-->       faulthandler's text, in a file beside the agent's sockets
    text     --threads_of-->   Threads, with the frames that a user knows

Pure, but for `answer` and `is_ready`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from distmagic.remote.wire.protocol import Frame, Thread

SIGNAL = signal.SIGRTMAX - 3  # of those that no library is known to take; queued, so none gets lost
MAX_FRAMES = 60  # kept of one thread, the innermost
_MAX_OTHERS = 8  # threads of a rank that are kept besides the main one, and
_MAX_OTHERS_FRAMES = 20  # frames of each
_MAX_CHARS = 200  # of a file's name, a function's and a line of source

_THREAD = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)\b.*:$")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(.+)$")
_LIBRARY = re.compile(r".*/lib(?:32|64)?/python\d+\.\d+/(.+)$")


def file_of(run_dir: Path, pid: int) -> Path:
    """Return the file that faulthandler writes to in this process."""
    return run_dir / f"stacks-{pid}"


def answer(run_dir: Path) -> None:
    """Have this process answer `SIGNAL` from now on. Where it can't, the rank does without."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(file_of(run_dir, os.getpid()), flags, 0o600)
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)


def is_ready(run_dir: Path, pid: int) -> bool:
    """Whether the signal leads to `answer` in that process: else it could end it, or write to another file.

    It does not any more in a program that the rank has become, or where its code has closed all open files.
    """
    wanted = str(file_of(run_dir, pid))
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            caught = re.search(rb"^SigCgt:\s*([0-9a-f]+)$", status.read(), re.MULTILINE)
        if caught is None or not int(caught[1], 16) >> (SIGNAL - 1) & 1:
            return False
        return any(os.readlink(f"/proc/{pid}/fd/{fd}") == wanted for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False  # gone, or somebody else's, or it closed a file meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a user knows of file names: `labels` of cells, `texts` of cells and scripts.

    `modules` is the directory of the user's own modules, `own` the beginning of the names of distmagic's files.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    modules: str = ""
    own: str = ""


def is_whole(text: str, own: str) -> bool:
    """Whether faulthandler is through: the main thread comes last, and the worker's `main` is its outermost frame.

    What is around that is not waited for. Of very deep stacks and very many threads faulthandler leaves out the rest.
    """
    last = text[max(text.rfind("\nThread 0x"), text.rfind("\nCurrent thread 0x"), 0) :]
    outermost = re.compile(
        rf'^  File "{re.escape(own)}/distmagic/remote/rank/worker\.py", line \d+ in main$', re.MULTILINE
    )
    return text.endswith("\n") and (text.endswith("...\n") or outermost.search(last) is not None)


def threads_of(text: str, sources: Sources) -> tuple[Thread, ...]:
    """Return the threads of faulthandler's text, the main one first; of the others those that run a user's code.

    Innermost frames come last. What is no line of faulthandler's is left out, so any text gives something.
    """
    blocks = [_known(frames, sources) for frames in _blocks(text)]
    if not blocks:
        return ()
    *others, main = blocks  # the main thread, the oldest, comes last
    kept = [Thread(frames=_inner(frames, _MAX_OTHERS_FRAMES)) for frames in others if any(f.mine for f in frames)]
    return (Thread(frames=_inner(main, MAX_FRAMES)), *kept[-_MAX_OTHERS:])


def _blocks(text: str) -> list[list[Frame]]:
    """Return the frames of each thread, innermost first; of several dumps only those of the last."""
    blocks: list[list[Frame]] = []
    seen: set[str] = set()
    for line in text.split("\n"):
        if found := _THREAD.match(line):
            if found[2] in seen:
                blocks, seen = [], set()
            seen.add(found[2])
            blocks.append([])
        elif blocks and (found := _FRAME.match(line)):
            number = int(found[2]) if found[2].isdecimal() else 0
            blocks[-1].append(Frame(file=found[1], line=number, function=found[3][:_MAX_CHARS]))
    return blocks


def _known(frames: list[Frame], sources: Sources) -> list[Frame]:
    """Return the frames, outermost first, under the names that a user knows them by, without those of distmagic."""
    own = bool(sources.own)
    shown = [_named(frame, sources) for frame in reversed(frames) if not (own and frame.file.startswith(sources.own))]
    first = next((i for i, frame in enumerate(shown) if frame.mine), 0)  # what is around it is Python's own beginning
    return shown[first:]


def _inner(frames: list[Frame], limit: int) -> tuple[Frame, ...]:
    """Return the innermost frames, and of the user's own at least the innermost one."""
    kept = frames[-limit:]
    mine = [frame for frame in frames if frame.mine]
    if mine and not any(frame.mine for frame in kept):
        kept[0] = mine[-1]
    return tuple(kept)


def _named(frame: Frame, sources: Sources) -> Frame:
    name, text = frame.file, ""
    if name in sources.texts:
        lines = sources.texts[name].split("\n")
        text = lines[frame.line - 1].strip()[:_MAX_CHARS] if 0 < frame.line <= len(lines) else ""
    if name in sources.labels or name in sources.texts:
        return replace(frame, file=sources.labels.get(name, name)[-_MAX_CHARS:], mine=True, text=text)
    if sources.modules and name.startswith(sources.modules):
        return replace(frame, file=name[len(sources.modules) :].lstrip("/")[-_MAX_CHARS:], mine=True)
    found = _PACKAGES.match(name) or _LIBRARY.match(name)
    if found:
        return replace(frame, file=found[1][-_MAX_CHARS:])
    return replace(frame, file=name[-_MAX_CHARS:], mine=name.startswith("/"))
