"""The allocations of one kernel: submitted once, used by every cell that asks for the same, and ended."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import AllocationEnded, NodeLost, RunError, SpecError
from distmagic.remote.system import memory
from distmagic.request.allocation import HostsRequest, SkyRequest, SlurmRequest
from distmagic.request.command_prefix import ENVIRONMENT
from distmagic.request.hosts import LOCALHOST, SKY, Host, parse_host
from distmagic.request.spec import Access
from distmagic.systems.skypilot import sky, sky_words
from distmagic.systems.skypilot.cluster import Cluster
from distmagic.systems.slurm import commands, submission
from distmagic.systems.slurm.allocation import Allocation, found, submitted
from distmagic.systems.slurm.job_states import JobState
from distmagic.systems.slurm.queue import SlurmQueue
from distmagic.systems.slurm.shell import Shell
from distmagic.transports import Transport
from distmagic.transports.asking import Asker

MORE_MEMORY = "Ask Slurm for more: --mem 64G on each node, or --exclusive --mem 0 for all that a node has."
_ShellKey = tuple[str, str | None, str | None]


def keeper_python(access: Access) -> str:
    """Return the interpreter of keepers and ushers: that of all nodes."""
    python = access.python_of("") or "python3"
    # They need no package, and an environment is found only where its nodes are.
    return "python3" if python.startswith(ENVIRONMENT) else python


def preview(
    request: HostsRequest,
    access: Access,
    owner: str,
    *,
    is_elastic: bool,
) -> str:
    """Return what a scheduler would be told; nothing is."""
    if isinstance(request, SlurmRequest):
        if request.job:
            return f"Slurm job {request.job} would be used as it is."
        python = keeper_python(access)
        return submission.preview(
            request, python, access.lease_s, is_elastic=is_elastic
        )
    if request.name:
        return f"The cluster {request.name} of SkyPilot would be used as it is."
    name = sky_words.name_for(owner, request)
    return shlex.join(("sky", *sky.launch_words(request, name)))


class Allocations:
    """What this kernel has of a scheduler. Used by the main thread, but for `transport`."""

    def __init__(self, connect: Callable[[Host, Access, Asker], Transport]) -> None:
        self._connect = connect
        self._queues: dict[_ShellKey, SlurmQueue] = {}
        self._all: list[Allocation | Cluster] = []

    @property
    def alive(self) -> tuple[Allocation | Cluster, ...]:
        """Those that can still be used, the oldest first."""
        self._all = [one for one in self._all if one.is_alive]
        return tuple(self._all)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The nodes of all of them."""
        return tuple(host for one in self.alive for host in one.hosts)

    @property
    def clusters(self) -> tuple[str, ...]:
        """The names of the clusters of SkyPilot among them."""
        return tuple(one.cluster for one in self.alive if isinstance(one, Cluster))

    def take_down(self, cluster: str, asker: NotebookAsker) -> str:
        """Take a cluster of SkyPilot down, also one that is not held, and return what SkyPilot says.

        Raises `SpecError` for what is no name, such as an option or a pattern that means others too, and `Unreachable`.
        """
        if not cluster:
            raise SpecError("--cluster names no cluster.", "Write --cluster NAME.")
        SkyRequest(name=cluster)  # which checks it
        for one in self._all:
            if isinstance(one, Cluster) and one.cluster == cluster:
                one.leave()
        return sky.take_down(cluster, asker)

    def get(
        self,
        request: HostsRequest,
        access: Access,
        asker: Asker,
        owner: str,
        *,
        is_elastic: bool,
    ) -> Allocation | Cluster:
        """Return the allocation that a cell asks for: one that is held, or a new one, which is pending."""
        is_in_doubt = False
        for one in self.alive:
            if one.fits(request):
                if one.check(asker):
                    return one
                is_in_doubt = True
        if isinstance(request, SkyRequest):
            cluster = Cluster(request, owner, is_in_doubt=is_in_doubt)
            self._all.append(cluster)
            return cluster
        queue = self._queue(request.login, access)
        python = keeper_python(access)
        if request.job:
            made = found(request, queue, asker, python=python, lease_s=access.lease_s)
        else:
            comment = submission.comment_of(owner)
            made = submitted(
                request,
                queue,
                asker,
                comment=comment,
                python=python,
                lease_s=access.lease_s,
                is_elastic=is_elastic,
            )
        self._all.append(made)
        return made

    def _queue(self, login: str, access: Access) -> SlurmQueue:
        """Return what asks Slurm through a log-in node, "" being this machine."""
        key = (login, access.ssh_config, access.ssh_command)
        if key not in self._queues:
            host = parse_host(login) if login else LOCALHOST

            def connect(asker: Asker) -> Transport:
                return self._connect(host, access, asker)

            shell = Shell(host.name if login else "this machine", connect)
            self._queues[key] = SlurmQueue(shell)
        return self._queues[key]

    def transport(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return the way to a node. Raises `AllocationEnded` if it is ours no longer."""
        for one in self._all:
            if one.name == host.allocation:
                return one.transport(host, access, asker)
        if host.allocation.startswith(SKY):
            raise AllocationEnded(
                f"The cluster of {host.name} was given up.",
                "Run the cell again: it asks SkyPilot for it.",
            )
        job = host.allocation.rpartition(":")[2]
        raise AllocationEnded(
            f"Slurm job {job} has ended.", "Run the cell again: it asks for new nodes."
        )

    def listed(self, login: str, access: Access, asker: Asker) -> tuple[JobState, ...]:
        """Return what Slurm has of this user's allocations, those of other kernels too. Raises `Unreachable`."""
        states = commands.look(self._queue(login, access).shell, (), "", asker).values()
        ours = [
            one for one in states if one.comment.startswith(f"{submission.JOB_NAME}:")
        ]
        return tuple(one for one in ours if one.is_pending or one.is_running)

    def advise(self, hosts: Sequence[Host], error: RunError) -> None:
        """Have the error of a run on these hosts say what to do, as far as their allocation has part in it."""
        names = {host.allocation for host in hosts}
        for one in self._all:
            if one.name not in names:
                continue
            if isinstance(error, NodeLost) and one.error is not None:
                error.hint = one.error.hint  # what still ran there has ended with it
            elif memory.REACHED in error.message and isinstance(one, Allocation):
                error.hint = f"{MORE_MEMORY}\n{error.hint}"

    def end(self) -> None:
        """Give all nodes back, whatever runs there, and close the connections to log-in nodes."""
        for one in self._all:
            one.end()
        self._forget()

    def leave(self) -> None:
        """Give all nodes back on which no job runs, and close the connections to log-in nodes."""
        for one in self._all:
            one.leave()
        self._forget()

    def _forget(self) -> None:
        self._all = []
        for queue in self._queues.values():
            queue.shell.close()
        self._queues = {}
