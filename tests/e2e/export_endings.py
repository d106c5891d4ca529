"""Exported cells that train under DistributedDataParallel on gloo, on two nodes that are two processes.

As a platform does, each node runs its script with the variables that the platform sets there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab.waiting import HANG_S

# Ranks that keep the model and end the group, as most do: the model then is the last to hold the group.
CELL = """%%distributed --export {line}
import itertools
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def train(width, ending):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in itertools.count() if ending == "goes on" else range(20):
        loss = model(torch.ones(8, width)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            print("rank", rank, "trains", flush=True)
    print("rank", rank, "has trained", flush=True)
    dist.destroy_process_group()
    if ending == "is killed" and rank == 1:
        os.kill(os.getpid(), 9)
    return model
model = train({width}, {ending!r})
"""
_EXPORT = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "distmagic")
for cell in sys.argv[1:]:
    shell.run_cell(cell, store_history=True).raise_error()
"""


@dataclass(frozen=True, slots=True)
class Node:
    """What a node runs in bash, and the variables that its platform sets there."""

    line: str
    variables: Mapping[str, str]


def _slurm_ranks(folder: Path, place: int, port: int) -> Node:
    given = {"SLURM_JOB_ID": "9", "SLURM_NNODES": "2", "SLURM_NODEID": str(place)}
    given |= {"SLURM_PROCID": str(place), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    given |= {"SLURM_NTASKS_PER_NODE": "1"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Node(f"cd {folder} && exec bash rank.sh", given)


def _by_hand(folder: Path, place: int, port: int) -> Node:
    return Node(f"exec bash {folder}/node-{place}.sh", {})


def _by_hand_c10d(folder: Path, place: int, port: int) -> Node:
    return Node(f"exec bash {folder}/any-node.sh", {})


FORMS: dict[str, tuple[str, Callable[[Path, int, int], Node]]] = {
    "slurm-ranks": ("slurm", _slurm_ranks),
    "torchrun-static": ("torchrun", _by_hand),
    "torchrun-c10d": ("torchrun", _by_hand_c10d),
}


@dataclass(frozen=True, slots=True)
class Exported:
    """A cell in one form, in a folder; its nodes meet at a port of this machine."""

    form: str
    folder: Path
    port: int

    def run(self) -> list[tuple[int, str]]:
        """Run both nodes; return the exit code of each and what it printed. A node that hangs is killed."""
        clean = {name: os.environ[name] for name in ("PATH", "HOME")}
        own = {**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with contextlib.ExitStack() as stack:
            started = []
            for place in range(2):
                node = FORMS[self.form][1](self.folder, place, self.port)
                output = stack.enter_context(tempfile.TemporaryFile("w+"))
                process = subprocess.Popen(
                    ["bash", "-c", node.line],
                    env={**own, **node.variables},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                started.append((process, output))
            ended = []
            for process, output in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(HANG_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                output.seek(0)
                ended.append((process.returncode, output.read()))
            return ended


def export(
    form: str,
    folder: Path,
    *,
    is_bundle: bool = False,
    ending: str = "",
    at: str = "127.0.0.1",
) -> Exported:
    """Export the cell for a form; `ending`: what rank 1 does. `is_bundle`: it goes as the pickled call.

    Nodes of torchrun by hand meet `at` an address.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    system = FORMS[form][0]
    line = f"{system} {folder} --nodes 2 --nproc-per-node 1 --python {sys.executable} --master-port {port}"
    if system == "torchrun":
        line += f" --rdzv-endpoint {at}:{port}"
    before = "class Width:\n    n = 16\n    def __index__(self): return self.n\nwidth = Width()"
    width = "width.__index__()" if is_bundle else "16"
    cell = CELL.format(line=line, width=width, ending=ending)
    command = [sys.executable, "-c", _EXPORT, *([before] if is_bundle else []), cell]
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "DISTMAGIC_HOME": home, "IPYTHONDIR": home}
        done = subprocess.run(
            command, env=env, cwd=home, check=False, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        folder / "program" / ("run_call.py" if is_bundle else "cell.py")
    ).exists(), done.stdout
    return Exported(form, folder, port)
