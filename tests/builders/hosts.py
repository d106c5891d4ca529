"""Hosts that answer every request by a script: real links and connections to them, without a process or a network."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from distmagic.connection.connections import Connections
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link_opener import Fleet, LinkOpener
from distmagic.connection.prompts import NotebookAsker
from distmagic.connection.warm_hosts import WarmHosts
from distmagic.errors import ConnectionLost, Unreachable
from distmagic.remote.system import facts
from distmagic.remote.wire import protocol as p
from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.transports import time_limits
from distmagic.transports.asking import Asker
from tests.builders.links import lines, reply
from tests.builders.plans import FACTS
from tests.lab.waiting import HANG_S

HANG_UP = None  # in place of an answer: the connection ends
RESULT = b"a result"

Answer = Callable[[p.Message], Sequence[p.Message | bytes] | None]


def runs_on(start: p.StartNode) -> list[p.Message]:
    """Return the events of a node whose one rank begins, and goes on."""
    return [
        p.Worker(
            rank=start.node_rank,
            local_rank=0,
            world_size=len(start.hosts),
            restart=0,
            pid=100,
        )
    ]


def runs_to_its_end(start: p.StartNode) -> list[p.Message]:
    """Return the events of a node whose one rank returns a small result."""
    ended = p.Ended(
        rank=start.node_rank, restart=0, outcome="returned", result_bytes=len(RESULT)
    )
    return [*runs_on(start), ended, p.EngineEnded(code=0), p.Final(reason="done")]


def fails(start: p.StartNode) -> list[p.Message]:
    """Return the events of a node whose one rank raises."""
    failure = p.Failure(
        type="ValueError", message="no", traceback="Traceback: ValueError: no"
    )
    ended = p.Ended(
        rank=start.node_rank, restart=0, outcome="raised", code=1, failure=failure
    )
    return [*runs_on(start), ended, p.EngineEnded(code=1), p.Final(reason="failed")]


def after(seconds: float, *answer: p.Message) -> Answer:
    """Return an answer for which a host takes so long: each time limit of this process that is due by then expires."""

    def answered(_: p.Message) -> Sequence[p.Message]:
        now_s = time.monotonic() + seconds
        for limit, due_s in time_limits._watcher.due_s.copy().items():
            if due_s <= now_s:
                limit.call_off()
                limit.is_over = True
                limit.act()
        return answer

    return answered


class FakeHost:
    """A host with at most one node of one job.

    `begins` gives the events of the node's agent after its hello. `answers` replace the usual answer to a kind of
    request: a list of messages and raw bytes, or `HANG_UP`. `error` is what connecting raises. `requests` are all that
    came, in order, over whichever link; `events` are the agent's. `barriers` hold up, until enough other hosts are as
    far, "connect", "boot", "hang up" (of a link), "disconnect", or the answer to a kind of request.
    """

    def __init__(
        self,
        name: str,
        begins: Callable[[p.StartNode], list[p.Message]] = runs_to_its_end,
    ) -> None:
        self.host = Host(name=name)
        self.facts = replace(FACTS, torch=facts.torch_version())
        self.python: tuple[int, ...] = sys.version_info[:3]
        self.begins = begins
        self.answers: dict[type, Answer] = {}
        self.free_port = self.facts.free_port
        self.barriers: dict[object, threading.Barrier] = {}
        self.error: Exception | None = None
        self.requests: list[p.Message] = []
        self.events: list[p.Message] = []
        self.listings: tuple[p.JobListing, ...] = ()
        self.results: dict[str, bytes] = {}
        self.work_notice = ""
        self.processes: list[HostProcess] = []
        self._lock = threading.RLock()

    def connect(self) -> FakeConnection:
        """Return a connection to this host; raise `error` if there is one."""
        self.meet("connect")
        if self.error is not None:
            raise self.error
        return FakeConnection(self)

    def agent_sends(self, *events: p.Message) -> None:
        """Have the agent send events. After its `Final` it is gone."""
        with self._lock:
            self.events += events
            for process in self.processes:
                process.follow(self.events)

    def cut(self) -> None:
        """End all connections that are open now."""
        with self._lock:
            for process in self.processes:
                process.cut()

    def requests_of(self, kind: type) -> list[p.Message]:
        """Return the requests of one kind, in order."""
        return [request for request in self.requests if isinstance(request, kind)]

    @property
    def is_left(self) -> bool:
        """Whether no link to this host is open any more."""
        return all(process.is_closed.is_set() for process in self.processes)

    def meet(self, what: object) -> None:
        """Wait until enough hosts are as far, if there is a barrier for this."""
        if what not in self.barriers:
            return
        try:
            self.barriers[what].wait(HANG_S)
        except threading.BrokenBarrierError:
            # Else nobody waits for the others any more: some were about to do it once more when the test ended.
            if what in self.barriers:
                raise

    def receive(self, process: HostProcess, request: p.Message) -> None:
        """Answer a request that came over a link."""
        self.meet(type(request))
        with self._lock:
            self.requests.append(request)
        # Without the lock: an answer may take its time.
        if type(request) in self.answers:
            answer = self.answers[type(request)](request)
            if answer is HANG_UP:
                process.cut()
            else:
                process.put(*answer)
            return
        with self._lock:
            self._answer(process, request)

    def _answer(self, process: HostProcess, request: p.Message) -> None:
        if isinstance(request, p.StartNode):
            hello = p.Hello(
                protocol=p.PROTOCOL,
                job=request.job,
                node_rank=request.node_rank,
                hostname=self.host.name,
                pid=9,
            )
            self.results[f"rank{request.node_rank}.result"] = RESULT
            if request.work is not None:
                path = f"/home/me/.distmagic/work/{request.work.name}"
                process.put(p.WorkDirReady(path=path, notice=self.work_notice))
            process.followed_after = 0
            self.agent_sends(hello, *self.begins(request))
        elif isinstance(request, p.FollowJob):
            process.followed_after = len(self.events) if request.live else request.after
            process.follow(self.events)
        elif isinstance(request, p.StopNode):
            if not any(isinstance(event, p.Final) for event in self.events):
                self.agent_sends(
                    p.EngineEnded(code=-15), p.Final(reason=request.reason)
                )
        elif isinstance(request, p.GetFile):
            data = self.results.get(request.name)
            if data is None:
                process.put(p.Refused(what="get_file", error="it is not there"))
            else:
                skip = min(request.offset, len(data))
                if request.most_bytes is not None:
                    skip = max(skip, len(data) - request.most_bytes)
                sent = p.Data(size_bytes=len(data) - skip, skipped_bytes=skip)
                process.put(sent, data[skip:])
        else:
            process.put(*self._usual_answers().get(type(request), ()))

    def _usual_answers(self) -> dict[type, Sequence[p.Message]]:
        return {
            p.GetFacts: [self.facts],
            p.GetRoute: [
                p.Route(address=self.facts.address, interface=self.facts.interface)
            ],
            p.GetFreePort: [p.FreePort(port=self.free_port)],
            p.ClaimDevices: [p.DevicesClaimed()],
            p.Examine: [
                p.Examined(
                    hostname=self.host.name,
                    route=p.Route(
                        address=self.facts.address, interface=self.facts.interface
                    ),
                    shm_bytes=1 << 40,
                    name_addresses=(self.facts.address,),
                )
            ],
            p.Knock: [p.Knocked()],
            p.OfferBlobs: [p.MissingBlobs()],
            p.CheckBlobs: [p.MissingBlobs()],
            p.SweepJob: [p.Final(reason="swept")],
            p.ListJobs: [p.Jobs(jobs=self.listings), p.Jobs()]
            if self.listings
            else [p.Jobs()],
            p.RemoveJob: [p.Removed(size_bytes=10)],
            p.PruneBlobs: [p.Removed(size_bytes=20)],
            p.ListTemplates: [p.Templates()],
            p.EndTemplates: [p.Templates()],
            p.ListWorkDirs: [p.WorkDirs()],
            p.RemoveWorkDir: [p.Removed(size_bytes=30)],
        }


class HostProcess:
    """One link's process on a fake host: it boots, and then takes requests."""

    def __init__(self, host: FakeHost) -> None:
        self.is_closed = threading.Event()
        self.followed_after: int | None = (
            None  # the number of the last event that was sent; None: it follows no job
        )
        self._host = host
        self._writes = 0
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._rest = b""
        self._is_cut = False
        self._lock = threading.Lock()

    def put(self, *answer: p.Message | bytes) -> None:
        for one in answer:
            data = one if isinstance(one, bytes) else lines(one)
            if data:  # no bytes at all are the end of the file
                self._pieces.put(data)

    def follow(self, events: Sequence[p.Message]) -> None:
        """Send the events that were not sent yet, if this process follows the job."""
        if self.followed_after is None:
            return
        for number, event in enumerate(
            events[self.followed_after :], self.followed_after + 1
        ):
            self._pieces.put(lines(event, first=number))
        self.followed_after = len(events)
        if any(isinstance(event, p.Final) for event in events):
            self.put(p.AgentGone())
            self.followed_after = None

    def cut(self) -> None:
        self._is_cut = True
        self._pieces.put(b"")

    # ---- what a link uses

    def write(self, data: bytes) -> None:
        if self._is_cut or self.is_closed.is_set():
            raise ConnectionLost(f"{self._host.host.name}: the other end is gone.")
        if not self._writes:
            self._host.meet("boot")
        with self._lock:
            self._writes += 1
            if self._writes == 1:  # the program that boots
                self._pieces.put(reply(python=list(self._host.python)))
                return
            if self._writes == 2:  # the size of the bundle, which is there
                self.put(self._host.facts)
                return
        for line in data.splitlines():
            self._host.receive(self, p.decode(line)[1])

    def read(self, max_bytes: int = 65536) -> bytes:
        if not self._rest:
            self._rest = self._pieces.get(timeout=HANG_S)
        if not self._rest:
            self._pieces.put(b"")  # for the next one who reads
        piece, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return piece

    def stderr(self) -> str:
        return ""

    def wait(self, timeout_s: float | None = None) -> int | None:
        return 0

    def close_stdin(self) -> None:
        self._pieces.put(b"")

    def close(self) -> None:
        if not self.is_closed.is_set():
            self.is_closed.set()
            self._host.meet("hang up")
        self._pieces.put(b"")


class FakeConnection:
    """A transport to a fake host."""

    warnings = ()

    def __init__(self, host: FakeHost) -> None:
        self._host = host

    def start(self, argv: tuple[str, ...]) -> HostProcess:
        if self._host.error is not None:
            raise self._host.error
        process = HostProcess(self._host)
        self._host.processes.append(process)
        return process

    def close(self) -> None:
        self._host.meet("disconnect")


def connector(*hosts: FakeHost) -> Callable[[Host, Access, Asker], FakeConnection]:
    """Return what connects to these hosts, by their names."""
    by_name = {one.host.name: one for one in hosts}

    def connect(host: Host, access: Access, asker: Asker) -> FakeConnection:
        return by_name[host.name].connect()

    return connect


def reach(
    *hosts: FakeHost, access: Access | None = None, spare: Sequence[FakeHost] = ()
) -> FirstLinks:
    """Begin to reach hosts; `spare` ones are only known."""
    access = access or Access()
    asker = NotebookAsker(can_ask=False)
    connections = Connections(connector(*hosts, *spare))
    named, others = tuple(one.host for one in hosts), tuple(one.host for one in spare)
    fleet = Fleet(hosts=named, access=access, spare=others)
    opener = LinkOpener(connections=connections, fleet=fleet, asker=asker)
    return FirstLinks(opener, WarmHosts(connections))


def down(name: str) -> Unreachable:
    """Return the error of a host that gives no answer."""
    return Unreachable(name, "no answer.", "Check the machine.")
