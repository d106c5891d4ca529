"""torchrun itself, in this process: its own parser and its own engine; and a report of how ranks ended.

`environment` is what the agent starts it with.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from distmagic.remote.engine import forking, rank_fork_server
from distmagic.remote.records import places
from distmagic.remote.system import processes, socket_peer
from distmagic.remote.system.gc_pause import uncollected
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES
from distmagic.remote.wire import protocol

_LOOK_S = 0.02  # at the ranks
_ENDPOINT_S, _ANSWER_S, _PAUSE_S = 3.0, 0.5, 0.005  # for the lead to listen; one attempt; between two


def environment(start: protocol.StartNode, host: dict[str, str], folder: Path, run_dir: Path) -> dict[str, str]:
    """Return torchrun's environment: the host's own without what would mislead torchrun, and the job's."""
    env = {k: v for k, v in host.items() if k not in TORCHRUN_VARIABLES and not k.startswith(("PET_", "TORCHELASTIC_"))}
    env = {**start.defaults, **env, **start.env, processes.MARK: start.job}
    env["DISTMAGIC_WORKER"] = json.dumps(
        {
            "socket": str(run_dir / "ranks"),
            "folder": str(folder),
            "call": str(places.blob(start.call)),
            "code": str(places.blob(start.code)),
            "endpoint": "" if start.lead else start.endpoint,
        }
    )
    return env


def main(argv: list[str]) -> None:
    """Run `torchrun` with these arguments; exit 1 after ranks have failed, as torchrun does.

    In a process forked from a template ranks are forked too, where torch is as we know it, else started by exec.
    """
    processes.die_with_parent()
    ranks = rank_fork_server.RankForkServer() if forking.inherited.is_warm else None
    with uncollected():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    mend_logs()
    if ranks is not None:
        _fork_ranks(ranks)
    args = parse_args(argv)
    if args.rdzv_backend == "c10d" and int(args.max_restarts) > 0:
        follow_rounds(is_elastic=":" in args.nnodes)
    args.log_dir = os.path.join(os.path.dirname(_told("socket")), "torchrun")  # else a directory in /tmp that stays
    os.mkdir(args.log_dir, 0o700)
    if args.rdzv_backend == "static":  # c10d asks its store at each look
        args.monitor_interval = min(args.monitor_interval, _LOOK_S)
    _await(_told("endpoint"), _ENDPOINT_S)
    try:
        run(args)
    except ChildFailedError as error:
        exits = tuple(
            protocol.Exit(rank=rank, local_rank=failure.local_rank, pid=failure.pid, code=failure.exitcode)
            for rank, failure in error.failures.items()
        )
        _tell(protocol.EngineEnded(code=1, exits=exits))
        sys.exit(1)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)  # the agent's own doing: no traceback


def mend_logs() -> None:
    """Have torchrun log an exception without torch's formatter, which imports torch's compiler for it.

    That takes seconds and leaves a directory in /tmp. And have it not log that the others were gone before it had
    passed its last barrier: whoever comes there last lets the lead go, and then asks it once more.
    """
    import logging  # torch has it already; the agent, which imports this file too, needs none

    make, plain = logging.getLogRecordFactory(), logging.Formatter()

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        made = make(*args, **more)
        if made.exc_info:
            made.exc_text, made.exc_info = plain.formatException(made.exc_info), None
        return made

    logging.setLogRecordFactory(record)
    agent = logging.getLogger("torch.distributed.elastic.agent.server.api")
    agent.addFilter(lambda record: not str(record.msg).startswith("Error waiting on exit barrier"))


def follow_rounds(*, is_elastic: bool) -> None:
    """Tell the ranks in which round of the rendezvous they were started; an elastic job also survives a failed one.

    Then torchrun meets the others anew, in place of ending, when one is lost in the middle of a meeting: a node that has joined and is gone before it says how many ranks it has leaves the others waiting for that word, as
    long as the store's `read_timeout` is (torch 2.13: `_assign_worker_ranks` in elastic/agent/server/api.py, and
    `RendezvousStoreInfo.build` before it).
    """
    import logging

    from torch.distributed import DistStoreError
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    meet = SimpleElasticAgent._rendezvous  # noqa: SLF001

    def until_all_are_there(agent: Any, group: Any) -> None:
        while True:
            try:
                meet(agent, group)
            except DistStoreError as error:
                if not is_elastic:
                    raise
                logging.getLogger(__name__).warning("Meeting the other nodes anew: %s", str(error).partition("\n")[0])
            else:
                _tell_ranks(round=_round_of(group.spec.rdzv_handler))
                return

    SimpleElasticAgent._rendezvous = until_all_are_there  # noqa: SLF001


def _fork_ranks(ranks: rank_fork_server.RankForkServer) -> None:
    """Take the ranks from the nursery if this torch starts them as those do that we know."""
    try:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        known = list(inspect.signature(subprocess_handler.SubprocessHandler._popen).parameters)  # noqa: SLF001
    except (ImportError, AttributeError):
        return
    if known == ["self", "args", "env"]:
        ranks.replace_popen(subprocess_handler.SubprocessHandler)


def _await(endpoint: str, patience_s: float) -> None:
    """Wait until the lead listens: torch's store would find out with growing pauses, the first of half a second."""
    address, _, port = endpoint.partition(" ")
    end = time.monotonic() + patience_s
    while port and time.monotonic() < end:
        try:
            socket.create_connection((address, int(port)), timeout=_ANSWER_S).close()
        except OSError:
            time.sleep(_PAUSE_S)
        else:
            return


def _tell(report: protocol.EngineEnded) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as conn:
        conn.connect(_told("socket"))
        socket_peer.check(conn)
        conn.send(protocol.encode(report))


def _round_of(handler: object) -> int:
    """Return how often the nodes have met before, 0 where this torch keeps that elsewhere."""
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    return int(getattr(state, "round", 0))


def _tell_ranks(**more: object) -> None:
    """Add to what ranks are told that are started from now on."""
    os.environ["DISTMAGIC_WORKER"] = json.dumps({**json.loads(os.environ["DISTMAGIC_WORKER"]), **more})


def _told(what: str) -> str:
    return str(json.loads(os.environ["DISTMAGIC_WORKER"])[what])
