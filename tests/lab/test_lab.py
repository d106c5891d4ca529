"""The lab itself, with the system's own SSH client: what the other tests rely on."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.lab import wait_until


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
