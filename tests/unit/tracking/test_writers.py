"""What trackers get: TensorBoard's files are read back by TensorBoard's own reader."""

import contextlib
import sys
import types
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
from tests.scenes import over


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


class PlayedWandb(types.ModuleType):
    """As far as a run of Weights & Biases is asked for."""

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.logged, self.codes = {}, [], []

    def init(self, **given):
        self.begun = given
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.logged.append(values)

    def finish(self, exit_code):
        self.codes.append(exit_code)


class PlayedMLflow(types.ModuleType):
    """As far as a run of MLflow is asked for."""

    def __init__(self):
        super().__init__("mlflow")
        self.params, self.logged, self.states = {}, [], []
        self.entities = types.SimpleNamespace(Metric=lambda *one: one)
        self.log_params = self.params.update

    def MlflowClient(self):  # noqa: N802
        return self

    @contextlib.contextmanager
    def start_run(self, run_name, nested):
        assert (run_name, nested) == ("j", True)
        yield types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))

    def update_run(self, run_id, status):
        self.states.append((run_id, status))

    def log_batch(self, run_id, metrics):
        assert run_id == "7"
        self.logged += [(key, value, step) for key, value, _, step in metrics]

    set_terminated = update_run


def tracked(tracker, monkeypatch, *, played, code):
    """Show a run of ranks 0 and 3 that ends with this code."""
    monkeypatch.setitem(sys.modules, tracker, played)
    screen = TrackedScreen(Shown(), tracker)
    state = called(begun(reported(0, 1), reported(3, 1)), "fit(lr=0.1)")
    screen.show(state)
    screen.finish(over(fold(state, [reported(0, 2)]), code))


@pytest.mark.parametrize("code", [0, 1])
def test_wandb_gets_arguments_the_points_of_all_ranks_and_the_end(monkeypatch, code):
    played = PlayedWandb()
    tracked("wandb", monkeypatch, played=played, code=code)
    assert played.begun == {
        "name": "j",
        "config": {"lr": 0.1},
        "reinit": "create_new",
    }
    assert played.logged == [
        {"loss/rank 0": 0.0, "loss/rank 3": 3.0, "step": 1},
        {"loss/rank 0": 0.0, "step": 2},
    ]
    assert played.codes == [code]


@pytest.mark.parametrize(("code", "word"), [(0, "FINISHED"), (1, "FAILED")])
def test_mlflow_gets_arguments_the_points_of_all_ranks_and_the_end(
    monkeypatch, code, word
):
    played = PlayedMLflow()
    tracked("mlflow", monkeypatch, played=played, code=code)
    assert played.params == {"lr": 0.1}
    assert played.logged == [
        ("loss/rank 0", 0.0, 1),
        ("loss/rank 3", 3.0, 1),
        ("loss/rank 0", 0.0, 2),
    ]
    assert played.states == [("7", "RUNNING"), ("7", word)]


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
