"""What the doctor finds in what hosts have answered: which host, how bad, what was seen, and the cure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from distmagic.diagnosis.finding import Subject, Unreached
from distmagic.diagnosis.report import Report, report
from distmagic.remote.wire.protocol import Examined, Facts, GpuHealth, Route
from distmagic.transports import troubles
from tests.builders.plans import FACTS

TORCH = "2.13.0+cu128"
GIB = 1 << 30
GPU = GpuHealth(model="H100", total_bytes=80 * GIB)
EXAMINED = Examined(
    hostname="a",
    name_addresses=("10.0.0.1",),
    mtus={"eth0": 1500},
    shm_bytes=8 * GIB,
    open_files=1024,
    locked_bytes=8 << 20,
    packages={"torch": TORCH, "numpy": "2.1.0"},
    torch_cuda="12.8",
    driver="570.1",
    driver_cuda="12.8",
    gpus=(GPU,) * 8,
)


def host(number: int, examined: Any = None, facts: Any = None, **more: Any) -> Subject:
    """Return a healthy host, but for some fields of what it has answered."""
    address, name = f"10.0.0.{number}", f"gpu-{number}"
    route = Route(address=address, interface="eth0")
    plain = replace(EXAMINED, hostname=name, name_addresses=(address,), route=route)
    known: Facts = replace(
        FACTS,
        torch=TORCH,
        gpus=8,
        host_id=name,
        state_dir="/home/me/.distmagic",
        free_bytes=500 * GIB,
    )
    subject = Subject(
        name=name,
        by_hand=f"ssh {name}",
        python=(3, 11, 2),
        facts=replace(known, **(facts or {})),
        examined=replace(plain, **(examined or {})),
    )
    return replace(subject, **more)


def found(*odd: Subject | Unreached) -> Report:
    """Return the report on three healthy hosts, of which the last ones are `odd`."""
    healthy = [host(1), host(2), host(3)][: 3 - len(odd)]
    return report([*healthy, *odd], TORCH)


def test_healthy_hosts_have_no_finding():
    for count in (1, 2, 8):
        said = report([host(number) for number in range(1, count + 1)], TORCH)
        assert (said.findings, said.table, said.has_errors) == ((), (), False)


def test_what_all_hosts_have_in_common_is_said(golden):
    golden(found())


def unreachable(trouble: troubles.Trouble) -> Unreached:
    trouble.log_in_by("gpu-3")
    return Unreached(name="gpu-3", error=trouble.for_host("gpu-3"))


WHERE = "10.0.0.3 port 22"
SICK = {
    "no name": unreachable(troubles.UNKNOWN_NAME("gpu-3")),
    "refused": unreachable(troubles.REFUSED(WHERE)),
    "silent": unreachable(troubles.no_answer(WHERE, 5)),
    "no route": unreachable(troubles.NO_ROUTE(WHERE, "No route to host")),
    "no banner": unreachable(troubles.no_answer(WHERE, 5, "banner")),
    "no SSH": unreachable(troubles.NOT_SSH(WHERE)),
    "no key": unreachable(
        troubles.unknown_host_key(WHERE, "gpu-3", "gpu-3", 22, "ssh-ed25519 SHA256:x", "~/.ssh/known_hosts")
    ),
    "no log-in": unreachable(
        troubles.not_accepted(WHERE, "me", ("key a",), ("publickey",))
    ),
    "no torch": host(3, facts={"torch": None}),
    "other torch": host(3, facts={"torch": "2.12.1+cu128"}),
    "patched torch": host(3, facts={"torch": "2.13.1+cu128"}),
    "read-only": host(3, facts={"write_error": "Read-only file system"}),
    "little disk": host(3, facts={"free_bytes": 700 << 20}),
    "full disk": host(3, facts={"free_bytes": 1 << 20}),
    "log-out": host(3, facts={"logout": "systemd ends what is left."}),
    "other Python": host(3, python=(3, 12, 1)),
    "other CUDA": host(3, examined={"torch_cuda": "11.8"}),
    "CPU build": host(3, examined={"torch_cuda": ""}),
    "other package": host(3, examined={"packages": {"torch": TORCH, "numpy": "1.26.4"}}),
    "no package": host(3, examined={"packages": {"torch": TORCH, "numpy": ""}}),
    "name at loopback": host(3, examined={"name_addresses": ("127.0.1.1",)}),
    "name of nobody": host(3, examined={"name_addresses": ()}),
    "same name": host(3, examined={"hostname": "gpu-1"}),
    "same address": host(3, examined={"route": Route(address="10.0.0.1", interface="docker0")}),
    "loopback": host(3, examined={"route": Route(address="127.0.0.1", interface="lo")}),
    "another MTU": host(3, examined={"mtus": {"eth0": 9000}}),
    "clock ahead": host(3, clock_s=(299.9, 300.1)),
    "clock behind": host(3, clock_s=(-5.1, -4.9)),
    "small shm": host(3, examined={"shm_bytes": 64 << 20}),
    "no shm": host(3, examined={"shm_bytes": -1}),
    "few files": host(3, examined={"open_files": 256}),
    "variable": host(3, examined={"variables": {"NCCL_SOCKET_IFNAME": "docker0"}}),
    "a GPU less": host(3, facts={"gpus": 7}, examined={"gpus": (GPU,) * 7}),
    "another model": host(3, examined={"gpus": (replace(GPU, model="A100"),) * 8}),
    "another driver": host(3, examined={"driver": "535.5"}),
    "old driver": host(3, examined={"driver": "470.1", "driver_cuda": "11.4"}),
    "ECC": host(3, examined={"gpus": (GPU, replace(GPU, ecc_errors=3), *(GPU,) * 6)}),
    "heat": host(3, examined={"gpus": (replace(GPU, slowed_by="heat"), *(GPU,) * 7)}),
    "held": host(3, examined={"gpus": (replace(GPU, used_bytes=40 * GIB, holders=("71 python",)), *(GPU,) * 7)}),
    "Xid": host(3, examined={"xid": "79 (PCI:0000:01:00)"}),
    "InfiniBand": host(3, examined={"infiniband": {"mlx5_0/1": "4: ACTIVE"}}),
    "InfiniBand down": host(3, examined={"infiniband": {"mlx5_0/1": "1: DOWN"}}),
}  # fmt: skip


@pytest.mark.parametrize("what", SICK)
def test_the_odd_host_is_named_with_evidence_and_cure(what, golden):
    said = found(SICK[what])
    assert {one.host for one in said.findings} == {"gpu-3"}
    golden(said)


def test_of_two_hosts_the_second_differs_from_the_first():
    said = report([host(1), host(2, clock_s=(9.0, 9.1))], TORCH)
    (one,) = said.findings
    assert (one.host, one.check) == ("gpu-2", "clock")


def test_hosts_with_the_same_finding_share_its_words():
    said = found(*(host(number, examined={"shm_bytes": 0}) for number in (2, 3)))
    assert len(said.findings) == 2
    assert repr(said).count("has only 0 MiB") == 2  # their commands differ
    said = found(*(host(number, examined={"open_files": 9}) for number in (2, 3)))
    assert "9 files" in repr(said)


def test_errors_come_first_and_warnings_alone_are_no_failure():
    said = found(host(2, examined={"shm_bytes": 0}), host(3, facts={"torch": None}))
    assert [(one.level, one.host) for one in said.findings] == [
        ("error", "gpu-3"),
        ("warning", "gpu-2"),
    ]
    assert said.has_errors
    assert not found(host(3, examined={"shm_bytes": 0})).has_errors


def test_names_of_one_machine_are_no_trap():
    """As in a playground, whose hosts are this machine."""
    both = [
        host(
            number,
            facts={"host_id": "same"},
            examined={
                "hostname": "laptop",
                "route": Route(address="127.0.0.1", interface="lo"),
            },
        )
        for number in (1, 2)
    ]
    assert report(both, TORCH).findings == ()


def test_a_report_as_data_and_as_a_page():
    said = found(host(2, facts={"torch": None}), SICK["refused"])
    data = json.loads(replace(said, is_data=True).__repr__())
    assert [one["check"] for one in data["findings"]] == ["torch", "TCP"]
    assert set(data["findings"][0]) == {"level", "host", "check", "evidence", "cure"}
    assert data["table"]["torch"]["gpu-1"] == TORCH
    page = said._repr_html_()
    assert page is not None
    assert "refused the connection" in page
    assert replace(said, is_data=True)._repr_html_() is None


def test_words_of_hosts_are_harmless_in_a_page_and_in_a_terminal():
    bad = {"variables": {"NCCL_DEBUG": "<script>\x1b[2J"}}
    said = found(host(3, examined=bad))
    assert "<script>" not in (said._repr_html_() or "")
    assert "\x1b" not in repr(said)


def test_versions_that_are_none_are_no_fault_of_ours():
    """A host may say anything."""
    bad = {"torch_cuda": "9x", "driver_cuda": "?", "driver": "", "packages": {}}
    said = found(host(3, examined=bad, facts={"torch": "?"}, python=()))
    assert {one.host for one in said.findings} == {"gpu-3"}
