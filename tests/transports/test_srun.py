"""The contract of `contract.py` over srun and keepers of real Slurm: from a log-in node, and through SSH to one."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator

import pytest

from distmagic.connection.connections import connect
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import AllocationEnded, ConnectionLost
from distmagic.request.access import Access
from distmagic.request.allocation import SlurmRequest
from distmagic.request.hosts import Host, parse_host
from distmagic.systems.slurm.allocation import Allocation, submitted
from distmagic.systems.slurm.shell import Shell
from distmagic.systems.slurm.srun_words import source
from distmagic.systems.slurm.submission import KeeperTerms
from distmagic.transports import Transport
from distmagic.transports.asking import Asker
from distmagic.transports.local import LocalTransport
from distmagic.transports.piped import PipedProcess
from tests.lab.slurm import SlurmLab
from tests.transports.contract import CONTRACT

pytestmark = pytest.mark.needs("lab", "slurm")
TERMS = KeeperTerms(python="python3", lease_s=60.0)


class OnLogin(LocalTransport):
    """What `local` is for a notebook that runs on the log-in node."""

    def __init__(self, slurm: SlurmLab) -> None:
        super().__init__()
        enter = (
            "nsenter",
            "--target",
            str(slurm.login._first_pid),
            "--net",
            "--uts",
            "--ipc",
            "--pid",
            "--mount",
        )
        self._enter = (*enter, "--", "env", "-C", "/home/node", "HOME=/home/node")

    def start(self, argv: tuple[str, ...]) -> PipedProcess:
        return super().start((*self._enter, *argv))


@pytest.fixture(scope="module", params=["on the log-in node", "over SSH"])
def allocation(
    request: pytest.FixtureRequest, session_slurm: SlurmLab
) -> Iterator[Allocation]:
    slurm = session_slurm
    slurm.cancel_all()
    access = Access(ssh_config=str(slurm.lab.ssh_config))

    def reach(asker: Asker) -> Transport:
        return (
            OnLogin(slurm)
            if request.param == "on the log-in node"
            else connect(parse_host("dm1"), access, asker)
        )

    shell, asker = Shell("dm1", reach), NotebookAsker(can_ask=False)
    wanted = SlurmRequest(login="dm1", nodes=2)
    made = submitted(wanted, shell, TERMS, asker, "distmagic:test")
    made.wait(asker, lambda _: None)
    yield made
    made.end()
    shell.close()
    slurm.assert_clean()


@pytest.fixture
def transport(
    allocation: Allocation, session_slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Transport]:
    # Which the nodes see, too.
    monkeypatch.setattr(tempfile, "tempdir", str(session_slurm.lab.folder))
    made = allocation.transport(
        allocation.hosts[1], Access(), NotebookAsker(can_ask=False)
    )
    yield made
    made.close()


@pytest.mark.quick
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check, transport):
    check(transport)


def test_a_blob_of_50_megabytes_without_a_newline(transport):
    """Without --unbuffered, srun would keep it until there is one."""
    process = transport.start(("cat",))
    process.write(b"first")
    assert process.read() == b"first"
    whole = bytes(50_000_000)
    writer = threading.Thread(
        target=lambda: (process.write(whole), process.close_stdin())
    )
    writer.start()
    count = 0
    while data := process.read(1 << 20):
        count += len(data)
        assert data.count(0) == len(data)
    writer.join()
    assert count == len(whole)
    process.close()


def test_a_job_that_has_ended_is_told_by_the_first_read(session_slurm):
    slurm = session_slurm
    access, asker = (
        Access(ssh_config=str(slurm.lab.ssh_config)),
        NotebookAsker(can_ask=False),
    )
    shell = Shell("dm1", lambda asker: connect(parse_host("dm1"), access, asker))
    wanted = SlurmRequest(login="dm1")
    made = submitted(wanted, shell, TERMS, asker, "distmagic:test")
    (host,) = made.wait(asker, lambda _: None)
    way = made.transport(host, Access(), asker)
    slurm.cancel_all()
    with pytest.raises(AllocationEnded, match=rf"{made.job} .*scancel"):
        way.start(("true",)).read()
    with pytest.raises(AllocationEnded, match="scancel"):
        made.transport(host, Access(), asker)
    made.end()
    shell.close()


def test_a_log_in_node_that_is_gone_is_a_lost_connection(session_slurm):
    shell = Shell("dm1", lambda _: OnLogin(session_slurm))
    with pytest.raises(ConnectionLost):
        shell.start(("true",))


def test_the_name_of_a_node_is_another_place_in_another_allocation():
    first, second = (
        Host(name="a1", allocation=source("", str(job))) for job in (17, 18)
    )
    assert first != second
    assert first.by_hand() == "srun --jobid=17 --overlap -N1 -n1 -w a1"
