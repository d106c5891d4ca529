"""The doctor on hosts of the lab: each misconfiguration is found, on the right host, and healthy hosts have none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest

from distmagic import cli
from distmagic.diagnosis.report import Report
from distmagic.errors import Hung, RendezvousFailed
from distmagic.request.hosts import parse_hosts
from distmagic.session.doctor import examine
from tests.builders.pythons import another_python
from tests.e2e.runner import all_reduce, as_value, reach, run
from tests.lab import HostSetup, Lab, LabHost
from tests.lab.clock import give_clock
from tests.lab.nvml import give_nvidia_gpus
from tests.lab.waiting import HANG_S, wait_until

pytestmark = pytest.mark.needs("lab")


def examined(lab: Lab) -> Report:
    hosts = parse_hosts(",".join(host.name for host in lab.hosts))
    return examine(reach(lab, hosts))


def of(report: Report) -> set[tuple[str, str, str]]:
    """Return the level, host and subject of each finding."""
    return {(one.level, one.host, one.check) for one in report.findings}


# ---- torchrun by hand, beside which the doctor takes a tenth of the time


PROGRAM = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1 << 20))
print("done", flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Torchrun:
    """Plain torchrun on two hosts, as it is started by hand."""

    nodes: tuple[subprocess.Popen[bytes], ...]
    logs: tuple[Path, ...]

    def said(self) -> list[list[str]]:
        """What each has said until its program was done; a host of the lab has no name server for names of clients."""
        said = []
        for log in self.logs:
            before, done, _ = log.read_text().partition("done\n")
            lines = (before + done).splitlines()
            said.append([one for one in lines if "hostname of the client" not in one])
        return said

    def codes(self) -> list[int | None]:
        return [node.poll() for node in self.nodes]


def _has_ended(
    hosts: Sequence[LabHost], nodes: Sequence[subprocess.Popen[bytes]]
) -> bool:
    """End what the program's processes are on hosts; whether all of them have ended."""
    for host in hosts:
        for one in host.processes():
            if one.cmdline[-1:] == ("/home/node/program.py",):
                with suppress(ProcessLookupError):
                    os.kill(one.outer_pid, signal.SIGKILL)
    return all(node.poll() is not None for node in nodes)


@contextmanager
def by_hand(first: LabHost, other: LabHost, folder: Path) -> Iterator[Torchrun]:
    """Run a program of two ranks that sum, as the shells of two hosts would; the first has the rendezvous."""
    nodes, logs = [], []
    words = f"python3 -m torch.distributed.run --nnodes 2 --master-addr {first.address} --node-rank"
    try:
        for number, host in enumerate((first, other)):
            program = host.home / "program.py"
            program.write_text(PROGRAM)
            shell = f"[ ! -e ~/.bashrc ] || . ~/.bashrc; exec {words} {number} /home/node/program.py"
            logs.append(folder / str(number))
            with logs[-1].open("wb") as file:
                argv = host.command(["env", "HOME=/home/node", "bash", "-c", shell])
                nodes.append(subprocess.Popen(argv, stdout=file, stderr=file))
        yield Torchrun(nodes=tuple(nodes), logs=tuple(logs))
    finally:
        wait_until(lambda: _has_ended((first, other), nodes), "torchrun to end")


def wait_ten_times_as_long(report: Report) -> None:
    """Wait for ten times as long as the doctor took."""
    until_s = time.monotonic() + 10 * report.took_s
    limit_s = 10 * report.took_s + HANG_S
    wait_until(lambda: time.monotonic() > until_s, "its time", limit_s)


def assert_ends_without_a_word(hosts: Sequence[LabHost], folder: Path) -> None:
    """Plain torchrun never names what the doctor finds: a small program succeeds. A larger one fails, or is slow."""
    first, other = hosts
    with by_hand(first, other, folder) as torchrun:
        wait_until(lambda: None not in torchrun.codes(), "torchrun to end")
        assert (torchrun.codes(), torchrun.said()) == ([0, 0], [["done"], ["done"]])


def assert_fails_without_a_cure(
    hosts: Sequence[LabHost], folder: Path, report: Report, words: str
) -> None:
    """Plain torchrun fails on one host, with these words and without a cure. The other one waits in silence."""
    first, other = hosts
    with by_hand(first, other, folder) as torchrun:
        wait_ten_times_as_long(report)
        wait_until(lambda: {*torchrun.codes()} != {None}, "torchrun to fail")
        silence, said = sorted(torchrun.said(), key=len)
        assert silence == []
        assert torchrun.codes().count(None) == 1
    assert words in "\n".join(said)
    assert not [one for one in report.findings if one.cure in "\n".join(said)]


# ---- healthy hosts


@pytest.mark.quick
def test_healthy_hosts_have_no_finding_and_nothing_is_left_on_them(ended):
    examined(ended)  # the bundle has come
    before = [host.files("/home/node") for host in ended.hosts]
    report = examined(ended)
    assert (report.findings, report.table) == ((), ()), repr(report)
    assert [host.files("/home/node") for host in ended.hosts] == before


@pytest.mark.parametrize("count", [2, 8])
def test_healthy_labs_of_other_sizes_have_no_finding(make_lab, count):
    report = examined(make_lab(count))
    assert (report.findings, report.table, report.square) == ((), (), ()), repr(report)


def give_bridge(lab: Lab) -> None:
    """Give each host a bridge of containers, with the same address, before its network card by name."""
    for host in lab.hosts:
        host.is_to_be_mended()
        for words in (
            "link add docker0 type bridge",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        ):
            done = host.exec(["ip", *words.split()])
            assert done.returncode == 0, done.stderr


def test_bridges_of_containers_have_one_address_on_all_hosts_and_are_no_finding(
    ended, tmp_path
):
    """Nothing is wrong with them: torchrun by hand goes another way, too."""
    give_bridge(ended)
    report = examined(ended)
    assert report.findings == (), repr(report)
    assert {one.examined.route.interface for one in report.subjects} == {"eth0"}
    assert_ends_without_a_word(ended.hosts[:2], tmp_path)


def test_names_that_lead_to_the_bridge_of_each_host_are_found(ended, tmp_path):
    """The wrong interface comes first: who announces its name is looked for on its own bridge."""
    give_bridge(ended)
    for host in ended.hosts:
        host.resolve_own_name("172.17.0.1")
    report = examined(ended)
    assert of(report) == {("warning", host.name, "own name") for host in ended.hosts}
    for one, host in zip(report.findings, ended.hosts, strict=True):
        assert "resolves to 172.17.0.1" in one.evidence
        assert one.cure.endswith(f": {host.address} {host.name}")
    words = "Connection refused"
    assert_fails_without_a_cure(ended.hosts[:2], tmp_path, report, words)


# ---- the way to a host


def refused(lab: Lab) -> None:
    lab.hosts[1].reject(22)


def dropped(lab: Lab) -> None:
    lab.hosts[1].drop(port=22)


def silent(lab: Lab) -> None:
    """Stop its SSH server where it is: the kernel still takes connections."""
    lab.hosts[1].freeze()


def another_key(lab: Lab) -> None:
    lab.hosts[1].change_key()


def no_log_in(lab: Lab) -> None:
    lab.hosts[1].set_sshd("DenyUsers root")


@pytest.mark.parametrize(
    ("spoil", "step"),
    [
        (refused, "TCP"),
        (dropped, "TCP"),
        (silent, "banner"),
        (another_key, "key"),
        (no_log_in, "log-in"),
    ],
)
def test_the_first_step_that_fails_on_the_way_to_a_host_is_named(lab, spoil, step):
    spoil(lab)
    report = examined(lab)
    assert of(report) == {("error", "dm2", step)}
    (finding,) = report.findings
    assert f"{step} failed" in finding.evidence
    assert finding.cure


def test_ssh_by_hand_waits_in_silence_ten_times_as_long(lab, tmp_path):
    silent(lab)
    (lab.folder / "dm2" / "ssh_limit").write_text("Host dm2\n  ConnectTimeout 1\n")
    report = examined(lab)
    assert of(report) == {("error", "dm2", "banner")}
    words = ["ssh", "-F", str(lab.ssh_config), "-o", "ConnectTimeout=3600"]
    with (tmp_path / "said").open("wb") as said:
        client = subprocess.Popen([*words, "dm2", "true"], stdout=said, stderr=said)
    try:
        wait_ten_times_as_long(report)
        assert (client.poll(), (tmp_path / "said").read_text()) == (None, "")
    finally:
        client.kill()
        client.wait()


def test_a_name_that_nobody_knows(lab):
    report = examine(reach(lab, parse_hosts("dm1,nobody.invalid")))
    assert of(report) == {("error", "nobody.invalid", "name")}


# ---- a host

NO_TORCH = "No module named 'torch'"


def test_a_host_without_torch_and_one_without_python(make_lab, tmp_path):
    setups = (HostSetup(), HostSetup(python="bare"), HostSetup(python="none"))
    lab = make_lab(3, setups=setups)
    report = examined(lab)
    assert {one for one in of(report) if one[0] == "error"} == {
        ("error", "dm2", "torch"),
        ("error", "dm3", "python"),
    }
    assert ("warning", "dm2", "numpy") in of(report)
    first, *others = lab.hosts
    for other, words in zip(others, (NO_TORCH, "python3: not found"), strict=True):
        assert_fails_without_a_cure((first, other), tmp_path, report, words)


def other_torch(lab: Lab) -> None:
    """Give a host a torch of another version, which works with the others' as far as a small program goes."""
    folder = lab.hosts[1].home / "other" / "torch"
    folder.mkdir(parents=True)
    real = Path(str(distribution("torch").locate_file("torch")))
    for path in real.iterdir():
        if path.name not in ("version.py", "__pycache__"):
            (folder / path.name).symlink_to(path)
    text = (real / "version.py").read_text()
    text = re.sub("__version__ = .*", "__version__ = '2.4.0'", text)
    (folder / "version.py").write_text(text)
    (lab.hosts[1].home / ".bashrc").write_text("export PYTHONPATH=$HOME/other\n")


def test_a_host_with_another_python_which_has_no_torch(tmp_path):
    python = Path(another_python())
    with Lab(2, keep=(python.parents[1],)) as lab:
        folder = lab.hosts[1].home / "bin"
        folder.mkdir()
        (folder / "python3").symlink_to(python)
        (lab.hosts[1].home / ".bashrc").write_text("export PATH=$HOME/bin:$PATH\n")
        report = examined(lab)
        assert_fails_without_a_cure(lab.hosts, tmp_path, report, NO_TORCH)
    assert of(report) == {
        ("warning", "dm2", "python"),
        ("error", "dm2", "torch"),
        ("warning", "dm2", "numpy"),
    }


def loopback(lab: Lab) -> None:
    lab.hosts[1].resolve_own_name("127.0.1.1")


def small_memory(lab: Lab) -> None:
    lab.hosts[1].exec(["mount", "-o", "remount,size=64M", "/dev/shm"])
    lab.hosts[1].is_to_be_mended()


def wrong_clock(lab: Lab) -> None:
    give_clock(lab.hosts[1], ahead_s=300)


def read_only(lab: Lab) -> None:
    examined(lab)
    lab.hosts[1].make_home_read_only()


def variable(lab: Lab) -> None:
    (lab.hosts[1].home / ".bashrc").write_text("export NCCL_SOCKET_IFNAME=docker0\n")


@pytest.mark.parametrize(
    ("spoil", "level", "check"),
    [
        (other_torch, "error", "torch"),
        (loopback, "warning", "own name"),
        (small_memory, "warning", "/dev/shm"),
        (wrong_clock, "warning", "clock"),
        (read_only, "error", "disk"),
        (variable, "warning", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_what_is_wrong_with_one_host_is_found_there(lab, tmp_path, spoil, level, check):
    spoil(lab)
    report = examined(lab)
    assert {one for one in of(report) if one[2] != "LD_PRELOAD"} == {
        (level, "dm2", check)
    }, repr(report)
    assert all(one.evidence and one.cure for one in report.findings)
    assert_ends_without_a_word(lab.hosts[1::-1], tmp_path)


def test_a_name_that_leads_nowhere_is_found(lab):
    lab.hosts[1].resolve_own_name(None)
    assert of(examined(lab)) == {("warning", "dm2", "own name")}


def test_a_host_with_a_gpu_less(ended, tmp_path):
    """Played by a library that answers as NVIDIA's does."""
    for host, count in zip(ended.hosts, (2, 1, 2), strict=True):
        give_nvidia_gpus(host, count)
    report = examined(ended)
    assert {one for one in of(report) if one[2] != "CUDA of torch"} == {
        ("warning", "dm2", "GPUs")
    }, repr(report)
    assert "the number of GPUs is 1, where the others have 2." in repr(report)
    assert "dm2 nvidia-smi -L" in repr(report)
    assert_ends_without_a_word(ended.hosts[:2], tmp_path)


def test_hosts_that_all_have_one_name(make_lab, tmp_path):
    lab = make_lab(3, setups=tuple(HostSetup(hostname="node") for _ in range(3)))
    assert of(examined(lab)) >= {
        ("warning", "dm2", "host name"),
        ("warning", "dm3", "host name"),
    }
    assert_ends_without_a_word(lab.hosts[:2], tmp_path)


# ---- between hosts


def no_port(lab: Lab) -> None:
    lab.hosts[1].close_ports("drop", but=(22,))


def refused_port(lab: Lab) -> None:
    lab.hosts[1].close_ports("reject with tcp reset", but=(22,))


def one_way(lab: Lab) -> None:
    """Have dm2 let in what it has asked for itself, and no call of dm1."""
    rule = f"in ip saddr {lab.hosts[0].address} tcp dport != 22 tcp flags & (syn | ack) == syn drop"
    lab.hosts[1].drop_by(rule)


def torchs_port(lab: Lab) -> None:
    lab.hosts[1].drop(port=29500)


def large_packets(lab: Lab) -> None:
    """Give two cards larger packets than the switch between them takes."""
    one, other = lab.hosts[1:]
    for host, peer in ((one, other), (other, one)):
        host.exec(["ip", "link", "set", "dev", "eth0", "mtu", "9000"])
        host.drop_by(f"in ip saddr {peer.address} meta length > 1500 drop")


FROM_FIRST = ("error", "dm2", "dialled from dm1")
BOTH_WAYS = [("error", "dm2", "dialled from dm3"), ("error", "dm3", "dialled from dm2")]


@pytest.mark.parametrize(
    ("spoil", "expected", "words"),
    [
        (no_port, [FROM_FIRST], "no answer"),
        (refused_port, [FROM_FIRST], "refused"),
        (one_way, [FROM_FIRST], "no answer"),
        (torchs_port, [("warning", "dm2", "dialled from dm1 at 29500")], "no answer"),
        (
            large_packets,
            [("warning", "dm1", "MTU"), *BOTH_WAYS],
            "large packets are lost",
        ),
    ],
)
def test_who_can_not_dial_whom_is_found(lab, spoil, expected, words):
    spoil(lab)
    report = examined(lab)
    assert of(report) == {*expected}, repr(report)
    assert words in repr(report)
    assert report.square
    print(report, report.took_s)


@pytest.mark.parametrize(
    ("spoil", "dialler", "finding"),
    [
        (refused_port, 0, FROM_FIRST),
        (no_port, 0, FROM_FIRST),
        (one_way, 0, FROM_FIRST),
        (torchs_port, 0, ("warning", "dm2", "dialled from dm1 at 29500")),
        (large_packets, 2, BOTH_WAYS[0]),
    ],
)
def test_it_takes_a_tenth_of_the_time_in_which_torchrun_has_no_word(
    lab, tmp_path, spoil, dialler, finding
):
    """Plain torchrun waits for minutes in silence. The doctor names host, evidence and cure meanwhile."""
    spoil(lab)
    report = examined(lab)
    # After it, because both listen at torchrun's port.
    with by_hand(lab.hosts[1], lab.hosts[dialler], tmp_path) as torchrun:
        wait_ten_times_as_long(report)
        assert torchrun.said() == [[], []]
        assert torchrun.codes() == [None, None]
    assert finding in of(report)
    assert all(one.evidence and one.cure for one in report.findings)


# ---- in a terminal


def way(lab: Lab) -> list[str]:
    """Return the flags that lead to hosts of a lab; it says itself for how long one is tried that can't answer."""
    return ["--ssh-config", str(lab.ssh_config), "--connect-timeout", f"{HANG_S:g}"]


def test_in_a_terminal_the_exit_code_says_whether_a_run_would_fail(lab, capsys):
    words = ["doctor", "--hosts", "dm1,dm2", *way(lab)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("2 hosts: nothing is wrong")
    lab.hosts[1].reject(22)
    assert cli.main([*words, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [(one["host"], one["check"]) for one in data["findings"]] == [("dm2", "TCP")]


# ---- how fast hosts are together


def is_warm(host: LabHost) -> bool:
    return any("template" in one.cmdline for one in host.processes())


def test_pairs_of_hosts_are_measured_and_nothing_is_left(ended, capsys):
    words = ["doctor", "--collective", "--json", "--hosts", "dm1,dm2,dm3"]
    assert cli.main([*words, *way(ended)]) == 0
    data = json.loads(capsys.readouterr().out)
    for host, speeds in data["speeds"].items():
        assert {name for name, said in speeds.items() if said} == {*data["hosts"]} - {
            host
        }
    wait_until(lambda: not any(map(is_warm, ended.hosts)), "new warm processes to end")
    for host in ended.hosts:
        assert not list(host.home.glob(".distmagic/jobs/*"))
        assert not list(host.home.glob(".distmagic/work/doctor*"))


def test_pairs_of_healthy_hosts_that_slow_each_other_down_are_no_finding(
    make_lab, capsys
):
    """Four pairs share this machine's processors. Twice, because each time is another."""
    lab = make_lab(8)
    hosts = ",".join(host.name for host in lab.hosts)
    for _ in range(2):
        words = ["doctor", "--collective", "--json", "--hosts", hosts]
        assert cli.main([*words, *way(lab)]) == 0
        assert json.loads(capsys.readouterr().out)["findings"] == []


def send_at(host: LabHost, megabits: int, slowly_to: LabHost | None = None) -> None:
    """Let a host send so much a second, and half as much to one other."""
    for words in (
        "qdisc add dev eth0 root handle 1: htb default 10",
        f"class add dev eth0 parent 1: classid 1:10 htb rate {megabits}mbit",
        f"class add dev eth0 parent 1: classid 1:20 htb rate {megabits // 2}mbit",
    ):
        done = host.exec(["tc", *words.split()])
        assert done.returncode == 0, done.stderr
    if slowly_to is not None:
        rule = f'out ip daddr {slowly_to.address} meta priority set "1:20"'
        host.drop_by(rule)
    host.is_to_be_mended()


def test_a_slow_link_is_told_from_a_slow_host(ended, tmp_path, capsys):
    one, other, third = ended.hosts
    send_at(one, 160, slowly_to=other)
    send_at(other, 160, slowly_to=one)
    send_at(third, 160)
    words = ["doctor", "--collective", "--json", "--hosts", "dm1,dm2,dm3"]
    assert cli.main([*words, *way(ended)]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    found = [(one["host"], one["check"]) for one in findings]
    assert found == [("dm2", "bandwidth with dm1")]
    assert_ends_without_a_word((one, other), tmp_path)


def test_a_slow_host_is_told_from_a_slow_link(ended, tmp_path, capsys):
    for host, megabits in zip(ended.hosts, (160, 160, 60), strict=True):
        send_at(host, megabits)
    words = ["doctor", "--collective", "--json", "--hosts", "dm1,dm2,dm3"]
    assert cli.main([*words, *way(ended)]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    found = [(one["host"], one["check"]) for one in findings]
    assert found == [("dm3", "bandwidth")]
    assert "ethtool eth0" in findings[0]["cure"]
    assert_ends_without_a_word(ended.hosts[1:], tmp_path)


# ---- by itself


def stand_still() -> None:
    """Report one step of two, and never the second one. Rank 0 answers as NCCL's own service does."""
    import os
    import socket
    import time

    import distmagic

    distmagic.report(step=1, total=2)
    if os.environ["RANK"] == "0":
        server = socket.create_server(("127.0.0.1", 28028))
        while True:
            guest, _ = server.accept()
            with guest:
                guest.recv(100)
                guest.sendall(b"Errors\n======\n\nDEAD\n  1 job process is dead\n\n")
    while True:
        time.sleep(0.1)


def test_under_a_hang_stands_what_is_wrong(lab):
    small_memory(lab)
    with pytest.raises(Hung) as caught:
        run(lab, "dm1:1,dm2:1", as_value(stand_still), hang_timeout_s=5.0)
    assert "warning: dm2: /dev/shm has only 64 MiB" in str(caught.value)
    assert "warning: dm1" not in str(caught.value)
    notices = caught.value.run.state.notices
    assert "dm1: NCCL reports: DEAD; 1 job process is dead." in notices


def test_under_a_rendezvous_that_failed_stands_what_is_wrong(lab):
    lab.hosts[0].drop(port=29533)
    with pytest.raises(RendezvousFailed) as caught:
        run(lab, "dm1:1,dm2:1,dm3:1", as_value(all_reduce), master_port=29533)
    address = lab.hosts[0].address
    dialled = rf"dm[23] can't dial dm1 at {re.escape(address)} port 29533"
    assert re.search(dialled, caught.value.message), caught.value.message
    found = f"error: dm1: no other host can dial it at {address}, port 29533"
    assert found in str(caught.value)
