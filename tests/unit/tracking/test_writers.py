"""What trackers get: TensorBoard's files are read back by TensorBoard's own reader."""

from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.errors import UsageError
from distmagic.outcome.run import Run
from distmagic.request import spec
from distmagic.request.spec import JobSpec
from distmagic.state.fold import fold
from distmagic.tracking.screen import TrackedScreen
from tests.builders.events import begun
from tests.builders.tracking import reported, scalars


def called(state, call):
    return replace(state, terms=replace(state.terms, call=call))


def test_a_run_becomes_a_folder_of_tensorboard_for_each_rank(tmp_path):
    state = called(
        begun(reported(0, 1, 2), reported(3, 1)), "fit(lr=0.1, data='cifar')"
    )
    run = Run(state, {}, lambda _: None, shown=False)
    assert run.to_tensorboard(tmp_path / "tb") == tmp_path / "tb"
    assert sorted(one.name for one in (tmp_path / "tb").iterdir()) == ["rank0", "rank3"]
    arguments = {"lr": 0.1, "data": "cifar"}
    assert scalars(tmp_path / "tb" / "rank0") == (
        {"loss": [(1, 0.0), (2, 1.0)]},
        arguments,
    )
    assert scalars(tmp_path / "tb" / "rank3") == ({"loss": [(1, 3.0)]}, arguments)


class Shown:
    """The screen beside the tracker."""

    def __init__(self):
        self.states = []

    def show(self, state):
        self.states.append(state)

    finish = show


def test_metrics_are_written_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = Shown()
    screen = TrackedScreen(shown, "tensorboard")
    first = begun(reported(0, 1))
    screen.show(first)
    assert Path("runs/j/rank0").is_dir()
    last = fold(first, [reported(0, 2)])
    screen.finish(last)
    assert scalars(Path("runs/j/rank0"))[0] == {"loss": [(1, 0.0), (2, 0.0)]}
    assert shown.states == [first, last]


def test_a_run_without_metrics_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    screen = TrackedScreen(Shown(), "tensorboard")
    screen.show(begun())
    screen.finish(begun())
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(
    tmp_path, monkeypatch, capsys, golden
):
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("a file where the folder is to be")
    shown = Shown()
    screen = TrackedScreen(shown, "tensorboard")
    state = begun(reported(0, 1))
    screen.show(state)
    state = fold(state, [reported(0, 2)])
    screen.show(state)
    screen.finish(state)
    assert len(shown.states) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    golden(err.replace(str(tmp_path), "HERE"))


def test_a_tracker_whose_package_is_missing_is_refused_before_the_run(
    monkeypatch, golden
):
    monkeypatch.setattr(spec.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError) as caught:
        JobSpec(track="wandb")
    golden(caught.value)
    run = Run(begun(), {}, lambda _: None, shown=False)
    with pytest.raises(UsageError) as caught:
        run.to_tensorboard("tb")
    golden(caught.value)


def test_what_can_not_be_tracked_is_refused(golden):
    for options in ({"track": "aim"}, {"track": "tensorboard", "detach": True}):
        with pytest.raises(UsageError) as caught:
            JobSpec(**options)
        golden(caught.value)
