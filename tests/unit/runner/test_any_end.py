"""Whatever happens to hosts, to agents and to this notebook's own cable, a run is over once no agent of it is left.

The loop, the node table, `fold` and `decide` are the real ones. Hosts, agents and links are those of `AnyRun`: a script of
faults, joins, clicks and interrupts; then every agent comes to its end, where it can be reached and where it can't.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

from hypothesis import example, given, settings
from hypothesis import strategies as st

from distmagic.errors import (
    AuthenticationError,
    ConnectionLost,
    PreflightError,
    Unreachable,
    UsageError,
)
from distmagic.remote.gang.liveness import FORM_S
from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.vocabulary import StopReason
from distmagic.runner.actions import (
    Action,
    AttemptFailed,
    Collect,
    Collected,
    Join,
    Joined,
    JoinFailed,
    Linked,
    LinkEnded,
    Listen,
    Reconnect,
    Send,
)
from distmagic.runner.interrupts import Interrupts
from distmagic.runner.node_row import Growth
from distmagic.runner.node_table import NodeTable
from distmagic.runner.run_loop import RunLoop
from distmagic.state.decide import CONFIRM_S, GRACE_S, Limits
from distmagic.state.events import Event, Planned
from distmagic.state.fold import begin
from distmagic.state.model import RunState
from tests.builders.runs import FakeScreen
from tests.builders.terms import on_terms, terms

HOSTS = ("gpu-a", "gpu-b", "gpu-c")
LEASE_S = 60.0
STEP_S = 1.0  # of the script
END_STEP_S = 3.0  # of what follows it
# A link breaks, is given up after its lease, and its host is looked for as a new node; or a stop is not confirmed.
BOUND_S = 2 * LEASE_S + FORM_S + 2 * (GRACE_S + CONFIRM_S) + 10 * END_STEP_S
CUT = ConnectionLost("the connection ended.")


@dataclass(slots=True)
class FakeAgent:
    """One node's agent. `is_mute`: it does nothing that it is asked for. `is_there`: it has not ended."""

    journal: list[Any] = field(default_factory=list)
    is_there: bool = True
    is_mute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a run begins with. `hosts` are those of its nodes, by index; `seed` is for what takes how long.

    `keeps`: it goes on when the notebook is away for the lease.
    """

    hosts: tuple[int, ...] = (0, 1)
    min_nodes: int = 1
    is_elastic: bool = True
    is_awaited: bool = False
    is_detached: bool = False
    keeps: bool = False
    restarts: int = 3
    seed: int = 0


class AnyRun:
    """The loop's queue and its executor, and the hosts behind them."""

    def __init__(self, scene: Scene, script: list[tuple[Any, ...]]) -> None:
        self.scene = scene
        self.elapsed_s = 0.0
        self.ended_at_s = math.inf
        self.screen = FakeScreen()
        self._script = list(script)
        self._dice = random.Random(scene.seed)
        self._ids = (f"id{number}" for number in itertools.count())
        self._names = [HOSTS[index] for index in scene.hosts]
        self._agents: dict[int, FakeAgent] = {}
        self._down: set[int] = set()
        self._locked: set[int] = set()
        self._cuts: set[int] = set()
        self.stopped: set[int] = set()  # nodes whose agents the notebook has stopped
        self._has_cable = True
        self._listening: list[tuple[Listen, int]] = []
        self._acts: list[tuple[int, Action]] = []
        for node in range(len(self._names)):
            self._start(node)

    def run(self) -> RunState:
        """Follow it until it is over. Fails where that takes too long."""
        scene = self.scene
        state = begin("j", self._names, terms(scene.restarts, scene.min_nodes))
        if scene.is_detached:
            state = replace(state, detached_by="asked")
        state = on_terms(state, goes_on_alone=scene.keeps)
        loop = RunLoop(
            state,
            self,
            self.screen,
            lambda longest_s: None,
            Interrupts(),
            lambda: self.elapsed_s,
            self._ids.__next__,
        )
        loop.note(Planned(addresses=()))
        growth = None
        if scene.is_elastic:
            is_awaited = scene.is_awaited and 2 not in scene.hosts
            growth = Growth(host_names=HOSTS, awaited=(2,) if is_awaited else ())
        table = NodeTable(scene.hosts, LEASE_S, self._ids.__next__, growth)
        links = {node: a_link(node, index) for node, index in enumerate(scene.hosts)}
        loop.follow(table, self, links, Limits(away_s=LEASE_S))
        return loop.state

    # ---- the queue

    def batch(self, _: float) -> list[Event]:
        """Return what has come after one more step."""
        is_scripted = bool(self._script)
        self.elapsed_s += STEP_S if is_scripted else END_STEP_S
        if is_scripted:
            self._do(self._script.pop(0))
        elif self.ended_at_s == math.inf:
            self.ended_at_s = self.elapsed_s
        if not is_scripted:
            assert self.elapsed_s < self.ended_at_s + BOUND_S, "it is never over"
            for node in list(self._agents):
                self._end(node)
        events = self._heard()
        due = [act for left, act in self._acts if left <= 0]
        self._acts = [(left - 1, act) for left, act in self._acts if left > 0]
        for act in due:
            node, what = self._DO[type(act)](self, act)
            events.append(self._event(node, what))
        return events

    def _event(self, node: int, what: Any) -> Event:
        return Event(node_rank=node, at_s=self.elapsed_s, what=what)

    def _heard(self) -> list[Event]:
        """Return what the links tell that are listened to, one node after the other."""
        events = []
        listening, self._listening = self._listening, []
        self._dice.shuffle(listening)
        for listen, after in listening:
            last = after
            node, link = listen.node_rank, listen.link
            agent = self._agents.get(node)
            error: Exception | None = None
            is_cut = link.host_index in self._cuts
            if is_cut or not self._reaches(link.host_index) or not link.is_open:
                error = CUT
            elif agent is None:
                error = PreflightError(HOSTS[link.host_index], "has no such job.")
            else:
                events += [self._event(node, what) for what in agent.journal[after:]]
                last = len(agent.journal)
            if error is None and agent is not None and agent.is_there:
                self._listening.append((listen, last))
            else:
                ended = LinkEnded(link=link, last=last, error=error)
                events.append(self._event(node, ended))
        return events

    # ---- the executor

    def keep_lease_over(self, links: tuple[Any, ...]) -> None:
        pass

    def perform(self, action: Action) -> None:
        """Begin an action."""
        if isinstance(action, Listen):
            self._listening.append((action, action.after))
        elif isinstance(action, Send):
            for link in action.links:
                if link.is_open and self._reaches(link.host_index):
                    self._obey(link.node, action.message)
        elif type(action) in self._DO:
            self._acts.append((self._dice.randrange(4), action))
        else:
            action.link.is_open = False

    def _reconnect(self, act: Reconnect) -> tuple[int, Any]:
        error = self._refusal(act.host_index)
        is_missing = act.meets and act.node_rank not in self._agents
        if error is not None or is_missing:
            return act.node_rank, AttemptFailed(error=error)
        return act.node_rank, Linked(link=a_link(act.node_rank, act.host_index))

    def _collect(self, act: Collect) -> tuple[int, Any]:
        return act.node_rank, Collected(
            results={}, is_kept_idle=self._dice.random() < 0.5
        )

    def _join(self, act: Join) -> tuple[int, Any]:
        error = self._refusal(act.host_index) or self._refusal(0)
        if error is None and not self._admit(act.host_index, act.request_id):
            error = UsageError("it has a node of this job.")
        elif error is None and self._dice.random() < 0.2:
            error = CUT  # the answer of the lead got lost
        if error is not None:
            return 0, JoinFailed(
                host_index=act.host_index, error=error, request_id=act.request_id
            )
        node = len(self._names) - 1
        if not self._reaches(act.host_index):
            error = CUT
        elif self._dice.random() < 0.2:
            error = PreflightError(HOSTS[act.host_index], "its disk is full.")
        else:
            self._start(node)
            if self._dice.random() < 0.2:
                error = CUT  # the answer got lost
        if error is not None:
            return 0, JoinFailed(
                host_index=act.host_index,
                error=error,
                request_id=act.request_id,
                node_rank=node,
            )
        return 0, Joined(
            host_index=act.host_index,
            request_id=act.request_id,
            link=a_link(node, act.host_index),
            node_rank=node,
        )

    _DO: ClassVar[dict[type, Any]] = {
        Reconnect: _reconnect,
        Collect: _collect,
        Join: _join,
    }

    # ---- hosts

    def _reaches(self, host_index: int) -> bool:
        return self._has_cable and host_index not in self._down

    def _refusal(self, host_index: int) -> Exception | None:
        if not self._reaches(host_index):
            return Unreachable(HOSTS[host_index], "no answer.")
        if host_index in self._locked:
            return AuthenticationError(HOSTS[host_index], "the agent is locked.")
        return None

    def _is_present(self, name: str) -> bool:
        for node, other in enumerate(self._names):
            agent = self._agents.get(node)
            if other == name and agent is not None and agent.is_there:
                return True
        return False

    def _admit(self, host_index: int, request_id: str, name: str = "") -> bool:
        """Have the lead count a host as one more node, if it still does."""
        name = name or HOSTS[host_index]
        lead = self._agents[0]
        is_open = lead.is_there and not lead.is_mute and self.scene.is_elastic
        if not is_open or self._is_present(name) or len(self._names) > 8:
            return False
        self._names.append(name)
        lead.journal.append(
            p.NodeAdded(request_id=request_id, hosts=tuple(self._names))
        )
        return True

    def _start(self, node: int) -> None:
        agent = self._agents[node] = FakeAgent()
        hello = p.Hello(
            protocol=p.PROTOCOL, job="j", node_rank=node, hostname="h", pid=9
        )
        world = len(self._names)
        worker = p.Worker(rank=node, local_rank=0, world_size=world, restart=0, pid=7)
        agent.journal += [hello, worker]

    def _obey(self, node: int, message: p.Message) -> None:
        agent = self._agents.get(node)
        if agent is None or agent.is_mute or not agent.is_there:
            return
        if isinstance(message, p.StopNode):
            self.stopped.add(node)
            self._stop(node, message.reason, -1)
        elif isinstance(message, p.DetachJob):
            agent.journal.append(p.Detached(why="asked"))

    def _stop(self, node: int, reason: StopReason, culprit: int) -> None:
        agent = self._agents.get(node)
        if agent is None or not agent.is_there:
            return
        code = 1 if reason == "failed" else -15
        agent.journal += [
            p.NodeStopping(reason=reason, culprit=culprit),
            p.EngineEnded(code=code),
            p.Final(reason=reason),
        ]
        agent.is_there = False

    def _end(self, node: int) -> None:
        """Have a node end well, if it still can; one that is mute ends without a word."""
        agent = self._agents[node]
        if agent.is_there and not agent.is_mute:
            ended = p.Ended(rank=node, restart=0, outcome="returned", result_bytes=3)
            agent.journal += [ended, p.EngineEnded(code=0), p.Final(reason="done")]
        agent.is_there = False

    # ---- the script

    def _do(self, command: tuple[Any, ...]) -> None:
        what, *more = command
        if what == "interrupt":
            raise KeyboardInterrupt
        if what == "click":
            self.screen.clicks = list(more)
        elif what == "cable":
            [self._has_cable] = more
        elif what in ("down", "locked", "cuts"):
            [(host_index, is_so)] = more
            kinds = {"down": self._down, "locked": self._locked, "cuts": self._cuts}
            places = kinds[what]
            (places.add if is_so else places.discard)(host_index)
        elif what == "joins":
            [(name, starts)] = more
            is_counted = self._admit(-1, "another's", name)
            if is_counted and starts:
                self._start(len(self._names) - 1)
        elif more and more[0] in self._agents:
            self._do_to(what, *more)

    def _do_to(self, what: str, node: int, *more: Any) -> None:
        agent = self._agents[node]
        if what == "killed":
            agent.is_there = False
        elif what == "mute":
            agent.is_mute = True
        elif what == "ends":
            self._end(node)
        elif what == "fails":
            self._stop(node, "failed", node)
        else:
            self._tell(what, node, *more)

    def _tell(self, what: str, node: int, *more: Any) -> None:
        """Have a member tell of the lead, or the lead of a member, or of itself."""
        agent, lead = self._agents[node], self._agents[0]
        if what == "misses the lead" and node and agent.is_there:
            agent.journal.append(p.PeerState(node_rank=0, state="lost"))
            self._stop(node, "lost", 0)
        elif what == "hears the lead" and node and agent.is_there:
            agent.journal.append(p.PeerState(node_rank=0, state="joined"))
        elif what == "heard" and lead.is_there:
            [state] = more
            lead.journal.append(p.PeerState(node_rank=node, state=state))
            if state == "lost" and not self.scene.is_elastic:
                self._stop(0, "lost", node)
        elif what == "alone" and lead.is_there:
            lead.journal.append(p.Detached(why="disconnected"))


def a_link(node: int, host_index: int) -> Any:
    return SimpleNamespace(
        agent_error="", kept=None, node=node, host_index=host_index, is_open=True
    )


SCENES = st.builds(
    Scene,
    hosts=st.sampled_from([(0, 1), (0, 1, 2), (0, 1, 1), (0, 1, 2, 1)]),
    min_nodes=st.integers(1, 2),
    is_elastic=st.just(True),
    is_awaited=st.booleans(),
    is_detached=st.booleans(),
    keeps=st.booleans(),
    restarts=st.integers(0, 3),
    seed=st.integers(0, 999),
) | st.builds(
    Scene,
    hosts=st.sampled_from([(0, 1), (0, 1, 2)]),
    min_nodes=st.just(0),
    is_elastic=st.just(False),
    is_detached=st.booleans(),
    keeps=st.booleans(),
    restarts=st.integers(0, 1),
    seed=st.integers(0, 999),
)
# A stop ends most of what could go wrong, so it is rare. The first command is the simplest.
COMMANDS = [
    ("nothing",),
    *[(what, node) for what in ("killed", "misses the lead") for node in (1, 1, 2, 3)],
    *[(what, node) for what in ("mute", "ends") for node in (1, 2)],
    *[("heard", node, "joined") for node in (1, 1, 2, 3)],
    *[("heard", node, "back") for node in (1, 2)],
    *[("heard", node, "lost") for node in (1, 2)],
    *[("down", (index, is_so)) for index in range(3) for is_so in (True, False)],
    # Each new link ends at once.
    *[("cuts", (index, is_so)) for index in range(3) for is_so in (True, False)],
    *[("joins", (name, starts)) for name in HOSTS[1:] for starts in (True, False)],
    ("joins", ("elsewhere", True)),
    ("heard", 1, "silent"),
    ("hears the lead", 1),
    ("locked", (1, True)),
    ("locked", (1, False)),
    ("cable", False),
    ("cable", True),
    ("alone", 0),
    ("killed", 0),
    ("fails", 1),
    ("click", "stop"),
    ("click", "detach"),
    ("interrupt",),
]
SCRIPTS = st.lists(st.sampled_from(COMMANDS), min_size=12, max_size=30)


# A host that was lost, came back as another node and is lost again: both of its nodes end while it is started once more.
TWICE_LOST = [
    *[("nothing",), ("killed", 1), *[("nothing",)] * 6],
    *[("down", (1, True)), ("killed", 2), *[("nothing",)] * 5],
    *[("down", (1, False)), *[("nothing",)] * 14],
]


@example(Scene(hosts=(0, 1, 1), seed=1), TWICE_LOST)
@settings(max_examples=100)
@given(SCENES, SCRIPTS)
def test_a_run_is_over_once_no_agent_is_left(scene, script):
    run = AnyRun(scene, script)
    state = run.run()
    assert state.is_over or state.detached_by or scene.keeps
    assert run.elapsed_s < run.ended_at_s + BOUND_S


GOING_ON_ALONE = st.builds(
    Scene,
    hosts=st.just((0, 1, 2)),
    min_nodes=st.sampled_from([0, 1, 2]),
    is_detached=st.booleans(),
    keeps=st.just(True),
    seed=st.integers(0, 999),
)
HERE_ALONE = [
    ("cable", False),
    ("cable", True),
    *[("nothing",)] * 6,
    *[(what, (index, True)) for what in ("down", "locked", "cuts") for index in range(3)],
    *[(what, (index, False)) for what in ("down", "locked", "cuts") for index in range(3)],
]  # fmt: skip
ALL_JOINED = [
    *[("nothing",)] * 4,
    *[("heard", node, "joined") for node in (1, 2)],
    *[("hears the lead", node) for node in (1, 2)],
    *[("nothing",)] * 4,
]


# One cable breaks some seconds before the others do, when a node has ended well: it is the first that is away for the lease.
ONE_BY_ONE = [
    ("ends", 1),
    *[("nothing",)] * 6,
    ("down", (0, True)),
    *[("nothing",)] * 5,
    ("cable", False),
    *[("nothing",)] * 56,
    ("down", (0, False)),
    *[("nothing",)] * 6,
    ("cable", True),
    *[("nothing",)] * 20,
]


@example(Scene(hosts=(0, 1, 2), is_elastic=False, min_nodes=0, keeps=True), ONE_BY_ONE)
@settings(max_examples=60)
@given(
    GOING_ON_ALONE.map(lambda scene: replace(scene, is_elastic=scene.min_nodes > 0)),
    st.lists(st.sampled_from([*HERE_ALONE, ("ends", 1)]), max_size=40),
)
def test_what_only_this_notebook_can_not_reach_is_never_stopped_where_the_job_goes_on_without_it(
    scene, script
):
    run = AnyRun(scene, [*ALL_JOINED, *script])
    run.run()
    assert run.stopped == set()
