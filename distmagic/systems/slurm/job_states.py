"""What `squeue` says of a job: one row, understood; and the same in words for a user. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from distmagic import sanitize
from distmagic.errors import AllocationEnded
from distmagic.systems.slurm import nodelist, srun_words

# job, state, reason, nodes, start (an estimate while it is pending), time left, CPUs; the comment last: it is the user's
FORMAT = "%i|%T|%r|%N|%S|%L|%C|%k"
_COLUMNS = 8
_MOST_CHARACTERS = 1000  # of a word of squeue, but for the list of nodes
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
_PENDING = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
_RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING")


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One row. `state` and `reason` are Slurm's words; `starts` and `left` are as it prints them, "" where it can't say."""

    job: str
    state: str
    reason: str = ""
    nodes: tuple[str, ...] = ()
    starts: str = ""
    left: str = ""
    cpus: int = 0
    comment: str = ""

    @property
    def is_pending(self) -> bool:
        """Whether the Slurm job has not started."""
        return self.state in _PENDING

    @property
    def is_running(self) -> bool:
        """Whether its nodes are its own."""
        return self.state in _RUNNING


def squeue(jobs: tuple[str, ...], cluster: str) -> tuple[str, ...]:
    """Return the command that asks for these jobs, or, for none, for all of this user."""
    which = (f"--jobs={','.join(jobs)}", "--states=all") if jobs else ("--me",)
    return (
        "squeue",
        "--noheader",
        *srun_words.of_cluster(cluster),
        *which,
        f"--format={FORMAT}",
    )


def rows(text: str) -> dict[str, JobState]:
    """Return what squeue printed, by job. Lines of another form are no jobs: a cluster's name, a site's greeting."""
    found = {}
    for line in text.splitlines():
        words = line.split("|", _COLUMNS - 1)
        if len(words) == _COLUMNS and re.fullmatch(r"\d+", words[0].strip()):
            nodes = words[3]
            job, state, reason, _, starts, left, cpus, comment = (
                _known(sanitize.line(word)[:_MOST_CHARACTERS]) for word in words
            )
            try:
                names = nodelist.expand(_known(nodes))
            except ValueError:
                names = ()
            if not all(_NODE_NAME.fullmatch(name) for name in names):
                names = ()  # no names of hosts, so nothing could be reached by them
            count = int(cpus) if cpus.isdecimal() and len(cpus) < 10 else 0
            one = JobState(
                job=job,
                state=state,
                reason=reason,
                nodes=names,
                starts=starts,
                left=left,
                cpus=count,
                comment=comment,
            )
            found[one.job] = one
    return found


def listing(states: Sequence[JobState], held: Collection[str]) -> list[tuple[str, ...]]:
    """Return the rows of a table of allocations; `held` are the numbers of those that this notebook holds."""
    if not states:
        return [("Slurm has no allocation of distmagic's that is yours",)]
    table: list[tuple[str, ...]] = [("job", "state", "nodes", "time left", "notebook")]
    for one in states:
        whose = "this notebook" if one.job in held else one.comment.partition(":")[2]
        nodes = ",".join(one.nodes) or one.reason
        table.append((one.job, one.state.lower(), nodes, one.left, whose))
    return table


def _known(word: str) -> str:
    return "" if word.strip() in ("N/A", "(null)", "None", "INVALID") else word.strip()


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
_SIZES = "Ask for less, or for another partition: sinfo -o '%P %D %c %m %l %G'."
_ACCOUNTS = "Name another one with --account, or another --partition."
# Reasons of jobs that Slurm takes though they can't run, and what to do.
_NEVER = {
    "PartitionNodeLimit": (
        "it asks for more nodes than the partition has or allows",
        "Ask for fewer: --nodes N. sinfo -o '%P %D' shows how many each partition has.",
    ),
    "PartitionTimeLimit": (
        "it asks for more time than the partition allows",
        "Ask for less: --time. sinfo -o '%P %l' shows the longest time of each partition.",
    ),
    "PartitionConfig": (
        "the partition can't give as many nodes, cores or as much time as it asks for",
        _SIZES,
    ),
    "BadConstraints": ("no nodes are as it asks for", _SIZES),
    "DependencyNeverSatisfied": (
        "the job it depends on has failed",
        "Leave the dependency out, or name another job.",
    ),
    "ReservationDeleted": (
        "its reservation is gone",
        "scontrol show reservation lists those that there are.",
    ),
    "InvalidAccount": ("its account can't be used", _ACCOUNTS),
    "AccountNotAllowed": ("its account may not use this partition", _ACCOUNTS),
    "InvalidQOS": (
        "its quality of service can't be used",
        "Name another with --qos, or none.",
    ),
    "QOSNotAllowed": (
        "its quality of service may not use this partition",
        "Name another with --qos, or another --partition.",
    ),
}
# Where Slurm keeps accounts itself it gives a sentence in place of a word: "Job's account not permitted to use this
# partition (gpu allows staff not me)".
_SENTENCES = {"Job's account": "AccountNotAllowed", "Job's QOS": "QOSNotAllowed"}


def _word(reason: str) -> str:
    """Return the word of a reason: "ReqNodeNotAvail, UnavailableNodes:a1" has more behind it."""
    for start, word in _SENTENCES.items():
        if reason.startswith(start):
            return word
    return reason.partition(",")[0].strip("()")


def waiting(state: JobState) -> str:
    """Return in a sentence why a job has not begun, and when it may."""
    word = _word(state.reason)
    words = _REASONS.get(word, "")
    if word in _NEVER:
        words = f"{_NEVER[word][0]}, so it will never start"
    if not words and (
        "Limit" in word
        or word.startswith(("AssocGrp", "AssocMax", "QOSGrp", "QOSMax", "MaxJobs"))
    ):
        words = "a limit of your account or quality of service is reached"
    if state.state == "CONFIGURING":
        words, word = "its nodes are being made ready", "CONFIGURING"
    why = f": {words} ({word})" if words and word else f" ({word})" if word else ""
    when = (
        f" Slurm expects it to start at {state.starts.replace('T', ' ')}."
        if state.starts
        else ""
    )
    return f"Slurm job {state.job} is pending{why}.{when}"


def cure_of_endless(state: JobState) -> str:
    """Return what to do about a pending job that waits for what can't come; "" for one that may start."""
    known = _NEVER.get(_word(state.reason))
    return known[1] if known is not None else ""


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
    "A keeper holds a node for the ranks; it may have been killed there. Run the cell again: it asks for new nodes.",
)


def ended(
    job: str, state: JobState | None, said: str = "", *, was_held: bool = False
) -> AllocationEnded:
    """Return the error of a job that has ended; None: Slurm no longer knows it.

    `said` is what its script printed; `was_held` says that all keepers were up.
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
