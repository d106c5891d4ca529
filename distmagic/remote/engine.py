"""torchrun itself, in this process: its own parser and its own engine; and a report of how ranks ended."""

from __future__ import annotations

import json
import os
import socket
import sys

from distmagic.remote import processes, protocol


def main(argv: list[str]) -> None:
    """Run `torchrun` with these arguments; exit 1 after ranks have failed, as torchrun does."""
    processes.die_with_parent()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    args = parse_args(argv)
    args.log_dir = os.path.join(os.path.dirname(_socket()), "torchrun")  # else a directory in /tmp that stays
    try:
        run(args)
    except ChildFailedError as error:
        exits = tuple(
            protocol.Exit(rank=rank, local_rank=failure.local_rank, pid=failure.pid, code=failure.exitcode)
            for rank, failure in error.failures.items()
        )
        _tell(protocol.Engineended(code=1, exits=exits))
        sys.exit(1)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)  # the agent's own doing: no traceback


def _tell(report: protocol.Engineended) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as conn:
        conn.connect(_socket())
        conn.send(protocol.encode(report))


def _socket() -> str:
    return str(json.loads(os.environ["DISTMAGIC_WORKER"])["socket"])
