"""What tests/e2e/test_faults.py and test_pairs.py share: the work that is disturbed, what disturbs it, what must hold then."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distmagic.errors import DistmagicError, RunError
from distmagic.outcome.run import Run
from distmagic.remote.records import journal
from distmagic.remote.wire import protocol
from distmagic.state.model import RunState
from distmagic.state.phases import OPENING
from tests.e2e import runner
from tests.e2e.runner import as_value
from tests.lab import Lab, LabHost
from tests.lab.waiting import wait_until

LOST_S = 3.0  # --node-lost-after, where a host is to be lost

# The state, and the seconds since the step before.
When = Callable[[RunState, float], bool]
Act = Callable[[Lab, RunState], object]


def work(steps: int, misdeed: Callable[[], object] | None = None) -> int:
    """Print and report a number twenty times a second; rank 1 does its misdeed at number 5."""
    import os
    import time

    import distmagic

    for i in range(steps):
        print(i)
        distmagic.report(step=i + 1, total=steps, value=i)
        if misdeed is not None and i == 5 and os.environ["RANK"] == "1":
            misdeed()
        time.sleep(0.05)
    return steps


# ---- what is known of a run when it is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the notebook has of a rank: its lines, its values; `is_whole`: its host has told all that it had to tell."""

    rank: int
    host: str
    is_whole: bool
    lines: list[str]
    values: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """How a run ended, in the words of its user's notebook, and what it showed."""

    outcome: str
    job: str = ""
    ranks: list[Shown] = field(default_factory=list)
    results: dict[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as one line, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Told:
        """Return what another process told."""
        found = json.loads(text)
        return cls(**{**found, "ranks": [Shown(**one) for one in found["ranks"]]})


def told_of(attempt: Callable[[], object]) -> Told:
    """Return what a user is told of an attempt to run something: "done", with all notices, or the error."""
    try:
        run = attempt()
        assert isinstance(run, Run)
        words = "; ".join(("done", *run.state.notices))
        return Told(
            outcome=words,
            results={str(rank): run.results[rank] for rank in run.results},
            **seen(run.state),
        )
    except RunError as error:
        words = f"{type(error).__name__}: {error.message}"
        return Told(
            outcome=words,
            **(seen(error.run.state) if isinstance(error.run, Run) else {}),
        )
    except DistmagicError as error:
        return Told(outcome=f"{type(error).__name__}: {error.message}")


def seen(state: RunState) -> dict[str, Any]:
    """Return the fields of `Told` that the last state of a run gives."""
    lost = set(state.lost)
    ranks = [
        Shown(
            rank=rank, host=worker.host, is_whole=worker.node_rank not in lost,
            lines=[line.text for line in state.lines if line.rank == rank and line.stream == "stdout"],
            values=[point.value for point in state.series.get(rank, {}).get("value", ())],
        )
        for rank, worker in sorted(state.workers.items())
    ]  # fmt: skip
    return {"job": state.job, "ranks": ranks}


def assert_read_once(lab: Lab, told: Told) -> None:
    """Assert that all that a rank wrote was shown once and in order: no line is lost, none came twice.

    Of a host that was lost, what came before that.
    """
    for one in told.ranks:
        written = log_of(host_of(lab, one.host), told.job, one.rank).splitlines()
        assert written == [str(i) for i in range(len(written))], (
            f"the log of rank {one.rank}"
        )
        assert one.lines == (written if one.is_whole else written[: len(one.lines)]), (
            f"the lines of rank {one.rank}"
        )
        assert one.values == sorted(set(one.values)), f"the values of rank {one.rank}"


def log_of(host: LabHost, job: str, rank: int) -> str:
    """Return what a rank of a job has written to its log so far, also on a host that is switched off."""
    files = host.home.glob(
        f".distmagic/jobs/{job}/*/{journal.log_name(rank, 'stdout')}"
    )
    return "".join(file.read_text() for file in files)


# ---- when


def hosts_answer(state: RunState, _: float) -> bool:
    """Hold when every agent runs and torchrun begins to look for its peers."""
    return all(node.hostname for node in state.nodes)


def hosts_meet(state: RunState, since_s: float) -> bool:
    """Hold when the agents have heard each other, and torchrun has only begun."""
    return hosts_answer(state, since_s) and all(
        node.gang == "joined" for node in state.nodes[1:]
    )


def training(state: RunState, _: float) -> bool:
    """Hold when every rank has come to its third number."""
    is_up = all(node.phase not in OPENING for node in state.nodes)
    return is_up and all((worker.step or 0) >= 3 for worker in state.workers.values())


def after(seconds: float) -> When:
    """Hold this long after the step before."""
    return lambda _, since_s: since_s >= seconds


def broken(name: str) -> When:
    """Hold when the notebook has noticed that a host's connection is broken, or was: it may be mended between two looks."""
    return lambda state, _: any(
        node.broken or node.broken_at_s for node in state.nodes if node.host == name
    )


def is_lost(state: RunState, _: float) -> bool:
    """Hold when a host is lost."""
    return bool(state.lost)


# ---- what


def host_of(lab: Lab, name: str) -> LabHost:
    """Return the host of a name."""
    return next(host for host in lab.hosts if host.name == name)


def on(name: str, what: Callable[[LabHost], object]) -> Act:
    """Do something to a host."""
    return lambda lab, _: what(host_of(lab, name))


def kill(process: str, name: str, number: int = signal.SIGKILL) -> Act:
    """Send a signal to processes of ours on a host; see `pids`."""
    return lambda lab, state: send(
        host_of(lab, name), pids(host_of(lab, name), process, state.job), number
    )


def send(host: LabHost, numbers: Sequence[int], number: int) -> None:
    """Send a signal to processes of a host."""
    assert numbers, f"{host.name} has no such process"
    host.exec(["kill", f"-{int(number)}", *map(str, numbers)]).check_returncode()


def pids(host: LabHost, process: str, job: str) -> list[int]:
    """Return the host's own numbers of: contact, session (its part of sshd), agent, torchrun or rank (of a job)."""
    if process in ("contact", "session"):
        contacts = [p for p in host.processes() if p.cmdline[1:3] == ("-u", "-c")]
        return [p.pid if process == "contact" else p.ppid for p in contacts]
    alive = {p.pid: p for p in host.processes()}
    kind = protocol.Hello if process == "agent" else protocol.Worker
    found = [
        event.pid
        for event in events_of(host, job)
        if isinstance(event, kind) and event.pid in alive
    ]
    if process == "torchrun":
        agents = pids(host, "agent", job)
        return sorted(
            {alive[pid].ppid for pid in found}
            or {p.pid for p in alive.values() if p.ppid in agents}
        )
    return found


def events_of(host: LabHost, job: str) -> list[protocol.Message | None]:
    """Return what a host's journal of a job says of how it goes."""
    files = host.home.glob(f".distmagic/jobs/{job}/*/{journal.FILE}")
    return [
        protocol.decode(line)[1]
        for file in files
        for line in file.read_bytes().splitlines()
    ]


class Script(runner.Watch):
    """A screen that does each step, (when, what), as soon as it is due after the one before."""

    def __init__(self, lab: Lab, steps: Sequence[tuple[When, Act]]) -> None:
        super().__init__()
        self._lab, self._left, self._at_s = lab, list(steps), 0.0

    def show(self, state: RunState) -> None:
        """Do what is due."""
        super().show(state)
        if self._left and self._left[0][0](state, state.at_s - self._at_s):
            self._left.pop(0)[1](self._lab, state)
            self._at_s = state.at_s

    def assert_done(self) -> None:
        """Assert that nothing is left to be done: a fault that never happened proves nothing."""
        assert not self._left


# ---- one fault


Play = Callable[["Fault", Lab], Told]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a fault is brought about; all but `steps` and `misdeed` seldom said.

    `steps` happen while the run goes on, `misdeed` is done by rank 1; `before` and `at_last` are done to the lab before
    the run and before the hosts are looked at. `numbers` is how far the ranks count. A row with a `play` is brought about
    by that alone; its `steps` are for pairs then.
    """

    steps: tuple[tuple[When, Act], ...] = ()
    misdeed: Callable[[], object] | None = None
    hosts: str = "dm1:1,dm2:1"
    numbers: int = 60
    before: Callable[[Lab], object] = lambda _: None
    at_last: Callable[[Lab], object] = lambda _: None
    options: Mapping[str, Any] = field(default_factory=dict)
    play: Play | None = None


@dataclass(frozen=True)
class Fault:
    """A row: what happens to which process at which moment, and what its user is told of it."""

    process: str
    moment: str
    kind: str
    outcome: str
    way: Way

    @property
    def name(self) -> str:
        """The row in words."""
        return f"{self.process}, {self.moment}: {self.kind}"

    @property
    def host(self) -> str:
        """The host that it strikes first; "" where it is the notebook."""
        if self.process in ("kernel", "notebook"):
            return ""
        return "dm1" if self.process.endswith("of the lead") else "dm2"

    @property
    def is_of_the_job(self) -> bool:
        """Whether what it strikes ends with the job."""
        return self.process.split()[0] in ("rank", "torchrun", "agent")


def play(fault: Fault, lab: Lab) -> Told:
    """Bring about a fault and return what was told, having seen that every step of it took place."""
    if fault.way.play is not None:
        return fault.way.play(fault, lab)
    screen = Script(lab, fault.way.steps)
    told = told_of(lambda: start(lab, fault.way, screen))
    screen.assert_done()
    return told


def start(lab: Any, way: Way, screen: runner.Watch) -> object:
    """Run the work as a fault wants it, to its end."""
    import distmagic

    misdeed = as_value(way.misdeed) if way.misdeed else None
    options = {"node_lost_after_s": 20.0, **way.options}
    return distmagic.run(
        as_value(work),
        way.numbers,
        misdeed,
        hosts=way.hosts,
        access=runner.access(lab),
        screen=screen,
        **options,
    )


def all_clean(lab: Lab) -> None:
    """Wait until nothing of ours is left on any host that is up."""
    wait_until(lambda: not any(host.leftovers() for host in lab.hosts), "clean hosts")
