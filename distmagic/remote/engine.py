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

    try:
        run(parse_args(argv))
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
    address = json.loads(os.environ["DISTMAGIC_WORKER"])["socket"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as conn:
        conn.connect(address)
        conn.send(protocol.encode(report))
