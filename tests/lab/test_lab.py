"""The lab itself, with the system's own SSH client: what the other tests rely on."""

from __future__ import annotations

import os
import subprocess

import pytest

from distmagic.request.hosts import Host
from distmagic.transports.ssh.config import resolve
from tests.lab import HostSetup, LabHost, wait_until


def test_hosts_differ_in_all_that_makes_a_host(lab):
    answers = [
        lab.ssh(
            host,
            "hostname; cat /etc/hostname; echo $HOME; readlink /proc/self/ns/pid >~/own",
        )
        for host in lab.hosts
    ]
    assert [answer.returncode for answer in answers] == [0, 0, 0], answers[0].stderr
    names = [answer.stdout.splitlines()[:3] for answer in answers]
    assert names == [[f"dm{i}", f"dm{i}", "/home/node"] for i in (1, 2, 3)]
    spaces = [(host.home / "own").read_text().strip() for host in lab.hosts]
    assert len({*spaces, os.readlink("/proc/self/ns/pid")}) == 4


def test_hosts_reach_each_other_by_name_and_nobody_else(lab):
    dm1 = lab.hosts[0]
    assert "10.99" in dm1.exec(["getent", "hosts", "dm3"]).stdout
    hello = ["bash", "-c", "read -r -n 3 word </dev/tcp/dm3/22; echo $word"]
    assert dm1.exec(hello).stdout == "SSH\n"
    assert dm1.exec(["getent", "hosts", "example.org"]).returncode != 0
    assert set(dm1.exec(["sh", "-c", "ls /sys/class/net"]).stdout.split()) == {
        "lo",
        "eth0",
    }


def test_tmp_is_private_and_files_leaves_out_what_is_shared(lab):
    dm1, dm2, _ = lab.hosts
    lab.ssh(dm1, "mkdir -p /tmp/a/b && touch /tmp/a/b/c /dev/shm/x")
    assert dm1.files("/tmp") == ("/tmp/a/b/c",)
    assert dm1.files("/dev/shm") == ("/dev/shm/x",)
    assert dm2.files("/tmp") == ()
    assert dm1.files("/nowhere") == ()


AWAY = {
    "cut": (LabHost.cut, LabHost.heal),
    "deaf": (LabHost.drop, LabHost.undrop),
    "frozen": (LabHost.freeze, LabHost.thaw),
    "off": (LabHost.kill, LabHost.start),
}


@pytest.mark.parametrize("how", AWAY)
def test_only_a_host_that_cant_answer_is_given_up_soon(lab, how):
    def limits() -> list[float | None]:
        return [
            resolve(Host(name=host.name), str(lab.ssh_config)).connect_timeout_s
            for host in lab.hosts
        ]

    strike, mend = AWAY[how]
    strike(lab.hosts[1])
    assert limits() == [30.0, 2.0, 30.0]
    mend(lab.hosts[1])
    assert limits() == [30.0, 30.0, 30.0]
    lab.hosts[1].drop(source=lab.hosts[0])
    assert limits() == [30.0, 30.0, 30.0], "it answers others"


def test_processes(lab):
    dm1, dm2, _ = lab.hosts
    with lab_process(lab, dm1, "DISTMAGIC_JOB=7 sleep 1000; true"):
        # In the middle of an exec a process has its new name, and no arguments yet; and its name is read first.
        (sleep,) = wait_until(
            lambda: [
                p
                for p in dm1.processes()
                if (p.name, p.cmdline) == ("sleep", ("sleep", "1000"))
            ],
            "sleep",
        )
        assert sleep.environ["DISTMAGIC_JOB"] == "7"
        assert sleep.ppid in {p.pid for p in dm1.processes()}
        assert dm2.processes() == ()
        with pytest.raises(AssertionError, match=r"dm1: process .*sleep 1000"):
            lab.assert_clean(within_s=0)
        dm1.exec(["kill", str(sleep.pid)])
        wait_until(lambda: dm1.processes() == (), "sleep's end")
    lab.assert_clean(within_s=0)


def test_leftovers_are_found_and_mended(lab):
    dm1 = lab.hosts[0]
    dm1.exec(["mkdir", "/tmp/distmagic-0-job-0"])
    with pytest.raises(AssertionError, match="dm1: /tmp/distmagic-0-job-0"):
        lab.assert_clean(within_s=0)
    dm1.mend()
    lab.assert_clean(within_s=0)


def test_drop_is_silent_and_reject_is_not(lab):
    dm1, dm2, _ = lab.hosts
    dm1.drop(port=22)
    assert "timed out" in ssh_in_haste(lab, dm1).stderr
    dm1.undrop()
    dm1.reject(22)
    assert "refused" in ssh_in_haste(lab, dm1).stderr
    dm1.undrop()
    dm1.reject(source=dm2)
    assert lab.ssh(dm1, "true").returncode == 0
    hello = [
        "timeout",
        "5",
        "bash",
        "-c",
        "read -r -n 3 word </dev/tcp/dm1/22; echo $word",
    ]
    assert "refused" in dm2.exec(hello).stderr
    dm1.undrop()
    dm1.drop()
    assert "timed out" in ssh_in_haste(lab, dm1).stderr
    dm1.undrop()
    assert dm2.exec(hello).stdout == "SSH\n"


@pytest.mark.parametrize(
    ("to", "found"), [("127.0.1.1", "127.0.1.1"), (None, ""), ("own", "own")]
)
def test_what_the_own_name_resolves_to(lab, to, found):
    host = lab.hosts[0]
    host.resolve_own_name(host.address if to == "own" else to)
    said = lab.ssh(host, "getent ahostsv4 $(hostname)").stdout
    assert said.partition(" ")[0] == (host.address if found == "own" else found)
    lab.mend()
    assert lab.ssh(host, "getent ahostsv4 dm1").stdout.startswith(host.address)


@pytest.mark.needs("fish", "csh")
@pytest.mark.parametrize(
    ("shell", "say"),
    [("/usr/bin/fish", "echo $FISH_VERSION"), ("/bin/csh", "echo $shell")],
)
def test_other_shells(lab, shell, say):
    host = lab.hosts[0]
    host.set_shell(shell)
    assert len(lab.ssh(host, say).stdout) > 3
    lab.mend()
    assert lab.ssh(host, "echo $0").stdout == "bash\n"


def test_a_shared_home_and_other_setups(make_lab):
    setup = HostSetup(hostname="node", sshd="Banner /etc/passwd", python="bare")
    lab = make_lab(2, shared_home=True, setups=(setup, HostSetup(hostname="node")))
    answers = [
        lab.ssh(host, "hostname; echo $SSH_CONNECTION >>~/seen") for host in lab.hosts
    ]
    assert [answer.stdout for answer in answers] == ["node\n", "node\n"]
    assert "root:x:0:0" in answers[0].stderr
    assert len((lab.hosts[0].home / "seen").read_text().splitlines()) == 2


def ssh_in_haste(lab, host):
    argv = [
        "ssh",
        "-F",
        str(lab.ssh_config),
        "-o",
        "ConnectTimeout=1",
        host.name,
        "true",
    ]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def lab_process(lab, host, command):
    return Client(["ssh", "-F", str(lab.ssh_config), host.name, command])


class Client:
    """An SSH client that is ended with its `with`."""

    def __init__(self, argv):
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self):
        return self.process

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()
