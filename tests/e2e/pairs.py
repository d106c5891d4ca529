"""Pairs of faults: two rows of the fault table that strike one job, each at a moment of its own.

    seed          --draw-->            Pair: a job, two strikes, the moment of each          (here; pure)
    Pair, lab     --pair_play.play-->  Played: what the notebook was told, what was hit      (side effects)
    Played, lab   --promises.check-->  nothing, or an AssertionError                         (looks, changes nothing)

`pair_stage.py` brings strikes about. A moment is an event of the run ("rank 1 has reported step 7", "dm2 has got half
of the payload"), never a time, so that a seed gives the same pair on a slow machine too. The table says what a user
is told of one fault; nobody wrote down what is told of two. So a pair is held to the promises alone, whatever the two do
to each other: promises.py has them.

A row takes part by what its `Way` has: `steps`, whose first moment is replaced by the one that was drawn; a `misdeed`,
done by a rank at a step that was drawn; or `before`. A row that has only a `play` does not take part.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
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
    "connecting",
    "delivering",
    "starting",
    "meeting",
    "running",
    "running",
    "ending",
    "fetching",
)
PHASES: dict[Kind, tuple[Phase, ...]] = {
    "plain": _COMMON,
    "together": _COMMON,
    "elastic": (
        "connecting",
        "delivering",
        "starting",
        "meeting",
        "running",
        "growing",
        "growing",
        "ending",
        "fetching",
    ),
    "followed": ("connecting", "running", "running", "ending", "fetching"),
}
# Where what is struck is not there in each phase: by the first word of the row.
_THERE: dict[str, tuple[Phase, ...]] = {
    "rank": ("running", "ending"),
    "torchrun": ("meeting", "running", "growing", "ending"),
    "agent": ("meeting", "running", "growing", "ending"),
    "contact": ("delivering", "starting", "meeting", "running", "growing", "ending", "fetching"),
    "sshd's": ("delivering", "starting", "meeting", "running", "growing", "ending", "fetching"),
}

STEP_S = 0.05
SMALL, LARGE = 10_000, 12 << 20  # bytes of a payload: large ones go from host to host
FEW_STEPS, MANY_STEPS = 60, 110


def _takes_part(fault: Fault) -> bool:
    way = fault.way
    return bool(way.steps) or (way.play is None)


ROWS: dict[str, Fault] = {fault.name: fault for fault in (*TABLE, *BESIDE_OTHERS) if _takes_part(fault)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When something strikes. `host`, `rank` and `step` are of the phases whose words name them."""

    phase: Phase
    host: str = ""
    rank: int = 0
    step: int = 0

    def __str__(self) -> str:
        words = {
            "beginning": "before the run",
            "connecting": f"when {self.host} has let the notebook in",
            "delivering": f"when {self.host} has got half of the payload",
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
class Pair:
    """One round: a job, and what strikes it.

    `hosts` are as after --hosts: their order says who leads. `is_warm`: the hosts keep torch loaded. `killed`: a job that
    is followed was left by a kernel that was killed, and not detached. `payload_bytes` and `result_bytes` are what
    travels there, and what comes back of each rank.
    """

    seed: int
    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    is_warm: bool
    killed: bool
    payload_bytes: int
    result_bytes: int
    steps: int
    strikes: tuple[Strike, Strike]

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
    def grows(self) -> bool:
        """Whether its last host is switched on only when the others work."""
        return any(strike.moment.phase == "growing" for strike in self.strikes)

    @property
    def options(self) -> dict[str, object]:
        """The options that the rows want, those of the second one first."""
        first, second = (strike.row.way.options for strike in self.strikes)
        return {**first, **second}

    def __str__(self) -> str:
        first, second = self.strikes
        left = f" ({'killed' if self.killed else 'detached'})" if self.kind == "followed" else ""
        warm = ", warm" if self.is_warm else ""
        return f"{self.kind}{left} on {self.hosts_line}{warm}: {first} + {second}"


# ---- drawing


def draw(seed: int) -> Pair:
    """Return the pair of a seed, always the same one."""
    rng = random.Random(seed)
    kind = rng.choice((*KINDS, "plain", "followed"))  # twice: these take the least time
    hosts = _hosts(rng, kind)
    rows = [_row(rng, kind), _row(rng, kind)]
    needs_time = kind == "elastic" or any(row.way.numbers > FEW_STEPS for row in rows)
    steps = MANY_STEPS if needs_time else FEW_STEPS
    ranks = sum(slots for _, slots in hosts)
    first = _moment(rng, rows[0], kind, hosts, ranks, steps, None)
    second = _moment(rng, rows[1], kind, hosts, ranks, steps, first)
    strikes = (Strike(fault=rows[0].name, moment=first), Strike(fault=rows[1].name, moment=second))
    is_fetched = any(strike.moment.phase == "fetching" for strike in strikes)
    return Pair(
        seed=seed,
        kind=kind,
        hosts=hosts,
        is_warm=rng.random() < 0.4,
        killed=rng.random() < 0.5,
        payload_bytes=rng.choice((SMALL, SMALL, LARGE)),
        result_bytes=3 << 20 if is_fetched else 1000,
        steps=steps,
        strikes=strikes,
    )


def _hosts(rng: random.Random, kind: Kind) -> tuple[tuple[str, int], ...]:
    """Return hosts and their ranks. The table strikes dm1 and dm2: either may lead."""
    names = ["dm1", "dm2", "dm3"] if kind == "elastic" else ["dm1", "dm2"]
    rng.shuffle(names)
    slots = [1, 1, 1] if kind == "elastic" else rng.choice(([1, 1], [1, 2]))
    return tuple(zip(names, slots, strict=False))


def _row(rng: random.Random, kind: Kind) -> Fault:
    """Return a row: first what is struck is drawn, so that what has many rows is not struck more often."""
    groups: dict[str, list[Fault]] = {}
    for row in ROWS.values():
        # A job whose hosts never hear each other can't be detached, so nobody follows it.
        if kind != "followed" or row.moment != "from the beginning":
            groups.setdefault(row.process.split()[0], []).append(row)
    return rng.choice(groups[rng.choice(sorted(groups))])


def _moment(
    rng: random.Random, row: Fault, kind: Kind, hosts: tuple[tuple[str, int], ...], ranks: int, steps: int,
    other: Moment | None,
) -> Moment:  # fmt: skip
    """Return when a row strikes. `other` is when the first one does, which the second one never comes before."""
    host, rank, step = rng.choice(hosts)[0], rng.randrange(ranks), rng.randint(2, steps - 10)
    if not row.way.steps and row.way.misdeed is None:
        return Moment(phase="beginning")
    there = _THERE.get(row.process.split()[0], PHASES[kind])
    phases = [phase for phase in PHASES[kind] if phase in there]
    if other is not None and other.phase != "beginning":
        if row.way.misdeed is None:
            relative: Phase | None = rng.choice((None, None, "with the other", "noticed"))
            if relative is not None:
                return Moment(phase=relative)
        order = PHASES[kind]
        later = [phase for phase in phases if order.index(phase) >= order.index(other.phase)]
        phases = later or phases[-1:]
    phase = rng.choice(phases)
    if row.way.misdeed is not None:
        return Moment(phase="running", rank=rank, step=steps if phase == "ending" else step)
    if phase in ("connecting", "delivering", "starting"):
        return Moment(phase=phase, host=host)
    if phase == "running":
        return Moment(phase=phase, rank=rank, step=step)
    return Moment(phase=phase, rank=rank) if phase == "fetching" else Moment(phase=phase)


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
    return bool(state.stopping or state.lost or state.notices or is_broken or state.first_failure is not None)
