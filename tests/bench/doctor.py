"""Section doctor: what it takes to examine 8 hosts, to measure their network, and to explain a hang."""

from __future__ import annotations

import contextlib
import sys

from distmagic.errors import Hung
from distmagic.render.overview import overview
from distmagic.state.model import RunState
from tests.bench.bench import Bench
from tests.bench.contestants import Place
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import kept_in, scratch
from tests.bench.kernels import Kernel
from tests.e2e import runner
from tests.lab import Lab

TITLE = "The doctor on 8 hosts over SSH; ranks on 2 of them that make different calls"
_EXAMINED, _MEASURED = "%distributed doctor", "%distributed doctor --collective"
_LIMITS_S = {_EXAMINED: 2, _MEASURED: 10}
_HOSTS = 8


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Examine healthy hosts in a kernel, then let ranks part in this process."""
    rows = []
    with scratch("doctor") as folder, Lab(_HOSTS) as lab:
        place = Place(lab=lab, folder=folder)
        hosts = ",".join(host.name for host in lab.hosts)
        way = f"--hosts {hosts} --ssh-config {lab.ssh_config}"
        with Kernel(sys.executable, folder, place.env) as kernel:
            kernel.run("%load_ext distmagic")
            for line, limit_s in _LIMITS_S.items():
                seconds = []
                for _ in range(bench.rounds_dear + 1):
                    ran = kernel.run(f"{line} {way}")
                    assert "nothing is wrong" in ran.shown or line == _MEASURED, ran.shown  # fmt: skip
                    seconds.append(ran.took_s)
                    bench.say(f"doctor: {line}: {ran.took_s:.2f} s")
                rows.append(
                    MetricRow(
                        what=f"{line}, {_HOSTS} hosts", unit="s", ours=tuple(seconds[1:]),
                        target=Target(limit=limit_s, of="ours"),
                    )
                )  # fmt: skip
            kernel.run("%distributed down")
        with kept_in(folder / "home"):
            still_s = tuple(_explained_after_s(lab) for _ in range(bench.rounds_dear))
    rows.append(
        MetricRow(
            what="ranks in different calls, from the last step to the words of the view", unit="s", ours=still_s,
            target=Target(limit=15, of="ours"),
        )
    )  # fmt: skip
    return tuple(rows)


def _part() -> None:
    """Make one call together, and then two different ones."""
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 1)
    while True:
        time.sleep(0.1)


def _explained_after_s(lab: Lab) -> float:
    """Return the seconds from the ranks' last advance to the view's words about their calls."""
    after_s = []

    def has_words(state: RunState) -> bool:
        words = [alert.text for alert in overview(state).alerts]
        if any("call 2 of" in text for text in words):
            after_s.append(state.at_s - state.advanced_at_s)
        return bool(after_s)

    with contextlib.suppress(Hung):
        runner.run(lab, "dm1:1,dm2:1", _part, hang_timeout_s=25.0, screen=runner.Watch(has_words))  # fmt: skip
    return after_s[0]
