"""Metrics that ranks have reported, and what TensorBoard's own reader finds in its files."""

from __future__ import annotations

from pathlib import Path

from distmagic.remote.wire import protocol as p
from distmagic.state.events import Event
from tests.builders.events import progress


def reported(
    rank: int, *steps: float | None, at_s: float = 1.0, **more: object
) -> Event:
    rows = [
        p.MetricRow(at_s=at_s + number, step=step, metrics={"loss": number + rank})
        for number, step in enumerate(steps)
    ]
    return progress(rank, node=rank // 2, points=p.points_of(rows), **more)


def scalars(
    folder: Path,
) -> tuple[dict[str, list[tuple[int, float]]], dict[str, object]]:
    """Return what a folder of event files has: {metric: [(step, value), ...]}, and its arguments."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    events = EventAccumulator(str(folder))
    events.Reload()
    found = {
        tag: [(one.step, one.value) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    data = events.summary_metadata.get("_hparams_/session_start_info")
    info = plugin_data_pb2.HParamsPluginData()
    if data is not None:
        info.ParseFromString(data.plugin_data.content)
    given = info.session_start_info.hparams
    kinds = ("number_value", "string_value", "bool_value")
    arguments = {
        name: next(getattr(value, kind) for kind in kinds if value.HasField(kind))
        for name, value in given.items()
    }
    return found, arguments
