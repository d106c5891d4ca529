"""The program `osmo`: what it says, its refusals, one that is missing and one that hangs."""

import json
import os
from pathlib import Path

import pytest

from distmagic.errors import DistmagicError, Unreachable, UsageError
from distmagic.systems.osmo import osmo, osmo_words
from tests.lab.waiting import wait_until


def program(folder, monkeypatch, text):
    """Put a program `osmo` on PATH, a script of sh."""
    path = folder / "osmo"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def is_gone(pid):
    """Whether a process is gone, or only its parent's to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def says(document, code=0):
    return f"cat <<'END'\n{json.dumps(document, indent=2)}\nEND\nexit {code}"


def test_a_workflow_is_submitted_and_its_id_read(tmp_path, monkeypatch):
    answer = says({"name": "cell-4", "overview": "https://osmo.example"})
    program(tmp_path, monkeypatch, f'echo "$@" >{tmp_path}/words\n{answer}')
    assert osmo.submit(tmp_path / "w.yaml") == "cell-4"
    words = (tmp_path / "words").read_text().split()
    assert words == ["workflow", "submit", str(tmp_path / "w.yaml"), "-t", "json"]


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (1, "Workflow submit failed:\nno pool", UsageError),
        (2, 'Must login first with "login" command', UsageError),
        (10, "Cannot connect to OSMO service", Unreachable),
        (75, "Too many requests", Unreachable),
    ],
)  # fmt: skip
def test_a_refusal_is_told_in_its_words(
    tmp_path, monkeypatch, code, message, kind, golden
):
    program(tmp_path, monkeypatch, says({"message": message, "code": 1}, code))
    with pytest.raises(kind) as caught:
        osmo.submit(tmp_path / "w.yaml")
    assert message.split("\n")[0] in caught.value.message
    golden(caught.value)


def test_a_program_that_fails_with_a_traceback(tmp_path, monkeypatch, golden):
    program(tmp_path, monkeypatch, "echo Traceback: boom >&2; exit 3")
    with golden.raises(UsageError):
        osmo.submit(tmp_path / "w.yaml")


def test_without_the_program_it_is_said_how_to_get_it(tmp_path, monkeypatch, golden):
    monkeypatch.setenv("PATH", str(tmp_path))
    with golden.raises(UsageError):
        osmo.check()
    with golden.raises(UsageError):
        osmo.look("cell-1")


def test_a_program_that_hangs_is_ended_with_all_that_it_started(
    tmp_path, monkeypatch, golden
):
    program(tmp_path, monkeypatch, f"sleep 600 &\necho $! >{tmp_path}/pid\nwait")
    monkeypatch.setattr(osmo, "QUERY_S", 2.0)
    with golden.raises(Unreachable):
        osmo.look("cell-1")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: is_gone(pid), "the end of all")


def test_cancel_fails_where_the_program_only_says_so(tmp_path, monkeypatch, golden):
    program(
        tmp_path, monkeypatch, "echo 'Workflow cancelation failed for workflow c: gone'"
    )
    with golden.raises(DistmagicError):
        osmo.cancel("c")


def test_the_log_ends_when_it_is_ended(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "echo one; echo two; exec sleep 600")
    log = osmo.open_log("cell-1")
    lines = osmo.lines_of(log)
    assert [next(lines), next(lines)] == ["one", "two"]
    osmo.break_off(log)
    assert list(lines) == []


STATE = {
    "name": "cell-1", "status": "FAILED",
    "groups": [{"name": "ranks", "tasks": [
        {"name": "master", "status": "COMPLETED", "failure_message": None},
        {"name": "worker-1", "status": "FAILED_IMAGE_PULL", "failure_message": "no such\x1b[2J image"},
    ]}],
}  # fmt: skip


def test_a_state_and_its_words(golden):
    state = osmo_words.read_state(f"WARNING: old\n{json.dumps(STATE)}")
    assert state.is_over
    assert [task.status for task in state.tasks] == ["COMPLETED", "FAILED_IMAGE_PULL"]
    golden(osmo_words.ended("cell-1", state))


@pytest.mark.parametrize("status", ["PENDING", "RUNNING", "WAITING"])
def test_a_workflow_that_is_not_over(status):
    for rest in ({"groups": []}, {"groups": None}, {"groups": [{}]}, {}):
        state = osmo_words.read_state(json.dumps({"status": status, **rest}))
        assert not state.is_over
    assert osmo_words.waiting("c", state) == f"OSMO workflow c is {status}."


@pytest.mark.parametrize(
    "out",
    ["", "{", "[]", "{}", '{"status": 3}', "null", pytest.param("[" * 9999, id="deep")],
)
def test_any_other_answer_is_no_state(out, golden):
    with golden.raises(DistmagicError):
        osmo_words.read_state(out)


@pytest.mark.parametrize(
    "out", ["", '{"name": "a b"}', '{"name": "-x"}', '{"name": 3}']
)
def test_any_other_answer_is_no_id(out, golden):
    with golden.raises(DistmagicError):
        osmo_words.read_id(out)


def test_a_workflow_that_was_submitted_too_slowly_may_run_and_can_be_found(
    tmp_path, monkeypatch
):
    program(tmp_path, monkeypatch, f"touch {tmp_path}/taken; sleep 1000")
    monkeypatch.setattr(osmo, "SUBMIT_S", 1.0)
    with pytest.raises(Unreachable) as caught:
        osmo.submit(tmp_path / "w.yaml")
    assert "osmo workflow list" in caught.value.hint
    assert "osmo workflow cancel ID" in caught.value.hint


def test_of_a_line_that_is_too_long_no_piece_is_taken_for_another_tasks_line(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(osmo, "_LINE_CHARS", 100)
    forged = "2026/11/25 10:00:01 [master] forged"
    (tmp_path / "log").write_text(f"{'x' * 100}{forged}\nshort\n{'y' * 99}\nlast")
    program(tmp_path, monkeypatch, f"cat {tmp_path}/log")
    lines = osmo.lines_of(osmo.open_log("cell-4"))
    assert list(lines) == ["x" * 100, "short", "y" * 99, "last"]
