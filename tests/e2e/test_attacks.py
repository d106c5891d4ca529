"""Ranks, hosts and users that do what nobody expects: the outcome is told truthfully, and nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from distmagic.errors import Cancelled, WorkerFailed
from distmagic.outcome.run import Run
from tests.e2e import runner
from tests.e2e.runner import as_value, at_work
from tests.lab import Lab
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]


def run_all(lab: Lab, *functions: Callable[[], object]) -> Run | WorkerFailed:
    """Run each function on a rank of its own: the first that fails ends the others, so let only one fail."""
    of_ranks = tuple(map(as_value, functions))

    def choose() -> object:
        import os

        return of_ranks[int(os.environ["RANK"])]()

    try:
        return runner.run_warm(lab, f"dm1:{len(functions)}", choose)
    except WorkerFailed as error:
        return error


def test_ranks_that_lose_their_streams_and_descriptors_still_tell_their_end(warm_lab):
    def close_stdout() -> int:
        import sys

        sys.stdout.close()
        return 1

    def no_streams() -> int:
        import sys

        sys.stdout = sys.stderr = None
        return 2

    def become_a_daemon() -> int:
        import os

        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 1024)
                script = "trap '' TERM HUP INT; while :; do sleep 1; done"
                # Without the job's mark.
                os.execve("/bin/sh", ["sh", "-c", script], {"PATH": "/bin:/usr/bin"})
            os._exit(0)
        return 4

    run = run_all(warm_lab, close_stdout, no_streams, become_a_daemon)
    assert isinstance(run, Run)
    assert dict(run.results) == {0: 1, 1: 2, 2: 4}


def test_a_rank_that_becomes_another_program(warm_lab):
    def become_shell() -> None:
        import os

        os.execvp("sh", ["sh", "-c", "echo from sh >&2; exit 3"])

    error = run_all(warm_lab, become_shell)
    assert isinstance(error, WorkerFailed)
    assert error.message == "rank 0 (dm1, local_rank 0) ended with exit code 3."
    assert "    from sh\n" in error.hint


def test_an_exception_whose_text_is_huge_and_whose_stderr_is_broken(warm_lab):
    def fail() -> None:
        import sys

        class Broken:
            def write(self, text: str) -> None:
                raise OSError("no")

        sys.stderr = Broken()
        raise ValueError("木" * 1_000_000)

    error = run_all(warm_lab, fail)
    assert isinstance(error, WorkerFailed)
    assert error.message.startswith(
        "rank 0 (dm1, local_rank 0) raised ValueError: 木木木"
    )
    assert len(error.message) < 10_000
    assert error.remote_traceback.startswith("Traceback (most recent call last):\n")
    assert " characters left out ..." in error.remote_traceback


def test_children_that_leave_the_function_are_not_the_rank(warm_lab):
    def fork_and_raise() -> str:
        import os

        if os.fork() == 0:
            raise ValueError("of the child")
        os.wait()
        return "parent"

    def fork_and_return() -> str:
        import os

        if os.fork() == 0:
            return "child"
        os.wait()
        return "parent"

    run = run_all(warm_lab, fork_and_raise, fork_and_return)
    assert isinstance(run, Run)
    assert dict(run.results) == {0: "parent", 1: "parent"}
    assert "ValueError: of the child" in run.logs(0, "stderr")


def test_handlers_that_raise_do_not_hide_the_end(warm_lab):
    """As DataLoader's does for every worker of it that dies, whatever the main process is at."""

    def fail() -> None:
        import os
        import signal
        import subprocess

        def complain(*_: object) -> None:
            raise RuntimeError("a worker exited unexpectedly")

        signal.signal(signal.SIGCHLD, complain)
        children = [subprocess.Popen(["sleep", str(0.02 * i)]) for i in range(100)]
        os.kill(children[0].pid, signal.SIGKILL)
        signal.pause()

    error = run_all(warm_lab, fail)
    assert isinstance(error, WorkerFailed)
    assert "RuntimeError" in error.message


def test_a_cache_that_was_cut_short_is_sent_again(warm_lab):
    """As hosts leave it that lose their power: the name is there, the bytes are not."""
    assert runner.run_warm(warm_lab, "dm1:1", int).results[0] == 0
    warm_lab.hosts[0].exec(
        ["sh", "-c", "for f in ~/.distmagic/blobs/*; do truncate -s 99 $f; done"]
    ).check_returncode()
    assert runner.run_warm(warm_lab, "dm1:1", int).results[0] == 0


# Rows of the fault table are those of a rank that fails and of a kernel that is killed.
@pytest.mark.parametrize(
    "end",
    [
        "well",
        pytest.param(
            "interrupt",
            marks=pytest.mark.promise(
                "a run leaves no process and no temporary file however it ends"
            ),
        ),
    ],
)
def test_nothing_stays_on_hosts(lab, end):
    """Each rank leaves a child that ignores SIGTERM, and torchrun has made a directory for its errors."""

    def temporary() -> list[tuple[str, ...]]:
        return [names for host in lab.hosts[:2] for names in (host.files("/tmp"), host.listdir("/tmp"))]  # fmt: skip

    def sleeps() -> int:
        processes = [one for host in lab.hosts[:2] for one in host.processes()]
        return sum("sleep" in one.cmdline for one in processes)

    before = temporary()
    struck: list[bool] = []

    def strike() -> None:
        # The child is a shell, which has yet to start its sleep.
        wait_until(lambda: temporary() != before and sleeps() > 0, "something to leave")
        struck.append(True)
        if end == "interrupt":
            signal.raise_signal(signal.SIGINT)
        for host in lab.hosts[:2]:
            (host.home / "go-on").touch()

    screen = runner.Watch(at_work(1), strike)
    if end == "well":
        run = runner.run(
            lab, "dm1:2,dm2:1", as_value(leave_a_child), end, screen=screen
        )
        assert all(run.results[rank] for rank in range(3))
    else:
        error = runner.failure(
            lab, "dm1:2,dm2:1", as_value(leave_a_child), end, screen=screen
        )
        assert isinstance(error, Cancelled)
        assert isinstance(error, KeyboardInterrupt)
        assert error.run.state.phase == "stopped"
    assert struck == [True], "there was something to leave"
    lab.assert_clean()
    assert (sleeps(), temporary()) == (0, before)


def leave_a_child(end: str) -> str:
    """Leave a child that ignores SIGTERM; then end well, or go on for ever."""
    import os
    import pathlib
    import subprocess
    import time

    import distmagic

    subprocess.Popen(
        ["/bin/sh", "-c", "trap '' TERM; sleep 1000"], start_new_session=True
    )
    distmagic.report(step=1)
    while end == "interrupt" or not (pathlib.Path.home() / "go-on").exists():
        time.sleep(0.02)
    return os.environ["TORCHELASTIC_ERROR_FILE"]
