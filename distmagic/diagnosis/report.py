"""The doctor's report: findings, and the rows of the table worth showing. Pure."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from distmagic.diagnosis import among, gpus, nccl, of_host, pairs, reach
from distmagic.diagnosis.as_html import html
from distmagic.diagnosis.as_text import text
from distmagic.diagnosis.finding import (
    MEMORY,
    SHARED_MEMORY,
    Diagnosis,
    Finding,
    Line,
    Subject,
    Unreached,
)
from distmagic.errors import DistmagicError
from distmagic.remote.checkup.collective import RankPair, Speed


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Diagnosis):
    """A diagnosis that a cell shows as text and as a page, or with `is_data` as JSON."""

    is_data: bool = False

    def __repr__(self) -> str:
        return self.to_json() if self.is_data else text(self)

    def _repr_html_(self) -> str | None:
        return None if self.is_data else html(self)

    def to_json(self) -> str:
        """Return the report as JSON: hosts, findings, table."""
        data: dict[str, object] = {"hosts": self.hosts}
        data["findings"] = [asdict(one) for one in self.findings]
        for name in ("table", "square", "speeds"):
            lines: Sequence[Line] = getattr(self, name)
            data[name] = {
                line.title: {host: line.cells.get(host, "") for host in self.hosts}
                for line in lines
            }
        return json.dumps(data, indent=2)


def report(
    every: Sequence[Subject | Unreached],
    local_torch: str | None,
    took_s: float = 0.0,
    reported: Sequence[Finding] = (),
) -> Report:
    """Return the faults of these hosts, and their differences.

    `local_torch` is this machine's version of torch, and `reported` are findings of the scheduler.
    """
    there = [one for one in every if isinstance(one, Subject)]
    hosts = [one.name for one in every]
    # A scheduler may report more nodes than these.
    asked = [one for one in reported if one.host in hosts]
    found = sorted(
        [*asked, *_findings(every, there, local_torch)],
        key=lambda one: (one.level != "error", hosts.index(one.host)),
    )
    compared = {"reached": {one.name: _reached(one) for one in every}}
    for row in among.rows(there):
        compared[row.title] = {one.name: row.value(one) or "" for one in there}
    table, alike = [], []
    for title, cells in compared.items():
        line = _line(title, cells, found)
        # An unreachable host differs in nothing.
        values = set(filter(None, cells.values()))
        if line.odd or len(values) > 1:
            table.append(line)
        elif values:
            alike.append(f"{title} {values.pop()}")
    looked_at: dict[str, dict[str, str]] = {}
    for one in there:
        for title, cell in _looked_at(one).items():
            looked_at.setdefault(title, {})[one.name] = cell
    lines = [_line(title, cells, found) for title, cells in looked_at.items()]
    return Report(
        hosts=tuple(hosts),
        findings=tuple(found),
        table=(*table, *[line for line in lines if line.odd]),
        alike=tuple(alike),
        square=reach.square(hosts, there),
        subjects=tuple(there),
        took_s=took_s,
    )


def _findings(
    every: Sequence[Subject | Unreached],
    there: Sequence[Subject],
    local_torch: str | None,
) -> Iterable[Finding]:
    found = list(reach.findings(there))
    for one in there:
        found += gpus.findings(one)
    found += among.findings(there, local_torch)
    found += nccl.findings(there)
    for host in every:
        if isinstance(host, Unreached):
            found.append(of_host.of_error(host))
        else:
            found += of_host.findings(host, local_torch)
    unique: dict[tuple[str, str], Finding] = {}
    for finding in found:
        # A difference from the other hosts' torch is more important than one from the notebook's.
        unique.setdefault((finding.host, finding.check), finding)
    return unique.values()


def _line(title: str, cells: Mapping[str, str], found: Sequence[Finding]) -> Line:
    odd = frozenset(one.host for one in found if one.check == title)
    return Line(title=title, cells=cells, odd=odd)


def _reached(one: Subject | Unreached) -> str:
    if isinstance(one, Subject):
        return "yes"
    step = getattr(one.error, "step", "")
    return f"no ({step})" if step else "no"


def _looked_at(subject: Subject) -> dict[str, str]:
    """Return properties that may differ between hosts, by title: one is shown if it is wrong on a
    host.
    """
    examined = subject.examined
    names = examined.name_addresses
    devices = {}
    for number, gpu in enumerate(examined.gpus):
        devices[f"{MEMORY} {number}"] = f"{gpu.used_bytes / 1e9:.1f} GB"
        devices[f"ECC of GPU {number}"] = str(gpu.ecc_errors)
        devices[f"speed of GPU {number}"] = gpu.slowed_by or "full"
    return devices | {
        "Xid": examined.xid,
        "address": f"{examined.route.address} {examined.route.interface}",
        "host name": examined.hostname,
        "own name": "" if names is None else next(iter(names), "none"),
        "disk": f"{subject.facts.free_bytes / (1 << 30):,.1f} GiB",
        SHARED_MEMORY: f"{max(examined.shm_bytes, 0) >> 20:,} MiB",
    }


def with_pairs(
    before: Report,
    results: Mapping[RankPair, Speed],
    judged: Container[RankPair],
    took_s: float,
) -> Report:
    """Return the report with the speeds of pairs of ranks, one on each host, in their order.

    Only those in `judged` may be called slow.
    """
    hosts = before.hosts
    measured = {}
    may_be_slow = []
    rows: dict[str, dict[str, str]] = {host: {} for host in hosts}
    for ranks, speed in sorted(results.items()):
        one, other = hosts[ranks[0]], hosts[ranks[1]]
        measured[one, other] = speed
        if ranks in judged:
            may_be_slow.append((one, other))
        rows[one][other] = rows[other][one] = pairs.in_words(speed)
    subjects = {one.name: one for one in before.subjects}
    found = pairs.findings(measured, may_be_slow, subjects)
    return replace(
        before,
        findings=(*before.findings, *found),
        speeds=tuple(Line(title=host, cells=cells) for host, cells in rows.items()),
        took_s=before.took_s + took_s,
    )


def without_pairs(before: Report) -> Report:
    """Return the report of hosts on which a measuring run would fail."""
    evidence = (
        "the speed between hosts was not measured: the errors above would fail a run."
    )
    cure = "Correct them, then repeat the command."
    finding = Finding("warning", before.hosts[0], "collective", evidence, cure)
    return replace(before, findings=(*before.findings, finding))


def with_failure(before: Report, error: DistmagicError) -> Report:
    """Return the report with the error of the measuring run."""
    evidence = f"a run of one rank per host failed. {error.message}"
    finding = Finding("error", before.hosts[0], "collective", evidence, error.hint)
    return replace(before, findings=(finding, *before.findings))
