"""torchrun's commands by hand: one a host, and one for all."""

from distmagic.errors import UsageError
from distmagic.exports import systems
from tests import REPOSITORY
from tests.builders.exports import job, shown, texts

GOLDEN = REPOSITORY / "tests/golden/exports"


def test_the_files_of_two_hosts():
    whole = job(
        "torchrun",
        hosts=(("gpu-a", 4), ("gpu-b", 2)),
        spec={"nnodes": (2, 2), "env": (("LR", "0.1"),), "max_restarts": 1},
        setup="conda activate torch",
    )
    assert shown(systems.files(whole)) == (GOLDEN / "torchrun.txt").read_text()


def test_one_node_meets_itself():
    node = texts(systems.files(job("torchrun")))["node-0.sh"]
    assert "--master-addr=127.0.0.1" in node


def test_the_address_where_they_meet_can_be_said():
    spec = {"nnodes": (2, 2), "rdzv_endpoint": "[fd00::1]:4000"}
    found = texts(systems.files(job("torchrun", spec=spec)))
    assert "--master-addr=fd00::1" in found["node-1.sh"]
    assert "--master-port=4000" in found["node-1.sh"]
    assert "'--rdzv-endpoint=[fd00::1]:4000'" in found["any-node.sh"]


def test_hosts_that_have_as_many_ranks_have_them_in_the_common_command():
    hosts = (("a", 4), ("b", 4))
    assert (
        "--nproc-per-node=4"
        in texts(systems.files(job("torchrun", hosts=hosts)))["any-node.sh"]
    )


def test_nodes_without_a_place_to_meet(golden):
    with golden.raises(UsageError):
        systems.files(job("torchrun", nodes=2))


def test_debug_is_a_few_variables_of_the_exported_job():
    spec = {"debug": True, "env": (("NCCL_DEBUG", "WARN"),)}
    found = texts(systems.files(job("torchrun", spec=spec)))
    environment = found["environment.sh"]
    assert "export TORCH_CPP_LOG_LEVEL=INFO\n" in environment
    assert "NCCL_DEBUG=WARN\n" in environment
    assert "NCCL_DEBUG=INFO" not in environment
    assert ". ./environment.sh" in found["node-0.sh"]
