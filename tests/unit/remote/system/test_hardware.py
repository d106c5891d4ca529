"""How busy a host is: what NVIDIA's library and the kernel report, and what the looking costs."""

from __future__ import annotations

import itertools
import time

import pytest

from distmagic.remote.agent import hardware_watch
from distmagic.remote.system import hardware
from distmagic.remote.wire import protocol
from tests.builders.nvml import Nvml, play
from tests.lab.waiting import wait_until


def gpu(number: float) -> protocol.Gpu:
    return protocol.Gpu(utilization=number)


def test_what_nvml_reports_of_each_gpu(monkeypatch):
    monkeypatch.setattr(hardware.time, "sleep", lambda _: None)
    play(monkeypatch, Nvml())
    first, second = itertools.islice(hardware.rounds(), 2)
    busy, silent = hardware.chosen(first, None)
    assert busy == protocol.Gpu(
        utilization=0.87, used_bytes=62311 << 20, total_bytes=81559 << 20, celsius=71.0
    )
    assert silent == protocol.Gpu()
    assert hardware.chosen(first, "GPU-100") == (busy,)
    assert second == first


@pytest.mark.parametrize(
    ("mask", "numbers"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("1,-1,0", [1]),
        ("GPU-c,GPU-a", [2, 0]),
        ("0, 1", [0, 1]),
        ("10", []),
    ],
)
def test_gpus_are_counted_as_ranks_count_them(mask, numbers):
    gpus = {}
    for number, uuid in enumerate(("GPU-aaaa", "GPU-bbbb", "GPU-cccc")):
        gpus[str(number)] = gpus[uuid] = gpu(number)
    assert hardware.chosen(gpus, mask) == tuple(gpu(number) for number in numbers)


def test_without_the_library_a_host_has_no_gpus(monkeypatch):
    monkeypatch.setattr(hardware.time, "sleep", lambda _: None)
    play(monkeypatch, None)
    assert list(itertools.islice(hardware.rounds(), 3)) == [{}, {}, {}]


def test_between_two_looks_the_kernel_tells_what_the_host_did():
    before = (10.0, 1000, 600, 5_000, 7_000)
    now = (12.0, 1400, 700, 25_000, 7_000)
    seen = hardware.hardware(before, now, (gpu(1.0),))
    assert seen.cpu_utilization == 0.75
    assert (seen.received_bytes_s, seen.sent_bytes_s) == (10_000, 0)
    assert 0 < seen.used_bytes < seen.total_bytes, "of this machine"
    assert seen.gpus == (gpu(1.0),)
    alone = hardware.hardware((10.0, 1000, 600, 0, 0), (12.0, 1400, 700, 0, 0), ())
    assert alone.received_bytes_s is None, "no device of a network"


def test_a_watch_has_news_once(monkeypatch):
    monkeypatch.setattr(hardware_watch, "_QUIET_S", 0.0)
    rounds = [{}, {"0": gpu(0.5), "GPU-a": gpu(0.5)}]
    monkeypatch.setattr(hardware, "rounds", lambda: iter(rounds))
    watch = hardware_watch.HardwareWatch(None)
    seen = []

    def is_there() -> bool:
        news = watch.news()
        if news is not None:
            seen.append(news.gpus)
        return (gpu(0.5),) in seen

    wait_until(is_there, "the second round")
    assert watch.news() is None


def test_looking_costs_less_than_half_a_percent_of_a_core():
    """Without GPUs; what NVIDIA's library costs besides is the driver's."""
    costs_s = []  # the least counts: other programs take caches away
    before = hardware.counters()
    for _ in range(50):
        began_s = time.thread_time()
        now = hardware.counters()
        hardware.hardware(before, now, ())
        before = now
        costs_s.append(time.thread_time() - began_s)
    assert min(costs_s) < 0.005 * hardware.EVERY_S
