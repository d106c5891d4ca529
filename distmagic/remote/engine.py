"""torchrun itself, in this process: its own parser and its own engine; and a report of how ranks ended.

`environment` is what the agent starts it with.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from distmagic.remote import peers, places, processes, protocol

_ORPHANED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
             "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


def environment(start: protocol.Start, host: dict[str, str], folder: Path, run_dir: Path) -> dict[str, str]:
    """Return torchrun's environment: the host's own without what would mislead torchrun, and the job's."""
    env = {k: v for k, v in host.items() if k not in _ORPHANED and not k.startswith(("PET_", "TORCHELASTIC_"))}
    env = {**start.defaults, **env, **start.env, processes.MARK: start.job}
    env["DISTMAGIC_WORKER"] = json.dumps(
        {
            "socket": str(run_dir / "ranks"),
            "folder": str(folder),
            "call": str(places.blob(start.call)),
            "code": str(places.blob(start.code)),
        }
    )
    return env


def main(argv: list[str]) -> None:
    """Run `torchrun` with these arguments; exit 1 after ranks have failed, as torchrun does."""
    processes.die_with_parent()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    args = parse_args(argv)
    args.log_dir = os.path.join(os.path.dirname(_socket()), "torchrun")  # else a directory in /tmp that stays
    os.mkdir(args.log_dir, 0o700)
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
        peers.check(conn)
        conn.send(protocol.encode(report))


def _socket() -> str:
    return str(json.loads(os.environ["DISTMAGIC_WORKER"])["socket"])
