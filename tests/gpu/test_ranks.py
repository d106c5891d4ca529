"""Ranks on GPUs: their devices, collectives over NCCL and gloo, results, errors, and how many a host has."""

import subprocess
import sys

import pytest

from distmagic.errors import WorkerFailed
from tests.gpu import checks, devices, programs

pytestmark = pytest.mark.usefixtures("gpus")

warm_and_cold = pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])

# What a contact tells of this host, and what torch sees here, each in a process of its own.
_COUNTS = (
    "import torch; from distmagic.remote.system import facts; count = facts.count_gpus();"
    "print(count, torch.cuda.device_count())"
)


@warm_and_cold
def test_each_rank_sees_its_own_device(run, gpus, is_cold):
    for _ in range(2):  # the second run is the one that a template has been kept for
        done = run(programs.see_device, "cuda", hosts=f"node1:{gpus}", is_cold=is_cold)
        found = [done.results[rank] for rank in range(gpus)]
        assert [one["place"] for one in found] == [
            f"cuda:{rank}" for rank in range(gpus)
        ]
        assert [(one["total"], one["count"], one["is_spoilt"]) for one in found] == [
            (3.0, gpus, False)
        ] * gpus
    assert done.state.workers[0].device == "cuda:0", "the table of ranks shows it"


@warm_and_cold
def test_only_ranks_have_a_context(run, gpus, context_mib, is_cold):
    seen = checks.processes_during(run, "cuda", hosts=f"node1:{gpus}", is_cold=is_cold)
    checks.assert_only_ranks_have_contexts(seen, context_mib)


@warm_and_cold
def test_nccl_in_a_world_of_one_rank(run, is_cold):
    """It begins, reduces and ends. That two ranks meet over it, only two GPUs show."""
    done = run(programs.reduce, "nccl", "cuda", False, hosts="node1:1", is_cold=is_cold)
    assert done.results[0] == {"first": 1.0, "last": 1.0, "sent": 42.0, "world": 1}


@warm_and_cold
def test_nccl_between_ranks_with_a_gpu_each(run, gpus, is_cold):
    if gpus < 2:
        pytest.skip("one GPU here, and NCCL wants one for each rank: no two can meet")
    done = run(
        programs.reduce, "nccl", "cuda", False, hosts=f"node1:{gpus}", is_cold=is_cold
    )
    total = gpus * (gpus + 1) / 2
    expected = {"first": total, "last": total, "sent": 42.0, "world": gpus}
    assert [done.results[rank] for rank in range(gpus)] == [expected] * gpus


@pytest.mark.parametrize("where", ["node1:3", "node1:2,node2:1"])
def test_several_ranks_on_one_gpu_with_gloo(run, where):
    done = run(programs.reduce, "gloo", "cuda", True, hosts=where)
    assert [done.results[rank] for rank in range(3)] == [
        {"first": 6.0, "last": 6.0, "sent": 42.0, "world": 3}
    ] * 3


def test_results_on_a_device_come_back_on_the_cpu_and_shared_storages_once(run):
    checks.assert_shared_once(run(programs.shared_storages, "cuda", hosts="node1:1"))


def test_a_gpu_without_memory_is_told_as_such(run):
    with pytest.raises(WorkerFailed) as caught:
        run(programs.ask_for_too_much, "cuda", hosts="node1:1")
    assert "rank 0 (node1, local_rank 0)" in caught.value.message
    assert "OutOfMemoryError" in caught.value.message
    assert "of node1" in caught.value.hint


def test_a_failed_assertion_on_a_gpu_is_told_as_such(run):
    with pytest.raises(WorkerFailed) as caught:
        run(programs.index_out_of_range, "cuda", hosts="node1:1")
    assert "device-side assert triggered" in caught.value.message
    assert " node1 " in caught.value.hint
    assert "--env CUDA_LAUNCH_BLOCKING=1" in caught.value.hint


def test_a_host_tells_how_busy_its_gpus_are(run, gpus, tmp_path):
    listed = devices.ask_smi("-L")
    if not listed:
        pytest.skip("no nvidia-smi here: nothing tells")
    if devices.uuids(listed)[1]:
        pytest.skip("MIG has divided a GPU here: NVML tells no utilization of a part")
    done, told = checks.hardware_during(run, "cuda", tmp_path)
    checks.assert_host_figures(told)
    assert len(told.gpus) == gpus
    checks.assert_gpu_figures(told.gpus[0], **done.results[0])
    node = done.state.nodes[0]
    assert node.gpu_peaks[0] >= done.results[0]["kept_bytes"], "in the table at the end"
    assert done.state.workers[0].gpu == 0, "in the row of its rank"


# ---- how many


def test_nproc_per_node_gpu(run, gpus):
    done = run(programs.see_device, "cuda", hosts="node1", nproc_per_node="gpu")
    assert sorted(done.results) == list(range(gpus))


def test_where_nothing_is_said_there_is_one_rank_a_gpu(run, gpus):
    assert len(run(programs.see_device, "cuda", hosts="node1").results) == gpus


def test_cuda_visible_devices_of_a_job_hides_gpus_from_its_ranks(run):
    done = run(
        programs.see_device, "cuda", hosts="node1:1", env={"CUDA_VISIBLE_DEVICES": "0"}
    )
    assert (done.results[0]["place"], done.results[0]["count"]) == ("cuda:0", 1)


def counts(monkeypatch, mask):
    """Return how many GPUs a host with this mask tells of, and how many torch sees there."""
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    done = subprocess.run(
        [sys.executable, "-c", _COUNTS], capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize(
    "mask", [None, "", "-1", "0", " 0 ", "0,-1", "0,99", "99", "0,0"]
)
def test_a_host_counts_the_gpus_that_torch_sees(monkeypatch, mask):
    ours, of_torch = counts(monkeypatch, mask)
    assert ours == of_torch


def test_gpus_by_their_uuids(monkeypatch):
    gpus, instances = devices.uuids(devices.ask_smi("-L"))
    if not gpus or instances:
        pytest.skip("nvidia-smi lists no GPU here, or MIG has divided it")
    assert counts(monkeypatch, ",".join(reversed(gpus))) == [len(gpus)] * 2
    assert counts(monkeypatch, gpus[0][:12]) == [1, 1]


def test_instances_of_a_divided_gpu(monkeypatch):
    _, instances = devices.uuids(devices.ask_smi("-L"))
    if not instances:
        pytest.skip("no GPU here is divided by MIG")
    assert counts(monkeypatch, instances[0]) == [1, 1]
    assert counts(monkeypatch, ",".join(instances)) == [1, 1]


def test_a_host_without_nvml_has_no_gpu(monkeypatch, tmp_path):
    """A library of NVML's name that is none stands in front of the real one."""
    (tmp_path / "libnvidia-ml.so.1").write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert counts(monkeypatch, None)[0] == 0
