"""Who can dial whom: the host that is cut off, the one that can't dial, and the single pair, each told from the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from distmagic.diagnosis import reach
from distmagic.diagnosis.finding import ANY_PORT, Subject
from distmagic.diagnosis.report import report
from tests.unit.diagnosis import healthy

Shut = dict[tuple[int, int], str]  # who dials whom, and finds what


def hosts(
    count: int, shut: Shut, port: int = ANY_PORT, named: Iterable[int] = ()
) -> list[Subject]:
    """Return hosts 1, 2 ..., each of which has dialled each at a free port and at 29500; `shut` is at `port`."""
    found = []
    for number, one in enumerate(healthy(count), 1):
        dials = {}
        for other in range(1, count + 1):
            for at in (29500, ANY_PORT) if other != number else ():
                is_shut = port in {at, ANY_PORT}
                answer = shut.get((number, other), "open") if is_shut else "open"
                dials[f"gpu-{other}", at] = answer
        found.append(replace(one, dials=dials, named_ports=tuple(named)))
    return found


def all_to(number: int, count: int, answer: str) -> Shut:
    return {(one, number): answer for one in range(1, count + 1) if one != number}


def all_from(number: int, count: int, answer: str) -> Shut:
    return {(b, a): answer for (a, b) in all_to(number, count, answer)}


SQUARES = {
    "nobody reaches one": hosts(4, all_to(3, 4, "silent")),
    "one reaches nobody": hosts(4, all_from(3, 4, "no route")),
    "one is cut off": hosts(4, {**all_to(3, 4, "refused"), **all_from(3, 4, "refused")}),
    "one pair": hosts(4, {(2, 3): "half"}),
    "two hosts, one way": hosts(2, {(1, 2): "silent"}),
    "two hosts, both ways": hosts(2, {(1, 2): "refused", (2, 1): "refused"}),
    "one address": hosts(3, {(1, 3): "another"}),
    "no name": hosts(3, all_to(1, 3, "no name")),
    "torch's port": hosts(3, all_to(1, 3, "silent"), 29500),
    "the named port": hosts(3, all_to(1, 3, "silent"), 29500, [29500]),
    "all of them": hosts(3, {(a, b): "silent" for a in (1, 2, 3) for b in (1, 2, 3) if a != b}),
}  # fmt: skip


@pytest.mark.parametrize("what", SQUARES)
def test_a_square_in_words(what, golden):
    golden(report(SQUARES[what], "2.13.0"))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_where_all_doors_are_open_nothing_is_found(count):
    said = report(hosts(count, {}), "2.13.0")
    assert (said.findings, said.square) == ((), ())


def test_of_a_cut_off_host_there_is_one_finding():
    for what, host in (("nobody reaches one", "gpu-3"), ("one is cut off", "gpu-3")):
        (finding,) = reach.findings(SQUARES[what])
        assert (finding.host, finding.level) == (host, "error")


def test_the_cure_lets_all_others_in_at_the_host_that_is_shut():
    (finding,) = reach.findings(SQUARES["nobody reaches one"])
    rule = "iptables -I INPUT -s 10.0.0.1,10.0.0.2,10.0.0.4 -j ACCEPT"
    assert f"ssh -t gpu-3 sudo {rule}" in finding.cure


def test_a_host_that_can_dial_nobody_is_let_out():
    blocked = hosts(3, {(2, 1): "refused", (2, 3): "refused"})
    (finding,) = reach.findings(blocked)
    assert finding.host == "gpu-2"
    rule = "iptables -I OUTPUT -d 10.0.0.1,10.0.0.3 -j ACCEPT"
    assert f"ssh -t gpu-2 sudo {rule}" in finding.cure


@pytest.mark.parametrize(
    ("mtu", "address", "less", "payload"),
    [
        (9000, "10.0.0.3", 1500, 8972),
        (1500, "10.0.0.3", 1280, 1472),
        (1500, "fd00::3", 1280, 1452),
    ],
)
def test_a_smaller_mtu_and_a_ping_that_shows_it(mtu, address, less, payload):
    """A network in a tunnel takes less than the 1500 bytes of its cards."""
    subjects = []
    for one in hosts(3, {(2, 3): "half"}):
        route = replace(one.examined.route, address=address)
        examined = replace(one.examined, route=route, mtus={"eth0": mtu})
        subjects.append(replace(one, examined=examined))
    (finding,) = reach.findings(subjects)
    assert f"mtu {less}\n" in finding.cure
    assert f"ssh gpu-2 ping -c 3 -M do -s {payload} {address}" in finding.cure


@pytest.mark.parametrize(("dialler", "dialled"), [(9000, 1500), (1500, 9000)])
def test_of_two_mtus_the_larger_one_is_made_smaller(dialler, dialled):
    one, other = hosts(2, {(1, 2): "half"})
    one = replace(one, examined=replace(one.examined, mtus={"eth0": dialler}))
    route = replace(other.examined.route, interface="ib0")
    examined = replace(other.examined, route=route, mtus={"ib0": dialled})
    (finding,) = reach.findings([one, replace(other, examined=examined)])
    large = "gpu-1 sudo ip link set dev eth0"
    if dialled > dialler:
        large = "gpu-2 sudo ip link set dev ib0"
    assert f"ssh -t {large} mtu 1500\n" in finding.cure


def test_a_rule_for_an_address_of_ipv6_is_one_of_ip6tables():
    subjects = []
    for number, one in enumerate(hosts(2, {(1, 2): "silent"}), 1):
        route = replace(one.examined.route, address=f"fd00::{number}")
        subjects.append(replace(one, examined=replace(one.examined, route=route)))
    (finding,) = reach.findings(subjects)
    assert "ip6tables -I INPUT -s fd00::1 -j ACCEPT" in finding.cure


def test_the_odd_row_comes_first():
    said = report(SQUARES["one reaches nobody"], "2.13.0")
    assert [line.title for line in said.square] == ["gpu-3", "gpu-1", "gpu-2", "gpu-4"]


def test_a_host_that_has_dialled_nobody_is_no_odd_one():
    subjects = hosts(3, {})
    subjects[2] = replace(subjects[2], dials={})
    assert list(reach.findings(subjects)) == []
