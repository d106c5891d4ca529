"""Numbers, rates and times as short text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from distmagic.payload.sizes import plural as plural  # noqa: PLC0414  # one of them
from distmagic.remote.wire.protocol import Gpu

_COUNT_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
_COUNT_LIMIT = 1e15
_LONG_S = 1000 * 86_400
_COMPACT_FROM = 100_000  # larger counts are abbreviated


def number(value: float) -> str:
    """Return a metric's value with 4 significant digits: `0.01235`, `12345`, `3e-05`, `NaN`,
    `inf`.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if abs(value) >= 1e6:
        return f"{value:.3e}".replace("e+0", "e").replace("e+", "e")
    if abs(value) >= 1000 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.4g}"


def count(value: float) -> str:
    """Return a number of steps: `5000`, `99,999`, `1.25M`, `2.5`."""
    if not math.isfinite(value):
        return number(value)
    if abs(value) < _COMPACT_FROM:
        if value != int(value):
            return f"{value:.4g}"
        # Four digits read well without a comma, five don't.
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.0f}"
    if abs(value) >= _COUNT_LIMIT:
        return f"{value:.2e}"
    for size, unit in _COUNT_UNITS:
        if abs(value) >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value / 1e3:.0f}k"


def size(done_bytes: float, total_bytes: float) -> str:
    """Return `12 of 80 MB`, `0.3 of 2.1 GB`: both in the unit of the total."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if total_bytes >= size:
            digits = 0 if total_bytes >= 10 * size else 1
            done = f"{done_bytes / size:,.{digits}f}"
            total = f"{total_bytes / size:,.{digits}f}"
            return f"{done} of {total} {unit}"
    return f"{done_bytes:.0f} of {plural(round(total_bytes), 'byte')}"


def used(used_bytes: float, total_bytes: float) -> str:
    """Return `62.1/80.0 GB`: used and total memory."""
    return f"{used_bytes / 1e9:.1f}/{total_bytes / 1e9:.1f} GB"


def per_second(size_bytes: float) -> str:
    """Return `1.2 MB/s`."""
    for unit_bytes, unit in ((1e9, "GB"), (1e6, "MB")):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}/s"
    return f"{size_bytes / 1e3:.0f} kB/s"


def gpus(told: Sequence[Gpu]) -> str:
    """Return `87%, 62.1/80.0 GB, 71 °C`, without unknown values.

    For several GPUs: `mean 85%, fullest 62.1/80.0 GB, hottest 71 °C`.
    """
    mean, fullest, hottest = (
        ("mean ", "fullest ", "hottest ") if told[1:] else ("",) * 3
    )
    words = []
    busy = [one.utilization for one in told if one.utilization is not None]
    if busy:
        words.append(f"{mean}{percent(sum(busy) / len(busy))}")
    full = [(one.used_bytes, one.total_bytes) for one in told if one.used_bytes is not None and one.total_bytes]  # fmt: skip
    if full:
        words.append(f"{fullest}{used(*max(full))}")
    heat = [one.celsius for one in told if one.celsius is not None]
    if heat:
        words.append(f"{hottest}{max(heat):.0f} °C")
    return ", ".join(words)


def percent(fraction: float) -> str:
    """Return `62%`; 100% only if complete, `?` for no number."""
    if math.isnan(fraction):
        return "?"
    if fraction >= 1:
        return "100%"
    return f"{min(99, int(max(fraction, 0) * 100))}%"


def rate(per_s: float, unit: str) -> str:
    """Return `12.3 it/s`, or `4.05 s/it` for less than one per second."""
    if not math.isfinite(per_s) or per_s <= 0:
        return ""
    if per_s < 1:
        return f"{duration(1 / per_s, exact=True)}/{unit}"
    if per_s < 100:
        number = f"{per_s:.1f}"
    elif per_s < _COMPACT_FROM:
        number = f"{per_s:,.0f}"
    else:
        number = count(per_s)
    return f"{number} {unit}/s"


def duration(seconds: float, *, exact: bool = False) -> str:
    """Return a time: `8 s`, `1 min 23 s`, `2 h 05 min`, `3 d 4 h`; with `exact`, `8.25 s` below 10
    s.
    """
    if not math.isfinite(seconds):
        return "?"
    if exact and seconds < 10:
        return f"{seconds:.3g} s"
    if seconds >= _LONG_S:
        return "years"
    minutes, s = divmod(max(0, round(seconds)), 60)
    if minutes == 0:
        return f"{s} s"
    if minutes < 60:
        return f"{minutes} min {s:02} s" if s else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def eta(seconds: float) -> str:
    """Return a remaining time, as precise as it can be known: `45 s`, `4 min`, `2 h 05 min`."""
    if not math.isfinite(seconds):
        return ""
    if 120 <= seconds < 3570:
        return f"{round(seconds / 60)} min"
    return duration(seconds)


def clock(unix_s: float) -> str:
    """Return a time of day of this machine with its seconds: `14:03:27`."""
    return f"{datetime.fromtimestamp(unix_s).astimezone():%H:%M:%S}"


def moment(unix_s: float, now_s: float) -> str:
    """Return a time of day of this machine: `14:03`, with the date if `now_s` is more than 12 hours
    later.
    """
    when = datetime.fromtimestamp(unix_s).astimezone()
    if now_s - unix_s < 12 * 3600:
        return f"{when:%H:%M}"
    return f"{when:%b} {when.day}, {when:%H:%M}"
