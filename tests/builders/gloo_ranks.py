"""Ranks of a program with gloo, forked from a Python that has loaded torch, and a store for them as torchrun has one."""

from __future__ import annotations

from pathlib import Path

from tests.builders.forks import Forks

_BEFORE = """
import contextlib, os, signal, sys, threading, time, traceback
import torch, torch.distributed as dist
from distmagic.remote.training import groups, steps

WORLD = {world}
torch.set_num_threads(1)
main_thread = threading.main_thread().ident

class Words:
    # What ranks say to each other, apart from their groups. A thread that waits for a word has a connection of its own.
    def __init__(self):
        self.store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    def say(self, key, text="-"):
        self.store.set("words/" + key, text)
    def hear(self, key):
        return self.store.get("words/" + key).decode()
    def meet(self, key):
        # All ranks meet; return what each of them brings.
        self.say(f"{{key}}/{{rank}}")
        for other in range(WORLD):
            self.hear(f"{{key}}/{{other}}")

def in_a_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    return thread

def begin(connection):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=os.read(connection, 10).decode(),
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )
    sys.stdout = open(f"{{sys.argv[1]}}/rank{{rank}}", "w", buffering=1)
    groups.install()
    steps.install()

pipes = [os.pipe() for _ in range(WORLD)]
children = {{}}
for rank in range(WORLD):
    child = os.fork()
    if child == 0:
        begin(pipes[rank][0])
        break
    children[child] = rank
else:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, writing in pipes:
        os.write(writing, str(store.port).encode())
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in pipes]
    os._exit(1 if any(codes) else 0)
words = Words()
"""


def run(forks: Forks, folder: Path, world: int, program: str) -> list[list[str]]:
    """Run a program in so many ranks to its end; return the lines that each rank prints. All ranks must end with 0.

    `forks` of a program with a model are `compiler_forks`.
    """
    script = folder / "ranks.py"
    script.write_text(_BEFORE.format(world=world) + program)
    done = forks.run(script, str(folder))
    assert done.returncode == 0, done.stderr.decode()
    texts = [(folder / f"rank{rank}").read_text() for rank in range(world)]
    return [text.splitlines() for text in texts]
