"""All that the doctor has found: findings, and the rows of the table that are worth a look. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from distmagic.diagnosis import among, gpus, of_host, pairs, reach
from distmagic.diagnosis.as_html import html
from distmagic.diagnosis.as_text import text
from distmagic.diagnosis.finding import SHARED_MEMORY, Diagnosis, Finding, Line, Subject
from distmagic.diagnosis.pairs import Pair
from distmagic.errors import DistmagicError
from distmagic.remote.checkup.collective import Measured


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Diagnosis):
    """A diagnosis that shows itself as text and as a page, or with `is_data` as JSON."""

    is_data: bool = False

    def __repr__(self) -> str:
        return self.to_json() if self.is_data else text(self)

    def _repr_html_(self) -> str | None:
        return None if self.is_data else html(self)

    def to_json(self) -> str:
        """Return the report as a text that programs read: hosts, findings, table."""
        table = {line.title: dict(zip(self.hosts, line.cells, strict=True)) for line in self.table}  # fmt: skip
        found = [asdict(one) for one in self.findings]
        square = {line.title: dict(zip(self.hosts, line.cells, strict=True)) for line in self.square}  # fmt: skip
        speeds = {line.title: dict(zip(self.hosts, line.cells, strict=True)) for line in self.speeds}  # fmt: skip
        data = {"speeds": speeds, "hosts": self.hosts, "findings": found, "table": table, "square": square}  # fmt: skip
        return json.dumps(data, indent=2)


def report(
    subjects: Sequence[Subject], local_torch: str | None, took_s: float = 0.0
) -> Report:
    """Return what is wrong with these hosts, and in what they differ. `local_torch` is this machine's version of torch."""
    unique: dict[tuple[str, str], Finding] = {}
    there = [one for one in subjects if one.facts is not None]
    every = [
        *reach.findings(subjects),
        *gpus.findings(there),
        *among.findings(subjects),
    ]
    for one in subjects:
        every += of_host.findings(one, local_torch)
    for finding in every:
        # That its torch is another one than the others' comes before that it is another one than the notebook's.
        unique.setdefault((finding.host, finding.check), finding)
    found = list(unique.values())
    order = {one.name: index for index, one in enumerate(subjects)}
    found.sort(key=lambda one: (one.level != "error", order[one.host]))
    table, alike = [], []
    compared = [_compared(one) for one in subjects]
    for line in _lines(compared, found, order):
        # A host that is out of reach differs in nothing.
        values = {cell for cell in line.cells if cell}
        if line.odd or len(values) > 1:
            table.append(line)
        elif values:
            alike.append(f"{line.title} {values.pop()}")
    looked_at = [_looked_at(one) for one in subjects]
    table += [line for line in _lines(looked_at, found, order) if line.odd]
    return Report(
        hosts=tuple(order),
        findings=tuple(found),
        table=tuple(table),
        alike=tuple(alike),
        square=tuple(
            Line(title=name, cells=tuple(cells))
            for name, cells in reach.square(subjects)
        ),
        took_s=took_s,
    )


def with_pairs(
    before: Report, results: Mapping[int, Sequence[Measured]], took_s: float
) -> Report:
    """Return the report with what ranks have measured, one on each host, in their order."""
    measured = []
    for rank, measures in results.items():
        for other, latency_s, bytes_per_s in measures:
            if rank < other:
                hosts = before.hosts[rank], before.hosts[other]
                measured.append(Pair(hosts=hosts, latency_s=latency_s, bytes_per_s=bytes_per_s))  # fmt: skip
    found = [*before.findings, *pairs.findings(measured)]
    speeds = {pair.hosts: pairs.in_words(pair) for pair in measured}
    lines = []
    for host in before.hosts:
        cells = []
        for other_host in before.hosts:
            said = speeds.get((host, other_host), "")
            cells.append(said or speeds.get((other_host, host), ""))
        lines.append(Line(title=host, cells=tuple(cells)))
    return replace(
        before,
        findings=tuple(found),
        speeds=tuple(lines),
        took_s=before.took_s + took_s,
    )


def with_failure(before: Report, error: DistmagicError) -> Report:
    """Return the report with the error of the run that was to measure how fast hosts are."""
    finding = Finding(
        level="error",
        host=before.hosts[0],
        check="collective",
        evidence=f"a run of one rank a host failed. {error.message}",
        cure=error.hint,
    )
    return replace(before, findings=(finding, *before.findings))


def _lines(
    tables: Sequence[Mapping[str, str]],
    found: Sequence[Finding],
    order: Mapping[str, int],
) -> Iterator[Line]:
    for title in dict.fromkeys(title for table in tables for title in table):
        odd = frozenset(order[one.host] for one in found if one.check == title)
        cells = tuple(table.get(title, "") for table in tables)
        yield Line(title=title, cells=cells, odd=odd)


def _compared(subject: Subject) -> dict[str, str]:
    """Return what should be alike on all hosts, by title; nothing of one that is out of reach."""
    facts, examined = subject.facts, subject.examined
    if facts is None:
        step = getattr(subject.error, "step", "")
        return {"reached": f"no ({step})" if step else "no"}
    cells = {
        "reached": "yes",
        "python": ".".join(map(str, subject.python[:2])),
        "torch": facts.torch or "none",
        "GPUs": str(facts.gpus),
    }
    if examined is None:
        return cells
    mtu = examined.mtus.get(subject.route.interface, 0) if subject.route else 0
    cells |= {
        "models": gpus.models(subject),
        "CUDA of torch": examined.torch_cuda,
        "driver": examined.driver,
        "MTU": f"{mtu or ''}",
        "open files": _or_unlimited(examined.open_files, 1, ""),
        "locked memory": _or_unlimited(examined.locked_bytes, 1 << 10, " KiB"),
    }
    for name, value in examined.variables.items():
        cells[name] = value
    for name, version in examined.packages.items():
        cells.setdefault(name, version)
    return cells


def _looked_at(subject: Subject) -> dict[str, str]:
    """Return what may well differ among hosts, by title: it is shown where it is wrong on one of them."""
    facts, examined = subject.facts, subject.examined
    if facts is None or examined is None:
        return {}
    route = subject.route
    devices = {}
    for number, gpu in enumerate(examined.gpus):
        devices[f"memory of GPU {number}"] = f"{gpu.used_bytes / 1e9:.1f} GB"
        devices[f"ECC of GPU {number}"] = str(gpu.ecc_errors)
        devices[f"speed of GPU {number}"] = gpu.slowed_by or "full"
    return devices | {
        "Xid": examined.xid,
        "address": f"{route.address} {route.interface}" if route else "",
        "host name": examined.hostname,
        "own name": examined.name_addresses[0] if examined.name_addresses else "none",
        "disk": f"{facts.free_bytes / (1 << 30):,.1f} GiB",
        SHARED_MEMORY: _or_unlimited(examined.shm_bytes, 1 << 20, " MiB"),
    }


def _or_unlimited(value: int, unit: int, words: str) -> str:
    return "none" if value < 0 else f"{value // unit:,}{words}"
