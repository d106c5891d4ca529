"""What the doctor finds in what hosts have answered: which host, how bad, what was seen, and the cure."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from distmagic.diagnosis.finding import Finding, Subject, Unreached
from distmagic.diagnosis.pairs import findings
from distmagic.diagnosis.report import Report, report
from distmagic.errors import PreflightError
from distmagic.planning.preflight import no_python
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


HARMLESS = {
    "another driver": {"driver": "535.5"},
    "devices of its own": {"variables": {"CUDA_VISIBLE_DEVICES": "GPU-3f2a"}},
    "a package that the others do without": {"packages": {"torch": TORCH, "numpy": "2.1.0", "peft": "0.15.0"}},
    "a torch from conda": {"packages": {"torch": TORCH, "numpy": "2.1.0", "nvidia-nccl-cu12": ""}},
    "InfiniBand of a host without GPUs": {"gpus": (), "infiniband": {"mlx5_0/1": "1: DOWN", "mlx5_1/1": "4: ACTIVE"}},
}  # fmt: skip


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


@pytest.mark.parametrize("what", HARMLESS)
def test_a_difference_with_which_hosts_work_together_is_no_finding(what):
    with_nccl = {"packages": {"torch": TORCH, "numpy": "2.1.0", "nvidia-nccl-cu12": "2.27.3"}}  # fmt: skip
    usual = with_nccl if "conda" in what else {}
    odd = host(3, examined=HARMLESS[what])
    said = report([host(1, usual), host(2, usual), odd], TORCH)
    assert said.findings == (), repr(said)


def test_a_variable_that_one_host_lacks_gets_the_value_of_the_others_in_quotes():
    usual = {"variables": {"NCCL_SOCKET_IFNAME": "eth0 eth1"}}
    (finding,) = report([host(1, usual), host(2, usual), host(3)], TORCH).findings
    assert "--env 'NCCL_SOCKET_IFNAME=eth0 eth1'" in finding.cure


def test_a_variable_of_one_host_alone_is_no_advice_for_all():
    (finding,) = found(SICK["variable"]).findings
    assert "docker0" in finding.evidence
    assert "docker0" not in finding.cure


def test_of_two_hosts_the_one_without_a_package_is_named_with_a_command_for_it():
    bare = host(1, examined={"packages": {"torch": TORCH, "numpy": ""}})
    (finding,) = report([bare, host(2)], TORCH).findings
    assert (finding.host, finding.check) == ("gpu-1", "numpy")
    assert finding.evidence == "numpy is missing, where gpu-2 has 2.1.0."
    assert f"ssh gpu-1 {bare.facts.executable} -m pip install numpy==2.1.0" in finding.cure  # fmt: skip


@pytest.mark.parametrize(
    ("by_hand", "is_root", "command"),
    [
        ("ssh -F '/a b' -p 2222 me@gpu-3", False, "ssh -t -F '/a b' -p 2222 me@gpu-3 sudo mount"),
        ("/usr/bin/ssh gpu-3", False, "/usr/bin/ssh -t gpu-3 sudo mount"),
        ("srun --jobid=7 -w gpu-3", False, "srun --pty --jobid=7 -w gpu-3 sudo mount"),
        ("ssh -p 2222 me@login1 srun --jobid=7 -w gpu-3", False,
         "ssh -t -p 2222 me@login1 srun --pty --jobid=7 -w gpu-3 sudo mount"),
        ("ssh me@login-srun srun --jobid=7 -w gpu-3", False,
         "ssh -t me@login-srun srun --pty --jobid=7 -w gpu-3 sudo mount"),
        ("env", False, "env sudo mount"),
        ("on gpu-3:", False, "on gpu-3: sudo mount"),
        ("ssh root@gpu-3", True, "ssh root@gpu-3 mount"),
    ],
)  # fmt: skip
def test_sudo_has_a_terminal_for_its_password_and_root_needs_no_sudo(
    by_hand, is_root, command
):
    odd = host(3, {"shm_bytes": 0, "is_root": is_root}, by_hand=by_hand)
    (finding,) = found(odd).findings
    assert finding.cure.startswith(f"{command} -o remount")


def with_gpus(number: int, count: int) -> Subject:
    return host(number, {"gpus": (GPU,) * count}, {"gpus": count})


def with_mtu(number: int, mtu: int) -> Subject:
    return host(number, {"mtus": {"eth0": mtu}})


def with_variable(number: int, value: str) -> Subject:
    return host(number, {"variables": {"OMP_NUM_THREADS": value} if value else {}})


def with_torch(number: int, version: str) -> Subject:
    return host(number, facts={"torch": version})


@pytest.mark.parametrize(
    ("make", "values", "odd"),
    [
        (with_gpus, (0, 8), {1}),
        (with_gpus, (8, 0), {2}),
        (with_gpus, (7, 8), {1}),
        (with_gpus, (0, 0, 8), {1, 2}),
        (with_gpus, (7, 7, 8, 8), {1, 2}),
        (with_mtu, (9000, 1500), {1}),
        (with_mtu, (1500, 9000), {2}),
        (with_variable, ("4", ""), {1}),
        (with_variable, ("", "4"), {2}),
        (with_torch, ("2.12.1+cu128", TORCH), {1}),
        (with_torch, (TORCH, "2.12.1+cu128"), {2}),
        (with_torch, ("2.13.0+cpu", TORCH), {1}),
        (with_torch, ("2.12.1+cu128", "2.12.1+cu128", TORCH), {3}),
    ],
)
def test_the_odd_one_is_not_just_the_second_where_hosts_are_split(make, values, odd):
    """A GPU is lost and never gained, the smaller MTU is safe, and this machine's torch is the right one."""
    hosts = [make(number, value) for number, value in enumerate(values, 1)]
    errors_or_odd = [one for one in report(hosts, TORCH).findings if "where" in one.evidence]  # fmt: skip
    assert {one.host for one in errors_or_odd} == {f"gpu-{number}" for number in odd}


def test_a_host_without_gpus_is_odd_beside_one_that_has_some(golden):
    golden(report([with_gpus(1, 0), with_gpus(2, 8)], TORCH))


def test_where_three_hosts_differ_the_one_is_named_with_which_they_are_compared():
    hosts = [
        host(1, python=(3, 11, 2)),
        host(2, python=(3, 12, 1), clock_s=(9.0, 9.1)),
        host(3, python=(3, 10, 4), clock_s=(300.0, 300.1)),
    ]
    said = {(one.host, one.check): one.evidence for one in report(hosts, TORCH).findings}  # fmt: skip
    assert said == {
        ("gpu-2", "python"): "Python 3.12, where gpu-1 has 3.11.",
        ("gpu-3", "python"): "Python 3.10, where gpu-1 has 3.11.",
        ("gpu-2", "clock"): "its clock is 9 s ahead of gpu-1's.",
        ("gpu-3", "clock"): "its clock is 300 s ahead of gpu-1's.",
    }


def test_where_some_differ_the_others_are_counted():
    hosts = [host(1), host(2), with_mtu(3, 9000), with_mtu(4, 9000), host(5)]
    for one in report(hosts, TORCH).findings:
        assert one.evidence == "the MTU of eth0 is 9000, where 3 hosts have 1500."


def test_a_name_of_several_hosts_belongs_to_the_one_that_is_reached_by_it():
    copy = host(1, {"hostname": "gpu-2"})
    (finding,) = report([copy, host(2)], TORCH).findings
    assert finding.host == "gpu-1"
    assert "hostnamectl set-hostname gpu-1 " in finding.cure


@pytest.mark.parametrize(
    ("address", "name"),
    [("10.0.0.2", "host-10-0-0-2"), ("fd00::2", "host-fd00-2"), ("fe80::2%eth0", "host-fe80-2-eth0")],
)  # fmt: skip
def test_a_host_that_is_named_by_an_address_gets_a_name_that_is_none(address, name):
    one, other = host(1, {"hostname": "node"}), host(2, {"hostname": "node"}, name=address)  # fmt: skip
    (finding,) = report([one, other], TORCH).findings
    assert f"hostnamectl set-hostname {name} " in finding.cure


@pytest.mark.parametrize(("ahead_s", "odd"), [((300.0, 0.0), "gpu-1"), ((0.0, 300.0), "gpu-2"), ((-9.0, 300.0), "gpu-2")])  # fmt: skip
def test_of_two_clocks_the_one_is_wrong_that_differs_from_this_machines(ahead_s, odd):
    """Where both differ, nobody knows."""
    hosts = [host(n, clock_s=(one - 0.1, one)) for n, one in enumerate(ahead_s, 1)]
    (finding,) = report(hosts, TORCH).findings
    assert (finding.host, finding.check) == (odd, "clock")


FOLDER = "/my images/a.sif"
ODD_WORD = 'it\'s $HOME; a "b"'
WAYS = (
    "ssh gpu-3",
    "ssh -o ProxyJump=me@bastion -F '/a b/config' -p 2222 me@gpu-3",
    "/usr/bin/ssh gpu-3",
    "ssh me@login1 srun --jobid=7 --overlap -N1 -n1 -w gpu-3",
    "ssh me@login1 ssh gpu-3",
    "srun --jobid=7 --overlap -N1 -n1 -w gpu-3",
    "env",
)


def run_by_hand(line: str) -> list[str]:
    """Return the words that arrive at the end of a command line: each ssh has a shell that splits them again."""
    words = shlex.split(line, comments=True)
    while words[0].rpartition("/")[2] == "ssh":
        while words[1].startswith("-"):
            del words[1 : 2 if words[1] == "-t" else 3]
        words = shlex.split(" ".join(words[2:]), comments=True)
    return words


@pytest.mark.parametrize("way", WAYS)
def test_words_of_cures_arrive_whole_through_all_shells(way):
    """Some stand in for names that a host has given: a folder, a card, an address."""
    odd = host(
        3,
        {
            "route": Route(address=f"{ODD_WORD} 1", interface=f"{ODD_WORD} 2"),
            "mtus": {f"{ODD_WORD} 2": 9000},
            "packages": {"torch": TORCH, "numpy": "1.26.4"},
            "xid": "79",
            "shm_bytes": 0,
        },
        {"state_dir": f"{ODD_WORD} 3", "executable": f"{ODD_WORD} 4", "free_bytes": 700 << 20},
        by_hand=way,
        dials={("gpu-1", 0): "silent", ("gpu-2", 0): "half"},
    )  # fmt: skip
    plain = {"packages": {"torch": TORCH, "numpy": f"{ODD_WORD} 5"}}
    others = [
        host(number, plain, by_hand=way, dials={("gpu-3", 0): "refused"})
        for number in (1, 2)
    ]
    cures = [one.cure for one in report([*others, odd], TORCH).findings]
    speeds = {("gpu-1", "gpu-3"): (1.0, 1e6), ("gpu-1", "gpu-2"): (1e-6, 1e9)}
    subjects = {one.name: one for one in (*others, odd)}
    cures += [one.cure for one in findings(speeds, list(speeds), subjects)]
    with pytest.raises(PreflightError) as caught:
        raise no_python("gpu-3", f"{ODD_WORD} 6", 1, "", way, f"nice '{FOLDER}'")
    cures.append(caught.value.hint)
    words: set[str] = set()
    starts = {way, odd.as_root}
    for line in "\n".join(cures).splitlines():
        at = [line.index(f"{start} ") for start in starts if f"{start} " in line]
        if at:
            words.update(run_by_hand(line[min(at) :]))
    assert {f"{ODD_WORD} {number}" for number in (1, 2, 3, 4, 6)} <= words
    assert {f"numpy=={ODD_WORD} 5", FOLDER} <= words
    assert not [one for one in words if one.startswith("'") or one == "b"]


def test_of_two_hosts_the_second_differs_from_the_first():
    said = report([host(1), host(2, clock_s=(9.0, 9.1))], TORCH)
    (one,) = said.findings
    assert (one.host, one.check) == ("gpu-2", "clock")


def test_what_a_scheduler_reports_is_a_finding_too():
    drained = Finding("warning", "gpu-2", "Slurm", "Slurm has it as draining.", "")
    said = report([host(1), host(2)], TORCH, 0.0, [drained])
    assert said.findings == (drained,)


def test_what_a_scheduler_reports_of_other_nodes_is_left_out():
    drained = Finding("warning", "gpu-9", "Slurm", "Slurm has it as draining.", "")
    assert report([host(1), host(2)], TORCH, 0.0, [drained]).findings == ()


DEAD = (
    "DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
    "  Process 3487984 on node 10.0.0.2 managing GPU 5\n\n"
    "#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n  The missing rank: 21"
)


def test_a_process_that_nccl_misses_is_named_once_with_its_own_host(golden):
    """All hosts of a job report the same."""
    odd = {"nccl": DEAD}
    said = report([host(1, odd), host(2), host(3, odd)], TORCH)
    (finding,) = said.findings
    assert (finding.level, finding.host) == ("warning", "gpu-2")
    golden(f"{finding.evidence}\n{finding.cure}")
    (finding,) = report([host(1), host(3, odd)], TORCH).findings
    assert finding.host == "gpu-3", "its node is none of these hosts"
    assert " ps " not in finding.cure, "the process is on another machine"


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


@pytest.mark.parametrize("what", ["CPU build", "ECC", "Xid", "heat", "held"])
def test_a_gpu_on_which_a_run_may_well_succeed_is_no_error(what):
    assert not found(SICK[what]).has_errors


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


def test_a_host_that_is_reached_at_its_own_loopback_address_has_no_wrong_name():
    for address in ("127.0.0.1", "::1"):
        route = Route(address=address, interface="lo")
        one = host(1, examined={"route": route, "name_addresses": (address,)})
        assert report([one], TORCH).findings == ()


def test_names_that_all_lead_to_one_bridge_are_named_on_each_host(golden):
    """As where the first address of a host is that of its docker0."""
    bridge = {"name_addresses": ("172.17.0.1", "10.0.0.7")}
    said = report([host(1, bridge), host(2, bridge), host(3)], TORCH)
    assert {(one.host, one.check) for one in said.findings} == {
        ("gpu-1", "own name"),
        ("gpu-2", "own name"),
    }
    golden(said)


def test_a_name_that_leads_to_another_network_of_its_host_is_no_finding():
    hosts = [host(n, {"name_addresses": (f"192.168.0.{n}",)}) for n in (1, 2)]
    assert report(hosts, TORCH).findings == ()


def test_a_name_of_which_nothing_is_known_is_no_finding():
    unknown = host(3, examined={"name_addresses": None})
    assert found(unknown).findings == ()
    said = found(host(2, examined={"name_addresses": ()}), unknown)
    (line,) = [line for line in said.table if line.title == "own name"]
    assert [*line.cells.values()] == ["10.0.0.1", "none", ""]


def test_a_loopback_address_of_ipv6_can_not_be_dialled_by_others():
    route = Route(address="::1", interface="lo")
    (finding,) = found(host(3, examined={"route": route})).findings
    assert (finding.level, finding.check) == ("error", "address")


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
