"""Hosts of the lab that seem to have GPUs, and who has claimed them."""

from __future__ import annotations

from tests.lab import LabHost

# What the kernel shows of two GPUs of AMD. Nothing else in /sys/class is needed on a host of the lab.
_TWO_GPUS = """
test -e /sys/class/kfd && exit
mount -t tmpfs tmpfs /sys/class
for number in 0 1; do
    mkdir -p /sys/class/kfd/kfd/topology/nodes/$number
    echo 'simd_count 64' >/sys/class/kfd/kfd/topology/nodes/$number/properties
done
"""
_NO_GPUS = """
test ! -e /sys/class/kfd || umount /sys/class
"""


def give_gpus(host: LabHost) -> None:
    """Have a host show two GPUs, until it is switched off."""
    host.exec(["sh", "-ec", _TWO_GPUS]).check_returncode()


def take_gpus(host: LabHost) -> None:
    """Take them away again, if it has them."""
    host.exec(["sh", "-ec", _NO_GPUS]).check_returncode()


def claims(host: LabHost) -> str:
    """Return the lines of all claims on devices of a host, "" where there is none."""
    return host.exec(
        ["grep", "-E", "@distmagic-(claim|device)-", "/proc/net/unix"]
    ).stdout
