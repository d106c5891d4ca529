"""What is left of a run: results that are a mapping, and files that come whole over connections that break."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distmagic.connection.link import Link
from distmagic.connection.requests.remote_files import RemoteFolder
from distmagic.errors import ConnectionLost, NoResult, PreflightError, UsageError
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.remote.values import parcel
from distmagic.remote.wire import protocol as p
from distmagic.render.overview import overview
from distmagic.state.events import Event, Gone, Lost
from distmagic.state.fold import begin, fold
from tests.builders.later import Later
from tests.builders.since import Since
from tests.builders.terms import terms
from tests.lab.waiting import wait_until
from tests.scenes import running

torch = Later("torch")

LOST = "its result is lost: it takes 7 bytes, and /x has 0 bytes free (No space left on device)"


def test_a_result_for_which_there_is_no_room_here(monkeypatch, golden):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = run_of(FakeHost(b"a large one"), {"result_bytes": 11})
    monkeypatch.setattr(FakeHost, "take", refuse)
    with pytest.raises(NoResult) as caught:
        run.results[0]
    assert "rank 0, 11 bytes" in caught.value.message
    golden(caught.value.hint)


def test_a_result_that_is_larger_than_the_room_here_is_not_begun(
    monkeypatch, tmp_path, golden
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host = FakeHost(b"")
    run = run_of(host, {"result_bytes": 1 << 60})
    with pytest.raises(NoResult) as caught:
        run.results[0]
    assert "rank 0, 1,152,921,504,606,846,976 bytes" in caught.value.message
    golden(caught.value.hint)
    assert host.asked == []
    assert list(tmp_path.iterdir()) == []


def test_a_result_whose_temporary_file_can_not_be_removed(
    value, monkeypatch, tmp_path, capsys
):
    """On NFS a mapped file leaves a `.nfs...` behind."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    run = run_of(FakeHost(value), {"result_bytes": len(value)})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as on_nfs:
        on_nfs.setattr(os, "rmdir", refuse)
        assert run.results[0] == {"loss": 0.5}


def test_small_results_keep_no_file(tmp_path):
    parcel.dump(torch.arange(5), tmp_path / "value")
    data = (tmp_path / "value").read_bytes()
    count = 200
    run = run_of(
        FakeHost(b""),
        *count * [{"result_bytes": len(data)}],
        small=dict.fromkeys(range(count), data),
    )
    since = Since()
    values = list(run.results.values())
    wait_until(lambda: not since.files(), "no file to be open")
    values[0][0] = 7
    assert [value.tolist() for value in values[:2]] == [
        [7, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    assert len(values) == count


def test_a_small_result_that_is_damaged(value, golden):
    run = run_of(FakeHost(b""), {"result_bytes": 9}, small={0: value[:-1]})
    with golden.raises(parcel.ParcelError):
        run.results[0]


class FakeHost:
    """A host with one file; each connection to it breaks after so many bytes, the last one holds."""

    def __init__(self, data: bytes, *cuts: int) -> None:
        self.data, self.cuts, self.asked = data, list(cuts), [0][:0]
        self.ends: list[str] = []

    def open(self, _: int) -> Link:
        """Return a new connection."""
        return cast(Link, self)

    def send(self, request: p.GetFile | p.ResultTaken) -> None:
        """Note from where on the file is asked for."""
        if isinstance(request, p.GetFile):
            self.asked.append(request.offset)

    def answer(self, _: type[p.Data]) -> p.Data:
        """Tell how much comes."""
        return p.Data(size_bytes=len(self.data) - self.asked[-1])

    def take(self, size: int, write: Callable[[bytes], object]) -> None:
        """Send what is asked for, as far as it goes."""
        rest = self.data[self.asked[-1] :]
        assert len(rest) == size
        if self.cuts:
            write(rest[: self.cuts.pop(0)])
            raise ConnectionLost("gpu-a: the connection ended.")
        write(rest)

    def close(self) -> None:
        """Note a connection that was dropped."""
        self.ends.append("closed")

    def finish(self) -> None:
        """Note one that ended well."""
        self.ends.append("finished")


def run_of(
    host: FakeHost, *ends: dict[str, Any], small: dict[int, bytes] | None = None
) -> Run:
    """Return a run of one host whose ranks ended so."""
    state = begin("j", ("gpu-a",))
    for rank, end in enumerate(ends):
        hello = p.Worker(
            rank=rank, local_rank=rank, world_size=len(ends), restart=0, pid=rank + 1
        )
        ended = p.Ended(**{"rank": rank, "restart": 0, "outcome": "returned", **end})
        state = fold(
            state, [Event(node_rank=0, at_s=1.0, what=what) for what in (hello, ended)]
        )
    return Run(state, small or {}, host.open, shown=False)


@pytest.fixture
def value(tmp_path) -> bytes:
    parcel.dump({"loss": 0.5}, tmp_path / "value")
    return (tmp_path / "value").read_bytes()


def test_a_transfer_that_breaks_goes_on_where_it_was(value, capsys):
    host = FakeHost(value, 10, 1, 90)
    run = run_of(host, {"result_bytes": len(value)})
    assert run.results[0] == {"loss": 0.5}
    assert host.asked == [0, 10, 11, 101]
    assert host.ends == ["closed", "closed", "closed", "finished"]


def test_a_transfer_that_gets_nowhere_is_given_up(value):
    host = FakeHost(value, 10, 0)
    run = run_of(host, {"result_bytes": len(value)})
    with pytest.raises(ConnectionLost):
        run.results[0]
    assert host.asked == [0, 10]


def test_results_are_a_mapping_of_ranks_that_left_one(value):
    host = FakeHost(value)
    run = run_of(
        host,
        {"result_bytes": 0},
        {"outcome": "raised", "code": 1},
        {"result_bytes": len(value)},
        {"meaning": LOST},
    )
    assert list(run.results) == [0, 2]
    assert [rank in run.results for rank in (0, 1, 2, 3, 9, "x")] == [
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    assert host.asked == []  # to ask whether it is there fetches nothing
    assert (run.results[0], run.results.get(1), run.results.get(9, "none")) == (
        None,
        None,
        "none",
    )


def test_results_are_shown_as_values_and_none_is_fetched_for_that(tmp_path):
    def small(one: object) -> bytes:
        parcel.dump(one, tmp_path / "small")
        return (tmp_path / "small").read_bytes()

    data = [small({"loss": 0.5}), small("x" * 5_000), b"damaged"]
    host = FakeHost(b"")
    run = run_of(
        host,
        *({"result_bytes": len(one)} for one in data),
        {"result_bytes": 0},
        {"outcome": "raised", "code": 1},
        {"result_bytes": 7_000_000},
        small=dict(enumerate(data)),
    )
    shown = repr(run.results)
    assert shown.startswith("{0: {'loss': 0.5}, 1: 'xxxx")
    assert len(shown) < 2_000
    assert ", 2: <ParcelError: " in shown
    assert shown.endswith(", 3: None, 5: <7,000,000 bytes, not looked at yet>}")
    assert host.asked == []


def test_a_run_is_a_sequence_of_what_its_ranks_returned(value):
    host = FakeHost(value)
    run = run_of(
        host,
        {"result_bytes": 0},
        {"outcome": "raised", "code": 1},
        {"result_bytes": len(value)},
    )
    assert (len(run), run[0]) == (2, None)
    assert host.asked == [], "to count them fetches nothing"
    first, second = run
    assert (first, second) == (run.results[0], run.results[2])
    assert list(run) == [run[0], run[2]]
    assert (run[-1], run[1:]) == (run[2], [run[2]])
    with pytest.raises(NoResult, match="rank 1"):
        run[1]
    with pytest.raises(NoResult, match="rank 1"):
        run[-2]
    none = run_of(host, {"outcome": "raised", "code": 1})
    assert (list(none), len(none), bool(none)) == ([], 0, True)


def test_the_curves_of_some_metrics_are_shown():
    run = Run(running(), {}, FakeHost(b"").open, shown=False)
    (line,) = repr(run.plot("loss")).splitlines()
    assert re.match(r"loss  [▁▂▃▄▅▆▇█]+ \S+ to \S+$", line)
    html = run.plot("loss")._repr_html_()
    assert html.count("<figure") == 1
    assert "rank 0: " in html
    assert len(repr(run.plot()).splitlines()) == 2
    with pytest.raises(UsageError, match="'los'") as caught:
        run.plot("loss", "los")
    assert "loss, acc" in caught.value.hint


def test_metrics_are_a_frame_where_pandas_is_there(monkeypatch, golden):
    metrics = Run(running(), {}, FakeHost(b"").open, shown=False).metrics
    pandas = SimpleNamespace(DataFrame=lambda rows: ("frame", rows))
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert metrics.frame() == ("frame", list(metrics))
    assert metrics[0].keys() == {"rank", "at_s", "step", "loss", "acc"}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with golden.raises(UsageError):
        metrics.frame()


@pytest.mark.parametrize(("rank", "message"), [
    (9, "There is no rank 9 in this run."),
    (1, "rank 1 (gpu-a, local_rank 1) left no result."),
    (2, f"rank 2 (gpu-a, local_rank 2) left no result: {LOST}."),
])  # fmt: skip
def test_a_result_that_is_not_there(rank, message):
    run = run_of(
        FakeHost(b""),
        {"result_bytes": 0},
        {"outcome": "raised", "code": 1},
        {"meaning": LOST},
    )
    with pytest.raises(NoResult) as caught:
        run.results[rank]
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, UsageError)
    assert str(caught.value) == f"{message}\nRanks with a result: [0]."
    assert caught.value._render_traceback_() == [
        f"NoResult: {message}",
        "Ranks with a result: [0].",
    ]


def test_a_result_that_was_removed_on_its_host_is_no_result():
    def removed(node_rank: int) -> Link:
        raise PreflightError("gpu-a", "rank0.result is not on this host.", "Run again.")

    run = run_of(FakeHost(b""), {"result_bytes": 7_000_000})
    gone = Run(run.state, {}, removed, shown=False)
    with pytest.raises(NoResult) as caught:
        gone.results[0]
    assert str(caught.value) == "gpu-a: rank0.result is not on this host.\nRun again."
    assert gone.results.get(0) is None


@pytest.mark.parametrize(
    "error",
    [UsageError("No file fits."), ConnectionLost("gpu-a: the connection ended.")],
    ids=lambda error: type(error).__name__,
)
def test_the_error_of_an_only_host_is_raised_as_it_is(monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(RemoteFolder, "fetch", fail)
    run = run_of(FakeHost(b""), {}, {})
    with pytest.raises(type(error)) as caught:
        run.fetch("*", ranks="all")
    assert caught.value is error


def without_its_second_host(*events: tuple[int, p.Message]) -> Run:
    """Return an elastic job of two hosts that went well after its second one was lost; of its nodes this was heard."""
    last = [(1, Lost(why="no connection for 60 s")), (0, Gone())]
    state = fold(
        begin("j", ["gpu-a", "gpu-b"], terms(3, min_nodes=1)),
        [Event(node_rank=node, at_s=0.0, what=what) for node, what in [*events, *last]],
    )
    return Run(state, {}, FakeHost(b"").open, shown=False)


def test_a_rank_of_a_host_that_was_lost_before_it_was_seen_is_not_said_never_to_have_been(
    golden,
):
    """The job was elastic, and went well; its lead alone could be followed to the end."""
    lead = p.Worker(rank=1, local_rank=0, world_size=2, restart=0, pid=1)
    left = p.Ended(rank=1, restart=0, outcome="returned", result_bytes=0)
    run = without_its_second_host((0, lead), (0, left))
    for look in (run.results.__getitem__, run.logs):
        with golden.raises(UsageError):
            look(0)
    assert run.results.get(0, "none") == "none"
    with golden.raises(NoResult):
        run.results[2]


def test_a_rank_whose_host_was_lost_before_its_end_is_not_said_to_have_left_no_result(
    golden,
):
    """The others had returned, so that the job went well without it."""
    first, second = (
        p.Worker(rank=rank, local_rank=0, world_size=2, restart=0, pid=1)
        for rank in (0, 1)
    )
    left = p.Ended(rank=0, restart=0, outcome="returned", result_bytes=0)
    run = without_its_second_host((0, first), (1, second), (0, left))
    with golden.raises(NoResult):
        run.results[1]


def test_a_lost_result_is_told_while_the_run_is_shown(golden):
    run = run_of(FakeHost(b""), {"meaning": LOST})
    golden(*told(run))
    assert run.state.workers[0].phase == "done"


def test_the_same_loss_of_several_ranks_is_told_once(golden):
    run = run_of(
        FakeHost(b""),
        {"meaning": LOST},
        {"result_bytes": 0},
        {"meaning": LOST},
        {"meaning": "its disk burns"},
    )
    golden(*told(run))


def told(run: Run) -> list[str]:
    return [alert.text for alert in overview(run.state).alerts]


def test_a_metric_with_the_name_of_a_column_keeps_its_own():
    row = p.MetricRow(
        at_s=1.0, step=2.0, metrics={"rank": 7.0, "at_s": -1.0, "loss": 0.5}
    )
    events = [
        p.Worker(rank=0, local_rank=0, world_size=1, restart=0, pid=1),
        p.Progress(rank=0, restart=0, at_s=1.0, points=p.points_of([row])),
    ]
    state = fold(
        begin("j", ["gpu-a"]),
        [Event(node_rank=0, at_s=0.0, what=what) for what in events],
    )
    assert Run(state, {}, FakeHost(b"").open, shown=False).metrics == [
        {"rank": 0, "at_s": 1.0, "step": 2.0, "rank_": 7.0, "at_s_": -1.0, "loss": 0.5}
    ]


def test_rows_after_a_restart_come_after_those_before_it():
    events = []
    for restart, steps in ((0, (1.0, 2.0, 3.0)), (1, (2.0, 3.0))):
        for rank in (0, 1):
            events.append(
                p.Worker(
                    rank=rank, local_rank=rank, world_size=2, restart=restart, pid=1
                )
            )
        for at_s, step in enumerate(steps, start=1):
            for rank in (0, 1):
                row = p.MetricRow(at_s=at_s, step=step, metrics={"loss": 0.5})
                events.append(
                    p.Progress(
                        rank=rank, restart=restart, at_s=at_s, points=p.points_of([row])
                    )
                )
    state = fold(
        begin("j", ["gpu-a"]),
        [Event(node_rank=0, at_s=0.0, what=what) for what in events],
    )
    rows = Run(state, {}, FakeHost(b"").open, shown=False).metrics
    seen = [(row["rank"], row["step"]) for row in rows]
    assert seen == [
        (rank, step) for step in (1.0, 2.0, 3.0, 2.0, 3.0) for rank in (0, 1)
    ]


def test_a_log_is_fetched_once_a_stream(golden):
    run = run_of(FakeHost(b"hello\n"), {"result_bytes": 0})
    assert run.logs(0) == "hello\nhello\n"
    assert run.logs(0, "stderr") == "hello\n"
    with golden.raises(UsageError):
        run.logs(3)


@pytest.mark.parametrize(
    ("world_size", "rank"),
    [
        (0, 7),  # no plan yet
        (2, 1),
        (2, 2),
        (2, -2),
    ],
)
def test_a_log_of_a_rank_that_has_yet_to_begin(world_size, rank, golden):
    state = replace(begin("j", ["gpu-a"]), world_size=world_size)
    run = Run(state, {}, FakeHost(b"").open, shown=False)
    with golden.raises(UsageError):
        run.logs(rank)
    over = Run(replace(state, abandoned="x"), {}, FakeHost(b"").open, shown=False)
    with golden.raises(UsageError):
        over.logs(rank)


def test_a_log_that_is_printed_moves_nothing_in_a_terminal():
    run = run_of(
        FakeHost(b"\x1b[32mok\x1b[0m\r50%\t\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b\n"),
        {"result_bytes": 0},
    )
    assert run.logs(0, "stdout") == "\x1b[32mok\x1b[0m\r50%\t\ufffd\n"


def test_results_that_were_looked_at_can_be_let_go_of(tmp_path):
    parcel.dump([1, 2], tmp_path / "small")
    run = run_of(
        FakeHost(b""), {"result_bytes": 3}, small={0: (tmp_path / "small").read_bytes()}
    )
    first = run.results[0]
    assert run.results[0] is first
    run.results.clear()
    assert run.results[0] == first
    assert run.results[0] is not first


def test_a_run_is_shown_again_in_any_cell_but_its_own(monkeypatch, capsys):
    shell = SimpleNamespace(execution_count=3)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    shown: list[object] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    run = Run(run_of(FakeHost(b""), {}).state, {}, FakeHost(b"").open, shown=True)
    run._ipython_display_()
    assert (shown, capsys.readouterr().out) == (
        [],
        f"<run {run.job}: {run.state.phase}>\n",
    )

    run = Run(run.state, {}, FakeHost(b"").open, shown=True)
    shell.execution_count = 4  # it had a name, so it was not the value of its own cell
    run._ipython_display_()
    assert len(shown) == 1

    left = Detached("j-1", ("gpu-a",), attach=lambda: None, stop=lambda: None)
    left._ipython_display_()
    assert (len(shown), capsys.readouterr().out) == (1, "<job j-1>\n")
    shell.execution_count = 5
    left._ipython_display_()
    assert shown[1:] == [{"text/plain": repr(left)}]


def test_a_detached_job_of_hosts_that_tell_escape_sequences(golden):
    left = Detached(
        "x\x1b[2J", ("gpu-a\x1b]52;c;AAAA\x07",), attach=lambda: None, stop=lambda: None
    )
    golden(repr(left))


@pytest.mark.parametrize("name", ["results", "logs", "metrics", "state"])
def test_a_job_that_was_let_go_says_how_its_run_is_had(name, golden):
    left = Detached("j-1", ("gpu-a",), attach=lambda: None, stop=lambda: None)
    with golden.raises(AttributeError):
        getattr(left, name)
    assert not hasattr(left, "nothing")
