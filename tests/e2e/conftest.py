"""What scenes share: a session of their own for each module; on real Slurm for each scene, and the rule that nothing is left."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from distmagic import api
from distmagic.session.session import Session
from tests.e2e.exports import Export, exporter
from tests.e2e.slurm_cells import Held
from tests.lab import HostProcess, Lab, LabHost, wait_until
from tests.lab.slurm import LOOK_S, SlurmLab


@pytest.fixture(scope="module", autouse=True)
def _own_session() -> None:
    """A session knows the hosts of all its runs. Those of earlier modules may be of a lab that is gone."""
    api.session().close()
    api.session.cache_clear()


@pytest.fixture
def lab(_cold: None, lab: Lab) -> Lab:
    """The lab as for all tests. What tests with `warm_lab` have kept loaded ends before."""
    return lab


@pytest.fixture
def _cold() -> None:
    api.session().down()


@pytest.fixture
def warm_lab(session_lab: Lab) -> Iterator[Lab]:
    """The lab for `runner.run_warm`: hosts keep torch loaded from test to test, and no process of a run is left on them.

    A run takes half a second then, not six, so tests that aren't about how ranks start ask for it.
    """
    for host in session_lab.hosts:
        host.empty_home(keeps=".distmagic")
        shutil.rmtree(host.home / ".distmagic" / "work", ignore_errors=True)
    yield session_lab
    wait_until(lambda: not at_work_on(session_lab.hosts), "agents and ranks to end")


@pytest.fixture
def ended(lab: Lab) -> Iterator[Lab]:
    """The lab, on which nothing is left after the test."""
    yield lab
    api.session().close()
    lab.assert_clean()


@pytest.fixture
def kernel(slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A kernel's session of its own for each test; afterwards nothing is left, in Slurm or on any host."""
    made = Session()
    monkeypatch.setattr(api, "session", lambda: made)
    yield made
    made.down()
    slurm.assert_clean()


@pytest.fixture(scope="module")
def held_by_module(session_slurm: SlurmLab) -> Iterator[Held]:
    """What `held` gives to each test of a module."""
    session_slurm.mend()
    made = Held(slurm=session_slurm, kernel=Session())
    yield made
    made.kernel.down()
    session_slurm.assert_clean()


@pytest.fixture
def held(held_by_module: Held, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """A kernel that the tests of a module share, with its allocation; after each of them no job of distmagic runs there.

    Tests that ask for it come first in their module: `slurm` and `kernel` end every job of Slurm.
    """
    monkeypatch.setattr(api, "session", lambda: held_by_module.kernel)
    yield held_by_module
    nodes = held_by_module.slurm.nodes
    wait_until(lambda: not at_work_on(nodes), "agents and ranks to end", every_s=LOOK_S)


def at_work_on(hosts: Iterable[LabHost]) -> list[HostProcess]:
    """Return what runs on hosts for jobs of distmagic. What is kept loaded for the next one has dashes in place of a job."""
    processes = [one for host in hosts for one in host.processes()]
    return [one for one in processes if one.environ.get("DISTMAGIC_JOB", "").strip("-")]


@pytest.fixture
def export(tmp_path: Path) -> Iterator[Export]:
    """Return what exports the program of these tests to a folder that all hosts see."""
    with exporter(tmp_path) as write:
        yield write
