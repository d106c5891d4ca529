"""The contract of a transport: functions that take one, run over every implementation by `test_contract.py`.

The host must have sh, cat, head and sleep. A new transport passes when all of `CONTRACT` do.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from distmagic.errors import DistmagicError
from distmagic.transports import Process, Transport
from tests.lab.waiting import HANG_S, wait_until


def read_all(process: Process) -> bytes:
    """Read until end of file."""
    parts = []
    while data := process.read():
        parts.append(data)
    return b"".join(parts)


def sh(text: str) -> tuple[str, ...]:
    """Return the argv of a shell line."""
    return ("sh", "-c", text)


def echoes_at_once(transport: Transport) -> None:
    process = transport.start(("cat",))
    for text in (b"first\n", b"second\n"):
        process.write(text)
        assert process.read() == text
    process.close()


def carries_every_byte_both_ways(transport: Transport) -> None:
    data = os.urandom(1 << 20) * 20
    process = transport.start(("cat",))
    writer = threading.Thread(
        target=lambda: (process.write(data), process.close_stdin())
    )
    writer.start()
    got = read_all(process)
    writer.join()
    assert len(got) == len(data)
    assert hashlib.sha256(got).digest() == hashlib.sha256(data).digest()
    assert process.wait(HANG_S) == 0
    process.close()


def keeps_the_end_of_stderr(transport: Transport) -> None:
    process = transport.start(
        sh(
            "i=0; while [ $i -lt 2000 ]; do echo line $i >&2; i=$((i+1)); done; echo out"
        )
    )
    assert read_all(process) == b"out\n"
    process.wait(HANG_S)
    wait_until(
        lambda: process.stderr().endswith("line 1999\n"), "the last line of stderr"
    )
    assert len(process.stderr()) <= 8192
    assert "line 10\n" not in process.stderr()
    process.close()


def is_not_stopped_by_unread_stderr(transport: Transport) -> None:
    process = transport.start(sh("head -c 5000000 /dev/zero >&2; echo done"))
    assert read_all(process) == b"done\n"
    process.close()


def tells_the_exit_code(transport: Transport) -> None:
    for code in (0, 3, 127):
        process = transport.start(sh(f"exit {code}"))
        assert read_all(process) == b""
        assert process.wait(HANG_S) == code
        process.close()


def tells_a_signal_or_nothing(transport: Transport) -> None:
    process = transport.start(sh("kill -TERM $$"))
    assert read_all(process) == b""
    assert process.wait(HANG_S) in (-signal.SIGTERM, None)
    process.close()


def waits_no_longer_than_told(transport: Transport) -> None:
    process = transport.start(("cat",))
    assert process.wait(0) is None
    assert process.wait(0.05) is None
    process.close_stdin()
    assert process.wait(HANG_S) == 0
    process.close()


def close_ends_a_blocked_read(transport: Transport) -> None:
    process = transport.start(("cat",))
    process.write(b"up")
    assert process.read() == b"up"
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(process.read()))
    reader.start()
    process.close()
    reader.join(HANG_S)
    assert got == [b""]
    process.close()


def close_ends_a_blocked_write(transport: Transport) -> None:
    process = transport.start(("sleep", "60"))
    raised: list[BaseException] = []
    started = threading.Event()

    def write() -> None:
        started.set()
        try:
            process.write(bytes(50_000_000))
        except DistmagicError as error:
            raised.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    started.wait(HANG_S)
    process.close()
    writer.join(HANG_S)
    assert len(raised) == 1


def close_stdin_is_the_end_of_file(transport: Transport) -> None:
    process = transport.start(sh("cat; echo over"))
    process.write(b"text\n")
    process.close_stdin()
    assert read_all(process) == b"text\nover\n"
    assert process.wait(HANG_S) == 0
    process.close()


def runs_two_at_once(transport: Transport) -> None:
    first, second = transport.start(("cat",)), transport.start(("cat",))
    first.write(b"1")
    second.write(b"2")
    assert second.read() == b"2"
    assert first.read() == b"1"
    first.close()
    second.write(b"still here")
    assert second.read() == b"still here"
    second.close()


def says_that_a_program_is_missing(transport: Transport) -> None:
    process = transport.start(("/nowhere/python3", "-c", "pass"))
    assert read_all(process) == b""
    assert process.wait(HANG_S) == 127
    assert "/nowhere/python3" in process.stderr()
    process.close()


def takes_any_argument(transport: Transport) -> None:
    words = (
        "a b",
        "",
        "it's",
        "\\",
        "a\\\\b",
        "!x",
        "$HOME",
        "`id`",
        "~",
        "*",
        "{a,b}",
        "#",
        "=ls",
        "%1",
        "^",
        '"',
        "é",
    )
    process = transport.start(("printf", "%s|", *words))
    assert read_all(process).decode() == "".join(f"{word}|" for word in words)
    process.close()


def expands_home_of_the_program(transport: Transport) -> None:
    process = transport.start(("~/no such/program",))
    assert read_all(process) == b""
    assert process.wait(HANG_S) == 127
    assert "~" not in process.stderr()
    process.close()


def writing_to_an_ended_process_is_an_error(transport: Transport) -> None:
    process = transport.start(sh("exit 0"))
    assert process.wait(HANG_S) == 0
    with pytest.raises(DistmagicError):
        process.write(bytes(10_000_000))
    process.close()


def last_words_arrive_though_all_is_closed_at_once(transport: Transport) -> None:
    with tempfile.TemporaryDirectory() as folder:
        heard = Path(folder) / "heard"
        process = transport.start(
            sh(f"echo up; cat > {heard}.new; mv {heard}.new {heard}")
        )
        assert process.read() == b"up\n"
        process.write(bytes(4000))
        process.close()
        transport.close()
        wait_until(heard.exists, "the last words", HANG_S)
        assert heard.stat().st_size == 4000


def closing_twice_is_fine(transport: Transport) -> None:
    process = transport.start(("cat",))
    process.close()
    process.close()
    assert process.read() == b""
    transport.close()
    transport.close()


def keeps_nothing_of_processes_that_are_over(transport: Transport) -> None:
    descriptors = len(os.listdir("/dev/fd"))
    ended: list[weakref.ref[Process]] = []
    for _ in range(5):
        process = transport.start(sh("echo up"))
        ended.append(weakref.ref(process))
        assert read_all(process) == b"up\n"
        process.wait(HANG_S)
        process.close()
    del process
    wait_until(
        lambda: gc.collect() >= 0 and sum(one() is not None for one in ended) <= 1,
        "all but the last to be gone",
    )
    wait_until(
        lambda: len(os.listdir("/dev/fd")) <= descriptors,
        "their descriptors to be closed",
    )


CONTRACT: tuple[Callable[[Transport], None], ...] = (
    echoes_at_once,
    carries_every_byte_both_ways,
    keeps_the_end_of_stderr,
    is_not_stopped_by_unread_stderr,
    tells_the_exit_code,
    tells_a_signal_or_nothing,
    waits_no_longer_than_told,
    close_ends_a_blocked_read,
    close_ends_a_blocked_write,
    close_stdin_is_the_end_of_file,
    runs_two_at_once,
    says_that_a_program_is_missing,
    takes_any_argument,
    expands_home_of_the_program,
    writing_to_an_ended_process_is_an_error,
    last_words_arrive_though_all_is_closed_at_once,
    closing_twice_is_fine,
    keeps_nothing_of_processes_that_are_over,
)
