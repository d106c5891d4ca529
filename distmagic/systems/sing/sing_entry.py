"""The entry point of every node of a SING Cloud job: finds the other nodes, and becomes torchrun.

    SING_RANK                                 the number of this node, 0 being the first
    SING_WORLD_SIZE                           the number of nodes
    SING_MASTER_ADDR                          the first node's name; without it the name is made of the next two:
    SING_JOB_NAME, SING_HOSTNAME_SUFFIX       node i is ${SING_JOB_NAME}-i.${SING_HOSTNAME_SUFFIX}
    SING_HOST_ADDR                            this node's own name or address

`settings.json` beside it says what to start, and with which variables. It needs nothing but Python and torch.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_WAIT_S = 300.0


def main(folder: Path) -> None:
    """Become torchrun. Exits with a sentence where a variable is missing, or the first node is not found."""
    settings = json.loads((folder / "settings.json").read_text())
    node, nodes, master = place(os.environ)
    is_c10d = any("ADDRESS" in word[1::2] for word in settings["command"])
    if is_c10d and nodes > 1 and not os.environ.get("SING_HOST_ADDR"):
        sys.exit(
            "SING_HOST_ADDR is not set: with c10d each node announces it to the others."
        )
    os.environ.update(settings["environment"])
    if nodes > 1:
        wait_for(master)
    ranks = settings["nproc_per_node"]
    if ranks is None:
        import torch

        ranks = torch.cuda.device_count() or 1
    known = {
        "NODE": str(node),
        "NODES": str(nodes),
        "MASTER": master,
        "RANKS": str(ranks),
        "IS_HOST": str(int(node == 0)),
        "ADDRESS": os.environ.get("SING_HOST_ADDR") or socket.gethostname(),
        "HOME": os.path.expanduser("~"),
    }
    words = [filled(parts, known) for parts in settings["command"]]
    paths = [str(folder / path) for path in settings["imports"]]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.chdir(folder / settings["directory"])
    os.execvp(words[0], words)  # noqa: S606 - a list of words needs no shell


def place(environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Return (this node, number of nodes, name of the first). Exits where the variables don't say it."""
    numbers = []
    for name in ("SING_RANK", "SING_WORLD_SIZE"):
        text = environ.get(name, "")
        if not text.isdecimal():
            sys.exit(
                f"{name} is {text!r}, not a number: SING Cloud sets it on every node."
            )
        numbers.append(int(text))
    node, nodes = numbers
    if node >= nodes:
        sys.exit(
            f"SING_RANK is {node}; with SING_WORLD_SIZE={nodes} it is at most {nodes - 1}."
        )
    master = environ.get("SING_MASTER_ADDR", "")
    job, suffix = environ.get("SING_JOB_NAME"), environ.get("SING_HOSTNAME_SUFFIX")
    if not master and job and suffix:
        master = f"{job}-0.{suffix}"
    if not master and nodes > 1:
        sys.exit(
            "The address of the first node is unknown: set SING_MASTER_ADDR, or SING_JOB_NAME and SING_HOSTNAME_SUFFIX."
        )
    return node, nodes, master or "127.0.0.1"


def wait_for(
    name: str,
    *,
    look_up: Callable[..., object] = socket.getaddrinfo,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when a name is known, which it may be some seconds after the node has begun; exit if it is not in 300 s."""
    ends = time.monotonic() + _WAIT_S
    while True:
        try:
            look_up(name, None)
        except OSError:
            if time.monotonic() > ends:
                sys.exit(f"{name}, the first node, is not known after {_WAIT_S:.0f} s.")
            sleep(1.0)
        else:
            return


def filled(parts: "list[str]", known: Mapping[str, str]) -> str:
    """Return a word of which every second part is the name of something known."""
    word = ""
    for number, part in enumerate(parts):
        word += known[part] if number % 2 else part
    return word


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
