"""Starts the ranks of one task: --size processes, whose global ranks begin at --offset, in a world
of --world_size.

    python start_ranks.py --size 8 --offset 16 --world_size 24 -- train.py 50 --lr 0.1

MASTER_ADDR and MASTER_PORT say where rank 0 listens. A rank that fails ends the others of its task,
and its exit code is this program's. It needs nothing but Python.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_LOOK_S = 0.1


def main(argv: Sequence[str]) -> int:
    """Start the ranks, wait for them, and return the exit code of the first that failed, or 0."""
    parser = argparse.ArgumentParser()
    for name in ("--size", "--offset", "--world_size"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("program", nargs="+", help="a script, or -m MODULE; arguments")
    args = parser.parse_args(argv)
    if not 0 < args.size <= args.world_size - args.offset or args.offset < 0:
        parser.error(
            f"ranks {args.offset} to {args.offset + args.size - 1} are not in a world of {args.world_size}"
        )
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    ranks = []
    try:
        for local_rank in range(args.size):
            own = {
                "RANK": args.offset + local_rank,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": args.world_size,
                "LOCAL_WORLD_SIZE": args.size,
            }
            variables = {name: str(value) for name, value in own.items()}
            environ = {"OMP_NUM_THREADS": "1", **os.environ, **variables}
            command = [sys.executable, "-u", *args.program]
            ranks.append(subprocess.Popen(command, env=environ))
        return _wait(ranks)
    finally:
        # End those that still run.
        running = [rank for rank in ranks if rank.poll() is None]
        for rank in running:
            rank.terminate()
        for rank in running:
            try:
                rank.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


def _stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _wait(ranks: "Sequence[subprocess.Popen[bytes]]") -> int:
    """Wait until all have ended well, or one has failed; return its exit code."""
    while True:
        codes = [rank.poll() for rank in ranks]
        for code in codes:
            if code:
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
