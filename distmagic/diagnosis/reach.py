"""Determines which hosts can connect to which. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distmagic.diagnosis.finding import ANY_PORT, Finding, Line, Subject

_WORDS = {
    "refused": "refused",
    "silent": "no answer",
    "half": "large packets are lost",
    "no route": "no route",
    "no name": "name can't be resolved",
    "another": "something else answers",
}
_CURES = {
    "refused": "A firewall on {host} rejects it. Let the hosts through: {root} {rule} -j ACCEPT",
    "silent": "A firewall or security group drops it. Let all TCP through between the hosts: {root} {rule} -j ACCEPT",
    "half": "The MTU of the network is smaller than that of the cards. Lower that of the card: {larger} ip link set dev {card} mtu {less}",
    "no route": "Name hosts by addresses of one network, or add the route: {dialler} ip route get {address}",
    "no name": "Add to /etc/hosts of all hosts the line: {address} {host}",
    "another": "That address is not {host}'s alone. Name it by one in the network of the others: %distributed hosts ADDRESS",
}
_SOME_PORT = 40000  # an example for a test by hand
_BY_HAND = (
    "By hand: {dialled} nc -l {port}\nand meanwhile: {dialler} nc -vz {address} {port}"
)
_LARGE_BY_HAND = "By hand: {dialler} ping -c 3 -M do -s {payload} {address}"
_USUAL_MTU, _SAFE_MTU = 1500, 1280  # of Ethernet; of any network with IPv6
# Bytes of a ping before its payload, by whether it is IPv6.
_HEADERS = {False: 28, True: 48}


@dataclass(frozen=True, eq=False, kw_only=True)
class _Door:
    """A port of one host, as another host has found it."""

    dialler: Subject
    dialled: Subject
    port: int
    answer: str

    @property
    def pair(self) -> tuple[str, str]:
        """The connecting host, and the other one."""
        return self.dialler.name, self.dialled.name

    @property
    def is_shut(self) -> bool:
        """Whether connecting to it fails."""
        return self.answer != "open"

    @property
    def place(self) -> str:
        """Its location, as text."""
        named = "" if self.port == ANY_PORT else f", port {self.port}"
        return f" at {self.dialled.examined.route.address}{named}"

    def finding(
        self, what: str, peers: Sequence[Subject], more: str = "", *, of_dialler: bool = False
    ) -> Finding:  # fmt: skip
        """Return a finding about the host that listens, or about the one that connects; `peers` are
        the others.
        """
        host = self.dialler if of_dialler else self.dialled
        address = self.dialled.examined.route.address
        is_v6 = ":" in address
        others = ",".join(dict.fromkeys(one.examined.route.address for one in peers))
        rule = "OUTPUT -d" if of_dialler else "INPUT -s"
        pair = (self.dialler, self.dialled)
        small, large = sorted(pair[::-1] if of_dialler else pair, key=_mtu)
        less = _mtu(small)
        if less == _mtu(large):
            less = _USUAL_MTU if less > _USUAL_MTU else _SAFE_MTU
        words = {
            "host": host.name,
            "root": host.as_root,
            "rule": f"{'ip6tables' if is_v6 else 'iptables'} -I {rule} {host.pasted(others)}",
            "address": self.dialler.pasted(address),
            "larger": large.as_root,
            "card": large.card,
            "less": str(less),
            "payload": str(_mtu(self.dialler) - _HEADERS[is_v6]),
            "dialler": self.dialler.by_hand,
            "dialled": self.dialled.by_hand,
            "port": str(self.port or _SOME_PORT),
        }
        by_hand = _LARGE_BY_HAND if self.answer == "half" else _BY_HAND
        check = "dials" if of_dialler else f"dialled from {self.dialler.name}"
        named = "" if self.port == ANY_PORT else f" at {self.port}"
        # No distmagic run needs it unless the user has named it.
        is_needed = self.port == ANY_PORT or self.port in self.dialled.named_ports
        return Finding(
            "error" if is_needed else "warning",
            host.name,
            f"{check}{named}",
            f"{what}: {_WORDS[self.answer]}{more}.",
            f"{_CURES[self.answer]}\n{by_hand}".format_map(words),
        )


def _mtu(host: Subject) -> int:
    return host.examined.mtus.get(host.examined.route.interface, _USUAL_MTU)


def findings(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Find hosts that can't connect to each other: one finding for a host cut off from all, else
    one a pair.
    """
    by_name = {one.name: one for one in subjects}
    doors: dict[int, list[_Door]] = {ANY_PORT: []}
    for one in subjects:
        for (host, port), answer in one.dials.items():
            door = _Door(dialler=one, dialled=by_name[host], port=port, answer=answer)
            doors.setdefault(port, []).append(door)
    known: set[tuple[str, str]] = set()  # pairs that fail at any port
    for port in sorted(doors):
        there = [door for door in doors[port] if door.pair not in known]
        yield from _of_port(subjects, there)
        if port == ANY_PORT:
            known.update(door.pair for door in there if door.is_shut)


def _of_port(subjects: Sequence[Subject], doors: Sequence[_Door]) -> Iterator[Finding]:
    explained = []
    for one in subjects:
        into = [door for door in doors if door.dialled is one]
        out = [door for door in doors if door.dialler is one]
        can_dial_none = bool(out) and all(door.is_shut for door in out)
        if len(into) > 1 and all(door.is_shut for door in into):
            explained += into + (out if can_dial_none else [])
            more = ", and it can dial none" if can_dial_none else ""
            what = f"no other host can dial it{into[0].place}"
            yield into[0].finding(what, [door.dialler for door in into], more)
        elif len(out) > 1 and can_dial_none:
            # Each of the others may be cut off from all hosts.
            others = {door.pair[1] for door in out}
            if any(door.pair[1] in others and not door.is_shut for door in doors):
                explained += out
                at = "" if out[0].port == ANY_PORT else f" at port {out[0].port}"
                what, them = (
                    f"it can dial no other host{at}",
                    [door.dialled for door in out],
                )
                yield out[0].finding(what, them, of_dialler=True)
    for door in doors:
        if door.is_shut and door not in explained:
            what = f"{door.dialler.name} can't dial it{door.place}"
            yield door.finding(what, [door.dialler])


def square(hosts: Sequence[str], subjects: Sequence[Subject]) -> tuple[Line, ...]:
    """Return a row for each connecting host, with a cell for each other host; () if all connections
    work.

    The row with the most failures comes first.
    """
    every = len({port for one in subjects for _, port in one.dials})
    rows = []
    for one in subjects:
        cells, shut = {}, 0
        for name in hosts:
            doors = {port: answer for (host, port), answer in one.dials.items() if host == name}  # fmt: skip
            closed = {port: _WORDS[answer] for port, answer in doors.items() if answer != "open"}  # fmt: skip
            shut += len(closed)
            cell = "ok" if doors else "not tested" if name != one.name else ""
            if closed:
                cell = ", ".join(f"{port} {answer}" for port, answer in closed.items())
            if ANY_PORT in closed or len(closed) == every > 0:
                cell = next(iter(closed.values()))
            cells[name] = cell
        rows.append((shut, Line(title=one.name, cells=cells)))
    rows.sort(key=lambda row: -row[0])
    return tuple(line for _, line in rows) if rows and rows[0][0] else ()
