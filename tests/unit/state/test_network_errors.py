"""Errors of connections as gloo, NCCL and torch's store write them, and what a user is told: who could not reach whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.wire import protocol as p
from distmagic.state import network_errors
from distmagic.state.events import Gone
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.verdict import verdict
from tests.builders.events import HOSTS, at, ended, hello, output, worker

NAMES = {
    "10.0.0.1": "gpu-a",
    "10.0.0.2": "gpu-b",
    "gpu-a": "gpu-a",
    "node17": "gpu-b",
    "fe80::2": "gpu-b",
}
OPEN = "gloo and NCCL connect the ranks over ports that the system chooses, mostly 32768 to 60999: open these between the hosts."
WAY = (
    "Is there a firewall, or another network? Name the interface of the common one: --env NCCL_SOCKET_IFNAME=eth0 "
    "--env GLOO_SOCKET_IFNAME=eth0"
)
ENDED = "whoever was there ended, or the network failed."
PAIR = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534]"
LAST = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error, NCCL version 2.21.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # gloo
        (f"{PAIR} Connection closed by peer [10.0.0.2]:40000", f"gpu-a lost the connection to gpu-b (10.0.0.2 port 40000): {ENDED}"),
        (f"{PAIR} Read error [10.0.0.2]:45633: Connection reset by peer", f"gpu-a lost the connection to gpu-b (10.0.0.2 port 45633): {ENDED}"),
        (f"{PAIR} connect [10.0.0.2]:13195: Connection refused", f"gpu-a could not reach gpu-b (10.0.0.2 port 13195): connection refused. {OPEN}"),
        (f"{PAIR} Connect timeout [10.0.0.2]:40000", f"gpu-a could not reach gpu-b (10.0.0.2 port 40000): no answer. {OPEN}"),
        (f"{PAIR} connect [::ffff:10.0.0.2]:13195: No route to host", f"gpu-a could not reach gpu-b (10.0.0.2 port 13195): no route to it. {WAY}"),
        (f"Gloo connectFullMesh failed with {PAIR} no error", f"gpu-a could not reach gpu-b: no answer. {OPEN}"),
        ("Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.h:301] Connect timeout [none]",
         f"gpu-a could not reach gpu-b: no answer. {OPEN}"),
        (f"Gloo connectFullMesh failed with {PAIR} timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:13743$1",
         f"gpu-a could not reach gpu-b (10.0.0.2 port 13743): connection refused. {OPEN}"),
        (f"{PAIR} SO_ERROR: Connection refused, remote=[127.0.1.1]:4321",
         f"gpu-a could not reach 127.0.1.1 port 4321: connection refused. {network_errors._LOOPBACK}"),
        # torch's store
        ("DistNetworkError: The client socket has failed to connect to [node17]:29500 (errno: 111 - Connection refused).",
         f"gpu-a could not reach gpu-b (node17 port 29500): connection refused. {OPEN}"),
        ("DistNetworkError: The client socket has timed out after 3000ms while trying to connect to (10.0.0.2, 29500).",
         ("gpu-a could not reach gpu-b (10.0.0.2 port 29500): no connection in time. "
          "Does anything listen there, and is that port open between the hosts?")),
        ("DistNetworkError: The IPv6 network addresses of (nosuch, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
         ("gpu-a could not reach nosuch port 29500: its name can't be resolved there. "
          "Let the hosts know each other's names, or give --master-addr's host by its address.")),
        # NCCL
        (f"{LAST}socketStartConnect: Connect to 10.0.0.2<43421> failed : Connection refused",
         f"gpu-a could not reach gpu-b (10.0.0.2 port 43421): connection refused. {OPEN}"),
        (f"{LAST}socketStartConnect: Connect to fe80::2%ib1<17943> failed : Software caused connection abort",
         f"gpu-a could not reach gpu-b (fe80::2%ib1 port 17943): the connection was aborted. {OPEN}"),
        (f"{LAST}socketPollConnect: Connect to 10.0.0.2<56849> returned 113(No route to host) errno 115(Operation now in progress)",
         f"gpu-a could not reach gpu-b (10.0.0.2 port 56849): no route to it. {WAY}"),
        ("NCCL WARN socketPollConnect poll() failed, ret 1, error Connection timed out, revents 8, connect to 10.0.0.2:39953",
         f"gpu-a could not reach gpu-b (10.0.0.2 port 39953): no answer. {OPEN}"),
        ("a:97:221 [0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer node17<36138>",
         f"gpu-a lost the connection to gpu-b (node17 port 36138): {ENDED}"),
        ("include/socket.h:403 NCCL WARN Call to connect returned Connection timed out, retrying",
         f"gpu-a could not reach gpu-b: no answer. {OPEN}"),
        ("misc/socket.cc:30 NCCL WARN Bootstrap : no socket interface found",
         ("gpu-a has no network interface as NCCL or gloo wants it. "
          "Name one that the hosts have: --env NCCL_SOCKET_IFNAME=eth0 --env GLOO_SOCKET_IFNAME=eth0")),
        (f"{LAST}socketStartConnect: Connect to 10.0.0.1<43421> failed : Connection refused",
         f"gpu-a could not reach itself (10.0.0.1 port 43421): connection refused. {OPEN}"),
    ],
)  # fmt: skip
def test_in_words(text, words):
    assert network_errors.in_words(text, (), "gpu-a", NAMES) == words


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


def test_with_several_others_nobody_is_named_without_an_address():
    text = "Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]"
    words = network_errors.in_words(text, (), "gpu-a", {**NAMES, "10.0.0.3": "gpu-c"})
    assert words == f"gpu-a could not reach another rank: no answer. {OPEN}"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[W socket.cpp:767] [c10d] The client socket has failed to connect to [gpu-b]:4444 (errno: 111 - Connection refused).", "connection refused"),
        ("[W socket.cpp:767] [c10d] The IPv6 network addresses of (gpu-b, 4444) cannot be retrieved (gai error: -2 - Name or service not known).",
         "its name can't be resolved there"),
        ("[W socket.cpp:767] [c10d] The client socket has failed to connect to [gpu-b]:5555 (errno: 111 - Connection refused).", "no connection in time"),
        ("[W socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3", "no connection in time"),
        ("my own: connection refused by (gpu-b, 4444)", "no connection in time"),
    ],
)  # fmt: skip
def test_torchs_store_tells_why_on_stderr_only(line, why):
    text = "DistNetworkError: The client socket has timed out after 3000ms while trying to connect to (gpu-b, 4444)."
    assert network_errors.in_words(text, ("x", line), "gpu-a", NAMES).startswith(
        f"gpu-a could not reach gpu-b port 4444: {why}. "
    )
    assert network_errors.in_words("", ("x", line), "gpu-a", NAMES) == ""


def test_the_place_on_the_line_of_the_cause_counts():
    text = "NCCL WARN listening on 10.0.0.1<5000>\nNCCL WARN Connect to 10.0.0.2<6000> failed : Connection refused\n10.9.9.9<7>"
    assert network_errors.trouble(text) == network_errors.NetworkTrouble(
        why="connection refused", address="10.0.0.2", port=6000
    )


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


def test_the_error_names_both_hosts():
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
    assert error.hint.splitlines()[0] == (
        f"gpu-b could not reach gpu-a (10.0.0.1 port 13195): connection refused. {OPEN}"
    )


def test_what_nccl_says_on_stderr_counts_where_the_exception_says_less():
    failure = p.Failure(type="DistBackendError", message=LAST, traceback="T")
    said = output("x:1:2 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to host0<99> failed : Connection refused\n",
                  2, 1, "stderr")  # fmt: skip
    for end in (
        ended(2, 1, outcome="raised", code=1, failure=failure),
        ended(2, 1, outcome="signalled", code=-6),
    ):
        error = verdict(run_of(said, end))
        assert (
            "gpu-b could not reach gpu-a (host0 port 99): connection refused."
            in error.hint
        )
