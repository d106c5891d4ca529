"""Devices of a host: which job has them, in which order the others wait, and when they are free again."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator

import pytest

from distmagic.remote.system import device_claims
from distmagic.remote.system.device_claims import (
    Claim,
    ClaimQueue,
    DeviceClaims,
    claims_before,
    device_key,
    parse,
)

LISTING = """Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 18127 /run/systemd/notify
0000000000000000: 00000002 00000000 00000000 0001 01 18130 @distmagic-port-40001
0000000000000000: 00000002 00000000 00000000 0001 01 18131 @distmagic-device-0
0000000000000000: 00000002 00000000 00000000 0001 01 18132 @distmagic-claim-0-17-1000-1122-181500-ab
0000000000000000: 00000002 00000000 00000000 0001 01 18133 @distmagic-claim-0-x-1000-j
0000000000000000: 00000002 00000000 00000000 0001 01 18134 @distmagic-claim-0-18
0000000000000000: 00000003 00000000 00000000 0001 03 18135
"""


def claim(key: str, since_ns: int, job: str) -> Claim:
    return Claim(key=key, since_ns=since_ns, uid=1000, job=job)


def test_what_the_kernel_lists_is_read_and_all_else_is_left_out():
    held = claim("0", 17, "1122-181500-ab")
    assert parse(LISTING) == ClaimQueue(claims=(held,), held=frozenset({"0"}))
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


def test_older_claims_of_other_jobs_on_the_same_devices_come_before():
    own = (claim("0", 50, "own"), claim("1", 50, "own"))
    other = (
        claim("1", 40, "b"),
        claim("0", 20, "a"),
        claim("1", 20, "a"),
        claim("0", 60, "later"),
        claim("2", 10, "elsewhere"),
        claim("0", 10, "own"),  # the same machine is another node of this job
        claim("0", 50, "aaa"),  # at the same moment the name decides, for both alike
    )
    assert [(one.key, one.job) for one in claims_before(own, (*own, *other))] == [
        ("0", "a"), ("1", "a"), ("1", "b"), ("0", "aaa"),
    ]  # fmt: skip
    assert claims_before(own, own) == ()


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


def jobs(before: tuple) -> list[tuple[str, bool]]:
    return [(claim.job, claim.is_held) for claim in before]


def test_a_clock_that_is_set_back_changes_no_place_in_the_queue(
    contacts, device, monkeypatch
):
    first, second, *_ = contacts
    now = time.time()
    assert first.take("j-1", (device,), waits=False) == ()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now - 3600)
        patch.setattr(time, "time_ns", lambda: int((now - 3600) * 1e9))
        assert jobs(second.take("j-2", (device,), waits=True)) == [("j-1", True)]
        assert first.take("j-1", (device,), waits=False) == (), "it still has them"
    (before,) = second.take("j-2", (device,), waits=True)
    assert abs(before.since_s - now) < 60, "for people it is a date"


def test_jobs_get_devices_in_the_order_in_which_they_asked(contacts, device):
    first, second, third, fourth = contacts
    other = f"{device}-1"
    assert first.take("j-1", (device,), waits=False) == ()
    assert first.take("j-1", (device,), waits=False) == (), "asked again, it has them"
    assert jobs(second.take("j-2", (device, other), waits=True)) == [("j-1", True)]
    before = third.take("j-3", (other,), waits=True)
    assert jobs(before) == [("j-2", False)], "nobody has it, but j-2 came first"
    assert before[0].device == other
    assert jobs(fourth.take("j-4", (device,), waits=True)) == [
        ("j-1", True),
        ("j-2", True),
    ]
    first.release()
    assert jobs(fourth.take("j-4", (device,), waits=True)) == [("j-2", False)]
    assert second.take("j-2", (device, other), waits=True) == ()
    assert jobs(third.take("j-3", (other,), waits=True)) == [("j-2", True)]
    second.release()
    assert third.take("j-3", (other,), waits=True) == ()
    assert fourth.take("j-4", (device,), waits=True) == ()


def test_nothing_is_kept_of_a_job_that_does_not_wait(contacts, device):
    first, second, third, _ = contacts
    assert first.take("j-1", (device,), waits=False) == ()
    assert jobs(second.take("j-2", (device,), waits=False)) == [("j-1", True)]
    assert second.descriptors == ()
    first.release()
    assert third.take("j-3", (device,), waits=False) == ()


def test_a_job_that_leaves_the_queue_lets_others_go_first_and_comes_behind_them(
    contacts, device
):
    first, asleep, third, _ = contacts
    assert first.take("a", (device,), waits=True) == ()
    assert asleep.take("b", (device,), waits=True)
    assert third.take("c", (device,), waits=True)
    for silent_s in (30.0, 59.0):
        asleep.lapse(silent_s)
    assert jobs(third.take("c", (device,), waits=True)) == [("a", True), ("b", True)]
    first.lapse(3600.0)  # nothing: it has the device
    asleep.lapse(60.0)
    assert jobs(third.take("c", (device,), waits=True)) == [("a", True)]
    first.release()
    assert third.take("c", (device,), waits=True) == ()
    assert jobs(asleep.take("b", (device,), waits=True)) == [("c", True)]


def test_devices_under_a_lease_go_to_others_when_the_notebook_is_silent(
    contacts, device
):
    """It has them, waits for those of another host, and sleeps."""
    asleep, second, *_ = contacts
    assert asleep.take("a", (device,), waits=True, lease_s=90.0) == ()
    assert second.take("b", (device,), waits=True)
    asleep.lapse(89.0)
    assert jobs(second.take("b", (device,), waits=True)) == [("a", True)]
    asleep.lapse(90.0)
    assert second.take("b", (device,), waits=True) == ()
    assert jobs(asleep.take("a", (device,), waits=False)) == [("b", True)]


def test_devices_that_are_asked_for_again_without_a_lease_are_kept(contacts, device):
    asleep, second, *_ = contacts
    assert asleep.take("a", (device,), waits=True, lease_s=90.0) == ()
    assert asleep.take("a", (device,), waits=False) == ()
    asleep.lapse(3600.0)
    assert second.take("b", (device,), waits=True)


def test_devices_are_kept_as_long_as_an_agent_has_the_descriptors(contacts, device):
    first, second, *_ = contacts
    assert first.take("j-1", (device,), waits=False) == ()
    of_agent = [os.dup(descriptor) for descriptor in first.descriptors]
    first.release()
    assert jobs(second.take("j-2", (device,), waits=True)) == [("j-1", True)]
    for descriptor in of_agent:
        os.close(descriptor)
    assert second.take("j-2", (device,), waits=True) == ()


def test_two_nodes_of_one_job_on_one_machine_share_its_devices(contacts, device):
    first, second, third, _ = contacts
    assert first.take("j-1", (device,), waits=False) == ()
    assert second.take("j-1", (device,), waits=False) == ()
    assert jobs(third.take("j-2", (device,), waits=True)) == [("j-1", True)] * 2


def test_a_clock_that_was_set_back_lets_nobody_have_a_device_twice(
    contacts, device, monkeypatch
):
    first, second, *_ = contacts
    assert first.take("j-1", (device,), waits=False) == ()
    monkeypatch.setattr(device_claims.time, "time_ns", lambda: 1)
    assert jobs(second.take("j-2", (device,), waits=True)) == [("j-1", True)]
    assert second.take("j-2", (device,), waits=True) != ()


def test_a_device_that_is_held_without_a_claim_is_another_run_s(contacts, device):
    held = device_claims._bound(f"distmagic-device-{device_key(device)}")
    with held:
        (before,) = contacts[0].take("j-1", (device,), waits=True)
    assert (before.job, before.owner, before.is_held) == ("", "", True)
    assert contacts[0].take("j-1", (device,), waits=True) == ()


def test_a_job_of_another_user_has_the_name_of_that_user(contacts, device, monkeypatch):
    first, second, third, _ = contacts
    with monkeypatch.context() as as_root:
        as_root.setattr(os, "getuid", lambda: 0)
        assert first.take("j-1", (device,), waits=False) == ()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    (before,) = second.take("j-2", (device,), waits=True)
    assert before.owner == "root"
    monkeypatch.setattr(os, "getuid", lambda: 4243)
    assert third.take("j-3", (device,), waits=True)[1].owner == "", "no such user"


def test_more_devices_than_a_host_has_are_refused(contacts):
    with pytest.raises(ValueError, match="101 devices"):
        contacts[0].take("j-1", tuple(map(str, range(101))), waits=False)
