"""Two throw-away hosts on this machine, and the rule for machines without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import distmagic
from distmagic.api import session
from distmagic.outcome.run import Run
from distmagic.playground import playground
from distmagic.playground.playground import Playground
from distmagic.request.access import Access
from tests.e2e.runner import Watch, as_value
from tests.gpu import devices

_COUNT = (
    "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
)
_HOLD = (
    "import torch; kept = torch.ones(1 << 20, device='cuda'); print(kept.nbytes, flush=True);"
    "import sys; sys.stdin.read()"
)


@pytest.fixture(scope="session")
def gpus() -> int:
    """The number of GPUs that torch can use here; without one the test is skipped."""
    count = count_gpus()
    if not count:
        pytest.skip("no GPU that torch can use (torch.cuda.is_available() is False)")
    return count


def count_gpus() -> int:
    """Return the number of GPUs that torch can use here. CUDA is not touched in this process."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False
    )
    return int(done.stdout) if done.returncode == 0 else 0


@pytest.fixture(scope="session")
def context_mib(gpus: int) -> int | None:
    """The memory of a GPU that a process takes which does what ranks of `programs.hold` do; None where nothing tells."""
    before = devices.used_mib()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"4194304\n"
        during = devices.used_mib()
        holder.communicate()  # end of file on its stdin ends it
    return None if before is None or during is None else during - before


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    """Hosts node1 and node2, which share this machine's GPUs. They need neither root nor a system's SSH server."""
    pytest.importorskip("asyncssh")
    all_gpus = ",".join(map(str, range(count_gpus())))
    own = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTMAGIC_PLAYGROUND_GPUS", own)
        started = playground.start(2, directory=tmp_path_factory.mktemp("hosts"))
    try:
        yield started
    finally:
        session().down()
        started.stop()


@pytest.fixture
def run(hosts: Playground) -> Callable[..., Run]:
    """Return a function that runs another one on these hosts: `run(function, *args, hosts="node1:2", is_cold=True)`."""

    def run_there(
        fn: Callable[..., Any],
        *args: Any,
        hosts: str,
        is_cold: bool = False,
        **spec: Any,
    ) -> Run:
        access = Access(ssh_config=playground_config, cold=is_cold)
        return distmagic.run(
            as_value(fn),
            *args,
            hosts=hosts,
            access=access,
            screen=spec.pop("screen", Watch()),
            **spec,
        )

    playground_config = hosts.ssh_config
    return run_there
