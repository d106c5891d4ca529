"""States of runs as a user meets them: what the tests of render and screen look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import Bar, Ended, Failure
from distmagic.state.model import (
    NodeState,
    OutputLine,
    RunState,
    StackDump,
    WorkerState,
)
from distmagic.state.series import Series

TRACEBACK = """Traceback (most recent call last):
  File "<cell 4>", line 12, in train
    loss = criterion(model(x), y)
  File "/opt/torch/nn/modules/module.py", line 1739, in _call_impl
    return forward_call(*args, **kwargs)
ValueError: Expected input batch_size (64) to match target batch_size (63).
"""


def worker(rank: int, per_host: int = 2, **more: object) -> WorkerState:
    host = (
        f"gpu-{'abcdefghijklmnopqrstuvwxyz'[rank // per_host]}"
        if rank // per_host < 26
        else f"n{rank // per_host}"
    )
    plain = {
        "rank": rank, "local_rank": rank % per_host, "node_rank": rank // per_host, "host": host, "phase": "running",
        "device": f"cuda:{rank % per_host}", "step": 310.0 + rank, "total": 500.0, "rate": 12.25 + rank / 10, "at_s": 25.0,
        "advanced_at_s": 27.0,
        "metrics": {"loss": 0.4213 + rank / 97, "acc": 0.87654321 - rank / 200},
    }  # fmt: skip
    return WorkerState(**{**plain, **more})  # type: ignore[arg-type]


@cache  # the largest scene has two thousand curves, and many tests show it
def series(rank: int, steps: int = 310) -> Mapping[str, Series]:
    def loss(i: int) -> float:
        return (
            2.3 * math.exp(-i / 90)
            + 0.25
            + 0.08 * math.sin(i * (rank + 3) / 5) * math.exp(-i / 200)
        )

    def acc(i: int) -> float:
        return (
            0.92
            - 0.8 * math.exp(-i / 70)
            - 0.01 * rank
            + 0.015 * math.sin(i * (rank + 2) / 3)
        )

    points = range(0, steps, max(1, steps // 150))
    curves = {
        "loss": curve([(float(i), loss(i)) for i in points]),
        "acc": curve([(float(i), acc(i)) for i in points]),
    }
    return MappingProxyType(curves)


def curve(points: list[tuple[float, float]]) -> Series:
    numbers = [n for step, value in points for n in (step / 12, step, value)]
    return Series().extended(numbers, limit=2000)


def lines(count: int = 30, ranks: int = 4, per_host: int = 2) -> tuple[OutputLine, ...]:
    return tuple(
        OutputLine(rank=i % ranks, label=f"rank {i % ranks} gpu-{'abcdefgh'[i % ranks // per_host]}", stream="stderr" if i % 7 == 5 else "stdout",
             text=f"UserWarning: step {i} <b>took</b> long" if i % 7 == 5 else f"epoch {i // 10} step {i}: loss {2.3 / (i + 1):.4f}")
        for i in range(count)
    )  # fmt: skip


def run(workers: list[WorkerState], per_host: int = 2, **more: object) -> RunState:
    hosts = {w.node_rank: w.host for w in workers}
    nodes = tuple(
        NodeState(node_rank=i, host=host, phase="running")
        for i, host in sorted(hosts.items())
    )
    plain = {
        "job": "0612-101500-5f3a", "nodes": nodes, "workers": {w.rank: w for w in workers}, "world_size": len(workers),
        "at_s": 27.4, "series": {w.rank: series(w.rank) for w in workers}, "lines": lines(), "lines_seen": 3214,
    }  # fmt: skip
    return RunState(**{**plain, **more})  # type: ignore[arg-type]


def over(state: RunState, code: int = 0, **more: object) -> RunState:
    nodes = tuple(
        replace(node, phase="gone", code=code, reason="done") for node in state.nodes
    )
    return replace(state, nodes=nodes, **more)  # type: ignore[arg-type]


def opening(*nodes: dict[str, object], at_s: float = 1.2, **more: object) -> RunState:
    made = [
        NodeState(node_rank=i, host=f"gpu-{'abcd'[i]}", **node)
        for i, node in enumerate(nodes)
    ]  # type: ignore[arg-type]
    return RunState(job="0612-101500-5f3a", nodes=tuple(made), at_s=at_s, **more)  # type: ignore[arg-type]


def connecting() -> RunState:
    return opening(
        {"phase": "connected"},
        {},
        {"unusable": "gpu-c: gpu-c port 22 refused the connection."},
        at_s=4.0,
    )


def waiting() -> RunState:
    what = "device 0, held by job 0612-100100-77ab of ann@laptop:/nb/train.ipynb since 10:01; 1 more run comes before"
    return opening({"phase": "connected"}, {"phase": "connected", "waits_for": what})


def sending() -> RunState:
    half = {"phase": "sending", "sent_bytes": 40 << 20, "total_bytes": 80 << 20}
    return opening(half, half | {"sent_bytes": 80 << 20}, {"phase": "sending"})


def starting() -> RunState:
    notices = ("gpu-b: torch 2.12.1 there, 2.13.0 here.",)
    return opening(
        {"phase": "starting", "hostname": "gpu-a"},
        {"phase": "starting"},
        notices=notices,
    )


def refused() -> RunState:
    return replace(
        connecting(), abandoned="gpu-c: gpu-c port 22 refused the connection."
    )


def given_up() -> RunState:
    why = "Interrupted while the hosts were being reached; nothing was started."
    return opening({"phase": "connected"}, {}, abandoned=why, stopping="interrupted")


def reconnecting() -> RunState:
    state = run([worker(r) for r in range(4)])
    broken = replace(
        state.nodes[1], broken="gpu-b: the connection ended.", broken_at_s=15.0
    )
    return replace(state, nodes=(state.nodes[0], broken))


def running() -> RunState:
    return run([worker(r) for r in range(4)])


def on_gpus() -> RunState:
    """Two hosts with a GPU a rank; one host tells nothing of its GPUs."""
    state = running()
    gpus = (
        protocol.Gpu(utilization=0.87, used_bytes=62_100_000_000, total_bytes=80_000_000_000, celsius=71.0),
        protocol.Gpu(used_bytes=12_000_000_000, total_bytes=80_000_000_000),
    )  # fmt: skip
    told = protocol.Hardware(
        cpu_utilization=0.43, used_bytes=31_000_000_000, total_bytes=256_000_000_000, received_bytes_s=1_200_000.0,
        sent_bytes_s=340_000.0, gpus=gpus,
    )  # fmt: skip
    silent = replace(told, cpu_utilization=None, received_bytes_s=None, gpus=())
    first, second = state.nodes
    first = replace(first, hardware=told, gpu_peaks=(79_000_000_000, 12_000_000_000))
    second = replace(second, hardware=silent)
    workers = {}
    for rank, worker in state.workers.items():
        device = f"cuda:{worker.local_rank}" if worker.node_rank == 0 else ""
        workers[rank] = replace(worker, device=device)
    return replace(state, nodes=(first, second), workers=workers)


def one_slow() -> RunState:
    workers = [worker(r) for r in range(4)]
    workers[2] = replace(workers[2], step=120.0, rate=0.31)
    return run(workers, notices=("gpu-a: no tqdm there", "gpu-b: no tqdm there"))


def standing_still() -> RunState:
    """No rank has advanced for more than a minute; they were asked where they are."""
    frame = protocol.Frame(
        file="Cell In[3]", line=14, function="train", text="load()", mine=True
    )
    threads = (protocol.Thread(frames=(frame,)),)
    stacks = {}
    for rank in range(4):
        stacks[rank] = protocol.Stacks(
            request_id="1", rank=rank, local_rank=rank % 2, threads=threads
        )
    dump = StackDump(at_s=90.0, stacks=stacks, nodes=(0, 1))
    return replace(running(), at_s=91.0, advanced_at_s=27.0, stack_dumps={"1": dump})


def done() -> RunState:
    ended = [
        worker(
            r,
            phase="done",
            step=500.0,
            ended=Ended(rank=r, restart=0, outcome="returned", result_bytes=10),
        )
        for r in range(4)
    ]
    return over(run(ended))


def failed() -> RunState:
    failure = Failure(
        type="ValueError", traceback=TRACEBACK,
        message="Expected input batch_size (64) to match target batch_size (63).",
    )  # fmt: skip
    workers = [worker(r, phase="stopped") for r in range(4)]
    workers[3] = worker(
        3,
        phase="failed",
        ended=Ended(rank=3, restart=0, outcome="raised", code=1, failure=failure),
    )
    return over(run(workers, first_failure=3, stopping="failed"), code=1)


def killed() -> RunState:
    ended = Ended(
        rank=1, restart=1, outcome="signalled", code=-9, meaning="killed: out of memory"
    )
    workers = [
        worker(0),
        worker(1, phase="failed", restart=1, ended=ended),
        worker(2, phase="starting", step=None, metrics={}, rate=None),
    ]
    return run(workers, first_failure=1, stopping="failed")


def nested() -> RunState:
    workers = []
    for r in range(4):
        bars = (
            Bar(id=1, desc="epoch: ", n=2, total=10, unit="epoch", rate=0.21),
            Bar(id=2, desc="batch", n=30.0 + r, total=100, unit="it", rate=21.5),
            Bar(id=3, desc="", n=4, total=None, unit="img"),
        )
        workers.append(
            worker(r, step=None, total=None, bars=bars, rate=0.21, metrics={})
        )
    return run(workers, series={}, lines=(), lines_seen=0)


def unicode_names() -> RunState:
    names = [
        "训练节点-一号",
        "a-very-long-host-name.with.many.parts.cluster.example.org",
        "été",
        "gpu-b",
    ]
    workers = [
        replace(
            worker(r, per_host=1),
            host=names[r],
            metrics={"损失": 1.5, "précision/top-1 <b>": float("nan")},
        )
        for r in range(4)
    ]
    state = run(workers, lines=(
        OutputLine(rank=0, label=f"rank 0 {names[0]}", stream="stdout", text="\x1b[32m✓ 完成\x1b[0m \x1b[1;31mbold red\x1b[0m 🎉 \x1b]0;title\x07\x1b[2Kx"),
        OutputLine(rank=1, label=f"rank 1 {names[1]}", stream="stderr", text="<script>alert(1)</script> " + "word " * 60),
    ), lines_seen=2)  # fmt: skip
    broken = curve(
        [
            (p.step or 0.0, float("nan") if i > 90 else p.value)
            for i, p in enumerate(series(0)["loss"])
        ]
    )
    return replace(
        state,
        series={0: {"损失": broken}, 1: {"损失": series(1)["loss"]}},
        open_lines={(0, 0, "stdout"): "unfinished 30%"},
    )


@cache
def ranks_64() -> RunState:
    workers = [worker(r, per_host=8, step=300.0 + r % 5) for r in range(64)]
    workers[17] = replace(workers[17], step=90.0)
    return run(workers, per_host=8)


def one_of_64_failed() -> RunState:
    """Rank 22 of 64 has failed, while the others go on."""
    state = ranks_64()
    failure = Failure(type="ValueError", message="no such batch", traceback="Traceback")
    ended = Ended(rank=22, restart=0, outcome="raised", code=1, failure=failure)
    failed_one = replace(state.workers[22], phase="failed", ended=ended)
    workers = {**state.workers, 22: failed_one}
    return replace(state, workers=workers, first_failure=22)


@cache
def ranks_1024() -> RunState:
    workers = [worker(r, per_host=8, step=300.0 + r % 5) for r in range(1024)]
    ended = Ended(rank=77, restart=0, outcome="exited", code=1)
    workers[77] = replace(workers[77], phase="failed", ended=ended)
    workers[500] = replace(workers[500], step=17.0)
    return run(workers, per_host=8, first_failure=77)


def waits_for_a_line(state: RunState, prompt: int = 7) -> RunState:
    """Return a state in which rank 1 is in a debugger and waits for somebody to type."""
    paused = protocol.Paused(
        rank=1, restart=0, prompt=prompt, file="Cell In[3]", line=4, asks="(Pdb) "
    )
    return replace(state, paused={1: paused})


SCENES: dict[str, Callable[[], RunState]] = {
    scene.__name__: scene
    for scene in (
        connecting, waiting, sending, starting, refused, given_up, running, reconnecting, one_slow, done, failed, killed, nested,
        unicode_names, ranks_64, ranks_1024,
    )
}  # fmt: skip
