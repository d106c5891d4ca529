"""A disk that is full under a job of its own, and a limit of logs that is none. Rows of the fault table fill disks, too."""

from __future__ import annotations

import pytest

from distmagic.api import session
from distmagic.errors import PreflightError
from distmagic.planning.jobs import choose
from distmagic.request.hosts import parse_hosts
from tests.e2e import runner
from tests.e2e.runner import as_value, detach, reach

pytestmark = pytest.mark.needs("lab")

DISK_BYTES = 32 << 20


def test_a_limit_that_is_none(lab):
    limit = {"DISTMAGIC_LOG_BYTES": "64M"}
    error = runner.failure(lab, "dm1:1,dm2:1", wait_for_ever, env=limit)
    assert "dm1" in str(error)
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
