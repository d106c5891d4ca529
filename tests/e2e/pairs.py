"""Pairs of faults: two rows of the fault table that strike one job, each at a moment of its own.

    seed, redraw  --draw-->            Pair: a job, two strikes, the moment of each          (here; pure)
    Pair, lab     --pair_play.play-->  Played: what the notebook was told, what was hit      (side effects)
    Played, lab   --promises.check-->  nothing, or an AssertionError                         (looks, changes nothing)

`pair_stage.py` brings strikes about. A moment is an event of the run ("rank 1 has reported step 7", "dm2 has got half
of the payload"), never a time, so that a seed gives the same pair on a slow machine too. The table says what a user
is told of one fault; nobody wrote down what is told of two. So a pair is held to the promises alone, whatever the two do
to each other: promises.py has them.

A pair proves something only where both strike. So no pair is drawn of which the table says that the first leaves the
second nothing to strike, or no moment to come: see `is_in_vain`. The ranks do not end before their strikes have struck:
see `Stage`. A pair that misses all the same, by chance, is drawn again, which is a pure function of the seed, too.

A row takes part by what its `Way` has: `steps`, whose first moment is replaced by the one that was drawn; a `misdeed`,
done by a rank at a step that was drawn; or `before`. A row that has only a `play` does not take part.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from distmagic.state.model import RunState
from tests.e2e import faults
from tests.e2e.fault_table import BESIDE_OTHERS, TABLE
from tests.e2e.faults import Fault

# plain: ranks that don't talk to each other. together: they sum numbers over gloo in each step. elastic: the same, and
# the job may lose hosts and get others. followed: the notebook that started it has left it, this one attaches to it.
Kind = Literal["plain", "together", "elastic", "followed"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Phase = Literal[
    "beginning", "connecting", "delivering", "starting", "meeting", "running", "growing", "ending", "fetching",
    "with the other", "noticed",
]  # fmt: skip
_COMMON: tuple[Phase, ...] = (
    "beginning",
    "connecting",
    "delivering",
    "starting",
    "meeting",
    "running",
    "ending",
    "fetching",
)
PHASES: dict[Kind, tuple[Phase, ...]] = {
    "plain": _COMMON,
    "together": _COMMON,
    "elastic": (*_COMMON[:-2], "growing", *_COMMON[-2:]),
    "followed": ("beginning", "connecting", "running", "ending", "fetching"),
}
# In which a kernel that starts a job may be killed: in the first three not all hosts have begun, which leaves next to
# nothing to strike, so that no pair has them.
EARLY: tuple[Phase, ...] = ("connecting", "delivering", "starting")
STARTED_IN: tuple[Phase, ...] = ("meeting", "running")
# Where what is struck is not there in each phase: by the first word of the row.
_THERE: dict[str, tuple[Phase, ...]] = {
    "rank": ("running", "ending"),
    "mount": ("connecting", "delivering", "starting"),  # busy afterwards: files on it are open
    "torchrun": ("meeting", "running", "growing", "ending"),
    "agent": ("meeting", "running", "growing", "ending"),
    "contact": ("delivering", "starting", "meeting", "running", "growing", "ending", "fetching"),
    "sshd's": ("delivering", "starting", "meeting", "running", "growing", "ending", "fetching"),
}  # fmt: skip

# What a run survives, but not before its agents run. Those that its state shows come first.
_BREAKS_CONNECTIONS = (
    "SIGKILL",
    "killed and started again",
    "cut for 5 s",
    "lets nobody in for 3 s",
    "drops every third packet",
)
# Each ends with what comes after it.
_BELOW = ("rank", "torchrun", "agent")

STEP_S = 0.05
FEW_STEPS, MANY_STEPS = 60, 110
# Bytes; a large one goes from host to host.
SMALL_PAYLOAD, LARGE_PAYLOAD = (10_000, 12 << 20)
# Bytes; a small one comes with the end of the run.
SMALL_RESULT, LARGE_RESULT = (1000, 3 << 20)


def _takes_part(fault: Fault) -> bool:
    way = fault.way
    return bool(way.steps) or (way.play is None)


ROWS: dict[str, Fault] = {
    fault.name: fault for fault in (*TABLE, *BESIDE_OTHERS) if _takes_part(fault)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When something strikes. `host`, `rank` and `step` count in the phases whose words name them."""

    phase: Phase
    host: str = ""
    rank: int = 0
    step: int = 0

    def __str__(self) -> str:
        words = {
            "beginning": "before the run",
            "connecting": f"when {self.host} has let the notebook in",
            "delivering": f"when {self.host} has got half of the payload or more",
            "starting": f"when {self.host} is about to be told to start",
            "meeting": "when all agents run",
            "running": f"when rank {self.rank} has reported step {self.step}",
            "growing": "when one more host is a node",
            "ending": "when a rank has ended",
            "fetching": f"when half of the result of rank {self.rank} has come",
            "with the other": "at the same time",
            "noticed": "when the notebook has noticed",
        }
        return words[self.phase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A row of the table, and when it happens."""

    fault: str
    moment: Moment

    @property
    def row(self) -> Fault:
        """The row itself."""
        return ROWS[self.fault]

    def __str__(self) -> str:
        return f"[{self.row.process}: {self.row.kind}] {self.moment}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is struck.

    `hosts` are as after --hosts, with their ranks: the order says who leads. `is_warm`: the hosts keep torch loaded.
    `killed`: the moment at which the kernel that started it was killed, of a job that is followed; else it was detached.
    `is_background`: it runs in the background, and the notebook waits for it. `devices` are those that it claims of each
    host. Its ranks count up to `steps`, or further.
    """

    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    steps: int
    payload_bytes: int
    is_warm: bool
    killed: Moment | None = None
    is_background: bool = False
    devices: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its hosts, the lead's first."""
        return tuple(name for name, _ in self.hosts)

    @property
    def hosts_line(self) -> str:
        """What stands after --hosts."""
        return ",".join(f"{name}:{slots}" for name, slots in self.hosts)

    @property
    def ranks(self) -> int:
        """How many there are when all hosts have come."""
        return sum(slots for _, slots in self.hosts)

    @property
    def may_not_begin(self) -> bool:
        """Whether the kernel that starts it is killed before all hosts have begun: not much is left to strike."""
        return self.killed is not None and self.killed.phase in EARLY

    def __str__(self) -> str:
        words = [self.kind]
        if self.kind == "followed":
            words.append(
                f"(its kernel was killed {self.killed})"
                if self.killed
                else "(detached)"
            )
        if self.is_background:
            words.append("in the background")
        words += ["on", self.hosts_line, "warm" if self.is_warm else "cold"]
        if self.devices:
            words.append("with --devices")
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One round: a job, and what strikes it: two strikes, the first one first, or none but the end of its kernel."""

    seed: int
    job: Job
    strikes: tuple[Strike, ...]

    @property
    def phases(self) -> set[Phase]:
        """When something strikes."""
        return {strike.moment.phase for strike in self.strikes}

    @property
    def grows(self) -> bool:
        """Whether its last host is switched on only when the others work."""
        return "growing" in self.phases

    @property
    def steps(self) -> int:
        """How far its ranks count; one that grows for longer, because a host needs some seconds to come."""
        return self.job.steps + (MANY_STEPS if self.grows else 0)

    @property
    def result_bytes(self) -> int:
        """What comes back of each rank: so much that it has to be fetched, where a strike waits for that."""
        return LARGE_RESULT if "fetching" in self.phases else SMALL_RESULT

    @property
    def options(self) -> dict[str, object]:
        """The options that the two rows want; where they differ, those of the second one. The job says if it is elastic."""
        return {
            name: value
            for strike in self.strikes
            for name, value in strike.row.way.options.items()
            if name not in ("nnodes", "max_restarts")
        }

    @property
    def first_to_end(self) -> str:
        """The host whose ranks end first, where a strike waits for the end of a rank: what it strikes must be there."""
        struck = {
            strike.row.host for strike in self.strikes if strike.row.is_of_the_job
        }
        return next(
            (name for name in self.job.names if name not in struck), self.job.names[0]
        )

    def __str__(self) -> str:
        return f"{self.job}: {' + '.join(map(str, self.strikes))}"


# ---- drawing


def draw(seed: int, redraw: int = 0) -> Pair:
    """Return the pair of a seed, always the same one; `redraw` counts those before it that did not strike twice."""
    rng = random.Random(f"{seed}/{redraw}")
    while is_in_vain(pair := _draw(rng, seed)):
        continue
    return pair


def _draw(rng: random.Random, seed: int) -> Pair:
    """Return any pair.

    First two phases are drawn, then a row of those that can strike in each. A phase weighs as the square root of the number
    of its rows: so neither those phases in which little can strike are rare, nor the few rows that can strike there frequent.
    """
    kind = rng.choice((*KINDS, "plain", "followed"))  # twice: these take the least time
    phases = PHASES[kind]
    weights = [math.sqrt(len(_there(kind, phase))) for phase in phases]
    phase, later = rng.choices(phases, weights, k=2)
    relative: Phase | None = rng.choice((None, None, "with the other", "noticed"))
    if phase == "beginning":
        relative = None
    if relative is None:
        phase, later = sorted((phase, later), key=phases.index)
        rows = rng.choice(_there(kind, phase)), rng.choice(_there(kind, later))
    else:
        # What is noticed is mostly noticed when the job runs.
        then = _there(kind, phase if relative == "with the other" else "running")
        with_steps = [row for row in then if row.way.steps]
        rows = rng.choice(_there(kind, phase)), rng.choice(with_steps)
    needs_time = kind == "elastic" or any(row.way.numbers > FEW_STEPS for row in rows)
    job = Job(
        kind=kind,
        hosts=_hosts(rng, kind),
        steps=MANY_STEPS if needs_time else FEW_STEPS,
        payload_bytes=rng.choice((SMALL_PAYLOAD, SMALL_PAYLOAD, LARGE_PAYLOAD)),
        is_warm=rng.random() < 0.4,
    )
    if kind == "followed" and rng.random() < 0.5:
        job = replace(job, killed=_of_kernel(rng, job))
    first = _moment(rng, rows[0], job, phase)
    second = _moment(rng, rows[1], job, relative or later)
    strikes = (
        Strike(fault=rows[0].name, moment=first),
        Strike(fault=rows[1].name, moment=second),
    )
    if relative is None and phase == later == "running":
        strikes = tuple(sorted(strikes, key=lambda one: one.moment.step))
    if relative is None and phase == later == "fetching":
        strikes = tuple(sorted(strikes, key=lambda one: one.moment.rank))
    pair = Pair(seed=seed, job=job, strikes=strikes)
    # A host that a run's own thread has switched on ends with that thread, so no
    # job grows there.
    is_background = rng.random() < 0.3 and kind != "followed" and not pair.grows
    # A host that was switched off has no GPUs when it is on again, so no elastic job claims any.
    devices = (0,) if rng.random() < 0.25 and kind != "elastic" else ()
    job = replace(job, is_background=is_background, devices=devices)
    return replace(pair, job=job)


@cache
def _there(kind: Kind, phase: Phase) -> tuple[Fault, ...]:
    """Return the rows that can strike a job in a phase."""
    return tuple(row for row in ROWS.values() if phase in _phases(row, kind))


def _phases(row: Fault, kind: Kind) -> tuple[Phase, ...]:
    # A job whose hosts never hear each other can't be detached, and one that runs keeps files open on its home's mount.
    if kind == "followed" and (
        row.moment == "from the beginning" or row.process.startswith("mount")
    ):
        return ()
    if row.way.misdeed is not None:
        return _THERE["rank"]
    if not row.way.steps:
        return ("beginning",)
    return _THERE.get(row.process.split()[0], PHASES[kind][1:])


def _hosts(rng: random.Random, kind: Kind) -> tuple[tuple[str, int], ...]:
    """Return hosts and their ranks. The table strikes dm1 and dm2: either may lead."""
    if kind == "elastic":
        names = ["dm1", "dm2", "dm3"]
        rng.shuffle(names)
        return tuple((name, 1) for name in names)
    names = ["dm1", "dm2"]
    rng.shuffle(names)
    return (names[0], 1), (names[1], rng.choice((1, 2)))


def _moment(rng: random.Random, row: Fault, job: Job, phase: Phase) -> Moment:
    """Return the moment of a phase at which a row strikes."""
    host, rank, step = (
        rng.choice(job.names),
        rng.randrange(job.ranks),
        rng.randint(2, job.steps - 10),
    )
    if row.way.misdeed is not None:
        return Moment(
            phase="running", rank=rank, step=job.steps if phase == "ending" else step
        )
    if phase in ("beginning", "with the other", "noticed"):
        return Moment(phase=phase)
    return Moment(phase=phase, host=host, rank=rank, step=step)


def _of_kernel(rng: random.Random, job: Job) -> Moment:
    """Return when the kernel that starts a job is killed: mostly when it works, as nobody follows what has not begun."""
    phase = rng.choice((*STARTED_IN, "running", "running"))
    host, rank = rng.choice(job.names), rng.randrange(job.ranks)
    return Moment(phase=phase, host=host, rank=rank, step=rng.randint(1, 10))


def varied(count: int) -> list[int]:
    """Return seeds whose pairs differ: each brings the most jobs, rows and phases that those before it have not."""
    pool = [draw(seed) for seed in range(1, 1001)]
    seeds: list[int] = []
    jobs: set[str] = set()
    strikes: set[str] = set()
    while len(seeds) < count:
        pair = max(
            pool,
            key=lambda pair: (
                len(_job_traits(pair.job) - jobs),
                len(_strike_traits(pair) - strikes),
            ),
        )
        pool.remove(pair)
        seeds.append(pair.seed)
        jobs |= _job_traits(pair.job)
        strikes |= _strike_traits(pair)
    return seeds


def _job_traits(job: Job) -> set[str]:
    return {
        f"{job.kind}, killed: {job.killed.phase if job.killed else ''}",
        f"warm: {job.is_warm}",
        f"background: {job.is_background}",
        f"devices: {bool(job.devices)}",
    }


def _strike_traits(pair: Pair) -> set[str]:
    return {strike.fault for strike in pair.strikes} | pair.phases


# ---- what misses


def is_in_vain(pair: Pair) -> bool:
    """Whether one of the two surely finds nothing to strike, or may well do."""
    first, second = pair.strikes
    if pair.job.killed and "lease_s" in pair.options:
        return True  # nobody renews it until the job is followed
    if pair.grows and any(
        strike.row.host == pair.job.names[-1]
        and strike.moment.phase not in ("growing", "ending", "fetching")
        and not (strike is second and first.moment.phase == "growing")
        for strike in pair.strikes
    ):
        return True  # that host is off
    if second.moment.phase == "noticed" and not _is_noticed_alone(first):
        return True
    is_relative = second.moment.phase in ("with the other", "noticed")
    later = first.moment if is_relative else second.moment
    if _is_left_alone(first, first.moment, pair.job):
        return True
    if _is_left_alone(second, later, pair.job):
        return True
    if not is_relative and not _goes_on(first, pair):
        return True
    return _has_taken(first, second, pair)


def _is_left_alone(strike: Strike, moment: Moment, job: Job) -> bool:
    """Whether no conversation is there to be struck: a run that is over talks only to the host of a result."""
    if moment.phase != "fetching" or strike.row.process.split()[0] not in ("contact", "sshd's"):  # fmt: skip
        return False
    hosts = [name for name, slots in job.hosts for _ in range(slots)]
    return job.kind == "elastic" or hosts[moment.rank] != strike.row.host


def _goes_on(strike: Strike, pair: Pair) -> bool:
    """Whether a job goes on when this has struck, with all its ranks where moments of a rank may be still to come."""
    row, phase = strike.row, strike.moment.phase
    if phase in (*EARLY, "fetching"):
        return row.outcome == "done" and row.kind not in _BREAKS_CONNECTIONS
    if pair.job.kind == "elastic" and row.process.split()[0] in ("link", "host"):
        later = pair.strikes[1].moment
        has_last_rank = later.phase in ("running", "fetching") and (
            later.rank == pair.job.ranks - 1
        )
        return row.host != pair.job.names[0] and not has_last_rank
    if pair.job.kind == "elastic" and row.is_of_the_job and not row.way.misdeed:
        return row.host != pair.job.names[0]
    if row.process in ("disk", "home", "mount of the home"):
        return pair.strikes[1].moment.phase != "fetching"  # a result may be missing
    return row.outcome.startswith("done") or not row.outcome


def _is_noticed_alone(strike: Strike) -> bool:
    """Whether the state of a run shows that this has struck; what fails before there is a run is only raised."""
    row, phase = strike.row, strike.moment.phase
    is_seen = row.outcome not in ("done", "") or row.kind in _BREAKS_CONNECTIONS[:3]
    return is_seen and phase not in (*EARLY, "fetching")


def _has_taken(first: Strike, second: Strike, pair: Pair) -> bool:
    """Whether the first strike takes away what the second one is to strike, or may have done so by then."""
    one, other = first.row, second.row
    is_same_host = one.host == other.host
    what, then = one.process.split()[0], other.process.split()[0]
    if is_same_host and what == "host":
        # One that is frozen starts no server of its own again.
        return one.kind.startswith(("power off", "reset")) or then == "sshd"
    if is_same_host and one.kind == "SIGKILL" and what in ("contact", "sshd's"):
        return then in ("contact", "sshd's")
    if not other.is_of_the_job:
        return False
    if is_same_host and one.kind == "SIGKILL" and one.is_of_the_job:
        return _BELOW.index(then) <= _BELOW.index(what)
    is_late = (
        second.moment.phase == "noticed" or one.way.misdeed or one.process == "kernel"
    )
    ends_all = one.is_of_the_job or what in ("kernel", "notebook")
    return bool(is_late) and ends_all and not _goes_on(first, pair)


# ---- moments that the state of the run shows


def has_come(moment: Moment, state: RunState) -> bool:
    """Whether the state shows that a moment has come; the others are noticed where they happen: see pair_stage.py."""
    if moment.phase == "meeting":
        return faults.hosts_answer(state, 0.0)
    if moment.phase == "running":
        worker = state.workers.get(moment.rank)
        return worker is not None and (worker.step or 0) >= moment.step
    if moment.phase == "growing":
        has_begun = any(worker.step for worker in state.workers.values())
        return has_begun and len(state.nodes) == 3  # it began with two
    if moment.phase == "ending":
        return any(worker.ended is not None for worker in state.workers.values())
    return False


def is_noticed(state: RunState) -> bool:
    """Whether the notebook has noticed that something is wrong."""
    is_broken = any(node.broken for node in state.nodes)
    return bool(
        state.stopping
        or state.lost
        or state.notices
        or is_broken
        or state.first_failure is not None
    )
