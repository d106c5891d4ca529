"""From what is asked for and what the hosts are like to what each host is told; the flags of torchrun are its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distmagic.errors import PreflightError, UsageError
from distmagic.planning import plan as planning
from distmagic.planning.plan import Plan, Reached, choose_backend, count_ranks
from distmagic.remote.contact import template_client
from distmagic.remote.wire.protocol import TemplateRequest
from distmagic.request.access import Access
from distmagic.request.hosts import LOCALHOST, Host
from distmagic.request.spec import JobSpec
from tests.builders.plans import FACTS, A, B, plan_for, reached


def plan_of(*hosts: Reached, **spec) -> Plan:
    return plan_for(JobSpec(**spec), *(hosts or (A, B)))


def flags_of(plan: Plan) -> list[tuple[str, ...]]:
    """Return torchrun's flags for each node."""
    return [plan.flags_of(node) for node in plan.nodes]


def test_two_nodes_meet_statically():
    plan = plan_of(nproc_per_node=2)
    assert (plan.job, plan.endpoint, plan.terms.max_restarts) == (
        "j-1",
        "10.0.0.1 40001",
        0,
    )
    common = (
        "--nnodes=2",
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--rdzv-backend=static",
        "--rdzv-id=j-1",
    )
    lead = ("--master-addr=10.0.0.1", "--master-port=40001")
    assert flags_of(plan) == [
        (*common, "--local-addr=10.0.0.1", "--node-rank=0", *lead),
        (*common, "--local-addr=10.0.0.2", "--node-rank=1", *lead),
    ]
    assert [
        (node.node_rank, node.host.name, node.nproc_per_node) for node in plan.nodes
    ] == [(0, "gpu-a", 2), (1, "gpu-b", 2)]


def test_two_nodes_meet_by_c10d():
    plan = plan_of(
        nproc_per_node=2, rdzv_backend="c10d", rdzv_id="mine", max_restarts=3
    )
    common = (
        "--nnodes=2",
        "--nproc-per-node=2",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=mine",
    )
    assert flags_of(plan) == [
        (
            *common,
            "--local-addr=10.0.0.1",
            "--rdzv-endpoint=10.0.0.1:40001",
            "--rdzv-conf=is_host=1",
        ),
        (
            *common,
            "--local-addr=10.0.0.2",
            "--rdzv-endpoint=10.0.0.1:40001",
            "--rdzv-conf=is_host=0",
        ),
    ]
    assert plan.terms.max_restarts == 3
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1") in plan.nodes[1].defaults
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1") not in plan_of().nodes[
        1
    ].defaults


@pytest.mark.parametrize("backend", [None, "c10d"])
@pytest.mark.parametrize("address", ["gpu-b", "10.0.0.2"])
def test_an_endpoint_that_is_not_the_first_host_s(backend, address, golden):
    with golden.raises(UsageError):
        plan_of(rdzv_endpoint=f"{address}:29400", rdzv_backend=backend)
    assert plan_of(rdzv_endpoint="gpu-a:29400").endpoint == "gpu-a 29400"


def test_an_elastic_job():
    flags = flags_of(plan_of(nnodes=(1, 4)))[0]
    assert flags[0] == "--nnodes=1:4"
    assert "--rdzv-backend=c10d" in flags


def test_a_single_node_dials_nobody():
    plan = plan_of(A)
    assert plan.endpoint == ""
    assert "--nnodes=1" in flags_of(plan)[0]


def test_addresses_of_ipv6():
    hosts = (reached(address="fd00::1"), reached("gpu-b", "fd00::2"))
    c10d = flags_of(plan_of(*hosts, rdzv_backend="c10d"))
    assert "--rdzv-endpoint=[fd00::1]:40001" in c10d[1]
    static = plan_of(*hosts)
    assert "--master-addr=fd00::1" in flags_of(static)[1]
    assert static.endpoint == "fd00::1 40001"


@pytest.mark.parametrize(
    ("asked", "endpoint"),
    [
        ({}, "10.0.0.1 40001"),
        ({"master_port": 29500}, "10.0.0.1 29500"),
        ({"rdzv_endpoint": "203.0.113.5"}, "203.0.113.5 40001"),
        ({"rdzv_endpoint": "203.0.113.5", "master_port": 29500}, "203.0.113.5 29500"),
        ({"rdzv_endpoint": "203.0.113.5:29400"}, "203.0.113.5 29400"),
        ({"rdzv_endpoint": "[fd00::5]:29400"}, "fd00::5 29400"),
        ({"rdzv_endpoint": "fd00::5"}, "fd00::5 40001"),
    ],
)
def test_where_the_nodes_meet(asked, endpoint):
    assert plan_of(**asked).endpoint == endpoint


def test_local_addr_is_the_first_hosts():
    flags = flags_of(plan_of(local_addr="192.0.2.1"))
    assert "--local-addr=192.0.2.1" in flags[0]
    assert "--local-addr=10.0.0.2" in flags[1]


@pytest.mark.parametrize(
    ("asked", "nodes", "backend"),
    [
        ({}, 2, "static"),
        ({"max_restarts": 1}, 1, "static"),
        ({"max_restarts": 1}, 2, "c10d"),
        ({"nnodes": (1, 2)}, 1, "c10d"),
        ({"rdzv_backend": "c10d"}, 1, "c10d"),
        ({"rdzv_backend": "static", "max_restarts": 1}, 1, "static"),
    ],
)
def test_the_backend(asked, nodes, backend):
    assert choose_backend(JobSpec(**asked), nodes) == backend


def test_static_does_not_restart_on_several_nodes(golden):
    with golden.raises(UsageError):
        plan_of(rdzv_backend="static", max_restarts=1)


@pytest.mark.parametrize(
    ("nnodes", "hosts"),
    [((3, 3), (A, B)), ((2, 2), (A,)), ((1, 1), (A, B)), ((3, 4), (A, B))],
    ids=["3 of 2", "2 of 1", "1 of 2", "3 to 4 of 2"],
)
def test_as_many_hosts_as_nodes(nnodes, hosts, golden):
    with golden.raises(UsageError):
        plan_of(*hosts, nnodes=nnodes)


@pytest.mark.parametrize(
    ("slots", "gpus", "count"),
    [
        (None, 0, 1),
        (None, 4, 4),
        (3, 4, 3),
        ("gpu", 2, 2),
        ("cpu", 2, 16),
        ("auto", 2, 2),
        ("auto", 0, 16),
    ],
)
def test_ranks_of_a_host(slots, gpus, count):
    assert count_ranks(slots, replace(FACTS, gpus=gpus), "gpu-a") == count


def test_gpu_without_a_gpu(golden):
    with golden.raises(PreflightError) as caught:
        plan_of(A, reached("gpu-b", slots="gpu"))
    assert caught.value.host == "gpu-b"


def test_a_hosts_own_number_goes_before_the_jobs():
    plan = plan_of(
        reached(slots=4),
        reached("gpu-b", slots="gpu", gpus=2),
        reached("gpu-c"),
        nproc_per_node=3,
    )
    assert [node.nproc_per_node for node in plan.nodes] == [4, 2, 3]
    for flags, ranks in zip(flags_of(plan), (4, 2, 3), strict=True):
        assert f"--nproc-per-node={ranks}" in flags


def test_collectives_are_bound_to_the_interface_that_is_dialled():
    plan = plan_of(A, B, nproc_per_node=2)
    assert plan.nodes[1].defaults == (
        ("GLOO_SOCKET_IFNAME", "ib0"),
        ("NCCL_SOCKET_IFNAME", "=ib0"),
        ("OMP_NUM_THREADS", "1"),
    )
    assert plan_of(reached(interface=""), nproc_per_node=1).nodes[0].defaults == ()


def test_variables_go_to_all():
    env = (("A", "1"), ("B", "two words"))
    assert [node.env for node in plan_of(env=env).nodes] == [env, env]


def test_the_working_directory():
    here = Reached(host=LOCALHOST, facts=FACTS, route=A.route)
    assert [node.cwd for node in plan_of(here, B).nodes] == ["/nb", ""]
    assert [node.cwd for node in plan_of(here, B, cwd="/data").nodes] == [
        "/data",
        "/data",
    ]


def test_commands_for_people(golden):
    text = planning.commands(
        plan_of(nproc_per_node=2, env=(("TOKEN", "secret"),), cwd="~/my runs"),
        ["python3", "/opt/my python"],
    )
    golden(text)


@pytest.mark.parametrize(
    ("cwd", "shown"),
    [
        ("~", "~"),
        ("/a b", "'/a b'"),
        ("~/x", "~/x"),
        ("$(rm)", "'$(rm)'"),
        ("~me/x", "'~me/x'"),
    ],
)
def test_a_command_without_variables(cwd, shown):
    text = planning.commands(
        plan_of(reached(interface=""), cwd=cwd, nproc_per_node=1), ["python3"]
    )
    assert text.startswith(
        f"# gpu-a (node_rank 0, 1 rank)\ncd {shown} && python3 -m torch.distributed.run --nnodes=1 "
    )


def test_the_flags_are_torchruns_own():
    """Torchrun's own parser reads them, and leaves nothing over."""
    from torch.distributed.run import get_args_parser

    for asked in ({}, {"rdzv_backend": "c10d"}, {"nnodes": (1, 3)}):
        parsed = get_args_parser().parse_args(
            [*flags_of(plan_of(**asked))[1], "script.py"]
        )
        assert (parsed.training_script, parsed.training_script_args) == (
            "script.py",
            [],
        )
        assert parsed.local_addr == "10.0.0.2"
        assert parsed.rdzv_id == "j-1"


def test_what_a_host_keeps_loaded_is_told_before_the_plan():
    spec, access = (
        JobSpec(env=(("A", "1"),)),
        Access(lease_s=5.0, warm_idle_s=7.0, preload=("lightning",)),
    )
    warm = planning.warming(spec, access, Host(name="gpu-a", slots=2), FACTS, "ab12")
    assert warm == TemplateRequest(
        owner="ab12",
        idle_s=7.0,
        lease_s=5.0,
        env={"A": "1"},
        defaults={"OMP_NUM_THREADS": "1"},
        preload=("lightning",),
    )
    one = planning.warming(spec, access, Host(name="gpu-a"), FACTS, "ab12")
    assert one is not None
    assert one.defaults == {}


@pytest.mark.parametrize("access", [Access(cold=True), Access(warm_idle_s=0.0)])
def test_nothing_is_kept_loaded_where_that_is_not_wanted(access):
    assert (
        planning.warming(JobSpec(), access, Host(name="gpu-a"), FACTS, "ab12") is None
    )


def test_a_job_that_will_not_start_warms_nothing():
    assert (
        planning.warming(
            JobSpec(nproc_per_node="gpu"), Access(), Host(name="gpu-a"), FACTS, "ab12"
        )
        is None
    )


def test_variables_of_the_plan_are_in_the_template_or_read_only_while_a_job_runs():
    """Else each run would be told that its template does not fit."""
    for host in (reached(slots=1), reached(slots=4)):
        warm = planning.warming(JobSpec(), Access(), host.host, host.facts, "ab12")
        (node,) = plan_of(host).nodes
        assert warm is not None
        more = (
            {name for name, _ in (*node.env, *node.defaults)}
            - set(warm.env)
            - set(warm.defaults)
        )
        assert more <= template_client.AT_RUN_TIME
