"""A process on a node that has dialled, where the connection ends before it has told how the process did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from distmagic.transports.channel import Channel
from distmagic.transports.dialled import OUTPUT, DialledProcess
from tests.builders.dialling import channels
from tests.lab.waiting import HANG_S


@pytest.fixture
def process_and_node() -> Iterator[tuple[DialledProcess, Channel]]:
    """A process, and the node's end of its stdout."""
    with channels() as (stdin, _), channels() as (stdout, node):
        process = DialledProcess("n1", stdin, stdout)
        with contextlib.closing(process):
            yield process, node


def soon(process: DialledProcess) -> tuple[bytes, int | None]:
    """Return what is read at the end, and the exit code; the process is closed where it would take for ever."""
    with ThreadPoolExecutor(2) as threads:
        read: Future[bytes] = threads.submit(process.read)
        code: Future[int | None] = threads.submit(process.wait, HANG_S)
        late = wait((read, code), HANG_S / 2).not_done
        process.close()
    assert not late
    return read.result(), code.result()


def test_a_connection_that_ends_without_an_exit_code_ends_the_process(process_and_node):
    process, node = process_and_node
    node.send(OUTPUT, b"so far")
    assert process.read() == b"so far"
    node.close()
    assert soon(process) == (b"", None)
