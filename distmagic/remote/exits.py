"""What the end of a process means, in words."""

from __future__ import annotations

import os
import signal

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


def outcome_of(code: int) -> str:
    """Return "exited" or "signalled"."""
    return "signalled" if code < 0 else "exited"


def meaning_of(code: int, *, out_of_memory: bool) -> str:
    """Return what an exit code says, "" for nothing. Codes above 128 are signals as a shell writes them."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    if number == signal.SIGKILL and out_of_memory:
        return "SIGKILL: the host ran out of memory and its kernel ended the process"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}" if number else ""
    return f"{name}: {_MEANINGS.get(signal.Signals(number)) or signal.strsignal(number) or ''}".rstrip(": ")


def count_out_of_memory() -> int:
    """Return how many processes the kernel has ended for want of memory since it started (0 where it doesn't say)."""
    try:
        with open("/proc/vmstat") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except OSError:
        return 0
