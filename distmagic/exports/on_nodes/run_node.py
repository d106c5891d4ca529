"""torchrun, which ends when another node of its job has failed. Every node of an exported job starts it.

    python run_node.py --nnodes=2 --node-rank=0 ... run_rank.py train.py 50

torchrun's own nodes report nothing to each other. One whose ranks have ended waits for a failed one for five minutes;
ranks that are still to meet wait for those of a failed node, or of a host that is switched off, as long as their process
group allows. Here each node counts in torchrun's store, and looks whether the next node does. It needs nothing but
Python and torch.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the modules that lie beside this file are the ranks'

import contextlib
import os
import socket
import time
from typing import Any

# Keys of torchrun's store, which is in the process of one node.
_BEAT = "distmagic/beat/"  # how often a node has looked, by its number
_ENDED = "distmagic/ended"  # how many nodes have ended well
_OVER = "distmagic/over"  # what ended the job: the first node that failed or is lost, or that all have ended well
_ALL_WELL = "all"
_LOOK_S = 1.0  # between two looks
_LOST_S = 30  # without a beat of a node, or without an answer of the store
# for ranks to fail by themselves where a peer is gone, with their own words
_GRACE_S = 5.0
_NO_STORE = "The node that has torchrun's store is gone."
_OF_SOCKETS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _LOST_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_S * 1000),
)


class NodeOfJob:
    """What torchrun's agent, one of which each node has, does besides: it follows how the other nodes end."""

    over = ""  # what is known to have ended the job
    looks_s = ends_s = heard_s = 0.0
    beats = -1  # of the next node

    def run(self, *args: Any) -> Any:
        """Run the ranks; leave word for the other nodes if that has failed."""
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
            time.sleep(2 * _LOOK_S)  # the others look

    def _monitor_workers(self, group: Any) -> Any:
        """Look at the ranks, and end them if another node has failed, or is lost, some seconds ago."""
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
        """Leave word that this node lives; return what ended the job for it, "" for nothing.

        A job that may start its ranks again waits for a lost node as torchrun does: another host may take its place.
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
        """Wait until all nodes have ended well, or the store is gone. Exits if one has failed or is lost."""
        group = self.get_worker_group()  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            if group.store.add(_ENDED, 1) == group.group_world_size:
                group.store.compare_set(_OVER, "", _ALL_WELL)
        while not (over := self._look(group)):
            time.sleep(_LOOK_S / 4)
        if over not in (_ALL_WELL, _NO_STORE):
            sys.exit(f"{over} The ranks of this one ended well.")


def _bound_waits() -> None:
    """Have each connection of this process fail some time after its other end has gone without a word."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or none of TCP
            one = socket.socket(fileno=int(name))
            try:
                for level, option, value in _OF_SOCKETS:
                    one.setsockopt(level, option, value)
            finally:
                one.detach()


def main() -> None:
    """Be torchrun, with the arguments of this process."""
    from torch.distributed import run
    from torch.distributed.launcher import api

    agent: Any = type("Agent", (NodeOfJob, api.LocalElasticAgent), {})
    vars(api)["LocalElasticAgent"] = agent
    run.main()


if __name__ == "__main__":
    main()
