"""The user's ssh agent: what it says is read, and what is wrong with it is named."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distmagic.transports.ssh.agent import KeyAgent
from distmagic.transports.ssh.public_keys import join_strings as strings
from tests.builders.agents import scripted_agent

Serve = Callable[..., KeyAgent]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts an agent with these answers, and returns our end of it."""
    with contextlib.ExitStack() as agents:
        yield lambda *answers: KeyAgent(
            agents.enter_context(scripted_agent(tmp_path / "agent", *answers))
        )


def test_its_keys_and_a_signature(serve):
    listed = b"\x0c\0\0\0\2" + strings(b"one", b"work", b"two", b"caf\xe9")
    signed = b"\x0e" + strings(b"signature")
    agent = serve(strings(listed), strings(signed))
    assert agent.keys(60) == ((b"one", "work"), (b"two", "caf\ufffd"))
    assert agent.sign(b"one", b"data", 2) == b"signature"
    assert (agent.trouble, agent.is_signing) == ("", False)
    agent.close()
    agent.close()


@pytest.mark.parametrize(
    "answer",
    [
        strings(b"\x05"),  # it refuses
        strings(b"\x0c\0\0\0\2" + strings(b"one")),  # cut short
        strings(b"\x0c"),
        strings(b""),
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_an_answer_that_is_no_list(serve, answer, golden):
    agent = serve(answer)
    assert agent.keys(60) == ()
    golden(agent.trouble)
    agent.close()


def test_it_is_gone(tmp_path):
    for path, why in (
        (tmp_path / "nobody", "No such file or directory"),
        (tmp_path / ("long" * 40), "AF_UNIX path too long"),
    ):
        agent = KeyAgent(str(path))
        assert agent.keys(60) == ()
        assert agent.trouble == why
    assert KeyAgent(None).keys(60) == ()


def test_a_refusal_to_sign_is_no_signature(serve):
    agent = serve(strings(b"\x0c\0\0\0\0"), strings(b"\x05"))
    agent.keys(60)
    assert agent.sign(b"one", b"data", 0) == b""
    assert agent.trouble == ""
    agent.close()


def test_silence_has_a_limit_and_is_named(serve):
    agent = serve()
    assert agent.keys(0.05) == ()
    assert agent.trouble == "no answer within 0.05 s"
    agent.close()


def test_to_close_it_ends_the_wait_for_a_signature(serve):
    agent = serve(strings(b"\x0c\0\0\0\0"))
    agent.keys(60)
    closer = threading.Timer(0.05, agent.close)
    closer.start()
    assert agent.sign(b"one", b"data", 0) == b""
    assert agent.is_signing
    closer.join()
