"""Pending jobs of one log-in node: how often Slurm is asked, and for which."""

from __future__ import annotations

import itertools

import pytest

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Unreachable
from distmagic.systems.slurm.queue import SlurmQueue, pauses
from distmagic.systems.slurm.shell import Shell
from tests.builders.logins import PENDING, RUNNING, Login, Said, squeue

ASKER = NotebookAsker(can_ask=False)
BOTH = PENDING + RUNNING.replace("17", "18")


@pytest.fixture
def login() -> Login:
    made = Login()
    squeue(made, BOTH)
    return made


def questions(login: Login) -> list[str]:
    """Return the jobs of each question to squeue."""
    return [
        word.partition("=")[2]
        for argv in login.asked
        for word in argv
        if word.startswith("--jobs=")
    ]


def test_one_question_for_all_jobs_that_are_waited_for(login):
    now = [0.0]
    queue = SlurmQueue(Shell("login1", lambda _: login), clock=lambda: now[0])
    assert queue.look("17", "", ASKER, 1.0).is_pending
    assert queue.look("18", "", ASKER, 1.0).is_running
    assert queue.look("17", "", ASKER, 1.0).is_pending
    assert questions(login) == ["17", "17,18"]
    now[0] = 1.5
    queue.look("17", "", ASKER, 1.0)
    queue.look("18", "", ASKER, 1.0)
    assert questions(login) == ["17", "17,18", "17,18"]


def test_a_job_that_is_forgotten_is_asked_for_no_more(login):
    queue = SlurmQueue(Shell("login1", lambda _: login))
    queue.look("17", "", ASKER, 0.0)
    queue.look("18", "", ASKER, 60.0)
    queue.forget("18", "")
    queue.look("17", "", ASKER, -1.0)
    assert questions(login) == ["17", "17,18", "17"]


def test_jobs_of_different_clusters_are_different_questions(login):
    queue = SlurmQueue(Shell("login1", lambda _: login))
    queue.look("17", "east", ASKER, 60.0)
    queue.look("17", "west", ASKER, 60.0)
    assert questions(login) == ["17", "17"]


def test_a_job_that_slurm_no_longer_knows(login):
    queue = SlurmQueue(Shell("login1", lambda _: login))
    assert queue.look("19", "", ASKER, 60.0) is None


def test_a_question_that_fails_says_nothing_and_the_next_look_asks_again(login):
    away = Said(err="squeue: error: Unable to contact slurm controller", code=1)
    login.answers["squeue"] = [away, Said(BOTH)]
    queue = SlurmQueue(Shell("login1", lambda _: login))
    with pytest.raises(Unreachable):
        queue.look("17", "", ASKER, 60.0)
    assert queue.look("17", "", ASKER, 60.0).is_pending


def test_looks_become_rare():
    assert (
        list(itertools.islice(pauses(), 29))
        == [0.25] * 4 + [1.0] * 9 + [5.0] * 6 + [15.0] * 8 + [30.0] * 2
    )
