"""Runs torchrun, and ends it when another node of its job has failed.

Every node of an exported job starts this script:

    python run_node.py --nnodes=2 --node-rank=0 ... run_rank.py train.py 50

torchrun's nodes do not report to each other. A node whose ranks have ended waits five minutes for a
failed one. Ranks that are still to meet wait for those of a failed or powered-off node until the
timeout of their process group. With this script each node increments a counter in torchrun's store,
and watches the next node's counter. It needs only Python and torch.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # modules next to this file are for the ranks

import contextlib
import os
import socket
import time
from typing import Any

# Keys of torchrun's store, which is in the process of one node.
_BEAT = "distmagic/beat/"  # counter of a node's checks, by its number
_ENDED = "distmagic/ended"  # number of nodes that have succeeded
# why the job ended: the first node that failed or is lost, or success of all nodes
_OVER = "distmagic/over"
_ALL_WELL = "all"
_LOOK_S = 1.0  # pause between two checks
# Time limit for a node's counter to change, and for an answer of the store.
_LOST_S = 30
# time for ranks to fail by themselves after a peer is gone, with their own messages
_GRACE_S = 5.0
_NO_STORE = "The node that has torchrun's store is gone."
_OF_SOCKETS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _LOST_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_S * 1000),
)


class NodeOfJob:
    """Extends torchrun's agent, of which each node has one: follows how the other nodes end."""

    over = ""  # why the job has ended, as far as known
    looks_s = ends_s = heard_s = 0.0
    beats = -1  # of the next node

    def run(self, *args: Any) -> Any:
        """Run the ranks; if that fails, record it for the other nodes."""
        try:
            result = super().run(*args)  # type: ignore[misc]
        except BaseException:
            self._fail()
            raise
        if result.is_failed():
            self._fail()
        return result

    def _fail(self) -> None:
        group = self.get_worker_group()  # type: ignore[attr-defined]
        if group.store is None:
            return  # the nodes have not met
        try:
            word = f"Node {group.group_rank} has failed."
            group.store.compare_set(_OVER, "", word)
        except RuntimeError:
            return  # the store is gone
        if group.group_rank == 0 and group.group_world_size > 1:
            time.sleep(2 * _LOOK_S)  # time for the others to read it

    def _monitor_workers(self, group: Any) -> Any:
        """Check the ranks, and end them if another node failed, or was lost, some seconds ago."""
        result = super()._monitor_workers(group)  # type: ignore[misc]
        now_s = time.monotonic()
        if not self.over and now_s >= self.looks_s:
            if not self.looks_s:
                _bound_waits()
            self.over = self._look(group)
            self.looks_s, self.ends_s = now_s + _LOOK_S, now_s + _GRACE_S
        if self.over and result.state.name == "HEALTHY" and now_s >= self.ends_s:
            sys.exit(f"{self.over} This node ends its ranks.")
        return result

    def _look(self, group: Any) -> str:
        """Increment this node's counter; return why the job has ended for it, "" if it has not.

        A job that may restart its ranks waits for a lost node like torchrun: another host may
        replace it.
        """
        store, now_s = group.store, time.monotonic()
        follows = (group.group_rank + 1) % group.group_world_size
        try:
            store.add(f"{_BEAT}{group.group_rank}", 1)
            beats = store.add(f"{_BEAT}{follows}", 0)
            if beats != self.beats:
                self.beats, self.heard_s = beats, now_s
            elif now_s - self.heard_s > _LOST_S and not group.spec.max_restarts:
                word = f"Node {follows} has been silent for {_LOST_S} s."
                store.compare_set(_OVER, "", word)
            if not store.check([_OVER]):
                return ""
            over: str = store.get(_OVER).decode()
        except RuntimeError:
            return _NO_STORE
        return over

    def _exit_barrier(self) -> None:
        """Wait until all nodes have succeeded, or the store is gone.

        Exits with an error if a node has failed or is lost.
        """
        group = self.get_worker_group()  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            if group.store.add(_ENDED, 1) == group.group_world_size:
                group.store.compare_set(_OVER, "", _ALL_WELL)
        while not (over := self._look(group)):
            time.sleep(_LOOK_S / 4)
        if over not in (_ALL_WELL, _NO_STORE):
            sys.exit(f"{over} The ranks of this one ended well.")


def _bound_waits() -> None:
    """Make each connection of this process fail some time after its other end has vanished."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or not TCP
            one = socket.socket(fileno=int(name))
            try:
                for level, option, value in _OF_SOCKETS:
                    one.setsockopt(level, option, value)
            finally:
                one.detach()


def main() -> None:
    """Run torchrun with the arguments of this process."""
    from torch.distributed import run
    from torch.distributed.launcher import api

    agent: Any = type("Agent", (NodeOfJob, api.LocalElasticAgent), {})
    vars(api)["LocalElasticAgent"] = agent
    run.main()


if __name__ == "__main__":
    main()
