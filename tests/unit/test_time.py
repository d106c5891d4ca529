"""Every use of the time of day, and why it may be one: a clock that can be set counts no lease, no age and no wait."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from tests import REPOSITORY

PACKAGE = REPOSITORY / "distmagic"
_OF_DAY = {
    "time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.strftime", "time.ctime", "time.asctime",
    "datetime.now", "datetime.utcnow", "datetime.today", "datetime.fromtimestamp", "date.today",
}  # fmt: skip
_SHOWN = "a date that people read, of this machine's own clock"
_NAME = "part of a name that people read; what follows it makes it unique"
REASONS = {
    ("planning/devices.py", "time.localtime"): _SHOWN,
    ("planning/devices.py", "time.strftime"): _SHOWN,
    ("render/quantities.py", "datetime.fromtimestamp"): _SHOWN,
    ("runner/launch.py", "time.time"): _SHOWN,
    ("session/place.py", "time.time"): _SHOWN,
    ("systems/osmo/workflow.py", "time.time"): _SHOWN,
    (
        "notebook/job_commands.py",
        "time.time",
    ): "how long ago a job began that has ended, in minutes: nothing is decided by it",
    ("screens/notebook.py", "time.time"): _SHOWN,
    ("session/session.py", "time.time"): _SHOWN,
    ("names.py", "time.strftime"): _NAME,
    ("systems/osmo/run.py", "time.strftime"): _NAME,
    (
        "remote/contact/contact.py",
        "time.time",
    ): "hosts are asked for their time of day, to compare the answers",
    (
        "remote/records/listing.py",
        "time.time",
    ): "the date at which a job began, for people and for the order of a list",
    (
        "remote/records/places.py",
        "time.time",
    ): "against dates of /tmp, which is this host's: one in the future is of a clock that was set",
    (
        "remote/system/device_claims.py",
        "time.time",
    ): "the date since when a device is held, for people; the order is that of up_s",
    (
        "remote/engine/meeting.py",
        "datetime.now",
    ): "once a process: torch wants dates, and all of them are counted from this one",
}


def uses() -> Iterator[tuple[str, str]]:
    """Yield (file, what it calls) of each use of the time of day."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(
                node.value, ast.Name | ast.Attribute
            ):
                owner = (
                    node.value.id
                    if isinstance(node.value, ast.Name)
                    else node.value.attr
                )
                if f"{owner}.{node.attr}" in _OF_DAY:
                    yield path.relative_to(PACKAGE).as_posix(), f"{owner}.{node.attr}"
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                yield path.relative_to(PACKAGE).as_posix(), "from time import"


def test_each_use_of_the_time_of_day_has_a_reason() -> None:
    found = Counter(uses())
    assert set(found) - set(REASONS) == set(), (
        "a clock that can be set: time.monotonic, processes.up_s or places.now_at"
    )
    assert set(REASONS) - set(found) == set(), "uses that are gone"
