"""What ranks of these tests do, and scripts that another kernel runs."""

from __future__ import annotations


def count(seconds: float) -> int:
    """Print a number every tenth of a second, and report it."""
    import time

    import distmagic

    total = int(seconds * 10)
    for i in range(total):
        print(i)
        distmagic.report(step=i + 1, total=total, value=i)
        time.sleep(0.1)
    return total


def count_until(path: str, seconds: float) -> int:
    """Count as `count` does, but make the last step only when there is a file of this name."""
    import time
    from pathlib import Path

    import distmagic

    total = int(seconds * 10)
    for i in range(total):
        while i == total - 1 and not Path(path).expanduser().exists():
            time.sleep(0.02)
        print(i)
        distmagic.report(step=i + 1, total=total, value=i)
        time.sleep(0.1)
    return total


def wait_for(path: str) -> str:
    """Wait until there is a file of this name, and return the name."""
    import time
    from pathlib import Path

    import distmagic

    distmagic.report(step=1)
    while not Path(path).exists():
        time.sleep(0.02)
    return path


def stubborn() -> None:
    """Ignore SIGTERM, with a child and a grandchild that do too, the latter without any variable; then work for ever."""
    import os
    import signal
    import subprocess
    import time

    import distmagic

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(
        [
            "/bin/sh",
            "-c",
            "trap '' TERM; (trap '' TERM; setsid env -i sleep 1000) & sleep 1000",
        ]
    )
    if os.environ["RANK"] == os.environ.get("FAILS"):
        distmagic.report(step=1)
        raise ValueError("enough")
    distmagic.report(step=1)
    time.sleep(1000)


COUNTING_KERNEL = """
import distmagic
from distmagic.request.access import Access
from tests.e2e import runner
from tests.e2e.programs import count_until
from tests.e2e.runner import as_value
distmagic.run(as_value(count_until), "~/go", {seconds}, hosts="dm1:1,dm2:1", access=Access(ssh_config={config!r}, warm_idle_s=0.0), screen=runner.Watch())
"""


def fail_at_first(lr: float, seed: int) -> tuple[float, int, int, str]:
    """Raise where the seed is 1 and nobody has tried in this directory; return what the rank was given, and where it is."""
    import os
    from pathlib import Path

    import distmagic

    distmagic.report(step=1, loss=lr + seed)
    if seed == 1 and not Path("tried").exists():
        Path("tried").touch()
        raise ValueError("the first try")
    return lr, seed, int(os.environ["WORLD_SIZE"]), str(Path.cwd())


def train_until_told() -> None:
    """Train, rank 1 slowly, until there is a file /tmp/enough on a host."""
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import distmagic

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    enough = torch.zeros(1)
    while not enough:
        if dist.get_rank() == 1:
            time.sleep(0.2)
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        distmagic.report(loss=1.0)
        enough = torch.tensor([float(Path("/tmp/enough").exists())])
        dist.all_reduce(enough)
