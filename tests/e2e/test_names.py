"""What a host's own name resolves to does not matter: every row that is known to hang plain torchrun works here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distmagic.api import session
from tests.e2e import runner
from tests.lab import HostSetup, Lab
from tests.lab.waiting import HANG_S

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]


@pytest.fixture(scope="module")
def same_names() -> Iterator[Lab]:
    """Two hosts of the same name."""
    with Lab(2, setups=(HostSetup(hostname="node"), HostSetup(hostname="node"))) as lab:
        yield lab


def ranks_meet(lab: Lab, own_name: str | None, backend: str) -> None:
    """Have the own name of each host resolve to an address, or to none, and ranks of both sum numbers."""
    for host in lab.hosts:
        host.resolve_own_name(own_name)
    run = runner.run_warm(
        lab, "dm1:2,dm2:1", runner.all_reduce, rdzv_backend=backend, timeout_s=HANG_S,
    )  # fmt: skip
    session().close()
    lab.assert_clean()
    assert [float(run.results[rank]["total"]) for rank in run.results] == [3.0] * 3


@pytest.mark.parametrize(
    ("address", "backend"), [(None, "c10d"), ("127.0.1.1", "static")]
)
def test_own_name_leads_nowhere_useful(lab, backend, address):
    ranks_meet(lab, address, backend)


def test_hosts_of_the_same_name_that_is_loopback(same_names):
    ranks_meet(same_names, "127.0.0.1", "static")


def test_the_user_s_own_choice_of_interface_is_left_alone(lab):
    (lab.hosts[0].home / ".bashrc").write_text("export GLOO_SOCKET_IFNAME=lo\n")

    def look() -> tuple[str, str]:
        import os

        return os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]

    run = runner.run(lab, "dm1:1", look, env={"NCCL_SOCKET_IFNAME": "ib0"})
    assert run.results[0] == ("lo", "ib0")
