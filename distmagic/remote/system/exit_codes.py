"""What the end of a process means, in words."""

from __future__ import annotations

import os
import signal

from distmagic.remote.wire.vocabulary import RankOutcome

_MEANINGS = {
    signal.SIGKILL: "killed from outside",
    signal.SIGSEGV: "segmentation fault: native code touched memory that isn't its own",
    signal.SIGABRT: "aborted by native code; its last words are on stderr",
    signal.SIGBUS: "bus error: often /dev/shm is full (DataLoader workers) or a mapped file was cut short",
    signal.SIGILL: "illegal instruction: a binary built for another processor",
    signal.SIGFPE: "arithmetic error in native code",
    signal.SIGTERM: "asked to end from outside",
    signal.SIGXCPU: "over its limit of CPU time",
}


def code_of(status: int) -> int:
    """Return the exit code for a waitpid status, negative for a signal."""
    return os.waitstatus_to_exitcode(status)


def outcome_of(code: int) -> RankOutcome:
    """Return "exited", or "signalled" for a negative code."""
    return "signalled" if code < 0 else "exited"


def is_signal(code: int) -> bool:
    """Whether an exit code says that a signal ended the process, as a shell writes it too."""
    return code < 0 or 128 < code < 160


def is_kill(code: int) -> bool:
    """Whether an exit code says SIGKILL, as a shell writes it too."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def meaning_of(code: int, *, out_of_memory: str = "") -> str:
    """Return what an exit code says, "" for nothing. Codes above 128 are signals as a shell writes them.

    `out_of_memory` is what memory.py knows of a process that was killed.
    """
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    if is_kill(code) and out_of_memory:
        return f"SIGKILL: {out_of_memory}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}" if number else ""
    return f"{name}: {_MEANINGS.get(signal.Signals(number)) or signal.strsignal(number) or ''}".rstrip(": ")
