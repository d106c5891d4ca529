"""A sweep on real hosts: runs side by side, a queue, a run that fails and is rerun where it left its file."""

import pytest

import distmagic
from distmagic.api import session
from distmagic.errors import WorkerFailed
from tests.e2e import runner
from tests.e2e.programs import fail_at_first

pytestmark = pytest.mark.needs("lab")


@pytest.mark.quick
def test_runs_of_a_sweep_have_a_directory_of_their_own_and_failed_ones_run_again(ended):
    sweep = distmagic.sweep(
        runner.as_value(fail_at_first),
        {"lr": [0.1, 0.2], "seed": range(2)},
        hosts="dm1:2,dm2:1",
        access=runner.access(ended),
        name="s",
    )
    sweep.wait()
    assert list(sweep.runs) == ["s-0", "s-1", "s-2", "s-3"]
    assert sorted(sweep.failed) == ["s-1", "s-3"], sweep.failed
    with pytest.raises(WorkerFailed):
        sweep.runs["s-1"].wait()
    sweep.rerun()
    sweep.wait()
    assert sweep.failed == {}
    found = [run.results[0] for run in sweep.runs.values()]
    assert [one[:3] for one in found] == [
        (0.1, 0, 1),
        (0.1, 1, 1),
        (0.2, 0, 1),
        (0.2, 1, 1),
    ]
    places = [one[3] for one in found]
    named = [place.rpartition("/")[2].rpartition("-") for place in places]
    assert [name for name, _, _ in named] == list(sweep.runs)
    assert len({digest for _, _, digest in named}) == 4
    rows = [line.split() for line in repr(sweep).splitlines()]
    assert rows[0][:4] == ["run", "lr", "seed", "state"]
    assert [row[:4] for row in rows[1:5]] == [
        [f"s-{number}", lr, seed, "done"]
        for number, (lr, seed) in enumerate(
            [("0.1", "0"), ("0.1", "1"), ("0.2", "0"), ("0.2", "1")]
        )
    ]
    assert session().background.running == ()
