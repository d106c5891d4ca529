"""The manual's way to Slurm on two machines, step by step: its file, one key of munge, one controller, two nodes."""

from __future__ import annotations

import re
import shutil

import pytest

from tests import REPOSITORY
from tests.lab import wait_until

pytestmark = pytest.mark.needs("lab", "slurm")
PAGE = (REPOSITORY / "distmagic" / "help" / "slurm.md").read_text()
# What the packages make when they are installed; here the machines share one disk, and have been given folders of their own.
INSTALLED = """
    set -eu
    for folder in /etc/munge /var/lib/munge /var/log/munge /etc/slurm /var/lib/slurm /var/log/slurm; do
        mkdir -p $folder; mount -n -t tmpfs -o mode=755 tmpfs $folder
    done
    mkdir -p /run/munge /var/lib/slurm/slurmctld /var/lib/slurm/slurmd
    chown munge: /run/munge /etc/munge /var/lib/munge /var/log/munge
    chown slurm: /var/lib/slurm/slurmctld /var/lib/slurm/slurmd /var/log/slurm
    dd if=/dev/urandom of=/etc/munge/munge.key bs=1 count=1024 2>/dev/null
    chown munge: /etc/munge/munge.key; chmod 400 /etc/munge/munge.key
"""
MUNGED = "setpriv --reuid munge --regid munge --clear-groups munged"


def must(host, script: str, stdin: str = "") -> str:
    done = host.exec(["sh", "-c", script], stdin=stdin)
    assert done.returncode == 0, f"{host.name}: {script}: {done.stdout}{done.stderr}"
    return done.stdout


def configuration(hosts) -> str:
    """Return the page's file with the names and the lines of these machines."""
    (text,) = re.findall(r"^```\n(ClusterName=.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for host, letter in zip(hosts, "ab", strict=True):
        line = must(host, "slurmd -C").splitlines()[0]
        text, count = re.subn(rf"(?m)^NodeName={letter} .*$", line, text)
        assert count == 1
    return text.replace("SlurmctldHost=a\n", f"SlurmctldHost={hosts[0].name}\n")


def test_slurm_is_installed_as_the_manual_has_it(make_lab):
    first, second = hosts = make_lab(2).hosts
    for host in hosts:
        must(host, INSTALLED)
    must(first, "cp -p /etc/munge/munge.key ~/key")
    shutil.copy2(first.home / "key", second.home / "key")
    must(second, "mv ~/key /etc/munge/munge.key; chown munge: /etc/munge/munge.key")
    for host in hosts:
        must(host, MUNGED)
    assert "Success" in must(second, "unmunge", stdin=must(first, "munge -n"))

    text = configuration(hosts)
    for host in hosts:
        must(host, "cat >/etc/slurm/slurm.conf", stdin=text)
    must(first, "slurmctld")
    for host in hosts:
        must(host, "slurmd")
    wait_until(
        lambda: (
            first.exec(["sinfo", "-h", "-o", "%D %t"]).stdout.split("\n")[:-1]
            == ["2 idle"]
        ),
        "both nodes to be idle",
    )
    names = must(first, "srun -N2 hostname").split()
    assert sorted(names) == [host.name for host in hosts]
