"""Ranks that can't reach each other although their nodes met: the error says which host could not reach which, and why."""

from __future__ import annotations

import pytest

from distmagic.errors import WorkerFailed
from tests.e2e import runner

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

PORT = 29500


def meet(seconds: float) -> None:
    """Meet the other ranks over gloo."""
    import datetime as dt

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=seconds))


def ask_store(host: str, port: int, seconds: float) -> None:
    """Look for a store that isn't there, on rank 1."""
    import datetime as dt
    import os

    import torch.distributed as dist

    if os.environ["RANK"] == "1":
        dist.TCPStore(
            host, port, is_master=False, timeout=dt.timedelta(seconds=seconds)
        )


@pytest.mark.parametrize(
    ("how", "why"),
    [("reject with tcp reset", "connection refused"), ("drop", "no answer")],
)
def test_closed_ports_between_ranks(warm_lab, how, why):
    hosts = warm_lab.hosts[:2]
    for host in hosts:
        host.close_ports(how, but=(22, PORT))
    error = runner.failure_warm(warm_lab, "dm1:1,dm2:1", meet, 5.0, master_port=PORT)
    for host in hosts:
        host.undrop()
    assert isinstance(error, WorkerFailed)
    first = error.hint.splitlines()[0]
    own = error.message.partition("(")[2].partition(",")[0]
    other = {"dm1": hosts[1], "dm2": hosts[0]}[own]
    assert first.startswith(f"{own} could not reach {other.name}")
    assert f": {why}. " in first
    if why != "no answer":  # of which gloo doesn't tell the address
        assert f"{other.name} ({other.address} port " in first


def test_a_store_that_is_not_there(warm_lab):
    error = runner.failure_warm(warm_lab, "dm1:1,dm2:1", ask_store, "dm1", 4444, 1.0)
    assert isinstance(error, WorkerFailed)
    assert error.hint.startswith("dm2 could not reach dm1 port 4444: ")
    assert "no connection in time" in error.hint
