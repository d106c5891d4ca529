"""Section fanout: connect to 1, 16, 64 and 128 hosts and start an agent on each."""

from __future__ import annotations

import contextlib
import resource
import secrets
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from distmagic.connection import link as links_of_hosts
from distmagic.connection import opening
from distmagic.connection.connections import connect
from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel, threads_for
from distmagic.connection.prompts import asker_of
from distmagic.payload.pack import pack_call
from distmagic.planning import plan
from distmagic.planning.start_messages import start_messages
from distmagic.remote.wire.protocol import Final, Route, StopNode, WorkDir
from distmagic.request.access import Access
from distmagic.request.hosts import parse_hosts
from distmagic.request.spec import JobSpec
from distmagic.runner.delivery import Delivery
from distmagic.session.session import Session
from distmagic.transports.ssh import client
from tests.bench.bench import Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import kept_in, scratch
from tests.lab import HostSetup, Lab

TITLE = "Connecting and starting over SSH"
_CLIENTS = 16  # of OpenSSH at a time: more are no faster
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
    addresses: tuple[str, ...]

    @property
    def access(self) -> Access:
        """The way there."""
        return Access(ssh_config=str(self.config), connect_timeout_s=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Seconds that all hosts took together, and CPU seconds of the notebook's side alone."""

    seconds: float
    cpu_s: float


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Connect by distmagic and by OpenSSH's client in turn, to ever more hosts."""
    rows: list[MetricRow] = []
    # One machine is all of these hosts.
    boot_patience = mock.patch.object(opening, "BOOT_TIMEOUT_S", 120.0)
    start_patience = mock.patch.object(links_of_hosts, "BOOT_TIMEOUT_S", 120.0)
    # A server that starts 128 agents on two cores is silent for longer than one of a host's own.
    silence_patience = mock.patch.object(client, "SILENT_TICKS", 60)
    with (
        boot_patience,
        start_patience,
        silence_patience,
        scratch("fanout") as folder,
        kept_in(folder / "home"),
        Lab(1, setups=(_bare(),)) as lab,
    ):
        crowd = _crowd(lab, folder)
        _start(crowd, 2)  # bundle and payload are there now, and compiled
        for count in _COUNTS:
            rows += _to(bench, crowd, count)
    return tuple(rows)


def _to(bench: Bench, crowd: Crowd, count: int) -> tuple[MetricRow, ...]:
    found: dict[str, list[Took]] = {"agents": [], "true": [], "OpenSSH": []}
    for number in range(bench.rounds_dear):
        for name, act in (("agents", _start), ("OpenSSH", _openssh), ("true", _answer)):
            found[name].append(act(crowd, count))
        shown = ", ".join(
            f"{name} {took[-1].seconds:.2f} s ({took[-1].cpu_s:.2f} s CPU)"
            for name, took in found.items()
        )
        bench.say(f"fanout: {count} hosts, round {number + 1}: {shown}")
    hosts = f"{count} host{'s' if count > 1 else ''}"
    is_most = count == _COUNTS[-1]

    def row(
        what: str,
        ours: str,
        figure: Callable[[Took], float],
        target: Target | None = None,
    ) -> MetricRow:
        mine, theirs = (tuple(map(figure, found[name])) for name in (ours, "OpenSSH"))
        return MetricRow(what=f"{hosts}, {what}", unit="s", ours=mine, against="OpenSSH's client running `true`",
                   theirs=theirs, target=target, note=_ABOUT)  # fmt: skip

    return (
        row(
            "connect and start the agent",
            "agents",
            lambda took: took.seconds,
            Target(limit=1.0) if is_most else None,
        ),
        row("connect and run `true`", "true", lambda took: took.seconds),
        *(
            [
                row(
                    "CPU of the notebook's side, agents",
                    "agents",
                    lambda took: took.cpu_s,
                )
            ]
            if is_most
            else []
        ),
        *(
            [row("CPU of the notebook's side, `true`", "true", lambda took: took.cpu_s)]
            if is_most
            else []
        ),
    )


def _bare() -> HostSetup:
    return HostSetup(python="bare", sshd="MaxStartups 400:30:800\nLogLevel INFO\n")


def _crowd(lab: Lab, folder: Path) -> Crowd:
    host = lab.hosts[0]
    net = lab.address.rpartition(".")[0]
    addresses = [f"{net}.{100 + i}" for i in range(max(_COUNTS))]
    host.exec(
        ["ip", "-batch", "-"],
        stdin="".join(f"addr add {a}/24 dev eth0\n" for a in addresses),
    ).check_returncode()
    names = tuple(f"dm{1000 + i}" for i in range(len(addresses)))
    key = host.known_hosts_line().partition(" ")[2]
    known = folder / "known_hosts"
    known.write_text(
        "".join(
            f"{name},{address} {key}"
            for name, address in zip(names, addresses, strict=True)
        )
    )
    config = folder / "ssh_config"
    aliases = "".join(
        f"Host {n}\n  HostName {a}\n" for n, a in zip(names, addresses, strict=True)
    )
    rest = (
        lab.ssh_config.read_text()
        .replace(str(lab.known_hosts), str(known))
        .partition("Host dm*")
    )
    config.write_text(aliases + rest[1] + rest[2])
    return Crowd(config=config, names=names, addresses=tuple(addresses))


def _start(crowd: Crowd, count: int) -> Took:
    """Return what it takes until every host's agent has said hello, from nothing. They are ended again after that."""
    session, hosts = Session(), parse_hosts(",".join(crowd.names[:count]))
    job = secrets.token_hex(6)
    spec = JobSpec(nproc_per_node=1, master_port=29000)
    with contextlib.closing(asker_of(None)) as asker, contextlib.closing(session):
        payload = pack_call(int, limit_bytes=1 << 20, labels={})
        clock = _Clock()
        reaching = session.reach(hosts, crowd.access, asker)
        links = reaching.wait()
        reached = [
            plan.Reached(
                host=link.host,
                facts=link.facts,
                route=Route(address=address, interface="eth0"),
            )
            for link, address in zip(links, crowd.addresses, strict=False)
        ]
        made = plan.make_plan(
            spec,
            reached,
            job=job,
            terms=plan.terms_of(spec, lease_s=60.0, owner=""),
            local_cwd="/",
            work=WorkDir(name="bench"),
        )
        Delivery(links, crowd.addresses[:count], payload.blobs, _ignore, _ignore).run()
        secret = secrets.token_hex(32)
        requests = start_messages(made, payload, secret, [link.warm for link in links])
        in_parallel(Link.start, links, requests)
        took = clock.took()
        in_parallel(_stop, links)
    return took


def _ignore(*_: object) -> None:
    """Take no notice of how far a delivery is."""


def _stop(link: Link) -> None:
    """End the agent, and wait until it has said its last word."""
    link.send(StopNode(grace_s=0.0, reason="measured"))
    ends = [what for _, what in link.events() if isinstance(what, Final)]
    assert ends, f"{link.host.name}'s agent ended without a word"
    link.close()


def _answer(crowd: Crowd, count: int) -> Took:
    """Return what it takes until every host has run `true`, over distmagic's own connections."""
    hosts = parse_hosts(",".join(crowd.names[:count]))
    with (
        contextlib.closing(asker_of(None)) as asker,
        threads_for(count, "bench") as pool,
        contextlib.ExitStack() as open_,
    ):

        def one(host: object) -> None:
            transport = connect(host, crowd.access, asker)  # type: ignore[arg-type]
            open_.callback(transport.close)
            process = transport.start(("true",))
            assert process.wait(60) == 0
            process.close()

        clock = _Clock()
        list(pool.map(one, hosts))
        return clock.took()


def _openssh(crowd: Crowd, count: int) -> Took:
    def one(name: str) -> None:
        subprocess.run(
            ["ssh", "-F", str(crowd.config), name, "true"],
            stdin=subprocess.DEVNULL,
            check=True,
        )

    with ThreadPoolExecutor(_CLIENTS) as pool:
        clock = _Clock()
        list(pool.map(one, crowd.names[:count]))
        return clock.took()


class _Clock:
    """Time, and the CPU of this process and of the children that have ended, from now on."""

    def __init__(self) -> None:
        self._began, self._cpu_s = time.monotonic(), _cpu_s()

    def took(self) -> Took:
        """Return what has gone by."""
        return Took(
            seconds=time.monotonic() - self._began, cpu_s=_cpu_s() - self._cpu_s
        )


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
