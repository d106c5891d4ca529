"""torchrun, which ends when another node of its job has failed. Every node of an exported job starts it.

    python run_node.py --nnodes=2 --node-rank=0 ... run_rank.py train.py 50

torchrun's own nodes report nothing to each other. One whose ranks have ended waits for a failed one for five minutes;
ranks that are still to meet wait for those of a failed node as long as their process group allows. It needs nothing but
Python and torch.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the modules that lie beside this file are the ranks'

import time
from typing import Any

# Keys of torchrun's store, which is in the process of node 0.
_ENDED = "distmagic/ended"  # how many nodes have ended well
_OVER = "distmagic/over"  # the first node that has failed, or that all have ended well
_ALL_WELL = "all"
_LOOK_S = 1.0  # between two looks while ranks run
_GRACE_S = (
    5.0  # for ranks to fail by themselves where a peer is gone, with their own words
)
_LEAVE_S = 300.0  # as torchrun's own: for nodes whose ranks take longer


class NodeOfJob:
    """What torchrun's agent, one of which each node has, does besides: it follows how the other nodes end."""

    failed = ""  # another node
    looks_s = ends_s = 0.0

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
            group.store.compare_set(_OVER, "", str(group.group_rank))
        except RuntimeError:
            return  # node 0 is gone
        if group.group_rank == 0 and group.group_world_size > 1:
            time.sleep(2 * _LOOK_S)  # the others look

    def _monitor_workers(self, group: Any) -> Any:
        """Look at the ranks, and end them if another node has failed some seconds ago."""
        result = super()._monitor_workers(group)  # type: ignore[misc]
        now_s = time.monotonic()
        if not self.failed and now_s >= self.looks_s:
            self.failed = _first_failed(group)
            self.looks_s, self.ends_s = now_s + _LOOK_S, now_s + _GRACE_S
        if self.failed and result.state.name == "HEALTHY" and now_s >= self.ends_s:
            sys.exit(f"Node {self.failed} has failed. This node ends its ranks.")
        return result

    def _exit_barrier(self) -> None:
        """Wait until all nodes have ended well, or node 0 is gone. Exits if one has failed."""
        group = self.get_worker_group()  # type: ignore[attr-defined]
        try:
            if group.store.add(_ENDED, 1) == group.group_world_size:
                group.store.compare_set(_OVER, "", _ALL_WELL)
            ends_s = time.monotonic() + _LEAVE_S
            while not group.store.check([_OVER]) and time.monotonic() < ends_s:
                time.sleep(_LOOK_S / 10)
        except RuntimeError:
            return
        failed = _first_failed(group)
        if failed:
            sys.exit(f"Node {failed} has failed. The ranks of this one ended well.")


def _first_failed(group: Any) -> str:
    """Return the number of the node that failed first; "" where none has, or node 0 is gone."""
    try:
        if not group.store.check([_OVER]):
            return ""
        word: str = group.store.get(_OVER).decode()
    except RuntimeError:
        return ""
    return "" if word == _ALL_WELL else word


def main() -> None:
    """Be torchrun, with the arguments of this process."""
    from torch.distributed import run
    from torch.distributed.launcher import api

    agent: Any = type("Agent", (NodeOfJob, api.LocalElasticAgent), {})
    vars(api)["LocalElasticAgent"] = agent
    run.main()


if __name__ == "__main__":
    main()
