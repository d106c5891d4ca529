"""Every use of time, and why it may be that one: of the time of day, of a file's date, of the clock that nobody can set.

The time of day can be set, so it counts no lease, no age and no wait. A file's date is of the clock of its file system,
which for a home on a file server is the server's. The clock that nobody can set stands still in a suspend: what has to
count a sleep of the machine is `processes.up_s`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

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
    (
        "session/doctor.py",
        "time.time",
    ): "it decides which of two hosts has the wrong clock",
    ("systems/osmo/workflow.py", "time.time"): _SHOWN,
    ("screens/notebook.py", "time.time"): _SHOWN,
    ("session/session.py", "time.time"): _SHOWN,
    ("staying/cell_runner.py", "time.time"): _SHOWN,
    ("staying/ranks.py", "time.time"): _SHOWN,
    ("names.py", "time.strftime"): _NAME,
    ("systems/osmo/run.py", "time.strftime"): _NAME,
    (
        "remote/rank/calls.py",
        "time.time_ns",
    ): "torch's recorder has dates of this clock alone; only how long a call waits follows from it, for people",
    (
        "remote/rank/stay.py",
        "time.time_ns",
    ): "which of the recorder's calls are of this cell: it has dates of this clock alone",
    (
        "remote/contact/contact.py",
        "time.time",
    ): "hosts are asked for their time of day, to compare the answers",
    (
        "remote/records/listing.py",
        "time.time",
    ): "how long ago a job began that has ended, if its host has restarted since: no clock of it goes on but this one",
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


# Files, and what their dates are held against.
_AS_IT_WAS = "only whether it is another date than before: no age"
_OF_THE_HOME = "against places.now_at: the clock that dates the home's files"
FILE_DATES = {
    "transports/ssh/known_hosts.py": _AS_IT_WAS,
    "transports/ssh/config_lines.py": _AS_IT_WAS,
    "transports/ssh/config.py": _AS_IT_WAS,
    "payload/bundle.py": _AS_IT_WAS,
    "remote/records/work_sync.py": f"{_AS_IT_WAS}; of incoming folders {_OF_THE_HOME}",
    "remote/contact/template_client.py": _AS_IT_WAS,
    "remote/training/profiling.py": _AS_IT_WAS,
    "remote/records/brought_files.py": f"{_AS_IT_WAS}; {_OF_THE_HOME}",
    "inside/shared_home.py": _OF_THE_HOME,
    "remote/records/work_dirs.py": _OF_THE_HOME,
    "remote/records/expiry.py": _OF_THE_HOME,
    "remote/records/environments.py": _OF_THE_HOME,
    "remote/records/places.py": f"what now_at is; in /tmp {REASONS[('remote/records/places.py', 'time.time')]}; "
    "the dates of two files of one folder: how long a job ran that has ended",
    "remote/rank/checkpoint.py": _OF_THE_HOME,
    "remote/records/found_files.py": "told as it is, and given to the file that is fetched",
    "connection/requests/remote_files.py": f"of the host's: {_AS_IT_WAS}",
    "payload/seen_files.py": f"{_AS_IT_WAS}; of files that this process neither sent nor fetched against the time "
    "when the run began, by the clock that dates files there",
}
_WAIT = (
    "how long this process waits for something: nobody waits while the machine sleeps"
)
_PACE = "how often something is done, told or looked at"
_TOOK = "how long something took, for people or to be compared: the machine was at work"
_LEASE = "a lease that is renewed each few seconds: while its host sleeps neither ranks run nor can it be renewed"
STEADY = {
    "remote/training/frames.py": _WAIT,
    "runner/interrupts.py": "whether two signals are one",
    "runner/run_loop.py": f"the clock of a run; {_WAIT}",
    "runner/prepare.py": "two looks in a row, between which a host has told its time of day",
    "runner/delivery.py": _PACE,
    "exports/on_nodes/run_node.py": _WAIT,
    "transports/ssh/deadline.py": _WAIT,
    "systems/slurm/allocation.py": f"{_WAIT}; {_PACE}",
    "systems/skypilot/sky.py": _WAIT,
    "inside/meeting.py": _WAIT,
    "inside/following.py": _WAIT,
    "session/background.py": _WAIT,
    "connection/requests/profile_requests.py": _WAIT,
    "remote/records/work_dirs.py": _WAIT,
    "remote/records/expiry.py": _WAIT,
    "remote/records/found_files.py": _WAIT,
    "remote/agent/reader.py": "how long one turn of the agent lasts: it is at work",
    "remote/agent/main.py": f"the clock of an agent. {_LEASE}",
    "remote/engine/meeting.py": "what has passed since this process began, in place of torch's time of day",
    "remote/engine/engine.py": _WAIT,
    "remote/engine/spare_ranks.py": _WAIT,
    "remote/rank/rich_bars.py": _PACE,
    "remote/training/loading.py": "how long a rank loads, of the time of its function",
    "remote/training/steps.py": f"{_WAIT}; since when a rank has made no step",
    "remote/checkup/collective.py": f"{_TOOK}; for how long pairs are measured again",
    "remote/checkup/nccl_ras.py": _WAIT,
    "connection/requests/host_requests.py": "two looks in a row, between which a host has told its time of day",
    "notebook/host_commands.py": _TOOK,
    "session/doctor.py": _TOOK,
    "staying/cell_runner.py": _PACE,
    "staying/starting.py": "how long no cell ran: in a sleep of this machine the lease ends the ranks",
    "remote/rank/report.py": f"{_PACE}; when a rank reported, since it began",
    "remote/rank/outbox.py": _WAIT,
    "remote/contact/task.py": _PACE,
    "remote/contact/environment_sync.py": f"{_PACE}; {_TOOK}",
    "remote/contact/blob_server.py": _WAIT,
    "remote/contact/blob_receiver.py": _PACE,
    "remote/contact/mutual_tls.py": _WAIT,
    "remote/contact/template.py": _LEASE,
    "remote/keeper/hold.py": "how long no job was on a node of a cluster, which does not sleep",
    "remote/keeper/keeper.py": _LEASE,
    "remote/keeper/usher.py": _WAIT,
    "remote/system/processes.py": _WAIT,
    "remote/system/hardware.py": "how much was done between two looks",
    "connection/requests/progress_line.py": f"{_PACE}; {_TOOK}",
    "transports/time_limits.py": _WAIT,
    "connection/idle_links.py": _WAIT,
    "playground/server.py": _WAIT,
    "screens/announcing.py": _PACE,
    "screens/board.py": "what a picture costs this thread: the next one waits for longer",
}
# What counts a sleep of the machine, too.
UP = {
    "playground/server.py": "for how long nobody has used a playground that is kept",
    "payload/seen_files.py": "since when a file has looked so, and how long ago a run began",
    "runner/launch.py": "when a run began, against which seen_files counts",
    "remote/records/listing.py": "when a job began, for a run that follows it after its end: see runner/launch.py",
    "systems/skypilot/cluster.py": "how long a cluster is held, which goes on while this machine sleeps",
    "remote/system/device_claims.py": "the order of those that wait, and since when",
    "remote/system/processes.py": "how old a process is: the kernel counts its start so",
}
IN_THE_PAGE = {
    "view.js": "when this page heard last, for people, by the clock of the reader",
    "channel.js": "the date that Jupyter's messages have",
}


@cache
def names() -> frozenset[tuple[str, str]]:
    """Return (file, name, with what it is of) of each name that the package has."""
    return frozenset(_found())


def _found() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                if isinstance(owner, ast.Attribute):
                    yield file, f"{owner.attr}.{node.attr}"
                elif isinstance(owner, ast.Name):
                    yield file, f"{owner.id}.{node.attr}"
                else:
                    yield file, f".{node.attr}"
            elif isinstance(node, ast.Name):
                yield file, node.id
            elif isinstance(node, ast.ImportFrom | ast.alias) and is_time(node):
                yield file, "from time import"


def is_time(node: ast.ImportFrom | ast.alias) -> bool:
    """Whether an import gives `time`, or what is in it, another name."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "time"
    return node.name == "time" and node.asname is not None


def files_with(*ends: str) -> set[str]:
    return {file for file, name in names() if name.rpartition(".")[2].startswith(ends)}


def test_each_use_of_the_time_of_day_has_a_reason():
    found = {
        (file, name)
        for file, name in names()
        if name in _OF_DAY or name == "from time import"
    }
    assert found - set(REASONS) == set(), (
        "a clock that can be set: time.monotonic, processes.up_s or places.now_at"
    )
    assert set(REASONS) - found == set(), "uses that are gone"


@pytest.mark.parametrize(
    ("ends", "reasons"),
    [
        (("st_mtime", "st_ctime", "st_atime", "getmtime", "getctime"), FILE_DATES),
        (("monotonic", "perf_counter", "thread_time", "process_time"), STEADY),
        (("up_s", "clock_gettime"), UP),
    ],
)
def test_each_use_of_another_time_has_a_reason(ends, reasons):
    assert files_with(*ends) ^ set(reasons) == set()


def test_each_use_of_time_in_the_page_has_a_reason():
    page = PACKAGE / "screens" / "page"
    found = {
        path.name
        for path in page.rglob("*.js")
        if re.search(r"\bDate\b|performance\.now|timeOrigin", path.read_text())
    }
    assert found ^ set(IN_THE_PAGE) == set()


def test_no_shell_on_a_host_reads_a_clock():
    """No script that travels asks `date`, whose answer can be set."""
    found = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in (".py", ".sh")
        and re.search(
            r"\bdate [+-]|\$\(date\)|EPOCHSECONDS|\bSECONDS=", path.read_text()
        )
    ]
    assert found == []
