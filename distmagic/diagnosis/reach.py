"""Who can dial whom. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from distmagic.diagnosis.finding import ANY_PORT, Finding, Level, Line, Subject, filled

_WORDS = {
    "refused": "refused",
    "silent": "no answer",
    "half": "small packets arrive, large ones do not",
    "no route": "no route",
    "no name": "its name is not known there",
    "another": "something else answers",
}
_CURES = {
    "refused": "A firewall on {host} rejects it. Let the hosts through: sudo iptables -I INPUT -s {source} -j ACCEPT",
    "silent": "A firewall or security group drops it. Let all TCP through between the hosts: sudo iptables -I INPUT -s {source} -j ACCEPT",
    "half": "The MTU of the network is smaller than that of the cards. On {host}: sudo ip link set dev {interface} mtu 1500",
    "no route": "Name hosts by addresses of one network, or add the route: ip route get {address}",
    "no name": "In /etc/hosts of all hosts: {address} {host}",
    "another": "That address is not {host}'s alone. Name it by one in the network of the others: %distributed hosts ADDRESS",
}
_SOME_PORT = 40000  # for a look by hand
_BY_HAND = "By hand: {dialled} nc -l {port}, and {dialler} nc -vz {address} {port}"
_LARGE_BY_HAND = "By hand: {dialler} ping -M do -s 8972 {address}"
_Pairs = dict[
    tuple[str, str], str
]  # what is behind a door, by who dials and is dialled


def findings(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Find which hosts can't dial each other: the host that is cut off from all, else each pair."""
    yield from _of_port(subjects, ANY_PORT, ())
    shut = {pair for pair, one in _answers(subjects, ANY_PORT).items() if one != "open"}
    for port in sorted(_ports(subjects) - {ANY_PORT}):
        yield from _of_port(subjects, port, shut)


def _ports(subjects: Sequence[Subject]) -> set[int]:
    return {port for one in subjects for _, port in one.dials}


def _answers(subjects: Sequence[Subject], port: int) -> _Pairs:
    """Return what was behind each door of this port."""
    found = {}
    for one in subjects:
        for (host, at), answer in one.dials.items():
            if at == port:
                found[one.name, host] = answer
    return found


def _of_port(
    subjects: Sequence[Subject], port: int, known: Collection[tuple[str, str]]
) -> Iterator[Finding]:
    pairs = _answers(subjects, port)
    shut = {pair: one for pair, one in pairs.items() if one != "open" and pair not in known}  # fmt: skip
    words = {pair: _WORDS[one] for pair, one in shut.items()}
    by_name = {one.name: one for one in subjects}
    explained: set[tuple[str, str]] = set()

    def finding(pair: tuple[str, str], evidence: str, *, of_dialler: bool = False) -> Finding:  # fmt: skip
        return _finding(by_name[pair[0]], by_name[pair[1]], port, shut[pair], evidence, of_dialler=of_dialler)  # fmt: skip

    for name, subject in by_name.items():
        dialled = [pair for pair in pairs if pair[1] == name]
        dials = [pair for pair in pairs if pair[0] == name]
        can_dial_none = bool(dials) and all(pair in shut for pair in dials)
        if len(dialled) > 1 and all(pair in shut for pair in dialled):
            explained.update(dialled, dials if can_dial_none else ())
            also = ", and it can dial none" if can_dial_none else ""
            yield finding(dialled[0], f"no other host can dial it{_at(subject, port)}: {words[dialled[0]]}{also}.")  # fmt: skip
        elif len(dials) > 1 and can_dial_none:
            # Each of the others may be cut off from all by itself.
            others = {one for _, one in dials}
            if any(one in others and answer == "open" for (_, one), answer in pairs.items()):  # fmt: skip
                explained.update(dials)
                at = "" if port == ANY_PORT else f" at port {port}"
                yield finding(dials[0], f"it can dial no other host{at}: {words[dials[0]]}.", of_dialler=True)  # fmt: skip
    for pair in shut:
        if pair not in explained:
            at = _at(by_name[pair[1]], port)
            yield finding(pair, f"{pair[0]} can't dial it{at}: {words[pair]}.")


def _at(subject: Subject, port: int) -> str:
    named = "" if port == ANY_PORT else f", port {port}"
    return f" at {subject.examined.route.address}{named}"


def _finding(
    dialler: Subject,
    dialled: Subject,
    port: int,
    why: str,
    evidence: str,
    *,
    of_dialler: bool,
) -> Finding:
    host = dialler if of_dialler else dialled
    names = {
        "host": host.name,
        "address": dialled.examined.route.address,
        "source": dialler.examined.route.address,
        "interface": dialled.examined.route.interface,
        "dialler": dialler.by_hand,
        "dialled": dialled.by_hand,
        "port": str(port or _SOME_PORT),
    }
    by_hand = _LARGE_BY_HAND if why == "half" else _BY_HAND
    check = "dials" if of_dialler else f"dialled from {dialler.name}"
    named = "" if port == ANY_PORT else f" at {port}"
    # No run of ours needs it where nobody has named it.
    is_needed = port == ANY_PORT or port in dialled.named_ports
    level: Level = "error" if is_needed else "warning"
    cure = filled(f"{_CURES[why]}\n{by_hand}", names)
    return Finding(level, host.name, f"{check}{named}", evidence, cure)


def square(hosts: Sequence[str], subjects: Sequence[Subject]) -> tuple[Line, ...]:
    """Return a row for each host that dials, with a cell for each that is dialled; () where all doors are open.

    The row with the most closed doors comes first.
    """
    every = len(_ports(subjects))
    rows = []
    for one in subjects:
        cells, shut = [], 0
        for name in hosts:
            doors = {port: answer for (host, port), answer in one.dials.items() if host == name}  # fmt: skip
            closed = {port: answer for port, answer in doors.items() if answer != "open"}  # fmt: skip
            shut += len(closed)
            cell = "ok" if doors else ""
            if closed:
                cell = ", ".join(f"{port} {answer}" for port, answer in closed.items())
            if ANY_PORT in closed or len(closed) == every > 0:
                cell = next(iter(closed.values()))
            cells.append(cell)
        rows.append((shut, Line(title=one.name, cells=tuple(cells))))
    rows.sort(key=lambda row: -row[0])
    return tuple(line for _, line in rows) if rows and rows[0][0] else ()
