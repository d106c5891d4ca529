"""A run on hosts of a system that somebody else brings by an entry point."""

import sys

import pytest

import distmagic
from distmagic.api import session
from distmagic.request.access import Access
from distmagic.request.flags import Defaults, parse_line
from tests.builders.own_systems import TOY, installed
from tests.e2e import runner
from tests.e2e.runner import as_value

pytestmark = pytest.mark.needs("lab")


@pytest.mark.quick
def test_ranks_run_on_its_hosts(tmp_path, monkeypatch):
    with installed(tmp_path, monkeypatch, TOY):
        run = distmagic.run(
            as_value(runner.all_reduce),
            allocation=parse_line("--on toy", Defaults()).allocation,
            nproc_per_node=2,
            access=Access(pythons=(("", sys.executable),)),
            screen=runner.Watch(),
        )
        session().close()  # and with it what the host keeps loaded
    assert [run.results[rank]["rank"] for rank in run.results] == [0, 1]
    assert {worker.host for worker in run.state.workers.values()} == {"toy-0"}
