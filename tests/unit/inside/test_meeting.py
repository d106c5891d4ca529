"""Nodes of a job find each other: with the secret and without, late, never, again, and with another cell."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace

import pytest

from distmagic.connection.certificate import one_time_secret
from distmagic.errors import Unreachable, UsageError
from distmagic.inside import following as following_module
from distmagic.inside import meeting as meeting_module
from distmagic.inside.following import Following, for_ranks
from distmagic.inside.job_node import JobNode
from distmagic.inside.meeting import Meeting
from distmagic.inside.proof import SharedSecret
from distmagic.transports.channel import Channel
from tests.builders.dialling import HERE, dialled, places
from tests.builders.since import Since
from tests.lab.waiting import HANG_S, wait_until

SECRET = SharedSecret(one_time_secret())


@contextlib.contextmanager
def met(
    first: JobNode, second: JobNode, *, digest: str = "same"
) -> Iterator[tuple[Meeting, Following]]:
    """Give both halves, of which the second has said that it is at cell 1."""
    with (
        contextlib.closing(Meeting(first, SECRET)) as meeting,
        contextlib.closing(Following(second, SECRET, HERE)) as following,
    ):
        following.come(1, digest, HANG_S)
        yield meeting, following


def test_a_node_comes_and_is_told_the_outcome():
    with met(*places()) as (meeting, following):
        meeting.gather(1, "same", HANG_S)
        meeting.end_cell(1, lambda node_rank: {"for": node_rank})
        assert following.outcome() == {"for": 1}


def test_the_next_cell_waits_for_the_node_to_come_to_it(golden):
    with met(*places()) as (meeting, following):
        meeting.gather(1, "same", HANG_S)
        with golden.raises(Unreachable):
            meeting.gather(2, "next", 0.3)
        following.come(2, "next", HANG_S)
        meeting.gather(2, "next", HANG_S)


def test_a_node_that_comes_late_is_told_how_the_cell_ended():
    first, second = places()
    with contextlib.closing(Meeting(first, SECRET)) as meeting:
        with pytest.raises(Unreachable):
            meeting.gather(1, "same", 0.2)
        meeting.end_cell(1, lambda _: {"of": 1})
        with contextlib.closing(Following(second, SECRET, HERE)) as following:
            following.come(1, "same", HANG_S)
            assert following.outcome() == {"of": 1}
            following.come(2, "next", HANG_S)
            meeting.gather(2, "next", HANG_S)
            meeting.end_cell(2, lambda _: {"of": 2})
            assert following.outcome() == {"of": 2}
        assert [member.outcomes for member in meeting.members] == [{2: {"of": 2}}]


def test_a_node_whose_notebook_was_restarted_is_told_so(golden):
    with met(*places()) as (meeting, following):
        meeting.gather(1, "same", HANG_S)
        for cell in (1, 2):
            meeting.end_cell(cell, lambda _: {})
        following.come(2, "", HANG_S)
        assert following.outcome() == {}
        following.come(1, "same", HANG_S)
        golden(following.outcome()["error"]["message"])


def test_who_waits_says_for_whom(monkeypatch):
    monkeypatch.setattr(meeting_module, "_TELL_S", 0.1)
    first, _ = places()
    said: list[str] = []
    with (
        contextlib.closing(Meeting(first, SECRET)) as meeting,
        pytest.raises(Unreachable),
    ):
        meeting.gather(1, "same", 0.5, said.append)
    assert said == ["waits for node 1, n1."]


def test_a_node_that_runs_something_else_is_named(golden):
    with met(*places(), digest="other") as (meeting, _), golden.raises(UsageError):
        meeting.gather(1, "same", HANG_S)


def test_a_node_that_never_comes_is_named(golden):
    first, _ = places()
    with contextlib.closing(Meeting(first, SECRET)) as meeting:
        with pytest.raises(Unreachable) as caught:
            meeting.gather(1, "same", 0.3)
        golden(re.sub("within \\d+ s", "within 0 s", str(caught.value)))


def test_a_node_0_that_never_comes_is_named(golden):
    _, second = places()
    following = Following(second, SECRET, HERE)
    with pytest.raises(Unreachable) as caught:
        following.come(1, "same", 0.3)
    golden(re.sub("within \\d+ s", "within 0 s", str(caught.value)))


def test_a_name_that_resolves_late_is_waited_for(monkeypatch):
    first, second = places()
    real, asked = socket.getaddrinfo, []

    def getaddrinfo(name, *given, **more):
        if name == "late":
            asked.append(name)
            if len(asked) <= 2:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            name = HERE
        return real(name, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with (
        contextlib.closing(Meeting(first, SECRET)) as meeting,
        contextlib.closing(Following(second, SECRET, "late")) as following,
    ):
        following.come(1, "same", HANG_S)
        meeting.gather(1, "same", HANG_S)
    # Once for each connection, and not for each port.
    assert 4 <= len(asked) < 2 + len(second.ports)


def test_a_wrong_secret_is_told_where_it_is(monkeypatch, golden):
    monkeypatch.setattr(following_module, "_WRONG_S", 0.3)
    first, second = places()
    wrong = Following(second, SharedSecret(one_time_secret()), HERE)
    with contextlib.closing(Meeting(first, SECRET)), golden.raises(Unreachable):
        wrong.come(1, "same", HANG_S)


def test_who_has_no_secret_is_told_nothing_and_holds_nobody_up():
    first, second = places()
    with (
        met(first, second) as (meeting, _),
        socket.create_connection((HERE, meeting.port), HANG_S) as plain,
    ):
        plain.sendall(b'{"node": 1, "for": "down"}\n')
        with contextlib.suppress(ConnectionResetError):
            said = plain.recv(1000)
            assert said[:1] in (b"", b"\x15"), "an alert of TLS, and nothing else"
        meeting.gather(1, "same", HANG_S)


def test_a_client_of_tls_without_the_certificate_is_read_nothing_of():
    first, _ = places()
    with contextlib.closing(Meeting(first, SECRET)) as meeting:
        blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        blind.check_hostname = False
        blind.verify_mode = ssl.CERT_NONE
        with (
            socket.create_connection((HERE, meeting.port)) as plain,
            blind.wrap_socket(plain) as tls,
        ):
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                tls.sendall(b'{"node": 1, "for": "down"}\n')
            with pytest.raises((ssl.SSLError, ConnectionError)):
                tls.recv(100)
        assert not any(member.is_there for member in meeting.members)


def test_ports_of_a_job_that_somebody_else_has_are_passed_over(monkeypatch):
    monkeypatch.setattr(following_module, "DIAL_S", 0.2)
    first, second = places()
    with contextlib.ExitStack() as stack:
        for port in first.ports[:3]:  # they are dialled, and say nothing
            stack.enter_context(socket.create_server((HERE, port)))
        meeting, _ = stack.enter_context(met(first, second))
        assert meeting.port in first.ports[3:]
        meeting.gather(1, "same", HANG_S)


def test_no_free_port_is_told(golden):
    first, _ = places()
    with contextlib.ExitStack() as stack:
        for port in first.ports:
            stack.enter_context(socket.create_server(("", port)))
        with pytest.raises(UsageError) as caught:
            Meeting(replace(first), SECRET)
    # Two of a job's eight ports may be one.
    said = str(caught.value).replace(", ".join(map(str, first.ports)), "PORTS")
    for port in first.ports:
        said = said.replace(str(port), "PORT")
    golden(said)


def test_a_node_that_leaves_is_named_at_once(golden):
    with met(*places()) as (meeting, following):
        meeting.gather(1, "same", HANG_S)
        following.close()
        with golden.raises(Unreachable):
            meeting.gather(2, "next", HANG_S)


def test_a_node_0_that_leaves_is_named_at_once(golden):
    with met(*places()) as (meeting, following):
        meeting.gather(1, "same", HANG_S)
        meeting.close()
        with pytest.raises(Unreachable) as caught:
            following.outcome()
    golden(caught.value)


def test_a_node_0_that_is_killed_is_named(monkeypatch, golden):
    with met(*places()) as (meeting, following):
        meeting.gather(1, "same", HANG_S)
        (member,) = meeting.members
        monkeypatch.setattr(type(member.down), "tell", lambda *_, **__: None)
        meeting.close()
        with pytest.raises(Unreachable) as caught:
            following.outcome()
    golden(caught.value)


@pytest.mark.parametrize("line", [b'{"cell": 1}', b"no JSON"], ids=["words", "bytes"])
def test_a_node_that_says_what_none_says_has_left_and_the_others_stay(line, golden):
    first, second, third = places(3)
    with (
        contextlib.closing(Meeting(first, SECRET)) as meeting,
        contextlib.closing(Following(second, SECRET, HERE)) as bad,
        contextlib.closing(Following(third, SECRET, HERE)) as good,
    ):
        for following in (bad, good):
            following.come(1, "same", HANG_S)
        meeting.gather(1, "same", HANG_S)
        bad._up.send(b"m", line)
        with golden.raises(Unreachable):
            meeting.gather(2, "next", HANG_S)
        with golden.raises(Unreachable):
            bad.outcome()  # it does not dial again and again
        process = meeting.transport("n2").start(("cat",))
        process.write(b"still here\n")
        assert process.read() == b"still here\n"
        process.close()


def test_a_node_that_begins_as_none_begins_is_hung_up_on():
    first, second = places()
    with (
        contextlib.closing(Meeting(first, SECRET)) as meeting,
        contextlib.closing(Following(second, SECRET, HERE)) as following,
    ):
        channel = Channel(following._connect(HERE, meeting.port))
        channel.tell(node=1, **{"for": "sideways"})
        assert channel.hear(HANG_S) is None
        channel.close()


def test_a_node_that_is_killed_at_its_first_dial_is_not_waited_for(monkeypatch, golden):
    monkeypatch.setattr(meeting_module, "_AGAIN_S", 0.2)
    first, second = places()
    with (
        contextlib.closing(Meeting(first, SECRET)) as meeting,
        contextlib.closing(Following(second, SECRET, HERE)) as following,
    ):
        following._open("up", dial=1).close()
        wait_until(lambda: meeting.members[0].dials["up"] == 1, "the dial")
        with golden.raises(Unreachable):
            meeting.gather(1, "same", HANG_S)
        following.come(1, "same", HANG_S)
        meeting.gather(1, "same", HANG_S)


@pytest.mark.parametrize("name", ["up", "down"])
def test_a_node_whose_connections_break_has_left_and_is_told_so(name, golden):
    with met(*places()) as (meeting, following):
        meeting.gather(1, "same", HANG_S)
        getattr(following, f"_{name}").close()
        with golden.raises(Unreachable):
            meeting.gather(2, "next", HANG_S)
        with pytest.raises(Unreachable):
            following.outcome()


def test_nothing_is_left_open():
    since = Since()
    with dialled() as transport:
        transport.start(("cat",)).close()
    wait_until(
        lambda: not since.threads("distmagic-f", "distmagic-m"), "the threads to end"
    )
    wait_until(lambda: not since.files(), "the descriptors to close")


def test_ranks_see_neither_the_secret_nor_the_log_in(monkeypatch):
    monkeypatch.setenv("DISTMAGIC_SECRET", "0123456789abcdef")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 1 10.0.0.1 22")
    assert for_ranks(("~/python", "-u"), "10.0.0.1") == (
        "env", "-u", "SSH_CONNECTION", "-u", "SSH_CLIENT", "-u", "SSH_TTY", "-u", "DISTMAGIC_SECRET",
        "DISTMAGIC_CLIENT=10.0.0.1", os.path.expanduser("~/python"), "-u",
    )  # fmt: skip
