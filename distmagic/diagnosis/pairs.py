"""Finds slow pairs of hosts, and whether a link or a host is the cause. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distmagic.diagnosis.finding import Finding, Subject
from distmagic.remote.checkup.collective import compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two hosts that ran collectives with each other: latency of the smallest, bytes per second of
    large ones.

    If others ran at the same time, it may be faster than that: `is_judged` is False.
    """

    hosts: tuple[str, str]
    latency_s: float
    bytes_per_s: float
    is_judged: bool = True


def findings(pairs: Sequence[Pair], subjects: Mapping[str, Subject]) -> list[Finding]:
    """Return the hosts and links that are slower than most. `subjects` has the hosts by name."""
    if len(pairs) < 2:
        return []
    speeds = {pair.hosts: (pair.latency_s, pair.bytes_per_s) for pair in pairs}
    (prompt, usual), late, slow = compared(speeds)
    judged = [pair for pair in pairs if pair.is_judged]
    return [
        *_of(judged, slow, "bandwidth", f"most pairs have {_rate(usual)}", subjects),
        *_of(judged, late, "latency", f"most pairs need {_time(prompt)}", subjects),
    ]


def in_words(pair: Pair) -> str:
    """Return the measurements of a pair as text."""
    return f"{_rate(pair.bytes_per_s)}, {_time(pair.latency_s)}"


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s > 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.0f} MB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _of(
    pairs: Sequence[Pair], bad: set[tuple[str, str]], what: str, usual: str, subjects: Mapping[str, Subject]
) -> Iterator[Finding]:  # fmt: skip
    explained: set[tuple[str, str]] = set()
    how = "high" if what == "latency" else "low"
    for host in dict.fromkeys(name for pair in pairs for name in pair.hosts):
        own = [pair for pair in pairs if host in pair.hosts]
        if len(own) > 1 and all(pair.hosts in bad for pair in own):
            explained.update(pair.hosts for pair in own)
            best = max(own, key=lambda pair: pair.bytes_per_s)
            evidence = f"its {what} is {how} with each of {len(own)} hosts, at best {in_words(best)}: {usual}."
            ask, card = subjects[host].by_hand, subjects[host].card
            cure = f"Look at its card and cable: {ask} ethtool {card}\nand at its errors: {ask} ip -s link show {card}"
            yield Finding("warning", host, what, evidence, cure)
    for pair in pairs:
        if pair.hosts in bad - explained:
            one, other = pair.hosts
            evidence = f"the link to {one} is slow, {in_words(pair)}: {usual}."
            address = subjects[other].pasted(subjects[one].examined.route.address)
            cure = (
                f"Look at the way between them: {subjects[other].by_hand} mtr -rn {address}\n"
                f"By hand: {subjects[one].by_hand} iperf3 -s -1\nand meanwhile: {subjects[other].by_hand} iperf3 -c {address}"
            )
            yield Finding("warning", other, f"{what} with {one}", evidence, cure)
