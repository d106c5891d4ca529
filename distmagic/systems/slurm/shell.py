"""The log-in node: one connection to it, and commands with time limits.

They query and cancel jobs. Errors of refused commands are distmagic's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress

from distmagic.errors import ConnectionLost, DistmagicError, Unreachable, UsageError
from distmagic.remote.frozen import frozen
from distmagic.systems.slurm import job_states, srun_words, submission
from distmagic.systems.slurm.job_states import JobState
from distmagic.transports import Argv, Process, Transport
from distmagic.transports.asking import Asker
from distmagic.transports.time_limits import TimeLimit

COMMAND_S = 30.0  # Slurm's commands wait long for an unreachable controller
SOON_S = 5.0  # for a command while the kernel ends
_LONGEST = 16 << 20  # limit of an answer
_END_S = 5.0
_LATER_S = 2.0  # added to the time limit: the command's own end must not be mistaken for its answer
_LOG_BYTES = "2000"  # limit for the output of a failed batch script
_AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes|Connection timed out"
    r"|resolve|connect failure|Slurm is initializing|munge",
    re.IGNORECASE,
)
_MISSING = r"\b{program}: (?:command )?(?:not found|No such file or directory)\s*$"


@frozen
class ShellAnswer:
    """The result of a command; `code` is None if unknown."""

    code: int | None
    out: str
    err: str


class Shell:
    """A log-in node and its shared connection; safe to use from threads.

    `connect` makes the connection, or renews a lost one, and may ask the user; `start` never asks.
    """

    def __init__(self, name: str, connect: Callable[[Asker], Transport]) -> None:
        self.name = name
        self._make = connect
        self._transport: Transport | None = None
        self._connecting = threading.Lock()

    def connect(self, asker: Asker) -> None:
        """Connect, unless connected. Raises the errors of a transport."""
        with self._connecting:
            if self._transport is None:
                self._transport = self._make(asker)

    def start(self, argv: Argv) -> Process:
        """Start a process on the log-in node. Raises `ConnectionLost` if the connection is lost."""
        transport = self._transport
        if transport is None:
            raise ConnectionLost(f"{self.name}: the connection is lost.")
        try:
            return transport.start(argv)
        except (ConnectionLost, Unreachable):
            with self._connecting:
                if self._transport is transport:
                    self._transport = None
            transport.close()
            raise

    def run(
        self,
        argv: Argv,
        asker: Asker,
        stdin: str = "",
        timeout_s: float = COMMAND_S,
        cure: str = "Try it by hand; scontrol ping shows if Slurm is up.",
    ) -> ShellAnswer:
        """Run a command to its end.

        A command that takes too long is killed on the log-in node, with its children. Neither SSH
        nor an end of file would end it. Raises `Unreachable` with the `cure` if it takes too long,
        and the errors of `connect` and `start`.
        """
        ending = ("timeout", "-k", "5", f"{timeout_s + _LATER_S:g}")
        command = (*ending, *srun_words.clean(argv))
        try:
            self.connect(asker)
            process = self.start(command)
        except ConnectionLost:  # noticed only now
            self.connect(asker)
            process = self.start(command)
        try:
            with TimeLimit(timeout_s, process.close) as limit:
                # It ended without reading; its output has the reason.
                with suppress(ConnectionLost):
                    process.write(stdin.encode())
                process.close_stdin()
                out = b""
                while len(out) < _LONGEST:
                    data = process.read()
                    if not data:
                        break
                    out += data
                code = None if limit.is_over else process.wait(_END_S)
        finally:
            process.close()
        if limit.is_over:
            raise Unreachable(
                self.name,
                f"{argv[0]} gave no answer within {timeout_s:g} s.",
                cure,
            )
        return ShellAnswer(
            code=code, out=out.decode(errors="replace"), err=process.stderr()
        )

    def close(self) -> None:
        """End the connection."""
        with self._connecting:
            transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    # ---- Slurm's commands

    def look(self, job: str, asker: Asker) -> dict[str, JobState]:
        """Return {job ID: state} for one job, or for all jobs of this user if `job` is "".

        A job that Slurm no longer lists is left out. Raises `Unreachable` if `squeue` fails.
        """
        answer = self.run(job_states.squeue(job), asker)
        if "Invalid job id" in answer.err:  # it has ended some minutes ago
            return {}
        if answer.code != 0:
            raise refusal(self.name, "squeue", answer.err)
        try:
            return job_states.rows(answer.out)
        except ValueError as error:
            raise Unreachable(self.name, f"squeue: {error}.") from None

    def cancel(self, job: str, asker: Asker) -> None:
        """Cancel a job, if possible."""
        # Unreachable, or Python is exiting and starts no threads: its first lease ends it.
        with suppress(DistmagicError, RuntimeError):
            self.run(("scancel", job), asker, timeout_s=SOON_S)

    def kill_sruns(self, job: str, asker: Asker, mark: str = "") -> None:
        """End distmagic's srun processes in a job (srun_words.kill_sruns); a failure of the
        command is ignored.
        """
        with suppress(DistmagicError, RuntimeError):
            self.run(srun_words.kill_sruns(job, mark), asker, timeout_s=SOON_S)

    def printed(self, job: str, asker: Asker) -> str:
        """Return the output of a job's batch script that ended before its keeper started, and
        remove it; "" without any.

        It is in the home directory, which not all hosts share.
        """
        path = submission.LOG.replace("%j", job)
        script = 'test -f "$1" && tail -c "$2" "$1" && rm -f "$1"'
        try:
            return self.run(("sh", "-c", script, "sh", path, _LOG_BYTES), asker).out
        except DistmagicError:
            return ""


def refusal(login: str, program: str, said: str) -> DistmagicError:
    """Return the error of a command that failed on `login`, from its stderr.

    An unreachable controller means nothing for the jobs: they may well run.
    """
    lines = []
    for line in said.splitlines():
        own = line.partition("error: ")[2] or line.removeprefix(f"{program}: ")
        lines.append(own.strip())
    words = " ".join(dict.fromkeys(lines)).strip()[:500] or "without a word"
    if re.search(_MISSING.format(program=program), said, re.MULTILINE):
        return Unreachable(
            login,
            f"there is no program {program}.",
            "Name a node with Slurm's commands: --on slurm:LOGIN.",
        )
    if _AWAY.search(said):
        return Unreachable(
            login,
            f"Slurm's controller does not answer ({words}).",
            "Running jobs continue. Try again; scontrol ping shows if it is back.",
        )
    return UsageError(
        f"Slurm refused the request ({program}: {words}).",
        job_states.ASK_OTHERWISE,
    )
