"""What the ranks of the other tests do, on the CPU: a mistake in it shows on a machine without a GPU, too."""

import pytest

from distmagic.errors import WorkerFailed
from tests.gpu import checks, devices, programs


@pytest.mark.parametrize("is_cold", [False, True])
def test_ranks_see_their_device(run, is_cold):
    done = run(programs.see_device, "cpu", hosts="node1:2,node2:1", is_cold=is_cold)
    found = [done.results[rank] for rank in range(3)]
    assert [(one["place"], one["total"], one["is_spoilt"]) for one in found] == [
        ("cpu", 3.0, False)
    ] * 3
    assert len({one["pid"] for one in found}) == 3


@pytest.mark.parametrize("is_shared", [False, True])
def test_ranks_reduce(run, is_shared):
    done = run(programs.reduce, "gloo", "cpu", is_shared, hosts="node1:2,node2:1")
    assert [done.results[rank] for rank in range(3)] == [
        {"first": 6.0, "last": 6.0, "sent": 42.0, "world": 3}
    ] * 3


def test_a_host_tells_how_busy_it_is_and_of_no_gpu_where_a_job_has_none(run, tmp_path):
    def without_gpus(*args, **spec):
        return run(*args, env={"CUDA_VISIBLE_DEVICES": ""}, **spec)

    done, told = checks.hardware_during(without_gpus, "cpu", tmp_path)
    assert done.results[0] == {"kept_bytes": 4096, "total_bytes": 0}
    checks.assert_host_figures(told)
    assert told.gpus == ()


def test_shared_storages_travel_once(run):
    checks.assert_shared_once(run(programs.shared_storages, "cpu", hosts="node1:1"))


def test_an_index_out_of_range(run):
    with pytest.raises(WorkerFailed) as caught:
        run(programs.index_out_of_range, "cpu", hosts="node1:1")
    assert "raised IndexError: index 12 is out of bounds" in str(caught.value)


def test_ranks_hold_their_device_until_they_are_interrupted(run):
    seen = checks.processes_during(run, "cpu", hosts="node1:2")
    assert len(seen.ranks) == 2
    assert {devices.parent_of(pid) for pid in seen.ranks} == {0}, "they are gone"
    assert not seen.ranks & seen.with_devices
