"""Parses a job's row in `squeue`, and describes it to the user. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distmagic import sanitize
from distmagic.errors import AllocationEnded
from distmagic.remote.frozen import frozen
from distmagic.systems.slurm import nodelist, submission
from distmagic.transports import Argv

# job, state, reason, nodes, start (an estimate while it is pending), time left, CPUs; the comment
# last: it is the user's %A, because %i is "123_7" for a job of an array, and "123+0" for a
# component of a heterogeneous job.
FORMAT = "%A|%T|%r|%N|%S|%L|%C|%k"
_COLUMNS = 8
_NONE = ("N/A", "(null)", "None", "INVALID")  # of squeue, for no value
_PENDING = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
# COMPLETING: the outcome is not known yet.
_RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "COMPLETING")


@frozen
class JobState:
    """One row of squeue."""

    job: str
    state: str  # Slurm's word
    reason: str = ""  # Slurm's word
    nodes: tuple[str, ...] = ()
    starts: str = ""  # as printed, "" if unknown
    left: str = ""  # as printed, "" if unknown
    cpus: int = 0
    comment: str = ""

    @property
    def is_pending(self) -> bool:
        """Whether the Slurm job has not started."""
        return self.state in _PENDING

    @property
    def is_ours(self) -> bool:
        """Whether any notebook submitted it with distmagic."""
        return self.comment.startswith(f"{submission.JOB_NAME}:")

    @property
    def has_ended(self) -> bool:
        """Whether the job no longer has its nodes."""
        return not self.is_pending and self.state not in _RUNNING


def squeue(job: str) -> Argv:
    """Return the command that queries a job, or, for "", all jobs of this user."""
    which = (f"--jobs={job}", "--states=all") if job else ("--me",)
    return ("squeue", "--noheader", *which, f"--format={FORMAT}")


def rows(text: str) -> dict[str, JobState]:
    """Return squeue's rows by job.

    Other lines, such as a cluster's name or a greeting, are ignored. Raises ValueError for invalid
    node names.
    """
    found = {}
    for line in text.splitlines():
        parts = line.split("|", _COLUMNS - 1)
        words = [sanitize.line(part).strip() for part in parts]
        words = ["" if word in _NONE else word for word in words]
        if len(words) == _COLUMNS and words[0].isdecimal():
            job, state, reason, nodes, starts, left, cpus, comment = words
            found[job] = JobState(
                job=job,
                state=state,
                reason=reason,
                nodes=nodelist.expand(nodes),
                starts=starts,
                left=left,
                cpus=int(cpus) if cpus.isdecimal() else 0,
                comment=comment,
            )
    return found


def listing(states: Sequence[JobState], held: Collection[str]) -> list[tuple[str, ...]]:
    """Return the rows of a table of allocations; `held` are the IDs of those that this notebook
    uses.
    """
    if not states:
        return [("You have no allocation of distmagic in Slurm",)]
    table: list[tuple[str, ...]] = [("job", "state", "nodes", "time left", "notebook")]
    for one in states:
        whose = "this notebook" if one.job in held else one.comment.partition(":")[2]
        nodes = ",".join(one.nodes) or one.reason
        table.append((one.job, one.state.lower(), nodes, one.left, whose))
    return table


# ---- pending

_REASONS = {
    "Resources": "the nodes it needs are busy",
    "Priority": "jobs with a higher priority come first",
    "Dependency": "another job has to end first",
    "BeginTime": "its start time has not come",
    "JobHeldUser": "it is held; scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is not active",
    "ReqNodeNotAvail": "nodes that it needs are down, reserved or being drained",
    "Reservation": "its reservation has not started",
    "Licenses": "it waits for a licence",
    "NodeDown": "a node that it needs is down",
    "Prolog": "its nodes are being prepared",
}
# Starts of the reasons of jobs that Slurm accepts although they can't run. With accounting, Slurm
# gives a sentence instead of a word: "Job's account not permitted to use this partition (gpu allows
# staff not me)".
_NEVER = (
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "PartitionConfig",
    "BadConstraints",
    "DependencyNeverSatisfied",
    "ReservationDeleted",
    "InvalidAccount",
    "AccountNotAllowed",
    "InvalidQOS",
    "QOSNotAllowed",
    "Job's account",
    "Job's QOS",
)
ASK_OTHERWISE = (
    "Slurm's reason names what to correct. Ask for less, or name another --partition, --account or --qos. "
    "sinfo -o '%P %D %c %m %l %G' shows what each partition has."
)


def never_starts(state: JobState) -> bool:
    """Whether a pending job waits for something that can't happen."""
    return state.reason.startswith(_NEVER)


def waiting(state: JobState) -> str:
    """Return a sentence with the reason why a job has not started, and when it may."""
    # "ReqNodeNotAvail, UnavailableNodes:a1" has more after the word.
    words = _REASONS.get(state.reason.partition(",")[0], "")
    if never_starts(state):
        words = "it will never start"
    if state.state == "CONFIGURING":
        words = "its nodes are being made ready"
    text = f"Slurm job {state.job} is pending{': ' if words else ''}{words}"
    text += f" ({state.reason})." if state.reason else "."
    if state.starts:
        text += f" Slurm expects it to start at {state.starts.replace('T', ' ')}."
    return text


# ---- the end

_ENDS = {
    "TIMEOUT": (
        "reached its time limit",
        "Ask for more: --time 2:00:00. With a checkpoint the next run continues from it.",
    ),
    "DEADLINE": ("reached its deadline", "Ask for it earlier, or without a deadline."),
    "PREEMPTED": (
        "was preempted: a job that may take its nodes has come",
        "Run the cell again, or use a partition or quality of service whose jobs are not preempted.",
    ),
    "NODE_FAIL": (
        "lost a node: Slurm found it dead",
        "Run the cell again; Slurm gives other nodes.",
    ),
    "BOOT_FAIL": (
        "has nodes that did not come up",
        "Run the cell again; Slurm gives other nodes.",
    ),
    "OUT_OF_MEMORY": (
        "used more memory than it had asked for",
        "Ask for more: --mem 64G, or --exclusive with --mem 0.",
    ),
    "CANCELLED": (
        "was cancelled with scancel, not by this notebook",
        "Ask whoever did; the next cell asks for new nodes.",
    ),
    "FAILED": (
        "failed: its batch script ended before its time",
        "Look at what --setup does, and that --python names a Python of the nodes.",
    ),
    "COMPLETED": (
        "has ended: nobody used it for the time of --idle, or its lease ran out",
        "The next cell asks for new nodes.",
    ),
    "REVOKED": ("was taken back by the federation", "Run the cell again."),
}
_FAILED_WHEN_HELD = (
    "failed: one of its keepers has ended",
    "A keeper holds a node for the ranks; it may have been killed. Run the cell again: it asks for new nodes.",
)


def ended(
    job: str, state: JobState | None, said: str = "", *, was_held: bool = False
) -> AllocationEnded:
    """Return the error of a finished job. `state` is None if Slurm no longer lists the job.

    `said` is the output of its script; `was_held`: all keepers had started.
    """
    words, hint = (
        "has ended, and Slurm no longer reports how",
        "The next cell asks for new nodes.",
    )
    if state is not None:
        words, hint = _ENDS.get(state.state, (f"has ended ({state.state})", hint))
        if was_held and state.state == "FAILED":
            words, hint = _FAILED_WHEN_HELD
    printed = f" It printed: {said.strip()[-500:]}" if said.strip() else ""
    return AllocationEnded(f"Slurm job {job} {words}.{printed}", hint)
