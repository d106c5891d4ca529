"""Finds differences between hosts that should be equal. Pure."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distmagic.diagnosis.finding import (
    Finding,
    Level,
    Subject,
    is_loopback,
    odd_ones,
    others_have,
)
from distmagic.diagnosis.of_host import of_own_name
from distmagic.planning.preflight import CLOCKS_APART_S
from distmagic.remote.frozen import frozen


@frozen
class Trait:
    """A property that should be equal on all hosts.

    Texts have names in braces.
    """

    title: str
    value: Callable[[Subject], str | None]  # the property of a host, None if unknown
    # decides which value is usual (see `odd_ones`)
    rank: Callable[[str, int], Any] = lambda value, count: (bool(value), count)
    words: str = ""  # the sentence about a host's value
    # advice for a value that is not the usual one; "": a difference is acceptable
    cure: str = ""
    # advice for a value that most hosts lack; "": such a value is acceptable
    removal: str = ""


def limit(value: int, unit: int = 1, words: str = "") -> str:
    """Return a limit as text, "unlimited" without one."""
    return "unlimited" if value < 0 else f"{value // unit:,}{words}"


def models(one: Subject) -> tuple[str, ...]:
    """Return the GPU models known to NVML, each once."""
    return tuple(dict.fromkeys(gpu.model for gpu in one.examined.gpus))


def _mtu(one: Subject) -> str | None:
    """Return the MTU of the network interface that leads to other hosts."""
    route = one.examined.route
    mtu = one.examined.mtus.get(route.interface)
    return str(mtu) if mtu and not is_loopback(route.address) else None


_PYTHON = "name a Python that has it: --python {host}=/path/to/python"
_ROWS = (
    Trait(
        title="python",
        value=lambda one: ".".join(map(str, one.python[:2])),
        words="Python {found}",
        cure="--python {host}=/path/to/python{usual}",
    ),
    Trait(
        title="torch",
        value=lambda one: one.facts.torch,
        words="torch {found}",
        cure=f"Install torch {{usual}} on that host, or {_PYTHON}",
    ),
    Trait(
        title="GPUs",
        value=lambda one: str(one.facts.gpus),
        # Hosts lose GPUs, and gain none.
        rank=lambda value, count: (value != "0", count, int(value)),
        words="the number of GPUs is {found}",
        cure="See which ones its driver finds: {by_hand} nvidia-smi -L",
    ),
    Trait(
        title="models",
        value=lambda one: ", ".join(models(one)) or None,
        words="{found}",
        cure="The slowest one sets the pace: give each host ranks to suit it, or leave it out of --hosts.",
    ),
    Trait(
        title="CUDA of torch",
        value=lambda one: one.examined.torch_cuda if one.facts.torch else None,
        words="torch is built for CUDA {found}",
        cure=f"Install the same build of torch on {{host}}, or {_PYTHON}",
    ),
    Trait(
        title="driver",
        value=lambda one: one.examined.driver or None,  # hosts of different drivers work together
    ),
    Trait(
        title="MTU",
        value=_mtu,
        rank=lambda value, count: (count, -int(value)),  # any network takes the smaller
        words="the MTU of {card} is {found}",
        cure="{as_root} ip link set dev {card} mtu {usual}",
    ),
    Trait(title="open files", value=lambda one: limit(one.examined.open_files)),
    Trait(
        title="locked memory",
        value=lambda one: limit(one.examined.locked_bytes, 1 << 10, " KiB"),
    ),
)  # fmt: skip


# They name a host's own devices.
_OF_A_HOST = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def rows(subjects: Sequence[Subject]) -> Iterator[Trait]:
    """Yield all properties that should be equal on these hosts, with the variables and packages of
    any of them.
    """
    yield from _ROWS
    for name in sorted({name for one in subjects for name in one.examined.variables}):
        yield Trait(
            title=name,
            value=partial(_variable, name),
            rank=lambda value, count: (count, not value),
            words="{title}={found}",
            cure="" if name in _OF_A_HOST else "Give all ranks one value: --env {entry}    # or change it in the start-up files of {host}",
            removal="Remove it from the start-up files of {host}, or give all ranks the right value: --env {title}=VALUE",
        )  # fmt: skip
    names = {name for one in subjects for name in one.examined.packages}
    for name in sorted(names - {"torch"}):
        yield Trait(
            title=name,
            value=partial(_package, name),
            words="{title} {found}",
            cure="Install the same packages on all hosts: %distributed env sync. By hand: {by_hand} {python} -m pip install {pinned}",
        )  # fmt: skip


def _variable(name: str, one: Subject) -> str:
    return one.examined.variables.get(name, "")


def _package(name: str, one: Subject) -> str | None:
    # Those of NVIDIA belong to a torch from pip; one from conda brings the same libraries
    # otherwise.
    missing = None if name.startswith("nvidia-") else ""
    return one.examined.packages.get(name) or missing


def findings(subjects: Sequence[Subject], local_torch: str | None) -> Iterator[Finding]:
    """Find differences among hosts that have answered; each finding is about the odd host, not the
    majority.

    In a tie the version of this machine's torch counts, which is `local_torch`, and then a build
    for GPUs.
    """
    own = _minor(local_torch or "")

    def of_torch(value: str, count: int) -> tuple[int, bool, bool]:
        return count, _minor(value) == own, not value.endswith("+cpu")

    if len(subjects) > 1:
        for row in rows(subjects):
            if row.cure:
                rank = of_torch if row.title == "torch" else row.rank
                yield from _of_row(replace(row, rank=rank), subjects)
        yield from _of_names(subjects)
        yield from _of_clocks(subjects)


def _of_row(row: Trait, subjects: Sequence[Subject]) -> Iterator[Finding]:
    values = {}
    for one in subjects:
        value = row.value(one)
        if value is not None:
            values[one.name] = value
    usual, odd = odd_ones(values, row.rank)
    # A host without it is the odd one, also of two. If most are, they do without it.
    has = [one for one in values.values() if one]
    if not row.removal and 2 * len(has) < len(values):
        return
    for one in subjects:
        if one.name in odd:
            found = odd[one.name]
            names = {
                "title": row.title,
                "found": found,
                "usual": usual,
                "entry": shlex.quote(f"{row.title}={usual}"),
                "host": one.name,
                "by_hand": one.by_hand,
                "as_root": one.as_root,
                "python": one.pasted(one.facts.executable),
                "pinned": one.pasted(f"{row.title}=={usual}"),
                "card": one.card,
            }
            what = row.words.format_map(names) if found else f"{row.title} is missing"
            evidence = f"{what}, where {others_have(values, usual)} {usual or 'none'}."
            # Ranks with other minor versions of torch can't communicate.
            differs = _minor(found) != _minor(usual)
            level: Level = "error" if row.title == "torch" and differs else "warning"
            cure = row.cure if usual else row.removal
            yield Finding(level, one.name, row.title, evidence, cure.format_map(names))


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _of_names(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Find hosts with equal hostnames, as from one machine image, whose address is also another
    host's, such as that of a container bridge.

    Only one host of each machine is checked: those of a playground share name and address, as they
    should. A host of an unknown machine is left out.
    """
    machines: dict[str, Subject] = {}
    for one in subjects:
        if one.facts.host_id:
            machines.setdefault(one.facts.host_id, one)
    names: dict[str, str] = {}
    addresses: dict[str, str] = {}
    # Of several hosts with one name, it belongs to the host that is reached by it.
    own_first = sorted(
        machines.values(),
        key=lambda one: (
            one.examined.hostname.partition(".")[0] != one.name.partition(".")[0]
        ),
    )
    led_to = Counter(map(_place_of_name, machines.values()))
    for one in own_first if len(machines) > 1 else ():
        host, hostname, route = one.name, one.examined.hostname, one.examined.route
        place = _place_of_name(one)
        if led_to[place] > 1 and place not in ("", route.address):
            yield of_own_name(one, f"resolves to {place}")
        first = names.setdefault(hostname, host)
        if first != host:
            evidence = f"calls itself {hostname}, as {first} does. Programs that announce their name reach the wrong host."
            is_name = re.fullmatch(r"[A-Za-z][\w.-]*", host)
            own = host if is_name else "-".join(["host", *re.findall(r"\w+", host)])
            cure = f"{one.as_root} hostnamectl set-hostname {own}    # for a container: docker run --hostname {own}"
            yield Finding("warning", host, "host name", evidence, cure)
        first = addresses.setdefault(route.address, host)
        at = f"its address {route.address} on {route.interface} is"
        evidence = f"{at} that of {first}, too: who dials it reaches itself."
        if is_loopback(route.address):
            evidence = f"{at} one that no other host can dial."
        elif first == host:
            continue
        cure = f"Name {host} by its address in the network of the others: %distributed hosts ADDRESS"
        yield Finding("error", host, "address", evidence, cure)


def _place_of_name(one: Subject) -> str:
    """Return the first address to which a host's own name leads on it, "" for none but a loopback
    address.
    """
    first = next(iter(one.examined.name_addresses or ()), "")
    return "" if is_loopback(first) else first


def _of_clocks(subjects: Sequence[Subject]) -> Iterator[Finding]:
    def allow(ahead_s: float) -> int:
        spans = [one.clock_s for one in subjects]
        return sum(least <= ahead_s <= most for least, most in spans)

    def rank(one: Subject) -> tuple[int, bool]:
        least, most = one.clock_s
        is_as_here = least - CLOCKS_APART_S <= 0.0 <= most + CLOCKS_APART_S
        return allow(least), is_as_here

    # The time of most clocks. In a tie that of the notebook, and then the first one's.
    first = max(subjects, key=rank)
    usual = first.clock_s[0]
    have = allow(usual)
    others = "the others'" if len(subjects) - 1 == have > 1 else f"{first.name}'s"
    for one in subjects:
        least, most = one.clock_s
        where = "ahead of" if least > usual else "behind"
        apart_s = max(least - usual, usual - most)
        if apart_s > CLOCKS_APART_S:
            evidence = f"its clock is {apart_s:,.0f} s {where} {others}."
            cure = f"{one.as_root} timedatectl set-ntp true    # with chrony or systemd-timesyncd; for a container, on its machine"
            yield Finding("warning", one.name, "clock", evidence, cure)
