"""Questions of hosts: one after the other, in their own name, and what is kept of the answers."""

from __future__ import annotations

import threading

import pytest

from distmagic.errors import AuthenticationError
from distmagic.transports import asking


class Typist:
    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self.inside = 0

    def ask(self, prompt: str, *, secret: bool) -> str:
        self.inside += 1
        assert self.inside == 1
        self.prompts.append(prompt)
        answer = self.answers.pop(0)
        self.inside -= 1
        return answer


@pytest.fixture(autouse=True)
def no_kept_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_passphrases", {})


def test_a_passphrase_is_kept_once_it_was_right(golden):
    typist = Typist("wrong", "right")
    for _ in range(3):
        assert (
            asking.unlock(typist, "gpu-a", "/k", lambda p: p if p == "right" else None)
            == "right"
        )
    golden(*typist.prompts)
    assert (
        asking.unlock(Typist("1", "2", "3"), "gpu-a", "/other", lambda p: None) is None
    )


def test_a_password_is_never_kept():
    typist = Typist("1", "2")
    assert [asking.ask(typist, "gpu-a", "Password:") for _ in range(2)] == ["1", "2"]
    assert typist.prompts == ["gpu-a: Password: "] * 2


def test_a_host_cannot_ask_in_the_name_of_another_one(golden):
    typist = Typist("1")
    asking.ask(
        typist, "gpu-a", "Pick one:\n 1. push\r\n\ngpu-b: Password:\x1b[2J\u202e "
    )
    golden(*typist.prompts)


def test_many_threads_ask_one_after_the_other_and_once():
    typist = Typist("right")
    unlock = lambda: asking.unlock(typist, "gpu-a", "/k", lambda p: p)  # noqa: E731
    threads = [threading.Thread(target=unlock) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(typist.prompts) == 1


def test_nobody_to_ask(golden):
    with pytest.raises(AuthenticationError) as caught:
        asking.ask(asking.NoAsker(), "gpu-a", "Verification code: ")
    assert caught.value.host == "gpu-a"
    golden(caught.value)
