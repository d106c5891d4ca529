"""Variables become a place: of every system, complete, half-set and contradictory. Tables, and properties of any job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.errors import UsageError
from distmagic.inside.addresses import address_in
from distmagic.inside.detect import detect
from distmagic.inside.job_node import RankTask
from distmagic.systems.osmo import inside as osmo

BY_SLURM = "SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE"
BY_RANK = "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE"
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    "SKYPILOT_TASK_ID": "sky-2026-11-22_train-1",
}
SING = {
    "SING_RANK": "1",
    "SING_WORLD_SIZE": "2",
    "SING_JOB_NAME": "test",
    "SING_HOSTNAME_SUFFIX": "test-service.demo.svc.cluster.local",
    "SING_MASTER_ADDR": "test-0.test-service.demo.svc.cluster.local",
    "SING_HOST_ADDR": "10.0.0.2",
}
OSMO = {
    "DISTMAGIC_WORKFLOW": "train-7",
    "DISTMAGIC_NODE_RANK": "1",
    "DISTMAGIC_NNODES": "3",
    "DISTMAGIC_MASTER_ADDR": "train-7-master.osmo",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "sx2",  # of a step, and not what counts
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "sx[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
SLURM_RANKS = SLURM | {
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
}
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "sx[1-2]",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "sx[1-2]"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job1",
}
ONE_A_NODE = TORCHRUN | {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}
OPERATOR = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "gpu-a",
    "PET_MASTER_PORT": "29500",
}

PLACES = {
    "SkyPilot": (SKYPILOT, "inside SkyPilot task sky-2026-11-22_train-1, node 1 of 2", "10.0.0.1", None),
    "SkyPilot on Slurm": (
        SLURM | SKYPILOT,
        "inside SkyPilot task sky-2026-11-22_train-1, node 1 of 2",
        "10.0.0.1",
        None,
    ),
    "SkyPilot with a job of Slurm around it": (
        SALLOC | SKYPILOT,
        "inside SkyPilot task sky-2026-11-22_train-1, node 1 of 2",
        "10.0.0.1",
        None,
    ),
    "SING Cloud": (SING, "inside SING Cloud job test, node 1 of 2", "test-0.test-service.demo.svc.cluster.local", None),
    "OSMO": (OSMO, "inside OSMO workflow train-7, node 1 of 3", "train-7-master.osmo", None),
    "Slurm, one task a node": (SLURM, "inside Slurm job 7, node 1 of 2", "sx1", None),
    "Slurm, one task a rank": (
        SLURM_RANKS,
        "inside Slurm job 7, node 1 of 2",
        "sx1",
        RankTask(
            rank=2, world_size=3, local_rank=0, local_world_size=1, said_by=BY_SLURM
        ),
    ),
    "torchrun": (
        TORCHRUN,
        "inside torchrun job job1, node 1 of 2",
        "gpu-a",
        RankTask(
            rank=3, world_size=4, local_rank=1, local_world_size=2, said_by=BY_RANK
        ),
    ),
    "torchrun in a step of Slurm": (
        SLURM | TORCHRUN,
        "inside torchrun job job1, node 1 of 2",
        "gpu-a",
        RankTask(
            rank=3, world_size=4, local_rank=1, local_world_size=2, said_by=BY_RANK
        ),
    ),
    "torchrun, one process a node": (ONE_A_NODE, "inside torchrun job job1, node 1 of 2", "gpu-a", None),
    "an operator that sets RANK": (OPERATOR, "inside torchrun, node 1 of 3", "job-master-0", None),
    "RANK with LOCAL_RANK": (
        OPERATOR
        | {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
        },
        "inside torchrun, node 1 of 2",
        "job-master-0",
        RankTask(
            rank=3, world_size=4, local_rank=1, local_world_size=2, said_by=BY_RANK
        ),
    ),
    "torchrun's flags as variables": (PET, "inside torchrun, node 1 of 2", "gpu-a", None),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_a_place(name):
    environ, words, lead, task = PLACES[name]
    found = detect(environ)
    assert found is not None
    assert (found.words, found.lead, found.task) == (words, lead, task)
    assert len(found.ports) == 8
    assert all(20_000 <= port < 30_000 for port in found.ports)


NOWHERE = {
    "nothing": {},
    "a notebook with a process group of its own": {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    "a world of one": {"MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "1"},
    "a rank of a run": TORCHRUN | {"DISTMAGIC_JOB": "1122-101112-abcd"},
    "a batch script of one node": BATCH | {"SLURM_JOB_NUM_NODES": "1"},
    "a step of one task": SLURM
    | {
        "SLURM_STEP_NODELIST": "sx2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
    },
    "a SkyPilot cluster of one": SKYPILOT
    | {
        "SKYPILOT_NODE_IPS": "10.0.0.1",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_RANK": "0",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NOWHERE)
def test_no_place(name):
    assert detect(NOWHERE[name]) is None


SEVERAL = (SKYPILOT, SING, OSMO, SLURM, ONE_A_NODE, PET)
NEEDED = {
    "SkyPilot": (SKYPILOT, ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")),
    "SING Cloud": (SING, ("SING_RANK", "SING_WORLD_SIZE", "SING_JOB_NAME", "SING_HOSTNAME_SUFFIX")),
    "OSMO": (OSMO, osmo.VARIABLES),
    "Slurm": (
        SLURM,
        tuple(
            name
            for name in SLURM
            if name
            not in ("SLURM_STEP_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")
        ),
    ),
    "torchrun": (TORCHRUN, tuple(name for name in TORCHRUN if name not in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"))),
    "an operator": (OPERATOR, ("RANK", "WORLD_SIZE", "MASTER_ADDR")),
    "flags": (PET, ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("system", "missing"),
    [(system, name) for system, (_, names) in NEEDED.items() for name in names],
)
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_a_variable_that_is_missing_is_named(system, missing, how):
    environ, names = NEEDED[system]
    given = {name: value for name, value in environ.items() if name != missing}
    if how == "empty":
        given[missing] = ""
    with pytest.raises(UsageError) as caught:
        detect(given)
    assert f"{missing} is not set, but " in caught.value.message
    there = [name for name in names if name != missing]
    assert there[0] in caught.value.message
    assert "--on none" in caught.value.hint


WRONG = {
    "more addresses than nodes": SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"},
    "a rank that is too high": SKYPILOT | {"SKYPILOT_NODE_RANK": "2"},
    "no number": SING | {"SING_WORLD_SIZE": "two"},
    "no nodes": SING | {"SING_WORLD_SIZE": "0"},
    "a negative rank": SING | {"SING_RANK": "-1"},
    "nothing but the first node's name": {"SING_MASTER_ADDR": "m"},
    "other names than nodes": SLURM | {"SLURM_STEP_NODELIST": "sx[1-3]"},
    "no list of nodes": SLURM | {"SLURM_STEP_NODELIST": "sx[1-"},
    "other tasks than nodes": SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
    "other tasks than there are": SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    "ranks that don't fit": OPERATOR | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_variables_that_contradict_each_other_are_named(name, golden):
    with golden.raises(UsageError):
        detect(WRONG[name])


@pytest.mark.parametrize("environ", [BATCH, SALLOC], ids=["batch", "salloc"])  # fmt: skip
def test_what_is_on_one_of_several_nodes_alone_is_told_what_to_write(environ, golden):
    with golden.raises(UsageError) as caught:
        detect(environ)
    for cure in ("srun", "--ntasks-per-node=1", "--on slurm", "--on none"):
        assert cure in caught.value.hint


@st.composite
def steps(draw):
    """Steps of Slurm: how many tasks each node has."""
    tasks = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    node = draw(st.integers(0, len(tasks) - 1))
    local = draw(st.integers(0, tasks[node] - 1))
    return tasks, node, local


@given(steps())
def test_any_step_of_slurm(step):
    tasks, node, local = step
    rank = sum(tasks[:node]) + local
    found = detect(
        SLURM
        | {
            "SLURM_STEP_NODELIST": f"n[1-{len(tasks)}]",
            "SLURM_STEP_NUM_NODES": str(len(tasks)),
            "SLURM_STEP_NUM_TASKS": str(sum(tasks)),
            "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
            "SLURM_NODEID": str(node),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
        }
    )
    if sum(tasks) == 1:
        assert found is None
        return
    assert found is not None
    assert (found.nnodes, found.node_rank, found.lead) == (len(tasks), node, "n1")
    if sum(tasks) == len(tasks):
        assert found.task is None
    else:
        assert found.task == RankTask(
            rank=rank,
            world_size=sum(tasks),
            local_rank=local,
            local_world_size=tasks[node],
            said_by=BY_SLURM,
        )


@given(
    st.sampled_from(SEVERAL),
    st.data(),
    st.sampled_from(["", "0", "1", "x", "-1", "999999999999", "\n", "²", "a b"]),
)
def test_any_single_change_is_a_place_or_an_error_that_names_a_variable(
    environ, data, value
):
    name = data.draw(st.sampled_from(sorted(environ)))
    found, message = None, ""
    try:
        found = detect(environ | {name: value})
    except UsageError as error:
        message = error.message
    assert not message or any(one in message for one in environ)
    assert found is None or 0 <= found.node_rank < found.nnodes


def test_all_nodes_of_a_job_have_its_key_and_ports_and_no_other_job_has():
    nodes = [detect(SKYPILOT | {"SKYPILOT_NODE_RANK": rank}) for rank in "01"]
    other = detect(SKYPILOT | {"SKYPILOT_TASK_ID": "sky-2026-11-22_train-2"})
    assert nodes[0].key == nodes[1].key != other.key
    assert nodes[0].ports == nodes[1].ports != other.ports


def test_the_address_of_a_node_of_slurm():
    said = "NodeName=sx1 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=dm2 Version=22.05"
    assert address_in(said) == "10.0.0.7"
    assert address_in("Node sx9 not found") == ""
