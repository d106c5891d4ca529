"""What a rank reports, packet by packet: a list takes the agent's place, and a hand-driven clock the time's."""

from __future__ import annotations

import math
import os
import socket
import threading

import pytest

from distmagic.remote.rank import outbox, report
from distmagic.remote.wire import protocol


class Agent:
    """Takes packets while `is_open`, as a socket would; decodes them as the agent does."""

    def __init__(self) -> None:
        self.is_open = True
        self.packets: list[bytes] = []

    def send(self, packet: bytes) -> bool:
        if self.is_open:
            self.packets.append(packet)
        return self.is_open

    @property
    def messages(self) -> list[protocol.Progress]:
        return [protocol.decode(packet)[1] for packet in self.packets]

    @property
    def points(self) -> dict[str, list[tuple[float, float | None, float]]]:
        """Seconds, step and value of each metric, of all packets together."""
        found: dict[str, list[tuple[float, float | None, float]]] = {}
        for message in self.messages:
            for name, one in message.points.items():
                for at_s, step, value in zip(
                    one[0::3], one[1::3], one[2::3], strict=True
                ):
                    told = None if math.isnan(step) else step
                    found.setdefault(name, []).append((at_s, told, value))
        return found

    @property
    def losses(self) -> list[float]:
        return [value for _, _, value in self.points["loss"]]

    @property
    def bars(self) -> list[protocol.Bar]:
        return [bar for message in self.messages for bar in message.bars]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def flush(patience_s: float = report._FLUSH_S) -> bool:
    return report._here.link.flush(patience_s)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def agent(clock, monkeypatch):
    monkeypatch.setattr(report._here, "complaints", set())
    agent = Agent()
    report.begin(agent.send, rank=3, restart=1, clock=clock)
    yield agent
    agent.is_open = True
    report.end()


def test_outside_a_run_nothing_happens(capfd):
    report.end()
    report.report(step=1, total=2, loss="nonsense")
    assert list(report.track([1, 2, 3])) == [1, 2, 3]
    assert capfd.readouterr() == ("", "")


def test_one_call_is_one_packet_that_the_protocol_reads(agent, clock):
    clock.now += 1.5
    report.report(step=3, total=10, loss=0.25, acc=1)
    assert agent.messages == [
        protocol.Progress(
            rank=3, restart=1, at_s=1.5, step=3.0, total=10.0,
            points={"loss": (1.5, 3.0, 0.25), "acc": (1.5, 3.0, 1.0)},
        )
    ]  # fmt: skip


def test_a_step_alone_makes_no_point_and_a_metric_alone_has_no_step(agent):
    report.report(step=4)
    report.report(loss=2.0)
    first, second = agent.messages
    assert (first.step, first.points) == (4.0, {})
    assert second.step == 4.0  # the latest, told again
    assert agent.points == {"loss": [(0.0, None, 2.0)]}


def test_names_and_values_that_json_finds_hard(agent):
    report.report(
        **{
            'a "quoted" näme\n': math.nan,
            "up": math.inf,
            "down": -math.inf,
            "tiny": 5e-324,
        }
    )
    metrics = {name: points[0][2] for name, points in agent.points.items()}
    assert math.isnan(metrics['a "quoted" näme\n'])
    assert (metrics["up"], metrics["down"], metrics["tiny"]) == (
        math.inf,
        -math.inf,
        5e-324,
    )


def test_numbers_of_other_libraries(agent):
    torch, np = pytest.importorskip("torch"), pytest.importorskip("numpy")
    report.report(
        step=np.int64(7), total=torch.tensor(9), a=torch.tensor(0.5, requires_grad=True), b=np.float32(0.5),
        c=np.array(2), d=True, e="0.125", f=torch.tensor(True),
    )  # fmt: skip
    assert (agent.messages[0].step, agent.messages[0].total) == (7.0, 9.0)
    assert {name: points[0][2] for name, points in agent.points.items()} == {
        "a": 0.5,
        "b": 0.5,
        "c": 2.0,
        "d": 1.0,
        "e": 0.125,
        "f": 1.0,
    }


def test_what_is_no_number_is_left_out_with_one_line(agent, capfd, golden):
    torch = pytest.importorskip("torch")
    bad = {
        "text": "abc",
        "list": [1],
        "vector": torch.zeros(3),
        "huge": 10**400,
        "complex": 1j,
        "none": None,
    }
    report.report(step="here", **bad, loss=1.0)
    report.report(step=object(), meta=torch.zeros((), device="meta"))
    assert agent.points == {"loss": [(0.0, None, 1.0)]}
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    golden(err)


@pytest.mark.parametrize(("step", "taken"), [(10**400, None), (-(10**400), None), (-(2**60), -(2.0**60)), (True, 1.0)])  # fmt: skip
def test_whole_numbers_that_are_no_usual_steps(agent, step, taken):
    report.report(step=step, total=step, loss=0.5)
    (progress,) = agent.messages
    assert (progress.step, progress.total) == (taken, taken)
    assert agent.losses == [0.5]


def test_what_the_agent_does_not_take_goes_with_the_next_call(agent, clock):
    agent.is_open = False
    for step in range(3):
        clock.now += 1
        report.report(step=step, loss=float(step))
    assert agent.packets == []
    agent.is_open = True
    clock.now += 1
    report.report(step=3, loss=3.0)
    assert len(agent.packets) == 1
    assert agent.points["loss"] == [(1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 3, 3)]


def test_pending_points_are_bounded_thinned_evenly_and_keep_the_last(agent, clock):
    agent.is_open = False
    for step in range(5000):
        report.report(step=step, total=5000, loss=float(step))
    agent.is_open = True
    assert flush(0.0) is True
    losses = agent.losses
    assert len(losses) <= outbox.KEPT_POINTS
    assert losses == sorted(losses)
    assert losses[-1] == 4999.0
    assert losses[0] < 100  # the beginning is not forgotten
    assert agent.messages[-1].step == 4999.0


def test_a_fast_loop_sends_fewer_packets_and_loses_nothing(agent, clock):
    for step in range(400):
        clock.now += 1e-4
        report.report(step=step, loss=float(step))
    assert 50 <= len(agent.packets) <= 60
    flush()
    assert agent.losses == [float(step) for step in range(400)]


def test_packets_stay_small_enough_for_the_socket(agent, capfd):
    agent.is_open = False
    for _ in range(100):
        report.report(**{f"layer{i:03}.weight.norm": 0.123456789 for i in range(200)})
    agent.is_open = True
    assert flush() is True
    assert [len(points) for points in agent.points.values()] == [100] * 200
    assert max(map(len, agent.packets)) < 1 << 16
    report.report(**{f"m{i}": 0.5 for i in range(10_000)})
    assert flush() is True
    assert "10000 metrics in one call" in capfd.readouterr().err


def test_a_metric_that_the_socket_would_refuse_is_told_and_takes_nothing_with_it(
    agent, capfd
):
    agent.is_open = False
    report.report(step=1, loss=1.0)
    report.report(step=2, **{"n" * 300_000: 0.5})
    report.report(step=2, **{f"{i:0300}": 0.5 for i in range(900)})
    report.report(step=3, loss=3.0)
    agent.is_open = True
    assert flush() is True
    assert agent.losses == [1.0, 3.0]
    assert len(agent.points) == 1 + 900
    assert "bytes in one call are more than 200,000" in capfd.readouterr().err


def test_names_of_metrics_that_wait_are_bounded(agent):
    agent.is_open = False
    for number in range(5000):
        report.report(**{f"m{number}": 1.0})
    agent.is_open = True
    assert flush() is True
    assert 1000 < len(agent.points) <= 2000


def test_flush_waits_for_the_agent_only_when_blocking(agent):
    agent.is_open = False
    report.report(step=1)
    assert flush(0.0) is False
    opener = threading.Timer(0.05, setattr, (agent, "is_open", True))
    opener.start()
    assert flush() is True
    opener.join()


def test_a_real_socket_pair(agent, clock):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)

        def send(packet: bytes) -> bool:
            try:
                return theirs.send(packet) == len(packet)
            except BlockingIOError:
                return False

        report.begin(send, rank=0, restart=0, clock=clock)
        for step in range(3000):
            clock.now += 1
            report.report(step=step, loss=1.0)
        seen: list[float] = []
        while True:
            message = protocol.decode(ours.recv(1 << 18))[1]
            seen.extend(message.points["loss"][1::3])
            flush(0.0)
            if message.step == 2999.0:
                break
        assert seen[-1] == 2999.0
        assert seen == sorted(set(seen))


def test_threads_do_not_lose_each_others_rows(agent):
    def work(name: str) -> None:
        for _ in range(100):
            report.report(**{name: 1.0})

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flush()
    assert [len(points) for points in agent.points.values()] == [100] * 4


def test_reporting_from_within_the_sending_itself_does_not_hang(agent):
    """A finalizer of a bar may run at any point, so in the middle of a packet too."""

    def send(packet: bytes) -> bool:
        if len(agent.packets) < 3:
            report.report(nested=1.0)
        return agent.send(packet)

    report.begin(send, rank=0, restart=0)
    report.report(loss=1.0)
    assert [*agent.messages[0].points] == ["loss"]
    assert {name: len(points) for name, points in agent.points.items()} == {
        "loss": 1,
        "nested": 3,
    }


def test_a_forked_child_is_silent(agent):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        report.report(step=5)
        list(report.track(range(3)))
        os.write(writer, str(len(agent.packets)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"0"
    os.close(reader), os.close(writer)
    report.report(step=6)
    assert len(agent.packets) == 1


def test_track_counts_and_closes(agent):
    assert list(report.track("abcd", desc="letters")) == list("abcd")
    first, last = agent.bars[0], agent.bars[-1]
    assert (first.n, first.total, first.desc, first.closed) == (
        0.0,
        4.0,
        "letters",
        False,
    )
    assert (last.n, last.closed, last.id) == (4.0, True, first.id)
    assert last.rate > 0


def test_track_is_at_most_20_updates_a_second(agent, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    for _ in report.track(iter(range(1000))):
        now[0] += 0.001
    assert len(agent.bars) <= 22
    assert agent.bars[0].total is None
    assert agent.bars[-1].n == 1000.0


def test_track_nested_and_broken_off(agent):
    for _ in report.track(range(2), desc="outer"):
        for item in report.track(range(10), desc="inner"):
            if item == 4:
                break
    flush()
    closed = [(bar.desc, bar.n) for bar in agent.bars if bar.closed]
    assert closed == [("inner", 4.0), ("inner", 4.0), ("outer", 2.0)]
    assert len({bar.id for bar in agent.bars}) == 3


def test_track_closes_its_bar_when_the_loop_raises(agent):
    def divide() -> None:
        for item in report.track([1, 0]):
            _ = 1 / item

    with pytest.raises(ZeroDivisionError):
        divide()
    flush()
    assert agent.bars[-1].closed


def test_bars_pending_are_bounded_but_open_ones_stay(agent):
    agent.is_open = False
    for _ in report.track(range(1), desc="outer"):
        for _ in range(1000):
            list(report.track([1], desc="inner"))
        agent.is_open = True
        flush()
        assert len(agent.bars) <= outbox.KEPT_BARS + 1
        assert agent.bars[0].desc == "outer"
        assert not agent.bars[0].closed


def test_the_device_is_told_once(agent, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    agent.is_open = False
    report.report(step=1)
    agent.is_open = True
    report.report(step=2)
    report.report(step=3)
    assert [message.device for message in agent.messages] == ["cuda:2", ""]


def test_a_report_without_a_step_stands_at_the_count_of_the_innermost_bar(agent):
    report.report(loss=5.0)
    for epoch in range(2):
        report.post_bar(protocol.Bar(id=1, desc="epoch", n=epoch, total=2))
        for batch in (0, 1):
            report.post_bar(protocol.Bar(id=2 + epoch, desc="batch", n=batch, total=2))
            report.report(loss=1.0)
        report.post_bar(protocol.Bar(id=2 + epoch, n=2, total=2, closed=True))
        report.report(accuracy=0.5)
    report.report(step=7, loss=0.5)
    flush()
    steps = {name: [step for _, step, _ in one] for name, one in agent.points.items()}
    assert steps == {"loss": [None, 0, 1, 0, 1, 7], "accuracy": [0, 1]}
    assert all(message.step in (None, 7) for message in agent.messages)
