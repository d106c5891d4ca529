"""Who can dial whom. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from distmagic.diagnosis.finding import ANY_PORT, Finding, Level, Subject

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
_Pairs = Mapping[
    tuple[str, str], str
]  # what is behind a door, by who dials and who is dialled


def answers(subjects: Sequence[Subject], port: int) -> _Pairs:
    """Return what was behind each door of this port."""
    found = {}
    for one in subjects:
        for dial in one.dials:
            if dial.port == port:
                found[one.name, dial.host] = dial.answer
    return found


def findings(subjects: Sequence[Subject]) -> list[Finding]:
    """Return which hosts can't dial each other: the host that is cut off from all, else each pair."""
    found = list(_of_port(subjects, ANY_PORT, set()))
    shut = {pair for pair, one in answers(subjects, ANY_PORT).items() if one != "open"}
    ports = {dial.port for one in subjects for dial in one.dials}
    for port in sorted(ports - {ANY_PORT}):
        found += _of_port(subjects, port, shut)
    return found


def _of_port(
    subjects: Sequence[Subject], port: int, known: Collection[tuple[str, str]]
) -> Iterator[Finding]:
    pairs = answers(subjects, port)
    shut = {
        pair: one for pair, one in pairs.items() if one != "open" and pair not in known
    }
    by_name = {one.name: one for one in subjects}
    explained: set[tuple[str, str]] = set()
    for name, subject in by_name.items():
        dialled = [pair for pair in pairs if pair[1] == name]
        dials = [pair for pair in pairs if pair[0] == name]
        if len(dialled) > 1 and all(pair in shut for pair in dialled):
            explained.update(dialled)
            why = shut[dialled[0]]
            also = ""
            if all(pair in shut for pair in dials):
                explained.update(dials)
                also = ", and it can dial none"
            what = (
                f"no other host can dial it{_at(subject, port)}: {_WORDS[why]}{also}."
            )
            yield _finding(by_name, dialled[0], port, what, why)
        elif len(dials) > 1 and all(pair in shut for pair in dials):
            whole = {one[1] for one in dials}
            # Each of the others may be cut off from all by itself.
            if any(pairs.get((other, one)) == "open" for one in whole for other in by_name):  # fmt: skip
                explained.update(dials)
                why = shut[dials[0]]
                what = f"it can dial no other host{'' if port == ANY_PORT else f' at port {port}'}: {_WORDS[why]}."
                yield _finding(by_name, dials[0], port, what, why, of_dialler=True)
    for pair, why in shut.items():
        if pair not in explained:
            at = _at(by_name[pair[1]], port)
            what = f"{pair[0]} can't dial it{at}: {_WORDS[why]}."
            yield _finding(by_name, pair, port, what, why)


def _at(subject: Subject, port: int) -> str:
    address = subject.route.address if subject.route else "its address"
    return f" at {address}{f', port {port}' if port != ANY_PORT else ''}"


def _finding(
    by_name: Mapping[str, Subject],
    pair: tuple[str, str],
    port: int,
    evidence: str,
    why: str,
    *,
    of_dialler: bool = False,
) -> Finding:
    dialler, dialled = by_name[pair[0]], by_name[pair[1]]
    host = dialler if of_dialler else dialled
    route, source = dialled.route, dialler.route
    assert route is not None
    assert source is not None
    cure = _CURES[why].format(
        host=host.name,
        address=route.address,
        source=source.address,
        interface=route.interface,
    )
    listen = f"{dialled.by_hand} nc -l {port or _SOME_PORT}"
    by_hand = (
        f"{listen}, and {dialler.by_hand} nc -vz {route.address} {port or _SOME_PORT}"
    )
    if why == "half":
        by_hand = f"{dialler.by_hand} ping -M do -s 8972 {route.address}"
    check = f"dialled from {pair[0]}" if not of_dialler else "dials"
    if port != ANY_PORT:
        check += f" at {port}"
    # No run of ours needs it where nobody has named it.
    level: Level = (
        "error" if port == ANY_PORT or port in dialled.named_ports else "warning"
    )
    return Finding(
        level=level,
        host=host.name,
        check=check,
        evidence=evidence,
        cure=f"{cure}\nBy hand: {by_hand}",
    )


def square(subjects: Sequence[Subject]) -> list[tuple[str, list[str]]]:
    """Return a row for each host that dials, with a cell for each that is dialled; [] where all doors are open.

    The row with the most closed doors comes first.
    """
    names = [one.name for one in subjects]
    every = {dial.port for one in subjects for dial in one.dials}
    rows = []
    for one in subjects:
        cells, shut = [], 0
        for name in names:
            closed = {dial.port: dial.answer for dial in one.dials if dial.host == name and dial.answer != "open"}  # fmt: skip
            shut += len(closed)
            cells.append(_cell(closed, every, is_dialled=any(dial.host == name for dial in one.dials)))  # fmt: skip
        rows.append((-shut, one.name, cells))
    if not any(shut for shut, _, _ in rows):
        return []
    rows.sort(key=lambda row: row[0])
    return [(name, cells) for _, name, cells in rows]


def _cell(
    closed: Mapping[int, str], every: Collection[int], *, is_dialled: bool
) -> str:
    if not is_dialled:
        return ""
    if not closed:
        return "ok"
    if len(closed) == len(every) or ANY_PORT in closed:
        return next(iter(closed.values()))
    return ", ".join(f"{port} {answer}" for port, answer in closed.items())
