"""Loops that are timed inside a rank, and in a plain process on a terminal. Standard library, tqdm and torch alone."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable

STEP_S = 0.001  # a step a millisecond: 1,000 reports a second


def reports(rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Return what `report` and an empty function take of the same training loop, as `in_loop`."""
    import distmagic

    def report(step: int) -> None:
        distmagic.report(
            step=step, total=steps, loss=1.0 / (step + 1), accuracy=step / steps
        )

    def nothing(step: int) -> None:
        _take(step=step, total=steps, loss=1.0 / (step + 1), accuracy=step / steps)

    return {
        "report": in_loop(report, rounds, steps),
        "nothing": in_loop(nothing, rounds, steps),
        "least": least(rounds, steps),
    }


def _take(**_: float) -> None:
    return


def least(rounds: int, steps: int) -> dict[str, list[float]]:
    """Return what the least takes that keeps every number: a tuple a call, and ten times a second JSON to another process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader = os.fork()
    if not reader:
        ours.close()
        while theirs.recv(1 << 20):
            continue
        os._exit(0)
    theirs.close()
    kept: list[tuple[float, int, int, dict[str, float]]] = []
    due_s = 0.0

    def keep(*, step: int, total: int, **metrics: float) -> None:
        nonlocal due_s
        now_s = time.monotonic()
        kept.append((now_s, step, total, metrics))
        if now_s >= due_s:
            due_s = now_s + 0.1
            ours.send(json.dumps(kept).encode())
            kept.clear()

    def call(step: int) -> None:
        keep(step=step, total=steps, loss=1.0 / (step + 1), accuracy=step / steps)

    found = in_loop(call, rounds, steps)
    ours.close()
    os.waitpid(reader, 0)
    return found


def updates(rounds: int, steps: int) -> dict[str, list[float]]:
    """Return what `update` of a bar of tqdm takes of the same loop, as `in_loop`."""
    from tqdm import tqdm

    with tqdm(total=steps * (rounds + 1)) as bar:
        return in_loop(lambda _: bar.update(1), rounds, steps)


def in_loop(
    call: Callable[[int], object], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Return, of each round of a training loop, what `call` took in per cent, and one call in microseconds."""
    import torch

    torch.set_num_threads(1)
    weights = torch.randn(128, 128)
    found: dict[str, list[float]] = {"percent": [], "us": [], "cpu_us": []}
    for number in range(rounds + 1):
        inside, inside_cpu, began = 0.0, 0.0, time.perf_counter()
        for step in range(steps):
            due = began + (step + 1) * STEP_S
            while time.perf_counter() < due:
                weights = torch.tanh(weights @ weights)
            before_cpu, before = time.thread_time(), time.perf_counter()
            call(step)
            inside += time.perf_counter() - before
            inside_cpu += time.thread_time() - before_cpu
        if number:  # the first round warms up
            found["percent"].append(100 * inside / (time.perf_counter() - began))
            found["us"].append(1e6 * inside / steps)
            found["cpu_us"].append(1e6 * inside_cpu / steps)
    return found


def bars(rounds: int) -> dict[str, list[float]]:
    """Return, of each round, what one iteration with a bar of tqdm takes in microseconds, in three ways of use."""
    found: dict[str, list[float]] = {
        "paced": [],
        "iterated": [],
        "updated": [],
        "postfix": [],
    }
    for number in range(rounds + 1):
        found["paced"] += [1e6 * _paced(1500) / 1500] if number else []
        for name, loop, count in (
            ("iterated", _iterated, 2_000_000),
            ("updated", _updated, 300_000),
            ("postfix", _postfix, 3_000),
        ):
            began = time.perf_counter()
            loop(count)
            if number:
                found[name].append(1e6 * (time.perf_counter() - began) / count)
    return found


def _paced(count: int) -> float:
    """Return how long tqdm itself took, in seconds, in a loop of a step a millisecond."""
    from tqdm import tqdm

    spent, began = 0.0, time.perf_counter()
    end = began
    for step in tqdm(range(count)):
        spent += time.perf_counter() - end
        while time.perf_counter() < began + (step + 1) * STEP_S:
            continue
        end = time.perf_counter()
    return spent


def _iterated(count: int) -> None:
    from tqdm import tqdm

    for _ in tqdm(range(count)):
        pass


def _updated(count: int) -> None:
    from tqdm import tqdm

    with tqdm(total=count) as bar:
        for _ in range(count):
            bar.update(1)


def _postfix(count: int) -> None:
    from tqdm import tqdm

    with tqdm(total=count) as bar:
        for step in range(count):
            bar.set_postfix(loss=1.0 / (step + 1), lr=0.1)
            bar.update(1)


def output(count: int) -> float:
    """Print `count` lines; return how long a call of `print` took on average, in microseconds."""
    began = time.perf_counter()
    for number in range(count):
        print(f"step {number}: loss 0.123456 accuracy 0.987654 learning rate 0.001")
    return 1e6 * (time.perf_counter() - began) / max(1, count)


def events(count: int) -> float:
    """Report `count` times as fast as it goes; return what a call took on average, in microseconds."""
    import distmagic

    began = time.perf_counter()
    for step in range(count):
        distmagic.report(step=step, total=count, loss=0.5)
    return 1e6 * (time.perf_counter() - began) / count


def large(size_bytes: int) -> object:
    """Return a tensor of that size."""
    import torch

    return torch.arange(size_bytes // 8)
