"""Provides hosts for `--on slurm`: nodes of allocations, and the list of the user's allocations."""

from __future__ import annotations

from distmagic.connection.connections import Connect
from distmagic.errors import UsageError
from distmagic.request.access import Access
from distmagic.request.allocation import SlurmRequest
from distmagic.request.command_prefix import ENVIRONMENT
from distmagic.request.hosts import LOCALHOST, parse_host
from distmagic.request.systems import Wanted
from distmagic.systems.slurm import submission
from distmagic.systems.slurm.allocation import Allocation, found, submitted
from distmagic.systems.slurm.job_states import listing
from distmagic.systems.slurm.shell import Shell
from distmagic.systems.slurm.submission import KeeperTerms
from distmagic.transports.asking import Asker

_ShellKey = tuple[str, str | None, str | None]


def asked(place: str, wanted: Wanted) -> SlurmRequest:
    """Return the request of a line: slurm, slurm:LOGIN, slurm:JOB or slurm:LOGIN:JOB, and flags.

    A part with only digits is a job ID. The default is the job that runs this process, as for a
    JupyterLab on a node. Raises `UsageError`.
    """
    where = place.partition(":")[2]
    login, colon, job = where.rpartition(":")
    if where.isdecimal():
        login, job = "", where
    elif not (colon and job.isdecimal() and not login.endswith(":")):
        login, job = where, ""
    if not (login or job or wanted.options or wanted.nodes):
        job = wanted.environ.get("SLURM_JOB_ID", "")
    if job and (wanted.options or wanted.nodes or wanted.setup):
        raise UsageError(
            f"Slurm job {job} has its nodes already.",
            "Leave out --nodes, --setup and the options of sbatch.",
        )
    known = wanted.given("nodes", "setup", "idle_s")
    return SlurmRequest(login=login, job=job, options=wanted.options, **known)


def preview(request: SlurmRequest, access: Access, _: str, *, is_elastic: bool) -> str:
    """Return the options and script for sbatch. Submits nothing."""
    if request.job:
        return f"Slurm job {request.job} would be used as it is."
    return submission.preview(request, _terms(access, is_elastic=is_elastic))


def _terms(access: Access, *, is_elastic: bool) -> KeeperTerms:
    # The interpreter of all nodes; keepers need no package, and an environment may only exist on
    # its nodes.
    python = access.python_of("") or "python3"
    if python.startswith(ENVIRONMENT):
        python = "python3"
    return KeeperTerms(python=python, lease_s=access.lease_s, is_elastic=is_elastic)


class SlurmPool:
    """The allocations of one kernel, and its connections to log-in nodes."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._shells: dict[_ShellKey, Shell] = {}
        self._made: list[Allocation] = []

    def get(
        self, request: SlurmRequest, access: Access, asker: Asker, owner: str, *, is_elastic: bool
    ) -> Allocation:  # fmt: skip
        """Return an allocation: an existing one, or a new, pending one."""
        shell = self._shell(request.login, access)
        terms = _terms(access, is_elastic=is_elastic)
        if request.job:
            made = found(request, shell, terms, asker)
        else:
            comment = submission.comment_of(owner)
            made = submitted(request, shell, terms, asker, comment)
        self._made.append(made)
        return made

    def _shell(self, login: str, access: Access) -> Shell:
        """Return the shell of a log-in node; "" means this machine."""
        key = (login, access.ssh_config, access.ssh_command)
        if key not in self._shells:
            host = parse_host(login) if login else LOCALHOST
            name = host.name if login else "this machine"
            connect = self._connect
            self._shells[key] = Shell(name, lambda asker: connect(host, access, asker))
        return self._shells[key]

    def listed(
        self, request: SlurmRequest, access: Access, asker: Asker
    ) -> list[tuple[str, ...]]:
        """Return the table rows of this user's allocations, including those of other kernels.

        Raises `Unreachable`.
        """
        shell = self._shell(request.login, access)
        states = shell.look("", asker).values()
        held = {one.job for one in self._made if one.is_alive}
        return listing([one for one in states if one.is_ours], held)

    def close(self) -> None:
        """Close the connections to log-in nodes."""
        for shell in self._shells.values():
            shell.close()
        self._shells, self._made = {}, []


pool = SlurmPool
