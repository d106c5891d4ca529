"""A node as a task of a platform: what it writes to its log, and what it refuses to begin with."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.remote.contact import task
from distmagic.remote.contact.task import MessageLog, merged
from distmagic.remote.wire import log_lines, protocol
from distmagic.remote.wire.protocol import Bar, MetricRow, Output, Progress, points_of

START = protocol.StartNode(
    job="1", node_rank=0, torchrun=(), env={}, defaults={}, cwd="", call="", code="",
    endpoint="", hosts=("master",), lead=True, terms=protocol.JobTerms(lease_s=60),
)  # fmt: skip


def progress(step, *, rank=0, bars=(), rows=1):
    made = tuple(
        MetricRow(at_s=step, step=step, metrics={"loss": 1.0}) for _ in range(rows)
    )
    return Progress(
        rank=rank, restart=0, at_s=step, step=step, points=points_of(made), bars=bars
    )


def messages(text):
    found = []
    joining = log_lines.Joining()
    for line in text.splitlines():
        whole = joining.add(log_lines.read(line))
        if whole is not None:
            found.append(protocol.decode(whole.encode()))
    return found


def test_progress_of_a_second_is_one_line_of_each_rank():
    out = io.StringIO()
    log = MessageLog(out)
    for step in range(1, 4):
        for rank in range(2):
            log.add(progress(step, rank=rank))
    assert out.getvalue() == ""
    log.flush()
    found = messages(out.getvalue())
    assert [
        (n, one.rank, one.step, len(one.points["loss"]) // 3) for n, one in found
    ] == [
        (1, 0, 3, 3),
        (2, 1, 3, 3),
    ]


def test_what_can_not_wait_comes_after_what_came_before_it():
    out = io.StringIO()
    log = MessageLog(out)
    log.add(progress(1))
    log.add(Output(rank=0, stream="stdout", offset=0, text="a"))
    log.add(Output(rank=0, stream="stdout", offset=1, text="b"))
    log.add(protocol.Ended(rank=0, restart=0, outcome="returned"))
    kinds = [type(one).__name__ for _, one in messages(out.getvalue())]
    assert kinds == ["Progress", "Output", "Ended"]
    assert messages(out.getvalue())[1][1].text == "ab"


def picture(number, rank=0):
    return protocol.Picture(rank=rank, restart=0, data=str(number))


def test_of_many_pictures_of_a_rank_few_are_written_and_the_last_at_the_end():
    out, now = io.StringIO(), [100.0]
    log = MessageLog(out, lambda: now[0])
    for number in range(100):  # ten a second
        now[0] += 0.1
        log.add(picture(number))
        log.add(picture(number, rank=1))
        log.flush()
        log.add(protocol.Notice(text="which can not wait"))
    log.flush(is_end=True)
    found = [one for _, one in messages(out.getvalue()) if hasattr(one, "data")]
    assert found == [picture(0), picture(0, 1), picture(99), picture(99, 1)]


def test_pictures_that_come_slowly_are_all_written():
    out, now = io.StringIO(), [0.0]
    log = MessageLog(out, lambda: now[0])
    for number in range(3):
        now[0] += 10.0
        log.add(picture(number))
        log.flush()
    assert [one.data for _, one in messages(out.getvalue())] == ["0", "1", "2"]


def test_how_busy_a_host_is_comes_seldom_and_stacks_do_not():
    out, now = io.StringIO(), [0.0]
    log = MessageLog(out, lambda: now[0])
    for second in range(60):
        now[0] = second
        log.add(protocol.Hardware(used_bytes=second))
        log.add(protocol.Stacks(request_id="a", rank=0, local_rank=0))
        log.add(protocol.StacksDone(request_id="a", ranks=1))
        log.flush()
    assert [one.used_bytes for _, one in messages(out.getvalue())] == [0, 30]


def test_of_a_bar_the_latest_state_counts_and_of_rows_the_last_ones():
    old, new = Bar(id=1, n=1), Bar(id=1, n=2)
    other = Bar(id=2, n=5)
    joined = merged(progress(1, bars=(old, other), rows=60), progress(2, bars=(new,)))
    assert joined.bars == (new, other)
    assert len(joined.points["loss"]) == 50 * 3
    assert joined.points["loss"][-2] == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (progress(1), progress(2, rank=1)),
        (progress(1), Output(rank=0, stream="stdout", offset=0, text="a")),
        (Output(rank=0, stream="stdout", offset=0, text="a"), Output(rank=0, stream="stderr", offset=0, text="a")),
        (
            Output(rank=0, stream="stdout", offset=0, text="a"),
            Output(rank=0, stream="stdout", offset=9, text="a", skipped_bytes=8),
        ),
    ],
)  # fmt: skip
def test_what_is_of_another_rank_or_stream_is_a_line_of_its_own(before, after):
    assert merged(before, after) is None


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NODE_RANK": "0", "MASTER_ADDR": "a"},
        {"NODE_RANK": "2"},
        {"NODE_RANK": "-1"},
        {"NODE_RANK": "x"},
    ],
    ids=str,
)
def test_half_set_or_contradictory_variables_are_named(
    tmp_path, monkeypatch, variables, golden
):
    start = replace(START, hosts=("master", "worker-1"))
    (tmp_path / task.START).write_bytes(protocol.encode(start))
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if len(variables) == 1:
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with golden.raises(SystemExit):
        task._start_message(tmp_path, ())


def test_a_pipe_in_the_working_directory_is_told_and_the_run_stays_done(
    tmp_path, monkeypatch
):
    work, kept = tmp_path / "work", tmp_path / "kept"
    work.mkdir()
    (work / "a.txt").write_text("a")
    os.mkfifo(work / "pipe")
    (work / "z.txt").write_text("z")
    monkeypatch.setenv("OUTPUT_DIR", str(kept))
    out = io.StringIO()
    ended = lead_at_its_end(work, MessageLog(out))
    assert ended._end("") == 0
    found = [message for _, message in messages(out.getvalue())]
    assert [type(one).__name__ for one in found] == ["Notice", "Final"]
    assert found[0].text.startswith(f"not all files of {work} were kept: ")
    assert "is a named pipe" in found[0].text
    assert sorted(path.name for path in kept.iterdir()) == ["a.txt", "z.txt"]


def test_of_many_files_that_are_not_kept_the_notice_is_short(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    for number in range(100):
        os.mkfifo(work / f"pipe{number}")
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "kept"))
    out = io.StringIO()
    assert lead_at_its_end(work, MessageLog(out))._end("") == 0
    assert len(messages(out.getvalue())[0][1].text) == 1000


def lead_at_its_end(work: Path, log: MessageLog) -> task.Task:
    """Return the first task of one, whose agent has said its last word; there is no contact."""
    made = task.Task.__new__(task.Task)
    made._log, made._work, made._start = log, str(work), START
    made._result_bytes, made._code = None, 0
    made._final = protocol.Final(reason="done")
    return made
