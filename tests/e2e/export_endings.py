"""Exported cells that train under DistributedDataParallel on gloo, in each form, on two nodes that are two processes.

    python -m tests.e2e.export_endings 20                     20 runs of each form
    python -m tests.e2e.export_endings 100 torchrun-static    100 runs of one

Every run has to end with code 0 on both nodes. A line a run; the last line counts them. As a platform does, each node runs
its script with the variables that the platform sets there.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.lab.waiting import HANG_S

# Ranks that keep the model and end the group, as most do: the model then is the last to hold the group.
CELL = """%%distributed --export {line}
import itertools
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def train(width, ending):
    rank = int(os.environ["RANK"])
    if ending == "fails at once" and rank == 1:
        sys.exit(7)
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


def _slurm(folder: Path, place: int, port: int) -> Node:
    given = {"SLURM_JOB_ID": "9", "SLURM_NNODES": "2", "SLURM_NODEID": str(place)}
    given |= {"SLURM_PROCID": str(place), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    given |= {"SLURM_NTASKS_PER_NODE": "1"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Node(f"cd {folder} && exec bash node.sh", given)


def _slurm_ranks(folder: Path, place: int, port: int) -> Node:
    node = _slurm(folder, place, port)
    return Node(node.line.replace("node.sh", "rank.sh"), node.variables)


def _skypilot(folder: Path, place: int, port: int, form: str = "task.yaml") -> Node:
    run = yaml.safe_load((folder / form).read_text())["run"]
    given = {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_NODE_RANK": str(place),
        "SKYPILOT_TASK_ID": "sky-1",
    }
    return Node(f"cd {folder}\n{run}", given)


def _skypilot_c10d(folder: Path, place: int, port: int) -> Node:
    return _skypilot(folder, place, port, "task-c10d.yaml")


def _osmo(folder: Path, place: int, port: int, form: str = "workflow.yaml") -> Node:
    """Lay the task's files below a folder of its own, for OSMO's place is one for all tasks of a machine."""
    tasks = yaml.safe_load((folder / form).read_text())["workflow"]["groups"][0][
        "tasks"
    ]
    task, own = tasks[place], folder / f"task-{place}"
    for file in task["files"]:
        path = own / file["path"].lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        data = base64.b64decode(file["contents"])
        path.write_bytes(
            data.replace(b"/tmp/distmagic", f"{own}/tmp/distmagic".encode())
        )
    output = own / "output"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    known = {"{{host:master}}": "localhost", "{{output}}": str(output)}
    given = {name: known.get(text, text) for name, text in task["environment"].items()}
    words = [*task["command"], *task["args"]]
    line = shlex.join(
        word.replace("/tmp/distmagic", f"{own}/tmp/distmagic") for word in words
    )
    return Node(f"exec {line}", {**given, "MASTER_PORT": str(port)})


def _osmo_ranks(folder: Path, place: int, port: int) -> Node:
    return _osmo(folder, place, port, "workflow-ranks.yaml")


def _sing(folder: Path, place: int, port: int) -> Node:
    given = {"SING_RANK": str(place), "SING_WORLD_SIZE": "2"}
    given |= {"SING_MASTER_ADDR": "127.0.0.1", "SING_HOST_ADDR": f"127.0.0.{place + 1}"}
    return Node(f"exec {shlex.quote(sys.executable)} {folder}/dist.py", given)


def _by_hand(folder: Path, place: int, port: int) -> Node:
    return Node(f"exec bash {folder}/node-{place}.sh", {})


def _by_hand_c10d(folder: Path, place: int, port: int) -> Node:
    return Node(f"exec bash {folder}/any-node.sh", {})


FORMS: dict[str, tuple[str, Callable[[Path, int, int], Node]]] = {
    "slurm": ("slurm", _slurm),
    "slurm-ranks": ("slurm", _slurm_ranks),
    "skypilot": ("skypilot", _skypilot),
    "skypilot-c10d": ("skypilot", _skypilot_c10d),
    "osmo": ("osmo", _osmo),
    "osmo-ranks": ("osmo", _osmo_ranks),
    "sing": ("sing", _sing),
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


def main(rounds: int, forms: list[str]) -> int:
    """Run each form so many times, every second time as a pickled call; return 1 if one has ended ill."""
    runs = ill = 0
    for form in forms:
        with tempfile.TemporaryDirectory() as place:
            both = [
                export(form, Path(place) / name, is_bundle=name == "call")
                for name in ("text", "call")
            ]
            for number in range(rounds):
                began_s = time.monotonic()
                ended = both[number % 2].run()
                codes = [code for code, _ in ended]
                runs += 1
                ill += codes != [0, 0]
                print(
                    f"{form} {number + 1}: {codes} in {time.monotonic() - began_s:.1f} s",
                    flush=True,
                )
                if codes != [0, 0]:
                    print(*(text for _, text in ended), sep="\n----\n", flush=True)
    print(f"{runs - ill} of {runs} runs ended well")
    return 1 if ill else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:] or list(FORMS)))
