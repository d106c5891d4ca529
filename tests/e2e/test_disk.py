"""Disks that fill up, and logs that grow: training goes on, and what is not kept is told."""

from __future__ import annotations

import re

import pytest

from distmagic.api import session
from distmagic.errors import NoResult, PreflightError
from distmagic.planning.jobs import choose
from distmagic.request.hosts import parse_hosts
from tests.e2e import runner
from tests.e2e.runner import as_value, detach, reach

pytestmark = pytest.mark.needs("lab")

DISK_BYTES = 32 << 20
NOT_KEPT = "dm1: can't write to /home/node/.distmagic/jobs/{job}/0-dm1 (No space left on device): "


def fill_the_disk(disk_bytes: int) -> object:
    """Print and report on a full disk, make room, print, and return more than there is room for."""
    import contextlib
    import os
    import time
    from pathlib import Path

    import torch

    import distmagic

    def say(*words: object) -> None:
        print(*words)
        time.sleep(2.0)  # each with an event of its own

    filler = Path("~/filler").expanduser()
    say("there is room")
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        # A host with another disk than the test's is not filled.
        for _ in range(disk_bytes // 4096):
            file.write(bytes(4096))
    for i in range(20):  # the log's last page takes some of it
        print(f"{i:03d}" * 400)
        distmagic.report(step=i + 1, total=20, loss=1.0)
    say("the disk is full")
    os.unlink(filler)  # noqa: PTH108
    say("there is room again")
    return torch.zeros(40 << 18)


def test_a_disk_that_becomes_full_stops_no_run(lab):
    lab.hosts[0].limit_home(DISK_BYTES)
    run = runner.run(lab, "dm1:1,dm2:1", fill_the_disk, DISK_BYTES)
    assert run.state.phase == "done"
    words = [line.text for line in run.state.lines if line.rank == 0]
    for text in (
        "there is room",
        *(f"{i:03d}" * 400 for i in range(20)),
        "the disk is full",
        "there is room again",
    ):
        assert words.count(text) == 1  # shown, though the log has not all of it
    assert (
        run.state.workers[0].step,
        len([row for row in run.metrics if row["rank"] == 0]),
    ) == (20, 20)
    log = run.logs(0, "stdout")
    missing = re.search(
        r"\n\[distmagic: ([0-9,]+) bytes are missing in this log: the disk was full\]\n",
        log,
    )
    assert missing is not None
    assert log.startswith("there is room\n")
    assert log.endswith("there is room again\n")
    whole = (
        "there is room\n"
        + "".join(f"{i:03d}" * 400 + "\n" for i in range(20))
        + "the disk is full\nthere is room again\n"
    )
    assert len(log) - len(missing[0]) + int(missing[1].replace(",", "")) == len(whole)
    told = [one for one in run.state.notices if one.startswith("dm1: can't write")]
    assert [text.startswith(NOT_KEPT.format(job=run.job)) for text in told] == [True]
    assert any("written to again" in text for text in run.state.notices)
    with pytest.raises(NoResult) as caught:
        run.results[0]
    assert re.search(
        r"rank 0 \(dm1, .* 41,9[0-9]{2},[0-9]{3} bytes", caught.value.message
    )
    assert "No space left on device" in caught.value.message
    assert run.results[1].numel() == 40 << 18


def end_on_a_full_disk(disk_bytes: int) -> None:
    """Fail because the disk is full, and leave it so."""
    from pathlib import Path

    with Path("~/filler").expanduser().open("wb", buffering=0) as file:
        for _ in range(disk_bytes // 4096):
            file.write(bytes(4096))


def test_a_job_that_died_of_a_full_disk_still_says_so_later(lab):
    lab.hosts[0].limit_home(DISK_BYTES)
    error = runner.failure(lab, "dm1:1", end_on_a_full_disk, DISK_BYTES)
    assert "No space left on device" in str(error)
    [job] = session().housekeeping.jobs(reach(lab, parse_hosts("dm1")))
    assert job.phase == "failed"
    screen = runner.Watch()
    with pytest.raises(type(error)) as caught:
        session().attach(reach(lab, parse_hosts("dm1")), job, screen)
    # Each names the variable that has its run.
    assert str(caught.value) == str(error).replace("error.run.", "run.")


def talk_for_long() -> None:
    """Print four times what is kept, and report meanwhile."""
    import distmagic

    for i in range(10_000):
        print(f"line {i:05d} of a rank that talks")
        distmagic.report(step=i)


def test_a_log_keeps_to_its_limit(lab):
    limit = 80_000
    run = runner.run(
        lab, "dm1:1", talk_for_long, env={"DISTMAGIC_LOG_BYTES": str(limit)}
    )
    log = run.logs(0, "stdout")
    beginning, gap, newest = re.split(
        r"\n\[distmagic: ([0-9,]+) bytes are not kept: .*\]\n", log
    )
    whole = "".join(f"line {i:05d} of a rank that talks\n" for i in range(10_000))
    assert whole.startswith(beginning)
    assert whole.endswith(newest)
    assert len(beginning) == limit // 8
    assert limit * 6 // 8 <= len(newest) <= limit * 7 // 8
    assert len(beginning) + int(gap.replace(",", "")) + len(newest) == len(whole)
    [folder] = lab.hosts[0].home.glob(f".distmagic/jobs/{run.job}/*")
    assert (
        sum(path.stat().st_size for path in folder.glob("rank0.stdout.log*")) <= limit
    )


def test_a_limit_that_is_none(lab):
    error = runner.failure(
        lab, "dm1:1,dm2:1", talk_for_long, env={"DISTMAGIC_LOG_BYTES": "64M"}
    )
    assert isinstance(error, PreflightError) or "dm1" in str(error)
    assert "DISTMAGIC_LOG_BYTES=64M" in str(error)


def wait_for_ever() -> None:
    import time

    time.sleep(600)


def test_a_job_on_a_disk_that_is_full_is_found_and_stopped_over_a_new_connection(lab):
    host, hosts = lab.hosts[0], parse_hosts("dm1:1,dm2:1")
    host.limit_home(DISK_BYTES)
    left = detach(lab, "dm1:1,dm2:1", as_value(wait_for_ever))
    host.exec(["sh", "-c", "cat /dev/zero > ~/filler"])
    session().close()
    with pytest.raises(PreflightError) as caught:
        detach(lab, "dm1:1,dm2:1", as_value(wait_for_ever))
    assert caught.value.host == "dm1"
    assert "[Errno 28]" in caught.value.message
    session().close()
    job = choose(session().housekeeping.jobs(reach(lab, hosts)), left.job)
    assert (job.phase, job.hosts, job.missing) == ("detached", ("dm1", "dm2"), ())
    session().housekeeping.stop(reach(lab, hosts), job)
    job = choose(session().housekeeping.jobs(reach(lab, hosts)), left.job)
    assert job.phase == "stopped"
    session().close()
