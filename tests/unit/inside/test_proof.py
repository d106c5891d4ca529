"""How nodes of a job know each other: by a secret, or by munge, of which these tests have one that anybody can read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.connection.certificate import one_time_secret, shared_secret
from distmagic.errors import Unreachable, UsageError
from distmagic.inside import following as following_module
from distmagic.inside import proof as proofs
from distmagic.inside.following import Following
from distmagic.inside.job_node import JobNode
from distmagic.inside.meeting import Meeting
from distmagic.inside.proof import Munge, SharedSecret, parsed, proof_of
from distmagic.remote.contact import mutual_tls
from tests.builders.dialling import HERE, places
from tests.lab.waiting import HANG_S, wait_until

FAKE = """#!{python}
import base64, os, sys
data = sys.stdin.buffer.read()
if sys.argv[0].endswith("unmunge"):
    uid, _, text = base64.b64decode(data.strip()).partition(b" ")
    sys.stdout.write("UID:              me (" + uid.decode() + ")\\n\\n")
    sys.stdout.flush()
    sys.stdout.buffer.write(text)
else:
    assert sys.argv[1] == "--restrict-uid=" + str(os.getuid())
    uid = os.environ.get("FAKE_UID") or str(os.getuid())
    sys.stdout.buffer.write(base64.b64encode(uid.encode() + b" " + data) + b"\\n")
"""


@pytest.fixture
def munge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in place of munge's, whose credentials say of which user they are."""
    for name in ("munge", "unmunge"):
        path = tmp_path / name
        path.write_text(FAKE.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@contextlib.contextmanager
def meeting_of(place: JobNode) -> Iterator[Meeting]:
    with contextlib.closing(Meeting(place, Munge(place))) as meeting:
        yield meeting


def test_the_proof_of_the_environment(golden):
    place, _ = places()
    assert proof_of({}, place) is None
    with golden.raises(UsageError):
        proof_of({"DISTMAGIC_SECRET": "short"}, place)
    assert proof_of({"DISTMAGIC_SECRET": "0123456789abcdef"}, place) is not None


def test_munge_is_for_slurm_where_it_is_installed(munge, nodes, monkeypatch):
    assert isinstance(proof_of({}, nodes[0]), Munge)
    secret = {"DISTMAGIC_SECRET": "0123456789abcdef"}
    assert isinstance(proof_of(secret, nodes[0]), SharedSecret)
    assert proof_of({}, replace(nodes[0], key="skypilot 7")) is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert proof_of({}, nodes[0]) is None


def test_nodes_meet_by_munge(munge, nodes):
    first, second = nodes
    with (
        meeting_of(first) as meeting,
        contextlib.closing(Following(second, Munge(second), HERE)) as following,
    ):
        following.come(1, "same", HANG_S)
        meeting.gather(1, "same", HANG_S)
        process = meeting.transport("n1").start(("cat",))
        process.write(b"by munge\n")
        assert process.read() == b"by munge\n"
        process.close()


@pytest.mark.parametrize("what", ["another user", "another job", "a stolen credential"])
def test_who_is_not_of_this_job_is_not_let_in(munge, nodes, monkeypatch, what):
    first, second = nodes
    proof = Munge(second)
    if what == "another user":
        monkeypatch.setenv("FAKE_UID", "4711")
    elif what == "another job":
        proof = Munge(replace(second, key="slurm 8.0"))
    else:  # whose certificate is another one
        real = proofs._as_client
        other = one_time_secret()
        monkeypatch.setattr(proofs, "_as_client", lambda plain, _: real(plain, other))
    monkeypatch.setattr(following_module, "_WRONG_S", 0.5)
    with meeting_of(first) as meeting:
        with pytest.raises(Unreachable):
            Following(second, proof, HERE).come(1, "same", 1.0)
        assert not meeting.members[0].is_there
        if what == "a stolen credential":
            assert meeting._arrivals.refused == 0
        else:
            wait_until(lambda: meeting._arrivals.refused > 0, "it to be counted")


def test_what_is_no_credential_is_turned_away(munge, nodes):
    with (
        meeting_of(nodes[0]) as meeting,
        socket.create_connection((HERE, meeting.port), HANG_S) as plain,
    ):
        plain.sendall(b"GET / HTTP/1.0\n")
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(100) == b""
        assert meeting._arrivals.refused == 0


@pytest.fixture
def crowded(munge, nodes, monkeypatch) -> Iterator[Meeting]:
    """Node 0, at whose door more wait than it has room for, none of whom says anything."""
    monkeypatch.setattr(mutual_tls, "HANDSHAKE_S", 4 * HANG_S)
    with contextlib.ExitStack() as stack:
        meeting = stack.enter_context(meeting_of(nodes[0]))
        for _ in range(proofs._MOST_AT_ONCE + 1):
            where = (HERE, meeting.port)
            stack.enter_context(socket.create_connection(where, HANG_S))
        yield meeting


def test_a_crowd_without_credentials_does_not_keep_a_node_out(crowded, nodes):
    with contextlib.closing(Following(nodes[1], Munge(nodes[1]), HERE)) as following:
        following.come(1, "same", HANG_S)
        crowded.gather(1, "same", HANG_S)


def test_a_crowd_at_the_door_does_not_hold_up_the_end(crowded, monkeypatch):
    door = crowded._arrivals._door
    monkeypatch.setattr(door, "_drop_oldest", lambda: None)  # none of them goes
    wait_until(lambda: len(door._waiting) == proofs._MOST_AT_ONCE, "the crowd")
    closing = threading.Thread(target=crowded.close, daemon=True)
    closing.start()
    closing.join(HANG_S)
    assert not closing.is_alive()


def test_what_unmunge_says():
    assert parsed('UID:              ann (1001)\n\n{"a": 1}\n\n') == (
        1001,
        '{"a": 1}\n\n',
    )
    assert json.loads(parsed("UID:  root (0)\n\n[]")[1]) == []
    for said in (
        "",
        "UID: x\n\n",
        "STATUS: Expired\n\n{}",
        "UID: a (1)\nUID: b (2)\n\n",
    ):
        with pytest.raises(ValueError, match="unmunge reported"):
            parsed(said)


def test_one_secret_makes_one_certificate_a_job():
    one = shared_secret("0123456789abcdef", "slurm 7.0")
    assert one == shared_secret("0123456789abcdef", "slurm 7.0")
    assert one.certificate != shared_secret("0123456789abcdef", "slurm 8.0").certificate
    assert one.certificate != shared_secret("0123456789abcdeF", "slurm 7.0").certificate
    assert "0123456789abcdef" not in one.certificate + repr(one)
