"""Devices of a host: which job has them, and when they are free again."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator

import pytest

from distmagic.remote.system import facts
from distmagic.remote.system.device_claims import Claim, DeviceClaims, device_key, parse
from distmagic.remote.wire.parts import DeviceClaim

LISTING = """Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 18127 /run/systemd/notify
0000000000000000: 00000002 00000000 00000000 0001 01 18130 @distmagic-port-40001
0000000000000000: 00000002 00000000 00000000 0001 01 18131 @distmagic-device-0
0000000000000000: 00000002 00000000 00000000 0001 01 18132 @distmagic-claim-0-17-1000-1122-181500-ab
0000000000000000: 00000002 00000000 00000000 0001 01 18133 @distmagic-claim-0-x-1000-j
0000000000000000: 00000002 00000000 00000000 0001 01 18134 @distmagic-claim-0-18
0000000000000000: 00000003 00000000 00000000 0001 03 18135
"""


def test_what_the_kernel_lists_is_read_and_all_else_is_left_out():
    held = Claim(key="0", since_ns=17, uid=1000, job="1122-181500-ab")
    assert parse(LISTING) == (held,)
    assert held.name == "distmagic-claim-0-17-1000-1122-181500-ab"


def test_the_longest_name_is_one_that_a_socket_can_have():
    name = Claim(
        key=device_key("MIG-GPU-1b2c/7/0"),
        since_ns=9 * 10**18,
        uid=2**32 - 1,
        job="1122-181500-abcdef01",
    ).name
    assert len(name) < 107


UUIDS = ("GPU-1b2c", "GPU-1bff", "2")  # the third one does not tell its own


@pytest.mark.parametrize(
    ("device", "other"),
    [("0", "GPU-1b2c"), ("0", "GPU-1b2"), ("1", "GPU-1bf"), ("2", "02"), ("7", "7")],
)
def test_a_gpu_has_one_key_however_it_is_named(device, other):
    assert device_key(device, UUIDS) == device_key(other, UUIDS)


def test_other_gpus_have_other_keys():
    keys = [device_key(one, UUIDS) for one in ("0", "1", "2", "3", "GPU-1b", "MIG-0")]
    assert len(set(keys)) == len(keys)
    # Number 0 of another allocation on the same machine.
    assert device_key("0", ("GPU-77aa",)) != device_key("0", UUIDS)


@pytest.fixture
def device() -> str:
    """A device that no other test, and no job on this machine, has ever named."""
    return f"GPU-{secrets.token_hex(8)}"


@pytest.fixture
def contacts() -> Iterator[list[DeviceClaims]]:
    """What four conversations with this host keep."""
    made = [DeviceClaims() for _ in range(4)]
    yield made
    for one in made:
        one.release()


def jobs(claims: tuple[DeviceClaim, ...]) -> list[str]:
    return [claim.job for claim in claims]


def test_a_job_gets_all_its_devices_or_none(contacts, device):
    first, second, third, fourth = contacts
    other = f"{device}-1"
    before_s = time.time()
    assert first.take("j-1", (device,)) == ()
    after_s = time.time()
    assert first.take("j-1", (device,)) == (), "asked again, it has them"
    (claim,) = second.take("j-2", (device, other))
    assert (claim.device, claim.job, claim.owner) == (device, "j-1", "")
    assert before_s - 1 <= claim.since_s <= after_s + 1
    assert second.descriptors == ()
    assert third.take("j-3", (other,)) == ()
    assert sorted(jobs(fourth.take("j-4", (device, other)))) == ["j-1", "j-3"]
    first.release()
    third.release()
    assert fourth.take("j-4", (device, other)) == ()
    assert jobs(second.take("j-2", (device, other))) == ["j-4", "j-4"]


def test_devices_are_kept_as_long_as_an_agent_has_the_descriptors(contacts, device):
    first, second, *_ = contacts
    assert first.take("j-1", (device,)) == ()
    of_agent = [os.dup(descriptor) for descriptor in first.descriptors]
    first.release()
    assert jobs(second.take("j-2", (device,))) == ["j-1"]
    for descriptor in of_agent:
        os.close(descriptor)
    assert second.take("j-2", (device,)) == ()


def test_two_nodes_of_one_job_on_one_machine_share_its_devices(contacts, device):
    first, second, third, _ = contacts
    assert first.take("j-1", (device,)) == ()
    assert second.take("j-1", (device,)) == ()
    assert jobs(third.take("j-2", (device,))) == ["j-1"] * 2
    first.release()
    assert jobs(third.take("j-2", (device,))) == ["j-1"], "the other node has it"
    second.release()
    assert third.take("j-2", (device,)) == ()


def test_a_device_that_is_held_without_a_claim_is_another_run_s(contacts, device):
    with facts.named_socket(f"distmagic-device-{device_key(device)}"):
        (claim,) = contacts[0].take("j-1", (device,))
    assert (claim.job, claim.owner) == ("", "")
    assert contacts[0].take("j-1", (device,)) == ()


def test_a_job_of_another_user_has_the_name_of_that_user(contacts, device, monkeypatch):
    first, second, *_ = contacts
    with monkeypatch.context() as as_root:
        as_root.setattr(os, "getuid", lambda: 0)
        assert first.take("j-1", (device,)) == ()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    (claim,) = second.take("j-2", (device,))
    assert claim.owner == "root"
    first.release()
    assert second.take("j-2", (device,)) == ()
    monkeypatch.setattr(os, "getuid", lambda: 4243)
    (claim,) = first.take("j-1", (device,))
    assert claim.owner == "", "no such user"


def test_more_devices_than_a_host_has_are_refused(contacts):
    with pytest.raises(ValueError, match="101 devices"):
        contacts[0].take("j-1", tuple(map(str, range(101))))
