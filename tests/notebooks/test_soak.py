"""One kernel, many runs: what it and its hosts hold stays what it is, and a run that is let go of is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import soak
from tests.lab import Lab, LabHost, held
from tests.lab.held import Held, HeldOnHost
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import LiveNotebook, live_notebook

pytestmark = pytest.mark.needs("lab")

WARM_UP, RUNS = 20, 40  # runs until all is loaded that ever is; runs altogether
# Of memory that is not free, in twenty runs of which four look at 4 MB; the bench's soak looks for what grows slowly.
MORE_MB = 5.0


@pytest.fixture
def notebook(lab: Lab, tmp_path: Path) -> Iterator[LiveNotebook]:
    """A notebook with a temporary directory of its own, whose runs are on one host.

    It has its own blobs, too: once a minute a kernel looks at all that its machine keeps, and thousands that other tests
    have left there take some MB.
    """
    (tmp_path / "tmp").mkdir()
    own = {"TMPDIR": str(tmp_path / "tmp"), "DISTMAGIC_HOME": str(tmp_path / "home")}
    with live_notebook(tmp_path, own) as made:
        made.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        made.run("%distributed hosts dm1:1")
        made.run(soak.PREPARE)
        yield made
        made.run("%distributed down")
        lab.assert_clean()


def of_kernel(notebook: LiveNotebook, tmp_path: Path) -> Held:
    notebook.run(soak.TRIM)
    return held.of_process(notebook.pid, tmp_path / "tmp")


def settled(notebook: LiveNotebook, tmp_path: Path, before: Held) -> Held:
    """Return what the kernel holds as soon as it is no more than before, or what it still holds after a while.

    Between two looks ZeroMQ opens and closes descriptors of its own, in threads of the kernel that come and go.
    """
    looks = [of_kernel(notebook, tmp_path)]

    def is_settled() -> bool:
        if held.added(looks[-1], before):
            looks.append(of_kernel(notebook, tmp_path))
        return not held.added(looks[-1], before)

    with contextlib.suppress(AssertionError):
        wait_until(is_settled, "the kernel to hold no more than before", every_s=0.2)
    return looks[-1]


def is_no_more(now: HeldOnHost, before: HeldOnHost) -> bool:
    """Whether a host has no more than before of all that is not kept by design, memory aside."""
    names = ("processes", "descriptors", "temporary")
    return all(getattr(now, name) <= getattr(before, name) for name in names)


def settled_host(host: LabHost, before: HeldOnHost) -> HeldOnHost:
    """Return what is on a host as `settled` does: what is kept there looks around now and then, with a descriptor more."""
    looks = [held.on_host(host)]

    def is_settled() -> bool:
        if not is_no_more(looks[-1], before):
            looks.append(held.on_host(host))
        return is_no_more(looks[-1], before)

    with contextlib.suppress(AssertionError):
        wait_until(is_settled, "the host to hold no more than before", every_s=0.2)
    return looks[-1]


def execute(notebook: LiveNotebook, run: soak.Run, lab: Lab) -> None:
    """Execute the cell of a run, which must end as it should, and a cell that looks at the run."""
    cell = f"%%distributed -o run\n{run.call}"
    if run.ending == "done":
        notebook.run(cell)
    elif run.ending == "failed":
        assert "WorkerFailed: rank 0 " in notebook.fail(cell)
    else:
        begun = lab.hosts[0].home / soak.BEGUN
        begun.unlink(missing_ok=True)

        def interrupt() -> None:
            wait_until(begun.exists, "the rank to begin")
            notebook.interrupt()

        with notebook.meanwhile(interrupt):
            assert "Cancelled: " in notebook.fail(cell)
    notebook.run(run.look)


def test_forty_runs_of_every_kind_hold_no_more_than_twenty(lab, notebook, tmp_path):
    before_kernel, before_host = None, None
    for number in range(RUNS):
        if number == WARM_UP:
            before_kernel, before_host = (
                of_kernel(notebook, tmp_path),
                held.on_host(lab.hosts[0]),
            )
        execute(notebook, soak.MIX[number % len(soak.MIX)], lab)
    assert before_kernel is not None
    assert before_host is not None
    kernel = settled(notebook, tmp_path, before_kernel)
    host = settled_host(lab.hosts[0], before_host)
    assert held.added(kernel, before_kernel) == []
    assert is_no_more(host, before_host), f"{host}, and before: {before_host}"
    assert kernel.memory_mb - before_kernel.memory_mb < MORE_MB
    assert host.memory_mb - before_host.memory_mb < MORE_MB
