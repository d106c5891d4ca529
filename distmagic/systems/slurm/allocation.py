"""One Slurm allocation: submitted, waited for, held by its lease while the kernel lives, ended.

    pending   sbatch has given it an ID; `wait` checks it with growing pauses
    held      its nodes are known and the lead's keeper has sent "ready"; a thread renews the lease
              over that pipe, and opens another one when it breaks. squeue is not called
    ended     the pipe breaks, and squeue is called once to confirm it; `error` has the reason

Promised: after its kernel has gone, an allocation ends when its lease expires, or, if it was
pending, its keeper's first lease. Not promised: that squeue is immediately up to date.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from distmagic.connection.prompts import NotebookAsker
from distmagic.diagnosis.finding import Finding
from distmagic.errors import (
    AllocationEnded,
    ConnectionLost,
    DistmagicError,
    PreflightError,
    RunError,
    Unreachable,
    UsageError,
)
from distmagic.remote.system import memory, threads
from distmagic.request.access import Access
from distmagic.request.allocation import HostsRequest, SlurmRequest
from distmagic.request.hosts import Host, Hosts
from distmagic.systems.protocol import Held
from distmagic.systems.slurm import job_states, node_states, srun_words, submission
from distmagic.systems.slurm.lease_pipe import END, LEAVE, LeasePipe
from distmagic.systems.slurm.shell import SOON_S, Shell, refusal
from distmagic.systems.slurm.srun import Node, SrunTransport
from distmagic.systems.slurm.submission import KeeperTerms
from distmagic.transports.asking import Asker

SETUP_S = 300.0  # time for the set-up and the keepers on nodes that were allocated
_LOOK_S = 5.0  # pause between two queries about an allocation with broken pipes
_AGAIN_S = 2.0  # between attempts to hold it again
# Time for an ending job to report how: Slurm's KillWait, and some more.
_COMPLETING_S = 35.0
ONE_CORE = "Slurm gives this job one core on each node. Ask for more: --cpus-per-task 8, or --exclusive."
_MAY_BE_QUEUED = "Slurm may have queued the job all the same: squeue --me shows it, and scancel ID ends it."
MORE_MEMORY = "Ask Slurm for more: --mem 64G on each node, or --exclusive --mem 0 for all that a node has."

Tell = Callable[[str], object]


def pauses() -> Iterator[float]:
    """Yield the seconds between checks of a pending job: most start at once, and the others need no
    hurry.
    """
    yield from [0.25] * 4 + [1.0] * 9 + [5.0] * 6 + [15.0] * 8
    yield from itertools.repeat(30.0)


class Allocation(Held):
    """One Slurm job whose nodes this kernel uses. `hosts` are its nodes, () while it is pending.

    `job` is its ID; `source` distinguishes it from jobs of other clusters. `error` is how it ended,
    None before that.
    """

    def __init__(
        self,
        request: SlurmRequest,
        shell: Shell,
        job: str,
        terms: KeeperTerms,
    ) -> None:
        self.request, self.job = request, job
        self.source = srun_words.source(request.login, job)
        self.title = f"Slurm job {job}"
        # Askers of the runs that wait for it.
        self.awaited_by: set[NotebookAsker] = set()
        self.awaited = request.nodes
        self._has_one_core = False
        self._shell, self._terms = shell, terms
        self._mark = secrets.token_hex(8)  # of this notebook's sruns in the job
        self._lease = LeasePipe()
        self._is_over = threading.Event()
        self._beginning = threading.Lock()  # held while it is being acquired
        self._looking = threading.Lock()
        self._looked_at = 0.0
        self._has_broken = False
        self._connected: set[str] = set()  # nodes that were connected before
        self._owner = os.getpid()
        # After paramiko's, which is imported by now, and so before it.
        atexit.register(self.leave)

    @property
    def is_alive(self) -> bool:
        """Whether the allocation is usable, as far as known."""
        return super().is_alive and not self._is_over.is_set()

    def fits(self, request: HostsRequest) -> bool:
        """Whether the allocation satisfies a cell's request."""
        if not isinstance(request, SlurmRequest):
            return False
        return request == self.request or bool(request.job and request.job == self.job)

    def check(self, asker: Asker) -> bool:
        """Return whether the allocation is still usable.

        If the pipe of its lease is broken, open a new one to find out. Raises `Unreachable` or an
        error of the connection if that stays unknown.
        """
        if self.is_alive and self._lease.is_broken:
            try:
                self._hold(asker, self.hosts[0].name, time.monotonic() + SETUP_S)
            except AllocationEnded:
                return False
        return self.is_alive

    # ---- pending

    def wait(self, asker: NotebookAsker, tell: Tell) -> Hosts:
        """Wait for the nodes and return them; `tell` is called with the reason for the wait.

        Call it on the thread of a run; there may be several: `asker` asks questions on it. Raises
        `AllocationEnded` for a job that ended before, and KeyboardInterrupt, which does not cancel
        the job.
        """
        if self.hosts:
            return self.hosts
        state = self._begun(asker, tell)
        tell(
            f"Slurm job {self.job} runs on {', '.join(state.nodes)}; its nodes are being set up."
        )
        with self._beginning:
            if not self.hosts:
                if not state.is_ours:
                    self._start_keepers(state.nodes, asker)
                self._hold(asker, state.nodes[0], time.monotonic() + SETUP_S)
                self._has_one_core = state.cpus <= len(state.nodes)
                self.hosts = tuple(
                    Host(name=name, allocation=self.source) for name in state.nodes
                )
                threads.begin("allocation", self._keep_renewing)
        return self.hosts

    def _begun(self, asker: NotebookAsker, tell: Tell) -> job_states.JobState:
        """Poll until the job runs, and return its row.

        Raises `AllocationEnded`, and `UsageError` for a job that can never start.
        """
        for pause_s in pauses():
            try:
                state = self._look(asker)
            except (ConnectionLost, Unreachable) as error:
                tell(f"The state of Slurm job {self.job} is unknown: {error.message}")
            else:
                if state is not None and state.is_pending:
                    words = job_states.waiting(state)
                    tell(words)
                    if job_states.never_starts(state):  # the cell would wait forever
                        if not self.request.job:
                            self._shell.cancel(self.job, asker)
                            words += " It was cancelled."
                        self.error = UsageError(words, job_states.ASK_OTHERWISE)
                        raise self.error
                elif state is None or state.has_ended:
                    said = self._shell.printed(self.job, asker)
                    self.error = job_states.ended(self.job, state, said)
                    raise self.error
                elif state.nodes and state.state != "COMPLETING":
                    return state
            asker.serve(pause_s)
        raise AssertionError("there is always another pause")

    def _look(self, asker: Asker) -> job_states.JobState | None:
        """Return the job's row in `squeue`, None if Slurm no longer lists the job.

        Raises `Unreachable` if `squeue` fails.
        """
        return self._shell.look(self.job, asker).get(self.job)

    def _start_keepers(self, nodes: tuple[str, ...], asker: Asker) -> None:
        """Start keepers in a job that distmagic did not submit.

        Raises `PreflightError` if the job accepts no such steps.
        """
        step = submission.lead_step(self.job, nodes[0])
        said = self._shell.run((*step, "true"), asker).err
        trouble = srun_words.trouble(nodes[0], self.job, said)
        if isinstance(trouble, PreflightError):
            self.error = trouble
            raise trouble
        start = submission.keepers_step(
            step, len(nodes), self._terms, self.request.idle_s
        )
        self._shell.run(start, asker)

    def _hold(self, asker: Asker, lead: str, end_s: float) -> None:
        """Open the pipe that renews the lease; return when the lead's keeper is ready.

        Raises `AllocationEnded`, and after `end_s` the reason why there is no keeper.
        """
        while True:
            try:
                self._shell.connect(asker)
                self._lease.open(self._transport(lead))
            except (AllocationEnded, ConnectionLost, Unreachable):
                self._look_at_end(asker)
                if time.monotonic() > end_s or self._is_over.wait(_AGAIN_S):
                    raise
            else:
                return

    # ---- held

    def transport(self, host: Host, access: Access, asker: Asker) -> SrunTransport:  # noqa: ARG002 - as a cluster's
        """Return a transport to one of the nodes.

        Raises `AllocationEnded` if this kernel no longer has them.
        """
        self._shell.connect(asker)
        if self.error is None and host.name in self._connected:
            self._has_broken = True  # an earlier connection
            self._look_at_end(asker)
        if self.error is not None:
            raise self.error
        self._connected.add(host.name)
        made = self._transport(host.name)
        if self._has_one_core and host == self.hosts[0]:
            made.warnings = (ONE_CORE,)
        return made

    def _transport(self, name: str) -> SrunTransport:
        node = Node(
            name=name,
            job=self.job,
            python=self._terms.python,
            mark=self._mark,
        )
        return SrunTransport(self._shell, node, self._explained)

    def advise(self, error: RunError) -> None:
        """Add advice to the error of a run on its nodes, as far as the allocation is involved."""
        super().advise(error)
        if memory.REACHED in error.message:
            error.hint = f"{MORE_MEMORY}\n{error.hint}"

    def findings(self, asker: Asker) -> tuple[Finding, ...]:
        """Return its nodes that Slurm takes out of use; () also if Slurm does not answer soon."""
        names = [host.name for host in self.hosts]
        ask = srun_words.on_login(self.request.login)
        with suppress(DistmagicError):
            answer = self._shell.run(node_states.sinfo(names), asker, timeout_s=SOON_S)
            return node_states.findings(answer.out, names, ask)
        return ()

    def _explained(self, error: DistmagicError) -> DistmagicError:
        """Return the reason of the allocation's end, if srun only reports that it has ended."""
        if isinstance(error, AllocationEnded):
            with suppress(DistmagicError):
                self._look_at_end(NotebookAsker(can_ask=False))
        return self.error or error

    def _look_at_end(self, asker: Asker) -> None:
        """Ask squeue, with a limited rate, whether it has ended; raise the reason if so.

        No answer means unknown.
        """
        with self._looking:
            if self.error is None and time.monotonic() > self._looked_at + _LOOK_S:
                self._looked_at = time.monotonic()
                try:
                    state = self._settled_state(asker)
                except DistmagicError:
                    return
                # A long COMPLETING state waits for a dead node: no distmagic process is left on it.
                if state is None or state.has_ended or state.state == "COMPLETING":
                    was_held = bool(self.hosts)
                    said = ""
                    if not was_held:
                        said = self._shell.printed(self.job, asker)
                    self.error = job_states.ended(
                        self.job, state, said, was_held=was_held
                    )
                    self._shell.kill_sruns(self.job, asker)
        if self.error is not None:
            raise self.error

    def _settled_state(self, asker: Asker) -> job_states.JobState | None:
        """Return the job's state after COMPLETING, which lasts while Slurm ends the processes and
        hides the outcome.
        """
        end_s = time.monotonic() + _COMPLETING_S
        while True:
            state = self._look(asker)
            is_ending = state is not None and state.state == "COMPLETING"
            if not is_ending or time.monotonic() > end_s:
                return state
            time.sleep(_AGAIN_S / 4)

    def _keep_renewing(self) -> None:
        """Renew the lease four times per lease, over a new pipe if the old one is broken."""
        pause_s = self._terms.lease_s / 4
        while not self._is_over.wait(pause_s):
            pause_s = self._terms.lease_s / 4
            if self.error is not None:
                return
            try:
                self._lease.renew()
            except DistmagicError:
                pause_s = _AGAIN_S
                with suppress(DistmagicError):
                    self._hold(NotebookAsker(can_ask=False), self.hosts[0].name, 0.0)

    # ---- the end

    def end(self) -> None:
        """Release the nodes, even if jobs run on them.

        A Slurm job from elsewhere continues without distmagic.
        """
        self._finish(END)

    def leave(self) -> None:
        """Release the nodes as soon as no job runs on them; called when the kernel ends."""
        # Otherwise in a forked child: it belongs to the parent.
        if os.getpid() == self._owner:
            self._finish(LEAVE)

    def _finish(self, word: bytes) -> None:
        atexit.unregister(self.leave)
        if self._is_over.is_set():
            return
        self._is_over.set()
        was_told = self._lease.give_up(word)
        asker = NotebookAsker(can_ask=False)
        # A job may run on its nodes: the lease ends it.
        is_wanted = was_told or (word == LEAVE and self.hosts)
        if not (is_wanted or self.error or self.request.job):
            self._shell.cancel(self.job, asker)
        if self._has_broken and self.error is None:
            # Not those of another notebook, which may use the same job.
            self._shell.kill_sruns(self.job, asker, self._mark)
        if self.error is None:
            self.error = AllocationEnded(
                f"Slurm job {self.job} was given back.",
                "Run the cell again: it asks for new nodes.",
            )


def submitted(
    request: SlurmRequest, shell: Shell, terms: KeeperTerms, asker: Asker, comment: str
) -> Allocation:
    """Return a new, pending allocation.

    Raises `UsageError`, `Unreachable` and the errors of connecting.
    """
    argv = submission.arguments(request, comment, is_elastic=terms.is_elastic)
    script = submission.script(request, terms)
    answer = shell.run(argv, asker, script, cure=_MAY_BE_QUEUED)
    if answer.code != 0:
        raise refusal(shell.name, "sbatch", answer.err)
    try:
        job = submission.job_id(answer.out)
    except ValueError as error:
        raise UsageError(
            f"{shell.name}: {error}.",
            "Try it by hand on that machine: sbatch --parsable",
        ) from None
    return Allocation(request, shell, job, terms)


def found(
    request: SlurmRequest, shell: Shell, terms: KeeperTerms, asker: Asker
) -> Allocation:
    """Return an existing allocation: another kernel's, or one made without distmagic.

    Raises `UsageError` if no such job exists.
    """
    state = shell.look(request.job, asker).get(request.job)
    if state is None or state.has_ended:
        raise UsageError(
            f"Slurm has no job {request.job} that runs.",
            "%distributed allocations lists yours.",
        )
    return Allocation(request, shell, request.job, terms)
