"""Finds slow pairs of hosts, and whether a link or a host is the cause. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from distmagic.diagnosis.finding import Finding, Subject
from distmagic.remote.checkup.collective import Speed, compared

HostPair = tuple[str, str]


def findings(
    speeds: Mapping[HostPair, Speed],
    judged: Sequence[HostPair],
    subjects: Mapping[str, Subject],
) -> list[Finding]:
    """Return the hosts and links that are slower than most. `subjects` has the hosts by name.

    Only pairs in `judged` may be called slow: others ran at the same time as the rest.
    """
    if len(speeds) < 2:
        return []
    (prompt, usual), late, slow = compared(speeds)
    own = {pair: speeds[pair] for pair in judged}
    return [
        *_of(own, slow, "bandwidth", f"most pairs have {_rate(usual)}", subjects),
        *_of(own, late, "latency", f"most pairs need {_time(prompt)}", subjects),
    ]


def in_words(speed: Speed) -> str:
    """Return the measurements of a pair as text."""
    latency_s, bytes_per_s = speed
    return f"{_rate(bytes_per_s)}, {_time(latency_s)}"


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s > 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.0f} MB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _of(
    speeds: Mapping[HostPair, Speed], bad: set[HostPair], what: str, usual: str, subjects: Mapping[str, Subject]
) -> Iterator[Finding]:  # fmt: skip
    explained: set[HostPair] = set()
    how = "high" if what == "latency" else "low"
    for host in dict.fromkeys(name for pair in speeds for name in pair):
        own = [pair for pair in speeds if host in pair]
        if len(own) > 1 and bad.issuperset(own):
            explained.update(own)
            best = max((speeds[pair] for pair in own), key=lambda speed: speed[1])
            evidence = f"its {what} is {how} with each of {len(own)} hosts, at best {in_words(best)}: {usual}."
            ask, card = subjects[host].by_hand, subjects[host].card
            cure = f"Look at its card and cable: {ask} ethtool {card}\nand at its errors: {ask} ip -s link show {card}"
            yield Finding("warning", host, what, evidence, cure)
    for pair, speed in speeds.items():
        if pair in bad - explained:
            one, other = pair
            evidence = f"the link to {one} is slow, {in_words(speed)}: {usual}."
            address = subjects[other].pasted(subjects[one].examined.route.address)
            cure = (
                f"Look at the way between them: {subjects[other].by_hand} mtr -rn {address}\n"
                f"By hand: {subjects[one].by_hand} iperf3 -s -1\nand meanwhile: {subjects[other].by_hand} iperf3 -c {address}"
            )
            yield Finding("warning", other, f"{what} with {one}", evidence, cure)
