"""Hosts that are reached at once: what happens to a run of which some can't be."""

from __future__ import annotations

from typing import Any, cast

import pytest

from distmagic.connection.connections import Connections
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.link_opener import Fleet, LinkOpener
from distmagic.connection.prompts import NotebookAsker
from distmagic.connection.warm_hosts import WarmHosts
from distmagic.errors import (
    ConnectionLost,
    HostError,
    HostErrors,
    HostKeyError,
    PreflightError,
    Unreachable,
)
from distmagic.request.access import Access
from distmagic.request.hosts import Host, parse_hosts
from tests.builders.links import FakeProcess, lines, reply
from tests.builders.plans import FACTS


class FakeLink:
    """A conversation; `kept` as of a host that keeps nothing."""

    kept = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


DOWN = Unreachable(
    "gpu-b", "no answer from 10.0.0.2 port 22 within 2 s.", "Check the machine."
)
STRANGE = HostKeyError("gpu-b", "the host key is not known.")


class Hosts:
    """Hosts of which some can't be reached, and the conversations with the others: connections, as far as first links go."""

    def __init__(self, errors: dict[str, HostError]) -> None:
        self.errors = errors
        self.links: list[FakeLink] = []

    def take_idle(self, host: Host, access: Access, asker: object) -> Link:
        if host.name in self.errors:
            raise self.errors[host.name]
        self.links.append(FakeLink(host.name))
        return cast(Link, self.links[-1])

    def give_back(self, link: FakeLink) -> None:
        link.close()

    def reach(self, names: str = "gpu-a,gpu-b,gpu-c") -> FirstLinks:
        return first_links(cast(Connections, self), parse_hosts(names))


def first_links(connections: Connections, hosts: tuple[Host, ...]) -> FirstLinks:
    fleet = Fleet(hosts=hosts, access=Access())
    asker = NotebookAsker(can_ask=False)
    opener = LinkOpener(connections=connections, fleet=fleet, asker=asker)
    return FirstLinks(opener, WarmHosts(connections))


def names(links: dict[int, Link]) -> list[str]:
    return [cast(FakeLink, link).name for link in links.values()]


def test_all_are_there():
    reaching = Hosts({}).reach()
    assert names(reaching.wait(enough=2)) == ["gpu-a", "gpu-b", "gpu-c"]
    assert (reaching.present, reaching.absent) == ((0, 1, 2), {})


def test_an_elastic_job_begins_without_a_host_that_is_down():
    reaching = Hosts({"gpu-b": DOWN}).reach()
    assert names(reaching.wait(enough=2)) == ["gpu-a", "gpu-c"]
    assert reaching.present == (0, 2)
    assert reaching.absent == {1: DOWN.message}


@pytest.mark.parametrize(("error", "enough"), [(DOWN, 3), (DOWN, None), (STRANGE, 2)])
def test_a_host_that_is_missed(error, enough):
    hosts = Hosts({"gpu-b": error})
    with pytest.raises(type(error)) as caught:
        hosts.reach().wait(enough=enough)
    assert caught.value is error
    assert [link.is_closed for link in hosts.links] == [True, True]


def test_too_many_are_down(golden):
    hosts = Hosts({"gpu-b": DOWN, "gpu-c": Unreachable("gpu-c", "down.")})
    with golden.raises(HostErrors):
        hosts.reach().wait(enough=2)


def test_a_laptop_that_is_there_alone_is_no_job_for_hosts_that_are_to_come():
    hosts = Hosts({"gpu-b": DOWN})
    reaching = hosts.reach("localhost,gpu-b")
    with pytest.raises(Unreachable):
        reaching.wait(enough=1, needs_remote=True)


def test_questions_are_answered_by_this_machine_alone_while_another_host_is_down():
    hosts = Hosts({"gpu-b": DOWN})
    reaching = hosts.reach("localhost,gpu-b")
    assert names(reaching.wait(enough=1)) == ["localhost"]


# ---- connections that are kept


class FakeTransport:
    """A connection over which nothing can be started; `why`."""

    def __init__(self, why: HostError) -> None:
        self.why = why
        self.is_closed = False

    def start(self, argv: tuple[str, ...]) -> Any:
        raise self.why

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("why", "logins"),
    [
        (PreflightError("gpu-a", "it has no torch."), 1),
        (Unreachable("gpu-a", "no answer."), 2),
    ],
)
def test_a_refusal_is_no_reason_to_log_in_again(why, logins):
    made: list[FakeTransport] = []

    def connect(*_: object) -> Any:
        made.append(FakeTransport(why))
        return made[-1]

    connections, asker = Connections(connect), NotebookAsker(can_ask=False)
    (host,) = parse_hosts("gpu-a")
    ways = (
        Access(),
        Access(lease_s=5.0),
        Access(pythons=(("gpu-a", "/opt/python"),)),
        Access(connect_timeout_s=1.0),
    )
    for access in ways[: 4 if logins == 1 else 2]:
        with pytest.raises(type(why)):
            connections.link(host, access, asker)
    assert len(made) == logins
    assert made[0].is_closed == (logins > 1)


class SharedTransport:
    """The connection of a kernel's runs to one host. It is dead once `is_cut`."""

    warnings = ()

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []
        self.is_cut = self.is_closed = False

    def start(self, argv: tuple[str, ...]) -> Any:
        if self.is_cut:
            raise ConnectionLost("gpu-a: the connection is lost.")
        self.processes.append(FakeProcess(reply(), lines(FACTS)))
        return self.processes[-1]

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_link_that_broke_alone_takes_the_connection_from_no_other_run(is_cut):
    """Its process on the host was killed. Where the host was cut off, opening a new one shows that."""
    made: list[SharedTransport] = []

    def connect(*_: object) -> Any:
        made.append(SharedTransport())
        return made[-1]

    connections = Connections(connect)
    runs = [first_links(connections, parse_hosts("gpu-a")) for _ in range(2)]
    first, second = runs[0].wait()[0], runs[1].wait()[0]
    made[0].is_cut = is_cut
    again = runs[0].opener.link(0, broken=first)
    assert (first.is_closed, second.is_closed) == (True, False)
    assert len(made) == (2 if is_cut else 1)
    assert made[0].is_closed == is_cut
    assert cast(Any, again.transport) is made[-1]
    # The second run's link broke with the connection, or was not touched: either way there is one to share.
    assert runs[1].opener.link(0, broken=second).transport is again.transport
    connections.close()
