"""Reads the detailed logs of NCCL and torch that `--debug` turns on: the network that each host
uses, and faults. Pure.

The patterns match lines of NCCL 2.5 to 2.29, of RCCL, of gloo, and of torch's C++ code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from distmagic.failures import network_errors

Shown = Mapping[tuple[int, str], str]  # by node and kind

_DETAIL = re.compile(
    r":\d+:\d+ \[\d+\] NCCL INFO |^NCCL version \d"
    # torch: [rank0]:[I1126 17:35:33.061 socket.cpp:785] text
    r"|^(?:\[rank\d+\]: ?)?\[I\d{3,4} [\d:.]+ "
    r"|^\[Gloo\] Rank \d+ is connected"
)
_FACTS = (
    ("address", r"NCCL INFO Bootstrap ?: Using (?:\[0\])?([^\s<>]+)<\d+>"),
    ("sockets", r"NCCL INFO NET/Socket ?: Using (.*\S)"),
    ("network", r"NCCL INFO Using network (.*\S)"),
    ("lacks", r"NET/IB ?: (No device found)|(Failed to open libibverbs)"),
    ("version", r"NCCL version (\d[\w.+]*)"),
    ("NCCL connected", r"ncclCommInitRank.* - (Init COMPLETE)"),
    ("gloo connected", r"\[Gloo\] (Rank \d+ is connected)"),
)  # fmt: skip
_LIBRARY = re.compile(r"NCCL|gloo", re.IGNORECASE)
_SOCKET = re.compile(r"\[\d+\](?P<interface>[^\s:]+):(?P<address>[^\s<>]+)<\d+>")
_MOST = 4  # hosts that are named in a sentence
_LONGEST = 300


def is_detail(line: str) -> bool:
    """Whether a library wrote this line only because of `--debug`; warnings and errors don't
    count.
    """
    return bool(_DETAIL.search(line))


def fact(line: str) -> tuple[str, str] | None:
    """Return what a line shows about the network of its host, None for most lines.

    That is a kind of `_FACTS`, or "NCCL failed", "gloo failed" for a connection; and a value.
    """
    library = _LIBRARY.search(line)
    if library is None:
        return None
    for kind, pattern in _FACTS:
        if found := re.search(pattern, line):
            value = next(filter(None, found.groups()))
            return kind, value[:_LONGEST]
    trouble = network_errors.trouble(line)
    if trouble is not None and trouble.address:
        name = "NCCL" if library[0] == "NCCL" else "gloo"
        return f"{name} failed", line[-_LONGEST:]
    return None


def summary(facts: Shown, hosts: Sequence[str]) -> str:
    """Return how NCCL connects the hosts, "" if no log shows that."""
    addresses = _of_kind(facts, "address")
    if not addresses:
        return ""
    version = next(iter(_of_kind(facts, "version").values()), "")
    networks = dict.fromkeys(_of_kind(facts, "network").values())
    by = " or ".join(map(_network, networks))
    if list(networks) == ["Socket"] and _of_kind(facts, "lacks"):
        by += ", because it found no InfiniBand"
    uses = [f"{hosts[node]} uses {_interface(at)}" for node, at in addresses.items()]
    return f"{f'NCCL {version}'.strip()} connects{f' by {by}' if by else ''}: {some_of(uses)}"


def faults(
    facts: Shown, hosts: Sequence[str], names: Mapping[str, str]
) -> tuple[str, ...]:
    """Return what logs show to be wrong, each with a cure.

    `names` has each host's name by its addresses.
    """
    found = _unreachable(facts, hosts, names)
    found = found or _failed_connections(facts, hosts, names)
    networks = _of_kind(facts, "network")
    if len(set(networks.values())) > 1:
        uses = [f"{hosts[node]} {_network(name)}" for node, name in networks.items()]
        found.append(
            f"NCCL can't connect hosts that use different networks: {some_of(uses)}. "
            "Use sockets on all of them: --env NCCL_IB_DISABLE=1 --env NCCL_NET=Socket"
        )
    versions = _of_kind(facts, "version")
    if len(set(versions.values())) > 1:
        has = [f"{hosts[node]} {version}" for node, version in versions.items()]
        found.append(
            f"Hosts have different versions of NCCL: {some_of(has)}. "
            "Install the same torch on all of them, or name one with --python."
        )
    return tuple(found)


def _unreachable(
    facts: Shown, hosts: Sequence[str], names: Mapping[str, str]
) -> list[str]:
    """Return a sentence for each address that several hosts announce, or that is a loopback
    address.
    """
    announced: dict[str, list[int]] = {}
    for node, at in _of_kind(facts, "address").items():
        announced.setdefault(at, []).append(node)
    found = []
    for at, nodes in announced.items():
        address = at.partition(":")[2]
        is_own = len(nodes) > 1 or address.startswith("127.") or address == "::1"
        if len(hosts) > 1 and is_own and address not in names:
            where = some_of([hosts[node] for node in nodes])
            name = _common_interface(facts, nodes)
            found.append(
                f"NCCL uses {_interface(at)} on {where}, an address that other hosts can't reach. "
                f"Name the interface of the common network: --env NCCL_SOCKET_IFNAME={name} --env GLOO_SOCKET_IFNAME={name}"
            )
    return found


def _failed_connections(
    facts: Shown, hosts: Sequence[str], names: Mapping[str, str]
) -> list[str]:
    """Return which hosts could not reach which, unless a later try succeeded, or the peer had
    ended.
    """
    found = []
    for library in ("NCCL", "gloo"):
        connected = _of_kind(facts, f"{library} connected")
        for node, line in _of_kind(facts, f"{library} failed").items():
            words = network_errors.in_words(line, (), hosts[node], names)
            is_of_a_peer = network_errors.is_of_a_peer(words)
            if words and node not in connected and not is_of_a_peer:
                found.append(words)
    return found


def _common_interface(facts: Shown, nodes: Sequence[int]) -> str:
    """Return an interface that has another address on each of these nodes, "eth0" if no log names
    one.
    """
    sockets = _of_kind(facts, "sockets")
    found: dict[str, set[str]] = {}
    for node in nodes:
        for one in _SOCKET.finditer(sockets.get(node, "")):
            if not one["address"].startswith(("127.", "::1", "fe80:")):
                found.setdefault(one["interface"], set()).add(one["address"])
    return next((name for name in found if len(found[name]) == len(nodes) > 1), "eth0")


def _of_kind(facts: Shown, kind: str) -> dict[int, str]:
    """Return the facts of one kind, by node."""
    return {node: facts[node, one] for node, one in sorted(facts) if one == kind}


def _interface(at: str) -> str:
    """Return `eth0 (10.0.0.1)` for NCCL's `eth0:10.0.0.1`."""
    name, _, address = at.partition(":")
    return f"{name} ({address})"


def _network(name: str) -> str:
    return {"Socket": "TCP sockets", "IB": "InfiniBand or RoCE"}.get(name, name)


def some_of(words: Sequence[str], most: int = _MOST) -> str:
    """Return the first of these words, and how many more there are."""
    more = len(words) - most
    shown = ", ".join(words[:most])
    return f"{shown} and {more} more" if more > 0 else shown
