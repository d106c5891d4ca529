"""Brings the two strikes of a pair about, each at its moment, and takes back what passes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from distmagic.connection.link import Link
from distmagic.connection.requests import job_requests
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.wire import protocol
from distmagic.state.model import RunState
from tests.e2e import fault_plays, faults, runner
from tests.e2e.faults import Act, When
from tests.e2e.pairs import Pair, Phase, Strike, has_come, is_noticed
from tests.lab import Lab, LabHost

GATE = ": > ~/is-in; while [ -e ~/is-in ]; do sleep 0.1; done\n"


# No rank of a host ends while its home has this file.
HOLD = "hold"


def let_end(host: LabHost) -> None:
    """Let the ranks of a host end."""
    (host.home / HOLD).unlink(missing_ok=True)


def open_gate(host: LabHost) -> None:
    """Let in whoever waits at a host's gate."""
    (host.home / "is-in").unlink(missing_ok=True)


class Stage(runner.Watch):
    """A screen on which strikes happen: as the state shows their moment, or as a conversation with a host comes to it.

    `hits` are the strikes that found what they were to strike. A strike may find nothing: the other one was there first.
    No rank ends, on a host with a file `HOLD` in its home, before the strikes that want it at work have struck.
    Inside a `with` only. At its end what is still to be taken back is taken back.
    """

    def __init__(self, lab: Lab, pair: Pair) -> None:
        super().__init__()
        self._lab, self._pair = lab, pair
        self._pending = [one for one in pair.strikes if one.row.way.steps]
        self._misdeeds = [
            one for one in pair.strikes if one.row.way.misdeed is not None
        ]
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._patches = ExitStack()
        self._must_grow = pair.grows
        # What a host is taking from another one.
        self._taken_bytes: dict[Link, int] = {}
        self.hits = [one for one in pair.strikes if one.moment.phase == "beginning"]

    def __enter__(self) -> Stage:  # noqa: PYI034 - typing.Self is of Python 3.11
        wrappers: tuple[tuple[Any, str, Callable[..., object]], ...] = (
            (Link, "pour", self._pour),
            (Link, "send", self._send),
            (Link, "answer", self._answer),
            (Link, "start", self._start),
            (job_requests, "fetch", self._fetch),
        )
        for owner, name, wrap in wrappers:
            self._patches.enter_context(
                mock.patch.object(owner, name, wrap(getattr(owner, name)))
            )
        # Two strikes at one host have one gate: each would put back what the other has written.
        for name in {
            strike.moment.host
            for strike in self._pending
            if strike.moment.phase == "connecting"
        }:
            self._begin(self._wait_at_gate, name)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._patches.close()
        for host in self._lab.hosts:
            let_end(host)

    # ---- moments that the state shows

    def show(self, state: RunState) -> None:
        """Strike what is due, and switch the last host on when the others work."""
        super().show(state)
        if self._must_grow and any(
            (worker.step or 0) >= 3 for worker in state.workers.values()
        ):
            self._must_grow = False
            faults.host_of(self._lab, self._pair.job.names[-1]).start()
        self._see_misdeeds(state)
        for strike in tuple(self._pending):
            moment = strike.moment
            is_due = has_come(moment, state)
            if moment.phase == "noticed":
                is_due = bool(self.hits) and is_noticed(state)
            if is_due:
                self._strike(strike)
        self._let_end()

    def finish(self, state: RunState) -> None:
        """Note what a rank did last."""
        super().finish(state)
        self._see_misdeeds(state)

    def _see_misdeeds(self, state: RunState) -> None:
        for strike in tuple(self._misdeeds):
            if has_come(strike.moment, state):
                self._misdeeds.remove(strike)
                self._note_hit(strike)

    def _let_end(self) -> None:
        """Let ranks end, as far as no strike is still to come that wants them at work."""
        waiting = {strike.moment.phase for strike in (*self._pending, *self._misdeeds)}
        if not self.hits:  # else it comes with the first one, or soon after
            waiting -= {"with the other", "noticed"}
        waiting.discard("fetching")
        for host in self._lab.hosts:
            is_first = host.name == self._pair.first_to_end
            if not waiting or (is_first and waiting == {"ending"}):
                let_end(host)

    # ---- moments in a conversation with a host

    def _wait_at_gate(self, name: str) -> None:
        """Have a host keep whoever logs in waiting until the strike is done."""
        host = faults.host_of(self._lab, name)
        start_up, is_in = host.home / ".bashrc", host.home / "is-in"
        before = start_up.read_text() if start_up.exists() else ""
        start_up.write_text(before + GATE)
        while not is_in.exists() and not self._over.wait(0.01):
            continue
        start_up.write_text(before)
        self._reach("connecting", name)
        open_gate(host)

    def _pour(self, pour: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
        def poured(link: Link, local: LocalBlob, offset: int = 0) -> Iterator[int]:
            done = offset
            for size in pour(link, local, offset):
                done += size
                self._has_got(link, done)
                yield size

        return poured

    def _answer(self, answer: Callable[..., object]) -> Callable[..., object]:
        def answered(link: Link, *kinds: type) -> object:
            found = answer(link, *kinds)
            if isinstance(found, protocol.ReceivedBytes):  # from another host
                self._has_got(link, found.size_bytes)
            # A host that takes less than a moment for all of it says only that it has it.
            if isinstance(found, protocol.MissingBlobs) and not found.sha256:
                self._has_got(link, self._taken_bytes.pop(link, 0))
            return found

        return answered

    def _has_got(self, link: Link, size_bytes: int) -> None:
        if 2 * size_bytes >= self._pair.job.payload_bytes:
            self._reach("delivering", link.host.name)

    def _send(self, send: Callable[..., None]) -> Callable[..., None]:
        def sent(link: Link, message: protocol.Message) -> None:
            if isinstance(message, protocol.ReceiveBlobs):  # from another host
                size_bytes = sum(blob.size_bytes for blob in message.blobs)
                self._taken_bytes[link] = size_bytes
            send(link, message)

        return sent

    def _start(self, start: Callable[..., None]) -> Callable[..., None]:
        def started(link: Link, request: protocol.StartNode) -> None:
            self._reach("starting", link.host.name)
            start(link, request)

        return started

    def _fetch(
        self, fetch: Callable[..., protocol.Data]
    ) -> Callable[..., protocol.Data]:
        def fetched(
            link: Link,
            request: protocol.GetFile,
            write: Callable[[bytes], object],
            **more: Any,
        ) -> protocol.Data:
            done = request.offset

            def take(data: bytes) -> None:
                nonlocal done
                write(data)
                done += len(data)
                if 2 * done >= self._pair.result_bytes:
                    self._reach("fetching", request.name)

            return fetch(link, request, take, **more)

        return fetched

    def _reach(self, phase: Phase, what: str) -> None:
        """Strike what is due when a conversation comes to a moment; `what` is the host's name, or the file's."""
        for strike in tuple(self._pending):
            moment = strike.moment
            if moment.phase == phase and what in (
                moment.host,
                f"rank{moment.rank}.result",
            ):
                self._strike(strike)

    # ---- striking

    def _strike(self, strike: Strike) -> None:
        """Bring a strike about, unless somebody else does, or the run is over."""
        with self._lock:
            if strike not in self._pending or self._over.is_set():
                return
            self._pending.remove(strike)
        (_, act), *rest = strike.row.way.steps
        try:
            has_hit = self._has_done(act)
        except KeyboardInterrupt:  # it was an interrupt, and no run is there to note it
            self._note_hit(strike)
            raise
        if has_hit:
            self._begin(self._go_on, rest)
            self._note_hit(strike)

    def _note_hit(self, strike: Strike) -> None:
        self.hits.append(strike)
        for other in tuple(self._pending):
            if other.moment.phase == "with the other":
                self._strike(other)

    def _has_done(self, act: Act) -> bool:
        try:
            act(self._lab, self.last or RunState(job="*", nodes=()))
        except (AssertionError, subprocess.CalledProcessError):
            return False  # the host is off, or the process has ended: because of the other strike, or by itself
        return True

    def _go_on(self, steps: Sequence[tuple[When, Act]]) -> None:
        """Do what follows upon a strike, each step in its time. When the run is over, what it broke is mended at once."""
        for when, act in steps:
            began_s = time.monotonic()
            while not (
                self.last and when(self.last, time.monotonic() - began_s)
            ) and not self._over.wait(0.02):
                continue
            # That one mends nothing.
            if act is not fault_plays.interrupt or not self._over.is_set():
                self._has_done(act)

    def _begin(self, do: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=do, args=args, name="pair-stage")
        self._threads.append(thread)
        thread.start()


class DoomedStage(Stage):
    """The screen of a kernel that is killed at the moment that its pair says, and that nothing else strikes."""

    def __init__(self, lab: Any, pair: Pair) -> None:
        super().__init__(lab, pair)
        assert pair.job.killed is not None
        self._misdeeds = []  # a rank does them by itself
        self._pending = [Strike(fault="kernel: SIGKILL", moment=pair.job.killed)]
        self._other_began = threading.Event()

    def _start(self, start: Callable[..., None]) -> Callable[..., None]:
        """Have the other host begin before the one is told to: what is left is half of a job."""

        def started(link: Link, request: protocol.StartNode) -> None:
            if any(
                one.moment.phase == "starting" and one.moment.host == link.host.name
                for one in self._pending
            ):
                self._other_began.wait(20.0)
                self._reach("starting", link.host.name)
            start(link, request)
            self._other_began.set()

        return started

    def _strike(self, _: Strike) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
