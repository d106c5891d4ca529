"""A profile of all ranks: one trace, the longest operations, and who waits for whom. Traces are as torch writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from distmagic.diagnosis.profile import Profile, longest, merged, waits

HOSTS = {0: "gpu-a", 1: "gpu-b"}


def took(
    name: str, ts: float, dur: float, cat: str = "cpu_op", pid: int = 7, tid: int = 7
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": dur,
    }


def trace(*events: dict[str, Any], base_ns: int = 0) -> dict[str, Any]:
    return {"baseTimeNanoseconds": base_ns, "traceEvents": list(events)}


def gloo(name: str, *times: tuple[float, float]) -> list[dict[str, Any]]:
    """Calls of a kind, each (begin, duration), in a thread of gloo."""
    return [
        took(f"gloo:{name}", ts, dur, "user_annotation", tid=9) for ts, dur in times
    ]


def test_one_trace_has_a_process_for_each_rank():
    named = {
        "ph": "M",
        "name": "process_name",
        "pid": 7,
        "tid": 0,
        "args": {"name": "python"},
    }
    thread = {
        "ph": "M",
        "name": "thread_name",
        "pid": 7,
        "tid": 7,
        "args": {"name": "main"},
    }
    window = {
        "ph": "X",
        "cat": "Trace",
        "name": "PyTorch Profiler (0)",
        "pid": "Spans",
        "tid": "x",
        "ts": 1.0,
        "dur": 9.0,
    }
    flow = {
        "ph": "s",
        "id": 3,
        "pid": 7,
        "tid": 7,
        "ts": 2.0,
        "cat": "ac2g",
        "name": "ac2g",
    }
    kernel = took("gemm", 5.0, 1.0, "kernel", pid=0, tid=20)
    one = trace(named, thread, window, flow, took("aten::mm", 1.0, 2.0), kernel)
    later = trace(
        took("aten::mm", 1.0, 2.0, pid=8, tid=8),
        flow | {"pid": 8, "tid": 8},
        base_ns=5000,
    )
    events = merged({0: one, 1: later}, HOSTS)["traceEvents"]
    shown = [
        (e["pid"], e.get("tid"), e["name"], e.get("ts"), e.get("id")) for e in events
    ]
    assert shown == [
        (0, None, "process_name", None, None),
        (0, None, "process_sort_index", None, None),
        (0, 7, "thread_name", None, None),
        (0, 7, "ac2g", 2.0, 3),
        (0, 7, "aten::mm", 1.0, None),
        (0, 10**9 + 20, "gemm", 5.0, None),
        (1, None, "process_name", None, None),
        (1, None, "process_sort_index", None, None),
        (1, 8, "aten::mm", 6.0, None),
        (1, 8, "ac2g", 7.0, 3 + 10**10),
    ]
    assert events[0]["args"] == {"name": "rank 0 (gpu-a)"}


def test_an_operation_takes_its_own_time_without_what_it_calls():
    inside = trace(
        took("linear", 0.0, 10_000.0),
        took("mm", 1000.0, 4000.0),
        took("mm", 6000.0, 2000.0),
        took("relu", 10_000.0, 1000.0),
        took("mm", 0.0, 500.0, tid=8),
    )
    slower = trace(took("mm", 0.0, 9500.0))
    found = longest({0: inside, 1: slower}, 2)
    assert [(op.name, op.ms, op.calls, op.slowest, op.slowest_ms) for op in found] == [
        ("mm", 4.0, 1.0, 1, 4.75),
        ("linear", 1.0, 0.2, 0, 2.0),
        ("relu", 0.25, 0.2, 0, 0.5),
    ]


def test_only_the_ten_longest_are_shown_and_of_gpus_only_what_they_do():
    many = [took(f"op{number}", 100.0 * number, 1.0 + number) for number in range(20)]
    assert [op.name for op in longest({0: trace(*many)}, 1)] == [
        f"op{number}" for number in range(19, 9, -1)
    ]
    on_gpu = trace(*many, took("gemm", 0.0, 3.0, "kernel", pid=0, tid=20))
    assert [op.name for op in longest({0: on_gpu}, 1)] == ["gemm"]


def test_a_kernel_that_begins_early_takes_only_that_time_from_the_one_before():
    rows = [("gemm", 0, 30), ("norm", 28, 50), ("gemm", 100, 30), ("norm", 128, 50)]
    found = longest({0: trace(*(took(*row, "kernel") for row in rows))}, 1)
    assert [(op.name, op.ms) for op in found] == [("norm", 0.1), ("gemm", 0.056)]


def test_a_rank_that_comes_last_has_the_others_wait():
    early = trace(
        *gloo("all_reduce", (0.0, 5000.0), (10_000.0, 4000.0)),
        *gloo("barrier", (20_000.0, 100.0)),
    )
    late = trace(
        *gloo("all_reduce", (4000.0, 1000.0), (13_500.0, 500.0)),
        *gloo("barrier", (19_000.0, 1100.0)),
    )
    first, second = waits({0: early, 1: late}, 2)
    assert (first.rank, first.calls_ms, first.waits_ms, first.last) == (1, 1.3, 0.5, 2)
    assert (second.rank, second.calls_ms, second.waits_ms, second.last) == (
        0,
        4.55,
        3.75,
        1,
    )


def test_a_step_that_one_rank_left_out_counts_for_none():
    """It began its profile one step later than the other."""
    whole = trace(*gloo("all_reduce", (0.0, 10.0), (100.0, 50.0), (200.0, 10.0)))
    rest = trace(*gloo("all_reduce", (140.0, 10.0), (200.0, 10.0), (300.0, 10.0)))
    found = waits({0: whole, 1: rest}, 1)
    assert [(one.rank, one.waits_ms) for one in found] == [(1, 0.0), (0, 0.04)]


def test_dates_of_two_traces_are_held_against_each_other():
    one = trace(*gloo("all_reduce", (0.0, 1.0), (100.0, 50.0)), base_ns=1_000_000)
    other = trace(*gloo("all_reduce", (1140.0, 10.0)))
    found = waits({0: one, 1: other}, 1)
    assert [(one.rank, one.waits_ms) for one in found] == [(1, 0.0), (0, 0.04)]


def test_kernels_of_nccl_are_the_calls_of_gpus():
    def rank(dur: float) -> dict[str, Any]:
        return trace(
            took("nccl:all_reduce", 0.0, 1.0, "user_annotation"),
            took(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)",
                10.0,
                dur,
                "kernel",
                pid=0,
                tid=20,
            ),
        )

    found = waits({0: rank(500.0), 1: rank(100.0)}, 1)
    assert [(one.rank, one.waits_ms) for one in found] == [(1, 0.0), (0, 0.4)]


def test_alone_or_without_a_common_call_nobody_waits():
    assert waits({0: trace(*gloo("barrier", (0.0, 1.0)))}, 1) == ()
    assert waits({0: trace(*gloo("barrier", (0.0, 1.0))), 1: trace()}, 1) == ()


def test_a_profile_as_text(golden):
    early = trace(
        *gloo("all_reduce", (0.0, 5000.0)), took("aten::addmm", 0.0, 12_345.0)
    )
    late = trace(
        *gloo("all_reduce", (4000.0, 1000.0)), took("aten::mm\x1b[2J", 0.0, 1000.0)
    )
    traces = {0: early, 1: late}
    found = Profile(
        path=Path("trace-j-5f0c.json.gz"),
        steps=1,
        ops=longest(traces, 1),
        waits=waits(traces, 1),
        hosts=HOSTS,
        notes=(
            "gpu-c: 1 of its ranks did not make 1 step of an optimizer within 120 s.",
        ),
    )
    golden(*[line.rstrip() for line in repr(found).splitlines()])
    alone = repr(replace(found, waits=(), notes=()))
    assert "collective" not in alone
