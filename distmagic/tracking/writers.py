"""Writes points by a tracker's own package, which only this module imports, at the first point."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from distmagic.comparison.arguments import arguments_of
from distmagic.state.model import RunState
from distmagic.tracking.points import TrackedPoint

FOLDER = "runs"  # TensorBoard's default in torch
_FLUSH_S = 5  # delay until TensorBoard can read written points
_MOST_AT_ONCE = 1000  # limit of metrics in one request to MLflow


class TensorBoard:
    """A folder of event files for each rank, so that TensorBoard draws ranks as lines of one
    chart.
    """

    def __init__(self, state: RunState, folder: Path) -> None:
        self._make = import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = folder
        self._arguments = _arguments(state)
        self._writers: dict[int, Any] = {}

    def write(self, points: Iterable[TrackedPoint]) -> None:
        """Write points to the files of their ranks."""
        for point in points:
            if point.rank not in self._writers:
                own = str(self._folder / f"rank{point.rank}")
                writer = self._make(own, flush_secs=_FLUSH_S)
                self._writers[point.rank] = writer
                if self._arguments:
                    writer.add_hparams(self._arguments, {}, run_name=".")
            writer = self._writers[point.rank]
            writer.add_scalar(
                point.name, point.value, point.step, walltime=point.unix_s
            )

    def close(self, *, has_failed: bool) -> None:
        """Close the files, in which no end of a run is noted."""
        del has_failed
        for writer in self._writers.values():
            writer.close()


class Wandb:
    """A Weights & Biases run. Its project, server and key come from the notebook's environment."""

    def __init__(self, state: RunState) -> None:
        self._run = import_module("wandb").init(
            name=state.job, config=_arguments(state), reinit="create_new"
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Iterable[TrackedPoint]) -> None:
        """Log points; those of one step together."""
        by_step: dict[int, dict[str, float]] = {}
        for point in points:
            by_step.setdefault(point.step, {})[_key(point)] = point.value
        for step, values in sorted(by_step.items()):
            self._run.log({**values, "step": step})

    def close(self, *, has_failed: bool) -> None:
        """Finish the run."""
        self._run.finish(exit_code=int(has_failed))


class MLflow:
    """An MLflow run. Its server and experiment come from the notebook's environment."""

    def __init__(self, state: RunState) -> None:
        self._mlflow = import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        with self._mlflow.start_run(run_name=state.job, nested=True) as run:
            self._run_id = run.info.run_id
            self._mlflow.log_params(_arguments(state))
        self._client.update_run(self._run_id, status="RUNNING")

    def write(self, points: Iterable[TrackedPoint]) -> None:
        """Log points."""
        make = self._mlflow.entities.Metric
        metrics = [
            make(
                re.sub(r"[^\w\-. /]", "_", _key(point)),
                point.value,
                round(1000 * point.unix_s),
                point.step,
            )
            for point in points
        ]
        for start in range(0, len(metrics), _MOST_AT_ONCE):
            some = metrics[start : start + _MOST_AT_ONCE]
            self._client.log_batch(self._run_id, metrics=some)

    def close(self, *, has_failed: bool) -> None:
        """End the run."""
        status = "FAILED" if has_failed else "FINISHED"
        self._client.set_terminated(self._run_id, status)


# The destination of one run's points. All methods raise the errors of the tracker's package.
Writer = TensorBoard | Wandb | MLflow


def _key(point: TrackedPoint) -> str:
    return f"{point.name}/rank {point.rank}"


def writer_for(tracker: str, state: RunState) -> Writer:
    """Return the writer of a run for the tracker named by `--track`."""
    if tracker == "wandb":
        return Wandb(state)
    if tracker == "mlflow":
        return MLflow(state)
    return TensorBoard(state, Path(FOLDER, state.job))


def _arguments(state: RunState) -> dict[str, object]:
    given = arguments_of(state.terms.call)
    return {name: _value(text) for name, text in given.items()}


def _value(text: str) -> object:
    """Return an argument as a number, a bool or a text, which all trackers accept."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str) else text
