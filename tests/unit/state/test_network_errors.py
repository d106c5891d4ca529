"""Errors of connections as gloo, NCCL and torch's store write them, and what a user is told: who could not reach whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.failures import network_errors
from distmagic.remote.wire import protocol as p
from distmagic.state.events import Gone
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.verdict import may_be_of_hosts, verdict
from tests.builders.events import HOSTS, at, ended, hello, output, worker

NAMES = {
    "10.0.0.1": "gpu-a",
    "10.0.0.2": "gpu-b",
    "gpu-a": "gpu-a",
    "node17": "gpu-b",
    "fe80::2": "gpu-b",
}
PAIR = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534]"
LAST = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error, NCCL version 2.21.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
"""


@pytest.mark.parametrize(
    "text",
    [
        # gloo
        f"{PAIR} Connection closed by peer [10.0.0.2]:40000",
        f"{PAIR} Read error [10.0.0.2]:45633: Connection reset by peer",
        f"{PAIR} connect [10.0.0.2]:13195: Connection refused",
        f"{PAIR} Connect timeout [10.0.0.2]:40000",
        f"{PAIR} connect [::ffff:10.0.0.2]:13195: No route to host",
        f"Gloo connectFullMesh failed with {PAIR} no error",
        "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.h:301] Connect timeout [none]",
        f"Gloo connectFullMesh failed with {PAIR} timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:13743$1",
        f"{PAIR} SO_ERROR: Connection refused, remote=[127.0.1.1]:4321",
        # torch's store
        "DistNetworkError: The client socket has failed to connect to [node17]:29500 (errno: 111 - Connection refused).",
        "DistNetworkError: The client socket has timed out after 3000ms while trying to connect to (10.0.0.2, 29500).",
        "DistNetworkError: The IPv6 network addresses of (nosuch, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
        # NCCL
        f"{LAST}socketStartConnect: Connect to 10.0.0.2<43421> failed : Connection refused",
        f"{LAST}socketStartConnect: Connect to fe80::2%ib1<17943> failed : Software caused connection abort",
        f"{LAST}socketPollConnect: Connect to 10.0.0.2<56849> returned 113(No route to host) errno 115(Operation now in progress)",
        "NCCL WARN socketPollConnect poll() failed, ret 1, error Connection timed out, revents 8, connect to 10.0.0.2:39953",
        "a:97:221 [0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer node17<36138>",
        "include/socket.h:403 NCCL WARN Call to connect returned Connection timed out, retrying",
        "misc/socket.cc:30 NCCL WARN Bootstrap : no socket interface found",
        f"{LAST}socketStartConnect: Connect to 10.0.0.1<43421> failed : Connection refused",
    ],
)  # fmt: skip
def test_in_words(text, golden):
    golden(text, network_errors.in_words(text, (), "gpu-a", NAMES))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: shapes differ",
        "ConnectionRefusedError: [Errno 111] Connection refused",  # of the user's own data base
        "requests: connection to [10.0.0.2]:443 timed out",
        "CUDA out of memory",
        "NCCL communicator was aborted on rank 1.",
        "gloo: unsupported dtype",
        "[W1121 13:00:33.096 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
    ],
)
def test_what_is_of_something_else(text):
    assert network_errors.in_words(text, (), "gpu-a", NAMES) == ""


def test_with_several_others_nobody_is_named_without_an_address(golden):
    text = "Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]"
    words = network_errors.in_words(text, (), "gpu-a", {**NAMES, "10.0.0.3": "gpu-c"})
    golden(words)


@pytest.mark.parametrize(
    "line",
    [
        "[W socket.cpp:767] [c10d] The client socket has failed to connect to [gpu-b]:4444 (errno: 111 - Connection refused).",
        "[W socket.cpp:767] [c10d] The IPv6 network addresses of (gpu-b, 4444) cannot be retrieved (gai error: -2 - Name or service not known).",
        "[W socket.cpp:767] [c10d] The client socket has failed to connect to [gpu-b]:5555 (errno: 111 - Connection refused).",
        "[W socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
        "my own: connection refused by (gpu-b, 4444)",
    ],
)  # fmt: skip
def test_torchs_store_tells_why_on_stderr_only(line, golden):
    text = "DistNetworkError: The client socket has timed out after 3000ms while trying to connect to (gpu-b, 4444)."
    golden(line, network_errors.in_words(text, ("x", line), "gpu-a", NAMES))
    assert network_errors.in_words("", ("x", line), "gpu-a", NAMES) == ""


def test_the_place_on_the_line_of_the_cause_counts():
    text = "NCCL WARN listening on 10.0.0.1<5000>\nNCCL WARN Connect to 10.0.0.2<6000> failed : Connection refused\n10.9.9.9<7>"
    assert network_errors.trouble(text) == network_errors.NetworkTrouble(
        why="connection refused", address="10.0.0.2", port=6000
    )


@pytest.mark.parametrize(
    "line",
    [
        "[c10d] recvValue failed on SocketImpl(fd=60, addr=[gpu-b]:44556, remote=[gpu-a]:29500): Connection reset by peer",
        f"{PAIR} local=[10.0.0.2]:50220, remote=[10.0.0.1]:29500, error=SO_ERROR: Connection refused",
        f"{PAIR} Connection refused, remote=[10.0.0.1]:29500, local=[10.0.0.2]:50220",
        "NCCL WARN Connect from 10.0.0.2<51000> to 10.0.0.1<29500> failed : Connection refused",
        "NCCL WARN Connect from 10.0.0.2<51000> to 10.0.0.1<29500> timed out",
        "NCCL WARN Connection reset by peer 10.0.0.1<29500>, rings 10.0.0.3<5>",
    ],
)  # fmt: skip
def test_of_two_addresses_on_a_line_the_other_ends_counts(line):
    found = network_errors.trouble(line)
    assert found is not None
    assert (NAMES.get(found.address), found.port) == ("gpu-a", 29500)


def test_the_own_address_counts_where_there_is_no_other():
    found = network_errors.trouble("NCCL WARN reset by peer, read from 10.0.0.1<7>")
    assert found is not None
    assert found.address == "10.0.0.1"


@given(st.text(max_size=300), st.sampled_from(["gloo", "NCCL WARN", "client socket"]))
def test_any_text(text, library):
    for one in (text, f"{library} {text} Connection refused {text}"):
        assert isinstance(network_errors.in_words(one, (one,), "gpu-a", NAMES), str)


def run_of(*events: object) -> RunState:
    start = [hello(0), hello(1), worker(0, 0), worker(2, 1)]
    ends = [
        at(what, node)
        for node in (0, 1)
        for what in (p.EngineEnded(code=1), p.Final(reason="done"), Gone())
    ]
    return fold(
        begin("j", HOSTS, addresses=("10.0.0.1", "10.0.0.2")), [*start, *events, *ends]
    )


def test_the_error_names_both_hosts(golden):
    failure = p.Failure(
        type="RuntimeError",
        message=f"{PAIR} connect [10.0.0.1]:13195: Connection refused",
        traceback="T",
    )
    error = verdict(run_of(ended(2, 1, outcome="raised", code=1, failure=failure)))
    assert (
        error.message
        == f"rank 2 (gpu-b, local_rank 0) raised RuntimeError: {failure.message}"
    )
    golden(error.hint.splitlines()[0])


@pytest.mark.parametrize(
    ("message", "may_be"),
    [
        (f"{PAIR} connect [10.0.0.1]:13195: Connection refused", True),
        (f"{PAIR} Connect timeout [10.0.0.1]:40000", True),
        (f"{PAIR} Connection closed by peer [10.0.0.1]:40000", False),
        ("the loss is not a number", False),
    ],
)
def test_the_doctor_looks_after_errors_of_the_network(message, may_be):
    """A connection that a peer has ended is no fault of the network."""
    failure = p.Failure(type="RuntimeError", message=message, traceback="T")
    state = run_of(ended(2, 1, outcome="raised", code=1, failure=failure))
    assert may_be_of_hosts(state, verdict(state)) == may_be


def test_what_nccl_says_on_stderr_counts_where_the_exception_says_less(golden):
    failure = p.Failure(type="DistBackendError", message=LAST, traceback="T")
    said = output("x:1:2 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to host0<99> failed : Connection refused\n",
                  2, 1, "stderr")  # fmt: skip
    for end in (
        ended(2, 1, outcome="raised", code=1, failure=failure),
        ended(2, 1, outcome="signalled", code=-6),
    ):
        error = verdict(run_of(said, end))
        golden(error)
