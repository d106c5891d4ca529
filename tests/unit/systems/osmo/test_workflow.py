"""A workflow of OSMO whose tasks never start: interrupted, not to be cancelled, ended by OSMO, or not to be asked for.

Those that run are in tests/e2e/test_osmo.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distmagic.errors import Cancelled, RunError, Unreachable, UsageError
from distmagic.payload import blobs, bundle
from distmagic.payload.pack import pack_call
from distmagic.request import flags
from distmagic.runner import run_loop
from distmagic.systems.osmo import osmo as program
from distmagic.systems.osmo import run as osmo
from distmagic.systems.osmo import workflow
from tests.builders.osmo_service import Here, Service, playing
from tests.builders.runs import FakeScreen
from tests.lab.waiting import wait_until


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    # No task runs it, and each workflow would quote its megabyte.
    monkeypatch.setattr(bundle, "build", lambda: blobs.keep(b"a bundle", tmp_path))
    places = [Here(tmp_path / "a"), Here(tmp_path / "b")]
    with playing(tmp_path, places, monkeypatch) as made:
        made.never_starts = True
        yield made
    assert made.broken == []


def submit(screen: FakeScreen, line: str = "") -> Any:
    request = flags.parse_line(f"--on osmo --nodes 2 {line}", flags.Defaults())
    payload = pack_call(dict, limit_bytes=1 << 30, labels={}, title="dict()")
    return osmo.run(request, payload, screen)


def log_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "distmagic-osmo-log"]


def interrupting(word: str) -> FakeScreen:
    """Return a screen at which somebody interrupts once, when a notice has this word."""
    words = [word]

    def act(state: Any) -> None:
        if words and words[0] in "".join(state.notices):
            words.clear()
            os.kill(os.getpid(), signal.SIGINT)

    return FakeScreen(act)


def test_an_interrupt_while_it_waits_cancels_it(service):
    screen = interrupting("PENDING: master SCHEDULING, worker-1 SCHEDULING")
    with pytest.raises(Cancelled):
        submit(screen)
    assert (service.state / "cell-1.cancel").exists()
    assert screen.finished[-1].is_over


def test_one_that_can_not_be_cancelled_is_named(service, monkeypatch, golden):
    service.how(cancel="refuse")
    monkeypatch.setattr(workflow, "LAST_LINES_S", 1.0)
    with golden.raises(Cancelled):
        submit(interrupting("PENDING"))
    wait_until(lambda: not log_threads(), "the end of the thread that reads the log")


@pytest.fixture
def shown_at_once(monkeypatch):
    """Show a run from its start, although a submission ends at once."""
    monkeypatch.setattr(run_loop, "_FIRST_SHOWN_S", 0.0)


def interrupted_while_it_is_submitted() -> Cancelled:
    # The screen is shown the run for the first time when the submission has begun.
    def act(state: Any) -> None:
        if not screen.shown[1:]:
            os.kill(os.getpid(), signal.SIGINT)

    screen = FakeScreen(act)
    with pytest.raises(Cancelled) as caught:
        submit(screen)
    return caught.value


@pytest.mark.usefixtures("shown_at_once")
def test_an_interrupt_while_it_is_submitted_cancels_it(service, golden):
    error = interrupted_while_it_is_submitted()
    golden(error)
    assert (service.state / "cell-1.cancel").exists()


@pytest.mark.usefixtures("shown_at_once")
def test_one_that_was_being_submitted_and_can_not_be_cancelled_is_named(
    service, golden
):
    service.how(cancel="away")
    error = interrupted_while_it_is_submitted()
    golden(error)
    assert not (service.state / "cell-1.cancel").exists()


def test_a_workflow_that_osmo_ends_says_why(service, golden):
    service.ends_as = "FAILED_IMAGE_PULL"
    screen = FakeScreen()
    with golden.raises(RunError) as caught:
        submit(screen)
    assert caught.value.run.results == {}
    assert screen.finished[-1].phase != "done"


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("refuse", UsageError),
        ("log in", UsageError),
        ("away", Unreachable),
        ("hang", Unreachable),
    ],
)
def test_a_submission_that_fails_starts_nothing(
    service, monkeypatch, how, kind, golden
):
    service.how(submit=how)
    monkeypatch.setattr(program, "SUBMIT_S", 1.0 if how == "hang" else 60.0)
    screen = FakeScreen()
    with golden.raises(kind):
        submit(screen)
    assert list(service.state.glob("*.yaml")) == []
    assert screen.finished[-1].abandoned


def test_a_state_that_can_not_be_asked_for_is_told_and_asked_for_again(service, golden):
    service.how(query="away")
    told: list[str] = []

    def act(state: Any) -> None:
        if not told and "The state of OSMO workflow cell-1 is unknown" in "".join(
            state.notices
        ):
            told.append("away")
            service.ends_as = "FAILED_PREEMPTED"
            service.how()

    with golden.raises(RunError):
        submit(FakeScreen(act))
    assert told


@pytest.mark.parametrize("is_a_file", [False, True], ids=["refused", "no folder"])
def test_results_that_can_not_be_downloaded_do_not_lose_the_run(
    service, capsys, golden, is_a_file
):
    service.ends_as = "COMPLETED"
    service.how(download="away")
    if is_a_file:
        Path("cell-1-results").touch()
    run = submit(FakeScreen(), "--results s3://b/kept")
    assert run.state.phase == "done"
    assert run.unfetched == ("s3://b/kept",)
    golden(capsys.readouterr().err)


def test_an_interrupt_of_the_download_does_not_lose_the_run(
    service, monkeypatch, golden
):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    service.ends_as = "COMPLETED"
    monkeypatch.setattr(program, "fetch", interrupt)
    with golden.raises(Cancelled) as caught:
        submit(FakeScreen(), "--results s3://b/kept")
    assert caught.value.run.unfetched == ("s3://b/kept",)
