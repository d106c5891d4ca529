"""An error of node 0, as the other nodes are told of it."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from distmagic.connection.certificate import one_time_secret
from distmagic.errors import WorkerFailed
from distmagic.inside.following import Following
from distmagic.inside.meeting import Meeting, as_words
from distmagic.inside.proof import SharedSecret
from distmagic.transports.channel import LONGEST
from tests.builders.dialling import HERE, places
from tests.lab.waiting import HANG_S

SECRET = SharedSecret(one_time_secret())


def test_errors_in_words():
    error = WorkerFailed(
        "rank 1 (n1, local_rank 0) raised", "See run.logs(1).", "ValueError: x"
    )
    assert as_words(error) == {
        "kind": "WorkerFailed",
        "message": "rank 1 (n1, local_rank 0) raised",
        "hint": "See run.logs(1).",
        "stacks": "",
        "remote_traceback": "ValueError: x",
    }
    assert as_words(KeyError("x")) == {
        "kind": "KeyError",
        "message": "'x'",
        "hint": "",
        "stacks": "",
        "remote_traceback": "",
    }


class ForeignError(Exception):
    """An error of a library that has ideas of its own."""

    message: Any = 7
    hint: Any = ("try", b"again")

    def __str__(self) -> str:
        raise ZeroDivisionError


def test_an_error_of_any_library_is_told_in_texts():
    assert as_words(ForeignError()) == {
        "kind": "ForeignError",
        "message": "7",
        "hint": "('try', b'again')",
        "stacks": "",
        "remote_traceback": "",
    }
    error = ForeignError()
    error.message = error
    assert as_words(error)["message"] == "<its str() raised ZeroDivisionError>"


@pytest.mark.parametrize("letter", ["x", "\n", "é", "😀"])
def test_an_error_of_any_length_is_told(letter):
    text = letter * 2**21
    error = WorkerFailed("", "", "")
    error.message = error.hint = error.stacks = error.remote_traceback = text
    words = as_words(error)
    first, second = places()
    with (
        contextlib.closing(Meeting(first, SECRET)) as meeting,
        contextlib.closing(Following(second, SECRET, HERE)) as following,
    ):
        following.come(1, "same", HANG_S)
        meeting.gather(1, "same", HANG_S)
        assert len(json.dumps(words)) < LONGEST * 3 / 4, "ranks have room, too"
        meeting.end_cell(1, lambda _: {"error": words})
        with ThreadPoolExecutor(1) as thread:
            outcome = thread.submit(following.outcome)
            is_late = bool(wait([outcome], HANG_S).not_done)
            meeting.close()  # which ends it in any case
        assert not is_late
        told = outcome.result()["error"]["message"]
    assert told.startswith(letter)
    assert told.endswith(letter)
    assert "characters left out" in told
