"""The process that runs torchrun: it calls torch's own parser and launcher, and reports failed
ranks to the agent.
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

from distmagic.remote.engine import forking, meeting, spare_ranks
from distmagic.remote.records import places
from distmagic.remote.system import processes, socket_peer
from distmagic.remote.system.gc_pause import gc_paused
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES
from distmagic.remote.training import import_hooks
from distmagic.remote.wire import protocol

_FOR_EVER_S = 10**6
# Longest pause between two checks of ranks by torchrun.
_MONITOR_S = 0.5
_NO_PAUSE_S = 1e-6  # torchrun refuses 0
_ENDPOINT_S = 3.0  # time limit for the lead to listen
_ATTEMPT_S = 0.5  # for one connection to it
_PAUSE_S = 0.005  # between two attempts
# Libraries would take these variables for the rank's own, but they belong to the task whose step
# contains all ranks of a node.
_OF_A_TASK = (
    "DISTMAGIC_SECRET",  # it authenticates the nodes of a job, not ranks
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_GTIDS",
    "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT",
)  # fmt: skip
_MISLEADING = (
    "PET_",
    "TORCHELASTIC_",
    "SLURM_STEP_",
    "SLURM_STEPID",
    "SLURM_TASK",
    "SLURM_CPU_BIND",
    "PMI",
)


def environment(
    start: protocol.StartNode, host: dict[str, str], folder: Path, run_dir: Path
) -> dict[str, str]:
    """Return torchrun's environment: the host's own without variables that would mislead torchrun,
    and the job's.

    The caller's process is its parent. `folder` is the node's directory of logs and results,
    `run_dir` that of its sockets.
    """
    own = {
        name: value
        for name, value in host.items()
        if name not in (*TORCHRUN_VARIABLES, *_OF_A_TASK)
        and not name.startswith(_MISLEADING)
    }
    env = {**start.defaults, **own, **start.env, processes.MARK: start.job}
    # Ranks import from the directory in which they start, and from the working directory around it.
    paths = []
    if start.work is not None:  # the notebook machine has none of its own
        place = os.path.join(start.work.path, start.work.inside).rstrip("/")
        paths = list(dict.fromkeys([place, start.work.path]))
    env["DISTMAGIC_WORKER"] = json.dumps(
        {
            "socket": str(run_dir / "ranks"),
            "folder": str(folder),
            "call": str(places.blob(start.call)),
            "code": str(places.blob(start.code)),
            "paths": paths,
            "endpoint": "" if start.lead else start.endpoint,
            "agent_pid": os.getpid(),
            "can_type": start.terms.can_type,
        }
    )
    return env


def main(argv: list[str]) -> None:
    """Run `torchrun` with these arguments; exit with 1 after ranks have failed, as torchrun does.

    In a process that was forked from a template, ranks are forked too, unless this version of torch
    starts them in an unknown way.
    """
    # The agent may have been killed while this process started.
    processes.die_with_parent(int(_from_agent("agent_pid")))
    with gc_paused():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    args = parse_args(argv)
    if forking.inherited.is_warm:
        _fork_ranks(int(args.nproc_per_node))
    # Not in the ranks, whose logs are the user's own.
    simplify_logs()
    if args.rdzv_backend == "c10d":
        meeting.count_by_own_clock()
        follow_rounds(is_elastic=":" in args.nnodes)
    # torchrun would make a directory in /tmp and leave it there.
    args.log_dir = os.path.join(os.path.dirname(_from_agent("socket")), "torchrun")
    os.mkdir(args.log_dir, 0o700)
    # The agent ends ranks that take too long. Earlier versions of torch wait 30 s.
    if "shutdown_timeout" in args:
        args.shutdown_timeout = _FOR_EVER_S
    # With c10d each check asks the store, which is on another host.
    is_static = args.rdzv_backend == "static"
    if is_static:
        args.monitor_interval = _NO_PAUSE_S
        _meet_at_once()
    to_agent = _connect_to_agent()
    _report_each_end(to_agent, waits=is_static)
    _await_endpoint(_from_agent("endpoint"))
    try:
        run(args)
    except ChildFailedError as error:
        exits = tuple(
            protocol.Exit(
                rank=rank,
                local_rank=failure.local_rank,
                pid=failure.pid,
                code=failure.exitcode,
            )
            for rank, failure in error.failures.items()
        )
        to_agent.send(protocol.encode(protocol.EngineEnded(code=1, exits=exits)))
        sys.exit(1)
    except SignalException as stopped:
        # The agent sent the signal: a traceback would look like a failure.
        sys.exit(128 + stopped.sigval)


def prepare() -> None:
    """Build torchrun's parser in the template, instead of in each job.

    A job with variables of torchrun builds its own: they are the parser's defaults.
    """
    from torch.distributed import run

    make = run.get_args_parser
    parser = make()

    def get_args_parser() -> Any:
        has_own = any(name.startswith("PET_") for name in os.environ)
        return make() if has_own else parser

    run.get_args_parser = get_args_parser


def simplify_logs() -> None:
    """Log exceptions without torch's formatter, and drop one message about torchrun's final
    barrier.

    The formatter imports torch's compiler, which takes seconds and leaves a directory in /tmp. The
    message reports that the lead was gone before this node had passed the barrier. That is normal:
    the last node to arrive lets the lead exit, and then asks it once more.
    """
    # Here, because the agent also imports this file and needs no logging.
    import logging

    make = logging.getLogRecordFactory()
    plain = logging.Formatter()

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        made = make(*args, **more)
        if made.exc_info:
            made.exc_text = plain.formatException(made.exc_info)
            made.exc_info = None
        return made

    logging.setLogRecordFactory(record)
    agent = logging.getLogger("torch.distributed.elastic.agent.server.api")
    agent.addFilter(
        lambda record: not str(record.msg).startswith("Error waiting on exit barrier")
    )


def follow_rounds(*, is_elastic: bool) -> None:
    """Pass the number of the rendezvous round to ranks, and repeat a round that failed in an
    elastic job.

    Otherwise torchrun ends if a node is lost during a round. A node may join and be lost before it
    announces its number of ranks. Then the others wait for the store's `read_timeout`, which raises
    DistStoreError (torch 2.13: `_assign_worker_ranks` in elastic/agent/server/api.py, and
    `RendezvousStoreInfo.build` before it).
    """
    import logging

    from torch.distributed import DistStoreError
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    def until_all_are_there(meet: Any, agent: Any, group: Any) -> None:
        while True:
            try:
                meet(agent, group)
            except DistStoreError as error:
                if not is_elastic:
                    raise
                logging.getLogger(__name__).warning(
                    "Meeting the other nodes again: %s", str(error).partition("\n")[0]
                )
            else:
                # torchrun starts the ranks after this, with this process's environment.
                for_ranks = json.loads(os.environ["DISTMAGIC_WORKER"])
                holder = getattr(group.spec.rdzv_handler, "_state_holder", None)
                # 0 if this torch stores it elsewhere.
                state = getattr(holder, "state", None)
                for_ranks["round"] = int(getattr(state, "round", 0))
                os.environ["DISTMAGIC_WORKER"] = json.dumps(for_ranks)
                return

    import_hooks.wrap(SimpleElasticAgent, "_rendezvous", until_all_are_there)


def _meet_at_once() -> None:
    """Make the store of a static rendezvous wait for no node.

    It would look every 10 ms whether all are there. torchrun waits for all anyway, without pauses,
    when it assigns ranks.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import (
        StaticTCPRendezvous,
    )

    def next_rendezvous(original: Any, handler: Any) -> Any:
        if handler._store is None:  # noqa: SLF001
            handler._store = TCPStore(  # noqa: SLF001
                handler.master_addr,
                handler.master_port,
                handler.world_size,
                handler.rank == 0,
                handler.timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        return original(handler)

    import_hooks.wrap(StaticTCPRendezvous, "next_rendezvous", next_rendezvous)


def _report_each_end(to_agent: socket.socket, *, waits: bool) -> None:
    """Make torchrun report failed ranks to the agent before it reaps them and ends the others,
    which can take seconds.

    With `waits` it checks its ranks when one has ended, instead of after a pause.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import (
        LocalElasticAgent,
    )

    reported: set[int] = set()

    def monitor_workers(original: Any, agent: Any, group: Any) -> Any:
        if waits:
            processes.wait_for_end([worker.id for worker in group.workers], _MONITOR_S)
        exits = []
        for worker in group.workers:
            process = processes.read(worker.id)
            is_new = worker.id not in reported
            if process is not None and process.exit_code and is_new:
                reported.add(worker.id)
                found = protocol.Exit(
                    rank=worker.global_rank,
                    local_rank=worker.local_rank,
                    pid=worker.id,
                    code=process.exit_code,
                )
                exits.append(found)
        if exits:
            to_agent.send(protocol.encode(protocol.RankExits(exits=tuple(exits))))
        return original(agent, group)

    import_hooks.wrap(LocalElasticAgent, "_monitor_workers", monitor_workers)


def _fork_ranks(count: int) -> None:
    """Fork the ranks for torchrun, if this torch starts them by the method that is replaced."""
    try:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import (
            subprocess_handler,
        )

        popen = subprocess_handler.SubprocessHandler._popen  # noqa: SLF001
        known = list(inspect.signature(popen).parameters)
    except (ImportError, AttributeError):
        return
    if known == ["self", "args", "env"]:
        ranks = spare_ranks.SpareRanks(count)
        ranks.replace_popen(subprocess_handler.SubprocessHandler)


def _await_endpoint(endpoint: str) -> None:
    """Wait until the lead listens. torch's store would notice later: its pauses grow from half a
    second.
    """
    address, _, port = endpoint.partition(" ")
    end = time.monotonic() + _ENDPOINT_S
    while port and time.monotonic() < end:
        try:
            socket.create_connection((address, int(port)), timeout=_ATTEMPT_S).close()
        except OSError:
            time.sleep(_PAUSE_S)
        else:
            return


def _connect_to_agent() -> socket.socket:
    """Return a connection for reports.

    It is made before ranks start: later the agent may be busy, or a cleaner may have removed its
    socket's file.
    """
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    conn.connect(_from_agent("socket"))
    socket_peer.check(conn)
    conn.send(protocol.encode(protocol.RankExits()))
    return conn


def _from_agent(key: str) -> str:
    """Return a value that `environment` has passed to this process."""
    return str(json.loads(os.environ["DISTMAGIC_WORKER"])[key])
