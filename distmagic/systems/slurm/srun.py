"""Nodes of a Slurm job: each process is a step of srun, run on a log-in node through another transport.

The step is only an usher: it hands its pipes to the node's keeper (remote/keeper), which starts the process. So what the
process starts, and means to outlive it, does not end with the step.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from distmagic.errors import ConnectionLost, DistmagicError
from distmagic.systems.slurm import srun_words
from distmagic.transports import Process, Transport, program_text
from distmagic.transports.piped import OpenProcesses

Explain = Callable[[DistmagicError], DistmagicError]
PATIENCE_S = 20.0  # for a keeper that is about to begin


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of a job. `cluster` is "" but in a federation; `python` runs the usher; `mark` is on every srun."""

    name: str
    job: str
    cluster: str = ""
    python: str = "python3"
    mark: str = ""


@dataclass(frozen=True, kw_only=True)
class ProcessNames:
    """What a process is called, and which others of its node are gone.

    `told` to the keeper at its start are those that were `gone` then.
    """

    own: str
    told: tuple[str, ...]
    gone: set[str]


class SrunProcess:
    """A process on a node, seen through its srun. Where there was no step, reading raises why.

    A step that Slurm refuses for now is asked for again by `begin`, with what was written meanwhile, for `REFUSED_S`.
    `explain` returns the error to raise for one that srun has told. When this end of it is gone, its own name is among
    those that are `gone`; what was told is taken out as soon as the keeper has heard it.
    """

    def __init__(
        self,
        begin: Callable[[], Process],
        node: Node,
        explain: Explain,
        names: ProcessNames,
    ) -> None:
        self._begin, self._node, self._explain = begin, node, explain
        self._names = names
        self._step = begin()
        self._written = b""  # as long as it is not known if there is a step
        self._has_spoken = self._is_at_end = False
        self._closed = threading.Event()
        self._begin_until = time.monotonic() + REFUSED_S

    def write(self, data: bytes) -> None:
        """Send all of `data` to its stdin. Raises `ConnectionLost` if the other end is gone."""
        if not self._has_spoken and len(self._written) < _KEPT_BYTES:
            self._written += data
        try:
            self._step.write(data)
        except ConnectionLost:
            self._names.gone.add(self._names.own)
            if self._has_spoken or self.is_closed or self._trouble() is None:
                raise
            # There was no step. The first read tells why.

    def read(self, max_bytes: int = 65536) -> bytes:
        """Return some bytes of its stdout; b"" at end of file. Raises why there was no step, if that is so."""
        while True:
            data = self._step.read(max_bytes)
            if data:
                self._has_spoken, self._written = True, b""
                self._names.gone.difference_update(self._names.told)
            else:
                self._names.gone.add(self._names.own)
            if self._has_spoken or self.is_closed:
                return data
            trouble = self._trouble()
            if trouble is None:
                return data
            if not self._begins_again():
                raise self._explain(trouble)

    def _trouble(self) -> DistmagicError | None:
        """Return why there was no step, if srun itself has failed."""
        if not self._step.wait(_END_S):
            return None  # it ended well, or how is not known
        return srun_words.trouble(self._node.name, self._node.job, self._step.stderr())

    def _begins_again(self) -> bool:
        """Ask for the step once more, after a pause, where Slurm refuses it for now; return whether that was done."""
        is_worth_it = (
            srun_words.is_refused_for_now(self._step.stderr())
            and len(self._written) < _KEPT_BYTES
            and time.monotonic() < self._begin_until
        )
        if not is_worth_it or self._closed.wait(_AGAIN_S):
            return False
        self._step.close()
        self._step = self._begin()
        with suppress(ConnectionLost):  # the next read tells why
            self._step.write(self._written)
        if self._is_at_end:
            self._step.close_stdin()
        if self.is_closed:  # meanwhile
            self._step.close()
        return True

    def stderr(self) -> str:
        """Return what it has written to stderr so far, without srun's own words on its end."""
        return srun_words.own_words(self._step.stderr())

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, negative for a signal; None if still running or unknown."""
        code = self._step.wait(timeout_s)
        if code is not None and _FIRST_SIGNAL < code < _FIRST_SIGNAL + 65:
            return _FIRST_SIGNAL - code
        return code

    def close_stdin(self) -> None:
        """Close the process's stdin."""
        self._is_at_end = True
        self._step.close_stdin()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def close(self) -> None:
        """Let go of the pipes."""
        self._closed.set()
        self._names.gone.add(self._names.own)
        self._step.close()


REFUSED_S = 25.0  # for a controller that was restarted; seen: up to 25 s
_AGAIN_S = 1.0
_KEPT_BYTES = 1 << 20  # of what was written before the first answer
_END_S = 5.0  # between a step's end of file and the end of its srun
_FIRST_SIGNAL = 128  # a shell's code for signal N is this and N; srun's too


class SrunTransport:
    """Starts processes on one node; `login` starts srun.

    `gone` are the names of processes there to which no notebook is connected any more: the next one to be started tells
    them to the keeper, which ends what is left of them. Share it between all transports to one node.
    """

    def __init__(
        self, login: Transport, node: Node, explain: Explain = lambda error: error, gone: set[str] | None = None
    ) -> None:  # fmt: skip
        self._gone = set() if gone is None else gone
        self.warnings: tuple[str, ...] = ()
        self.node = node
        self._login, self._explain = login, explain
        self._processes = OpenProcesses()

    def start(self, argv: tuple[str, ...]) -> SrunProcess:
        """Start `argv` there. Raises what `login` raises; what srun says is raised by the process's `read`."""
        if not argv:
            raise ValueError("a command needs a program")
        process = self._started({"argv": argv})
        self._processes.add(process)
        return process

    def hold(self) -> SrunProcess:
        """Open the lead's lease: the keeper says "ready"; each byte renews it, and an "e" ends the allocation."""
        return self._started({"lease": True})

    def _started(self, what: dict[str, object]) -> SrunProcess:
        node = self.node
        told = tuple(self._gone)
        names = ProcessNames(own=secrets.token_hex(6), told=told, gone=self._gone)
        request = {
            "job": node.job,
            "patience_s": PATIENCE_S,
            "name": names.own,
            "gone": sorted(told),
            **what,
        }
        usher = program_text.command(node.python, "usher", request)
        step = srun_words.step(node.job, node.cluster, node.name, usher, mark=node.mark)
        return SrunProcess(lambda: self._login.start(step), node, self._explain, names)

    def close(self) -> None:
        """Let go of all pipes. The log-in node's connection is others' too, and stays."""
        self._processes.close()
