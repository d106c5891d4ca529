"""Explains exit codes in words.

Codes are those of `subprocess`: negative for a signal. Codes from 129 to 159 are signals too, as a
shell reports them.
"""

from __future__ import annotations

import signal

from distmagic.remote.wire.vocabulary import RankOutcome

_MEANINGS = {
    signal.SIGKILL: "killed from outside",
    signal.SIGSEGV: "segmentation fault: native code touched memory that isn't its own",
    signal.SIGABRT: "aborted by native code; its last message is on stderr",
    signal.SIGBUS: "bus error: often /dev/shm is full (DataLoader workers) or a mapped file was cut short",
    signal.SIGILL: "illegal instruction: a binary built for another processor",
    signal.SIGFPE: "arithmetic error in native code",
    signal.SIGTERM: "asked to end from outside",
    signal.SIGXCPU: "over its limit of CPU time",
}


def outcome_of(code: int) -> RankOutcome:
    """Return "signalled" for a negative code, else "exited"."""
    return "signalled" if code < 0 else "exited"


def is_signal(code: int) -> bool:
    """Whether a signal ended the process."""
    return code < 0 or 128 < code < 160


def is_kill(code: int) -> bool:
    """Whether SIGKILL ended the process."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def meaning_of(code: int, *, out_of_memory: str = "") -> str:
    """Return the signal's name and its usual cause; "" for a code that is no signal.

    `out_of_memory` is the reason that memory.py found for a SIGKILL, "" for none.
    """
    number = 0
    if is_signal(code):
        number = -code if code < 0 else code - 128
    if is_kill(code) and out_of_memory:
        return f"SIGKILL: {out_of_memory}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}" if number else ""
    meaning = _MEANINGS.get(signal.Signals(number)) or signal.strsignal(number)
    return f"{name}: {meaning}" if meaning else name
