"""Logs of NCCL, gloo and torch under --debug: they stay in the log, and the run notes what they show of the network."""

from __future__ import annotations

import pytest

from distmagic.failures import detailed_logs
from distmagic.remote.wire import protocol as p
from distmagic.render.notes import notes
from distmagic.state.events import Event, Gone
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.verdict import verdict
from tests.builders.events import HOSTS, at, hello, output, raised, worker
from tests.builders.terms import on_terms

BUS = "14605:14673 [0] NCCL INFO"
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534]"
REFUSED = "socketPollConnect: connect to 10.0.0.1<40123> returned Connection refused, retrying (1/34) after sleep for 100 msec"


@pytest.mark.parametrize(("line", "kind", "value"), [
    # NCCL 2.7, 2.14, 2.28
    (f"\x1b[0m gpu-a:{BUS} Bootstrap : Using [0]ens5:172.31.0.137<0> [1]veth75fa783:fe80::14ad%veth75fa783<0>",
     "address", "ens5:172.31.0.137"),
    (f"gpu-a:{BUS} Bootstrap : Using ib0:10.41.21.104<0>", "address", "ib0:10.41.21.104"),
    (f"gpu-a:{BUS} Bootstrap: Using eth0:fd00::2<0>", "address", "eth0:fd00::2"),
    (f"gpu-a:{BUS} NET/Socket : Using [0]enp1s0f0:10.100.12.111<0>", "sockets", "[0]enp1s0f0:10.100.12.111<0>"),
    (f"gpu-a:{BUS} NET/IB : No device found.", "lacks", "No device found"),
    (f"gpu-a:{BUS} Failed to open libibverbs.so[.1]", "lacks", "Failed to open libibverbs"),
    (f"gpu-a:{BUS} Using network Socket", "network", "Socket"),
    (f"gpu-a:{BUS} Using network AWS Libfabric", "network", "AWS Libfabric"),
    ("NCCL version 2.14.3+cuda11.5", "version", "2.14.3+cuda11.5"),
    (f"gpu-a:{BUS} ncclCommInitRank comm 0x558e820ca930 rank 1 nranks 2 cudaDev 0 busId 1000 commId 0x7f - Init COMPLETE",
     "NCCL connected", "Init COMPLETE"),
    (f"gpu-a:{BUS} {REFUSED}", "NCCL failed", f"gpu-a:{BUS} {REFUSED}"),
    ("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1", "gloo connected",
     "Rank 0 is connected"),
    (f"[rank0]:[I1126 17:35:33.061527386 ProcessGroupGloo.cpp:143] {GLOO} connect [10.0.0.2]:13195: No route to host",
     "gloo failed",
     f"[rank0]:[I1126 17:35:33.061527386 ProcessGroupGloo.cpp:143] {GLOO} connect [10.0.0.2]:13195: No route to host"),
])  # fmt: skip
def test_a_line_of_a_log_that_shows_something(line, kind, value):
    assert detailed_logs.fact(line) == (kind, value)
    is_warned_of = "libibverbs" not in line
    assert detailed_logs.is_detail(line) or not is_warned_of


@pytest.mark.parametrize("line", [
    f"gpu-a:{BUS} Channel 00/04 :    0   1",
    f"gpu-a:{BUS} NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:172.25.30.42<0>",
    f"gpu-a:{BUS} init.cc:1402 -> 6",
    "[I1126 17:34:16.790184147 debug.cpp:48] [c10d] The debug level is set to DETAIL.",
    "[rank4]:[I421 02:05:38.764490322 socket.cpp:955] [c10d] The client socket has connected to [::ffff:10.0.0.1]:29871",
])  # fmt: skip
def test_a_detail_that_shows_nothing(line):
    assert detailed_logs.is_detail(line)
    assert detailed_logs.fact(line) is None


@pytest.mark.parametrize("line", [
    "step 3: loss 0.25",
    "NCCL is fast",
    "[INFO] loading [I1]",
    "gpu-a:1:2 [0] misc/socket.cc:483 NCCL WARN Cuda failure 'invalid device ordinal'",
    "[rank4]:[E421 02:05:38.764490322 ProcessGroupGloo.cpp:143] Gloo connectFullMesh failed with [pair.cc:144] no error",
    "[W1126 17:35:33.061527386 socket.cpp:785] [c10d] The client socket failed",
])  # fmt: skip
def test_what_is_no_detail(line):
    assert not detailed_logs.is_detail(line)
    assert detailed_logs.fact(line) is None


def run_of(*events: Event, debug: bool = True) -> RunState:
    """Return a run of two hosts, which reach each other at 10.0.0.1 and 10.0.0.2."""
    state = on_terms(begin("j", HOSTS), debug=debug)
    start = [hello(0), hello(1), worker(0, world=2), worker(1, 1, world=2)]
    return fold(state, [*start, *events])


def logs(*texts: str) -> list[Event]:
    """Return the output of rank 0 on gpu-a, and of rank 1 on gpu-b."""
    return [output(text + "\n", rank, rank) for rank, text in enumerate(texts)]


def log(at: str, network: str = "Socket", version: str = "2.27.3+cuda12.9") -> str:
    return (
        f"host:{BUS} Bootstrap: Using {at}<0>\nhost:{BUS} NET/IB : No device found.\n"
        f"host:{BUS} Using network {network}\nNCCL version {version}\nloss 0.5"
    )


def test_details_are_left_out_of_the_view_and_warnings_are_not():
    warned = f"host:{BUS} x\nhost:1:2 [0] init.cc:9 NCCL WARN something\n"
    text = f"{warned}[I1126 17:35:33.06 socket.cpp:785] y\nloss 0.5\n"
    shown = [line.text for line in run_of(output(text)).lines]
    assert shown == ["host:1:2 [0] init.cc:9 NCCL WARN something", "loss 0.5"]
    # A user who sets the variables himself sees what they do.
    usual = run_of(output(text), debug=False)
    assert [line.text for line in usual.lines] == text.splitlines()
    assert usual.logged == {}


@pytest.mark.parametrize("texts", [
    (log("eth0:10.0.0.1"), log("eth0:10.0.0.2")),
    (log("ib0:10.0.0.1", "IB"), log("ib1:10.0.0.2", "IB")),
    (log("eth0:10.0.0.1"), log("eth0:10.0.0.2", version="2.21.5+cuda12.4")),
    (log("eth0:10.0.0.1"), log("eth0:10.0.0.2", "IB")),
    (log("docker0:172.17.0.1"), log("docker0:172.17.0.1")),
    (log("lo:127.0.0.1"), log("eth0:10.0.0.2")),
    (
        f"{log('docker0:172.17.0.1')}\nh:{BUS} NET/Socket : Using [0]docker0:172.17.0.1<0> [1]ens5:10.0.0.1<0>",
        f"{log('docker0:172.17.0.1')}\nh:{BUS} NET/Socket : Using [0]docker0:172.17.0.1<0> [1]ens5:10.0.0.2<0>",
    ),
    ("loss 0.5", f"h:{BUS} {REFUSED}"),
    (f"[I1126 17:35:33.06 x.cpp:1] {GLOO} connect [10.0.0.2]:13195: No route to host", "loss 0.5"),
], ids=["sockets", "InfiniBand", "versions", "networks", "docker0", "loopback", "other interface", "refused", "gloo"],
)  # fmt: skip
def test_what_a_run_notes_of_them(texts, golden):
    golden("\n".join(notes(run_of(*logs(*texts)))))


@pytest.mark.parametrize("later", [
    f"h:{BUS} ncclCommInitRank comm 0x1 rank 1 nranks 2 - Init COMPLETE",
    f"h:{BUS} socketProgress: Connection closed by remote peer 10.0.0.1<36138>",
])  # fmt: skip
def test_a_connection_that_a_later_try_made_or_that_a_peer_ended_is_no_fault(later):
    state = run_of(*logs("", f"h:{BUS} {REFUSED}"), output(f"{later}\n", 1, 1))
    assert notes(state) == ()


def test_hosts_on_one_machine_may_share_an_address():
    """A job's hosts may be names of one machine, as those of the playground are."""
    state = run_of(*logs(log("lo:127.0.0.1"), log("lo:127.0.0.1")))
    names = {"127.0.0.1": "gpu-a"}
    assert detailed_logs.faults(state.logged, HOSTS, names) == ()


def test_a_single_host_has_no_other_to_reach():
    assert detailed_logs.faults({(0, "address"): "lo:127.0.0.1"}, ("gpu-a",), {}) == ()


def test_many_hosts_are_not_all_named():
    hosts = [f"gpu-{number}" for number in range(8)]
    facts = {(node, "address"): f"eth0:10.0.0.{node}" for node in range(8)}
    words = detailed_logs.summary(facts, hosts)
    assert "gpu-3 uses eth0 (10.0.0.3) and 4 more" in words
    assert "gpu-4" not in words


def test_the_error_of_a_run_has_its_faults_first(golden):
    docker = log("docker0:172.17.0.1")
    ends = [
        at(what, node)
        for node in (0, 1)
        for what in (p.EngineEnded(code=1), p.Final(reason="done"), Gone())
    ]
    failed = raised(1, 1, "Watchdog caught collective operation timeout")
    golden(verdict(run_of(*logs(docker, docker), failed, *ends)))


def test_what_a_host_logs_can_not_draw_on_the_page():
    state = run_of(*logs(log("\x1b[2Jeth0:10.0.0.1"), log("eth0:10.0.0.2")))
    assert "\x1b" not in "".join(notes(state))
