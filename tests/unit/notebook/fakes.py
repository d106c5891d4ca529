"""What stands for the session, the hosts and the playground where magics are tested, and a shell that uses them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from distmagic import api
from distmagic.comparison.compare import RunHistory
from distmagic.connection.link_opener import Fleet
from distmagic.notebook import magic
from distmagic.payload import pack
from distmagic.planning.jobs import Job
from distmagic.playground import playground
from distmagic.remote.wire.protocol import EnvironmentProgress, KeptWorkDir
from distmagic.request.access import Access
from distmagic.request.allocation import SlurmRequest
from distmagic.request.hosts import Host, parse_hosts
from distmagic.screens import choose
from distmagic.session import dry_run, place, programs
from distmagic.session.background import BackgroundRuns
from distmagic.session.housekeeping import Stopped, Synced
from distmagic.session.inside import Inside
from distmagic.systems.skypilot import hosts as sky_hosts
from distmagic.systems.slurm.job_states import JobState, listing
from distmagic.systems.slurm.srun_words import source
from tests.lab.waiting import HANG_S


@dataclass
class FakeFirstLinks:
    cancelled: bool = False
    absent: dict[int, str] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=lambda: Fleet(hosts=(), access=Access()))
    futures: tuple = ()

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeAllocation:
    """Two nodes, after a while in which it says why."""

    log: list[str]
    request: SlurmRequest
    hosts: tuple[Host, ...] = ()
    failure: BaseException | None = None
    awaited_by: set = field(default_factory=set)

    @property
    def title(self) -> str:
        name = getattr(self.request, "name", "")
        return f"cluster {name} of SkyPilot" if name else "Slurm job 17"

    @property
    def awaited(self) -> int:
        return self.request.nodes

    def wait(self, asker, tell):
        tell("Slurm job 17 is pending.")
        self.log.append("wait")
        if self.failure:
            raise self.failure
        self.hosts = tuple(
            Host(name=name, allocation=source("", "17")) for name in ("a1", "a2")
        )
        return self.hosts

    def end(self) -> None:
        self.log.append("end of the allocation")


@dataclass
class FakeAllocations:
    """What one kernel has of Slurm and of SkyPilot."""

    log: list[str]
    given: FakeAllocation | None = None
    states: tuple[JobState, ...] = ()
    hosts: tuple[Host, ...] = ()
    clusters: tuple[str, ...] = ()
    down: str = ""  # what SkyPilot says of a cluster that is taken down

    def get(self, request, access, asker, owner, *, is_elastic=False):
        self.log.append("allocate")
        self.wanted = request
        self.given = self.given or FakeAllocation(self.log, request)
        return self.given

    def pool(self, system):
        if system != "skypilot":
            return self
        pool = sky_hosts.pool(connect=None)
        for name in self.clusters:
            pool._made.append(SimpleNamespace(cluster=name, is_alive=True))
        pool.take_down = lambda name, asker: self.down
        return pool

    def listed(self, request, access, asker):
        self.log.append(f"allocations of {request.login or 'this machine'}")
        return listing(self.states, set())


@dataclass
class FakeSession:
    """Runs one rank here: a run is what the thunk returned."""

    log: list[str] = field(default_factory=list)
    failure: Exception | None = None
    untold: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    begun_places: dict = field(default_factory=dict)
    found: tuple[Job, ...] = ()
    dirs: tuple[KeptWorkDir, ...] = ()
    cleaned_for: list[str] = field(default_factory=list)  # owners, "" for everybody
    unused_bytes: int = 5 * 10**5  # of sent files, and of what this notebook has made
    stopped: Stopped | None = None
    synced: Synced = field(default_factory=lambda: Synced(ready={}))
    reached: list[FakeFirstLinks] = field(default_factory=list)
    background: BackgroundRuns = field(default_factory=BackgroundRuns)
    history: RunHistory = field(default_factory=RunHistory)
    goes_on: threading.Event | None = None  # until which a run does not end
    screens: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocations = FakeAllocations(self.log)

    @property
    def housekeeping(self):
        return self

    @property
    def inside(self):
        return Inside("k", None)

    def reach(self, hosts, access, asker, spec=None, spare=()):
        self.hosts, self.access, self.asker = hosts, access, asker
        self.log.append("reach")
        self.reached.append(FakeFirstLinks(fleet=Fleet(hosts=hosts, access=access)))
        return self.reached[-1]

    def begun_at(self, job_name):
        return self.begun_places.get(job_name)

    def launch(
        self, first_links, spec, payload, screen, job="", variable="run", companion=None
    ):
        assert not first_links.cancelled
        self.spec, self.payload, self.screen = spec, payload, screen
        self.variable = variable
        self.screens += getattr(screen, "_screens", [screen])
        self.log.append("launch")
        if self.goes_on is not None:
            assert self.goes_on.wait(HANG_S)
        if self.failure:
            raise self.failure
        return payload() if callable(payload) else payload

    def _start_commands(self, first_links, spec, program="<the cell>", payload=None):
        self.log.append("dry_run")
        return f"would run {spec.nproc_per_node}"

    def jobs(self, first_links):
        return self.found

    def attach(self, first_links, job, screen, variable="run", companion=None):
        self.variable = variable
        self.log.append(f"attach {job.name}")
        return f"the run of {job.name}"

    def add(self, first_links, job, tell):
        tell("gpu-c\x1b]52;c;AAAA\x07", 2)

    def profile(self, first_links, job, steps):
        return f"{steps} steps of {job.name}"

    def stop(self, first_links, job):
        self.log.append(f"stop {job.name}")
        return self.stopped or Stopped(ended=job.hosts, unknown={})

    def remove(self, first_links, jobs, owner=""):
        self.log.append(" ".join(["remove", *(job.name for job in jobs)]))
        self.cleaned_for.append(owner)
        return 10**6 * len(jobs)

    def cached(self, first_links, *, removes=False, owner=""):
        found = self.unused_bytes
        self.log.append("clear" if removes else "measure")
        if removes:
            self.cleaned_for.append(owner)
            self.unused_bytes = 0
        return found

    def sync_environment(self, first_links, packages, show):
        self.log.append(f"sync {packages.name}: {', '.join(packages.requirements)}")
        show({"gpu-a": EnvironmentProgress(line="Downloading torch\x1b[2J", elapsed_s=3.2)})  # fmt: skip
        for line, elapsed_s in (("Built numpy", 5), ("waiting", 9), ("waiting", 15)):
            show({"gpu-a": EnvironmentProgress(line=line, elapsed_s=elapsed_s)})
        return self.synced

    def folder(self, first_links, path):
        self.log.append(f"folder {path} of {self.hosts[0].name}")
        return FakeFolder(self.log)

    def work_dirs(self, first_links):
        return {"gpu-a": self.dirs}

    def remove_work_dirs(self, first_links, names):
        self.log.append(" ".join(["rmdir", *names["gpu-a"]]))
        return 10**6 * len(names["gpu-a"])

    def down(self) -> tuple[str, ...]:
        self.log.append("down")
        return self.untold

    def close(self) -> None:
        self.log.append("close")


@dataclass
class FakeFolder:
    """A folder of a host, which has one file for any pattern."""

    log: list[str]

    def fetch(self, pattern, to):
        self.log.append(f"fetch {pattern} to {to}")
        return [to / "a\x1b[31m\n.pt"]

    def send(self, source):
        self.log.append(f"send {source}")
        return [source.name]


@dataclass
class FakePlayground:
    hosts: tuple
    ssh_config: str = "/play/config"
    stopped: bool = False
    is_kept: bool = False

    ordered: list = field(default_factory=list)

    def order(self, verb="", name=""):
        words = (verb, name) if verb else ()
        self.ordered.append(words)
        frozen = [words == ("freeze", host.name) for host in self.hosts]
        return [
            (host.name, "frozen" if is_frozen else "up", 3)
            for host, is_frozen in zip(self.hosts, frozen, strict=True)
        ]

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        self.stopped |= not self.is_kept


@dataclass
class FakeScreen:
    """Keeps what it was to show."""

    shell: InteractiveShell
    in_background: bool = False
    notices: list[str] = field(default_factory=list)
    shown: list = field(default_factory=list)
    finished: list = field(default_factory=list)

    def announce(self, text: str) -> None: ...

    def show(self, state) -> None:
        self.notices += state.notices
        self.shown.append(state)

    def finish(self, state) -> None:
        self.finished.append(state)

    def can_type(self) -> bool:
        return False

    def requests(self):
        return ()


class Lab:
    """A shell with the extension loaded, and what the fakes were given."""

    def __init__(
        self, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.shell = shell
        self.session = FakeSession()
        self.packed: dict = {}
        self.uses: set[str] = set()  # libraries of the call
        self.playgrounds: list[FakePlayground] = []
        monkeypatch.setattr(pack, "pack_call", self.pack)
        monkeypatch.setattr(pack, "pack_whole", self.pack)
        monkeypatch.setattr(choose, "screen_for", FakeScreen)
        monkeypatch.setattr(playground, "start", self.playground)
        # What is packed here is no payload, and no host has answered.
        monkeypatch.setattr(place, "with_files", lambda payload, *_: payload)
        for module in (dry_run, programs):
            monkeypatch.setattr(module, "start_commands", self.session._start_commands)
        monkeypatch.setattr(api, "session", lambda: self.session)
        self.load()

    def load(self) -> None:
        """Load the extension."""
        magic.load_ipython_extension(self.shell)

    def pack(self, what, **given):
        self.packed = given
        if callable(what):
            what.blobs = ()
            what.folder = None
            what.uses = self.uses
        return what

    def playground(self, count: int, *, keep: bool) -> FakePlayground:
        hosts = parse_hosts(",".join(f"play-{n}" for n in range(count)))
        self.playgrounds.append(FakePlayground(hosts, is_kept=keep))
        return self.playgrounds[-1]

    def run(self, cell: str):
        return self.shell.run_cell(cell, store_history=True)

    def value(self, cell: str):
        result = self.run(cell)
        assert result.success, result.error_in_exec
        return result.result

    def error(self, cell: str) -> BaseException:
        result = self.run(cell)
        assert not result.success
        return result.error_in_exec
