"""In what hosts differ that should be alike. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from distmagic.diagnosis.finding import Finding, Subject, odd_ones, others_have
from distmagic.planning.preflight import CLOCKS_APART_S


def findings(subjects: Sequence[Subject]) -> list[Finding]:
    """Return what is wrong among hosts that have answered; each finding is about the odd host, not about those it differs from."""
    there = [one for one in subjects if one.facts is not None]
    if len(there) < 2:
        return []
    return [
        *_of_versions(there),
        *_of_names(_apart(there)),
        *_of_addresses(_apart(there)),
        *_of_mtus(there),
        *_of_clocks(there),
        *_of_variables(there),
        *_of_packages(there),
    ]


def _apart(subjects: Sequence[Subject]) -> list[Subject]:
    """Return one host of each machine: those of a playground share their name and their address, as they should.

    A host of which that is not known is left out.
    """
    machines: dict[str, Subject] = {}
    for one in subjects:
        if one.facts is not None and one.facts.host_id:
            machines.setdefault(one.facts.host_id, one)
    return list(machines.values()) if len(machines) > 1 else []


def _of_versions(subjects: Sequence[Subject]) -> Iterator[Finding]:
    others = others_have(subjects)
    pythons = {one.name: _dots(one.python[:2]) for one in subjects if one.python}
    usual, odd = odd_ones(pythons)
    for host, found in odd.items():
        evidence = f"Python {found}, where {others} {usual}."
        cure = f"--python {host}=/path/to/python{usual}"
        yield Finding("warning", host, "python", evidence, cure)
    torches = {one.name: one.facts.torch for one in subjects if one.facts and one.facts.torch}  # fmt: skip
    usual, odd = odd_ones(torches)
    for host, found in odd.items():
        is_minor = found.split(".")[:2] != usual.split(".")[:2]
        evidence = f"torch {found}, where {others} {usual}."
        cure = f"Install torch {usual} there, or name a Python that has it: --python {host}=/path/to/python"
        yield Finding("error" if is_minor else "warning", host, "torch", evidence, cure)
    cudas = {one.name: one.examined.torch_cuda for one in subjects if one.examined}
    usual, odd = odd_ones(cudas)
    for host, found in odd.items():
        if host in torches:
            evidence = f"torch is built for {_cuda(found)}, where {others} one for {_cuda(usual)}."
            cure = f"Install the same build of torch on {host}, or name a Python that has it: --python {host}=/path/to/python"
            yield Finding("warning", host, "CUDA of torch", evidence, cure)


def _cuda(version: str) -> str:
    return f"CUDA {version}" if version else "CPUs alone"


def _dots(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _of_names(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Find hosts that call themselves alike, as machines from one image do."""
    hosts: dict[str, list[str]] = {}
    for one in subjects:
        if one.examined is not None:
            hosts.setdefault(one.examined.hostname, []).append(one.name)
    for hostname, alike in hosts.items():
        for host in alike[1:]:
            evidence = f"calls itself {hostname}, as {alike[0]} does. Programs that announce their name reach the wrong host."
            cure = f"On {host}: sudo hostnamectl set-hostname {host}"
            yield Finding("warning", host, "host name", evidence, cure)


def _of_addresses(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Find hosts whose address, as the others dial it, is another host's, too: that of a bridge for containers, say."""
    hosts: dict[str, str] = {}
    for one in subjects:
        if one.route is None or one.facts is None:
            continue
        address, interface = one.route.address, one.route.interface
        first = hosts.setdefault(address, one.name)
        if address.startswith("127."):
            evidence = f"its address is {address} on {interface}, which no other host can dial."
        elif first != one.name:
            evidence = f"its address {address} on {interface} is that of {first}, too: who dials it reaches itself."
        else:
            continue
        cure = f"Name {one.name} by its address in the network of the others: %distributed hosts ADDRESS"
        yield Finding("error", one.name, "address", evidence, cure)


def _of_mtus(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Find hosts whose card takes larger or smaller packets: large ones may get lost between them."""
    values = {}
    for one in subjects:
        if one.examined is None or one.route is None:
            continue
        mtu = one.examined.mtus.get(one.route.interface, 0)
        if mtu and not one.route.address.startswith("127."):
            values[one.name] = str(mtu)
    usual, odd = odd_ones(values)
    for one in subjects:
        if one.name in odd and one.route is not None:
            card = one.route.interface
            evidence = f"the MTU of {card} is {odd[one.name]}, where {others_have(subjects)} {usual}."
            cure = f"{one.by_hand} sudo ip link set dev {card} mtu {usual}"
            yield Finding("warning", one.name, "MTU", evidence, cure)


def _of_clocks(subjects: Sequence[Subject]) -> Iterator[Finding]:
    middles = [sum(one.clock_s) / 2 for one in subjects]
    # Of two hosts the first one's: nobody can say which one is right.
    usual = statistics.median(middles) if len(middles) > 2 else middles[0]
    for one, middle in zip(subjects, middles, strict=True):
        least, most = one.clock_s
        if max(least - usual, usual - most) > CLOCKS_APART_S:
            where = "ahead of" if middle > usual else "behind"
            others = "the others'" if len(middles) > 2 else f"{subjects[0].name}'s"
            evidence = f"its clock is {abs(middle - usual):,.0f} s {where} {others}."
            cure = f"{one.by_hand} sudo timedatectl set-ntp true"
            yield Finding("warning", one.name, "clock", evidence, cure)


def _of_variables(subjects: Sequence[Subject]) -> Iterator[Finding]:
    others = others_have(subjects)
    examined = {one.name: one.examined for one in subjects if one.examined}
    names = {name for one in examined.values() for name in one.variables}
    for name in sorted(names):
        values = {host: one.variables.get(name, "") for host, one in examined.items()}
        usual, odd = odd_ones(values)
        for host, found in odd.items():
            set_so = f"{name}={found}" if found else f"{name} is not set"
            evidence = f"{set_so}, where {others} {usual or 'none'}."
            cure = f"Give all ranks one value: --env {name}={usual or found}    # or change it in the start-up files of {host}"
            yield Finding("warning", host, name, evidence, cure)


def _of_packages(subjects: Sequence[Subject]) -> Iterator[Finding]:
    others = others_have(subjects)
    examined = {one.name: one.examined for one in subjects if one.examined}
    names = {name for one in examined.values() for name in one.packages}
    for name in sorted(names - {"torch"}):
        values = {host: one.packages.get(name, "") for host, one in examined.items()}
        usual, odd = odd_ones(values)
        for host, found in odd.items():
            evidence = (
                f"{name} {found or 'is missing'}, where {others} {usual or 'none'}."
            )
            cure = f"Have the same packages on all hosts: %distributed env sync. By hand: python -m pip install '{name}=={usual or found}'"
            yield Finding("warning", host, name, evidence, cure)
