"""Section fanout: connect to 1, 16, 64 and 128 hosts and start an agent on each."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from distmagic import api, plan
from distmagic.hosts import parse_hosts
from distmagic.launch import Launch
from distmagic.notebook_prompts import asker_of
from distmagic.pack import pack_call
from distmagic.reach import PARALLEL, connect
from distmagic.remote.protocol import Route
from distmagic.spec import Access, JobSpec
from distmagic.state import Gone, Lost
from tests.bench.bench import Bench
from tests.bench.figures import Row, Target
from tests.bench.folders import kept_in, scratch
from tests.lab import HostSetup, Lab

TITLE = f"Connecting and starting, {PARALLEL} at a time"
_COUNTS = (1, 16, 64, 128)
_ABOUT = (
    "all addresses are one machine's with one SSH server, and share its cores with the notebook: "
    "what real hosts do each for itself is done in turn here"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Many names for one server: each is an address of its own, and a connection of its own."""

    config: Path
    names: tuple[str, ...]

    @property
    def access(self) -> Access:
        """The way there."""
        return Access(ssh_config=str(self.config), connect_timeout_s=60)


def measure(bench: Bench) -> tuple[Row, ...]:
    """Connect by distmagic and by OpenSSH's client in turn, to ever more hosts."""
    rows: list[Row] = []
    with scratch("fanout") as folder, kept_in(folder / "home"), Lab(1, setups=(_bare(),)) as lab:
        crowd = _crowd(lab, folder)
        _start(crowd, 2)  # bundle and payload are there now, and compiled
        for count in _COUNTS:
            started, answered, theirs = [], [], []
            for number in range(bench.rounds_dear):
                started.append(_start(crowd, count))
                theirs.append(_openssh(crowd, count))
                answered.append(_answer(crowd, count))
                bench.say(
                    f"fanout: {count} hosts, round {number + 1}: agents {started[-1]:.2f} s, `true` {answered[-1]:.2f} s, "
                    f"OpenSSH `true` {theirs[-1]:.2f} s"
                )
            target = Target(limit=1.0) if count == _COUNTS[-1] else None
            for what, ours in (("connect and start the agent", started), ("connect and run `true`", answered)):
                rows.append(
                    Row(
                        what=f"{count} hosts, {what}", unit="s", ours=tuple(ours), against="OpenSSH's client running `true`",
                        theirs=tuple(theirs), target=target if ours is started else None, note=_ABOUT,
                    )
                )  # fmt: skip
    return tuple(rows)


def _bare() -> HostSetup:
    return HostSetup(python="bare", sshd="MaxStartups 400:30:800\nLogLevel INFO\n")


def _crowd(lab: Lab, folder: Path) -> Crowd:
    host = lab.hosts[0]
    net = lab.address.rpartition(".")[0]
    addresses = [f"{net}.{100 + i}" for i in range(max(_COUNTS))]
    host.exec(["ip", "-batch", "-"], stdin="".join(f"addr add {a}/24 dev eth0\n" for a in addresses)).check_returncode()
    names = tuple(f"dm{1000 + i}" for i in range(len(addresses)))
    key = host.known_hosts_line().partition(" ")[2]
    known = folder / "known_hosts"
    known.write_text("".join(f"{name},{address} {key}" for name, address in zip(names, addresses, strict=True)))
    config = folder / "ssh_config"
    aliases = "".join(f"Host {n}\n  HostName {a}\n" for n, a in zip(names, addresses, strict=True))
    rest = lab.ssh_config.read_text().replace(str(lab.known_hosts), str(known)).partition("Host dm*")
    config.write_text(aliases + rest[1] + rest[2])
    return Crowd(config=config, names=names)


def _start(crowd: Crowd, count: int) -> float:
    """Return the seconds until every host's agent has said hello, from nothing. They are ended again after that."""
    session, hosts = api.Session(), parse_hosts(",".join(crowd.names[:count]))
    job = secrets.token_hex(6)
    spec = JobSpec(nproc_per_node=1, master_port=29000)
    with contextlib.closing(asker_of(None)) as asker, contextlib.closing(session):
        payload = pack_call(int, limit_bytes=1 << 20, labels={})
        began = time.monotonic()
        reaching = session.reach(hosts, crowd.access, asker)
        links = reaching.wait()
        reached = [
            plan.Reached(host=link.host, facts=link.facts, route=Route(address="127.0.0.1", interface="lo"))
            for link in links
        ]
        made = plan.make_plan(spec, reached, job=job, local_cwd="/")
        launch = Launch(job, links, 60.0, time.monotonic, lambda node: links[node])
        with contextlib.closing(launch):
            launch.start(made, (payload.call, payload.code))
            took_s = time.monotonic() - began
            _stop(launch, count)
    return took_s


def _stop(launch: Launch, count: int) -> None:
    """End all agents, and wait until each is gone."""
    launch.stop(range(count), 0.0, "measured")
    over: set[int] = set()
    end = time.monotonic() + 60
    while len(over) < count:
        assert time.monotonic() < end, f"{count - len(over)} agents don't end"
        over |= {event.node_rank for event in launch.batch(0.1) if isinstance(event.what, Gone | Lost)}


def _answer(crowd: Crowd, count: int) -> float:
    """Return the seconds until every host has run `true`, over distmagic's own connections."""
    hosts = parse_hosts(",".join(crowd.names[:count]))
    with (
        contextlib.closing(asker_of(None)) as asker,
        ThreadPoolExecutor(PARALLEL) as pool,
        contextlib.ExitStack() as open_,
    ):

        def one(host: object) -> None:
            transport = connect(host, crowd.access, asker)  # type: ignore[arg-type]
            open_.callback(transport.close)
            process = transport.start(("true",))
            assert process.wait(60) == 0
            process.close()

        began = time.monotonic()
        list(pool.map(one, hosts))
        return time.monotonic() - began


def _openssh(crowd: Crowd, count: int) -> float:
    def one(name: str) -> None:
        subprocess.run(["ssh", "-F", str(crowd.config), name, "true"], stdin=subprocess.DEVNULL, check=True)

    with ThreadPoolExecutor(PARALLEL) as pool:
        began = time.monotonic()
        list(pool.map(one, crowd.names[:count]))
        return time.monotonic() - began
