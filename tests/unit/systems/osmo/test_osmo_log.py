"""The log of a workflow of OSMO, read: events of tasks, foreign lines, hostile ones, and a log that is read again."""

import base64
import json

from distmagic.remote.wire import log_lines, protocol
from distmagic.systems.osmo.osmo_words import LogReader

STAMP = "2026/11/22 14:55:15"


class Reading:
    """A reader of two tasks, and what it has put."""

    def __init__(self):
        self.put = []
        self.reader = LogReader(
            ("master", "worker-1"),
            lambda node, what, size: self.put.append((node, what)),
        )

    def read(self, *lines):
        for line in lines:
            self.reader.read(line)
        return self.put


def of(task, message, number):
    text = protocol.encode(message, number).decode().rstrip()
    lines = log_lines.written(log_lines.EVENT, number, text)
    return [f"{STAMP} [{task}] {line}" for line in lines]


def notice(text):
    return protocol.Notice(text=text)


def test_events_are_those_of_the_task_that_wrote_the_line():
    done = protocol.Final(reason="done")
    reading = Reading()
    put = reading.read(*of("worker-1", notice("a"), 1), *of("master", done, 1))
    assert put == [(1, notice("a")), (0, done)]
    assert reading.reader.finished == {0}


def test_pictures_and_how_busy_a_host_is_come_too():
    picture = protocol.Picture(rank=0, restart=0, data="iVBORw0KGgo=")
    busy = protocol.Hardware(cpu_utilization=0.5, used_bytes=1, total_bytes=2)
    put = Reading().read(*of("master", picture, 1), *of("master", busy, 2))
    assert put == [(0, picture), (0, busy)]


def test_a_retried_task_writes_under_its_name():
    line = of("worker-1", notice("a"), 1)[0].replace("[worker-1]", "[worker-1 retry-2]")
    assert Reading().read(line) == [(1, notice("a"))]


def test_a_log_that_is_read_again_gives_nothing_twice():
    lines = [
        "Workflow cell-1 has logs:",
        *of("master", notice("a"), 1),
        f"{STAMP} [master] hello",
    ]
    reading = Reading()
    reading.read(*lines)
    before = len(reading.put)
    reading.reader.begin()
    reading.read(*lines, *of("master", notice("b"), 2), f"{STAMP} [master] again")
    assert next(what for _, what in reading.put[before:]) == notice("b")
    assert len(reading.put) == before + 2


def test_foreign_lines_are_shown_as_output_of_their_task():
    put = Reading().read(
        f"{STAMP} [worker-1] Pulling \x1b[2Jthe image\x07", "no prefix at all"
    )
    assert [(node, what.rank, what.text) for node, what in put] == [
        (1, -1, "Pulling the image\n"),
        (0, -1, "no prefix at all\n"),
    ]


def test_hostile_lines_raise_nothing_and_change_nothing():
    def event(text, number=1):
        return f"{STAMP} [master] distmagic event {number} 1/1 {text}"

    stranger = {"t": "start_node", "n": 1, "job": "x"}
    lines = [
        event("{"),
        event("[" * 10_000),
        event(json.dumps(stranger), 2),
        event(json.dumps({"t": "final", "n": 1}), 3),
        event(json.dumps({"t": "detached", "n": 1, "why": "asked"}), 4),
        f"{STAMP} [other] distmagic event 1 1/1 {{}}",
        "\x00\ufffd",
    ]
    reading = Reading()
    reading.read(*lines)
    assert {type(what) for _, what in reading.put} == {protocol.Output}
    assert reading.reader.finished == set()


def test_texts_are_bounded_as_those_of_any_host():
    put = Reading().read(*of("master", notice("x" * 50_000 + "\x1b[2J"), 1))
    assert len(put[0][1].text) <= 2000


def test_the_result_of_rank_0_and_no_other_one():
    data = base64.b64encode(b"\x80" * 40_000).decode()
    reading = Reading()
    for task, rank in (("master", 0), ("master", 1), ("worker-1", 0)):
        lines = log_lines.written(log_lines.RESULT, rank, data if not rank else "gA==")
        reading.read(*(f"{STAMP} [{task}] {line}" for line in lines))
    reading.read(f"{STAMP} [master] distmagic result 0 1/1 no base64!")
    assert reading.reader.result == b"\x80" * 40_000
    assert reading.put == []


def test_what_osmo_says_around_a_reading_is_no_line_of_a_task():
    reading = Reading()
    for _ in range(3):
        reading.reader.begin()
        reading.read(
            "Workflow cell-1 has logs:",
            f"{STAMP} [master] one",
            "a stranger",
            "",
            "Log stream has timed out or failed. Please run the command again.",
        )
    reading.read(f"{STAMP} [master] two")
    assert [what.text for _, what in reading.put] == ["one\n", "a stranger\n", "two\n"]
