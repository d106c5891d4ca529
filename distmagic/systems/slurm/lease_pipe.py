"""The pipe to the keeper of an allocation's first node, the lead, over which its lease is renewed.

See remote/keeper/.
"""

from __future__ import annotations

from distmagic.errors import ConnectionLost, DistmagicError, Unreachable
from distmagic.systems.slurm.srun import SrunProcess, SrunTransport
from distmagic.transports.time_limits import TimeLimit

OPEN_S = 45.0  # for one attempt to reach the keeper; the usher has its own time limit
_TOLD_S = 5.0  # time for the keeper to obey
END, LEAVE = b"e", b"b"  # the allocation ends at once; as soon as no job runs there
_RENEW = b"."


class LeasePipe:
    """The pipe over which the lease is renewed, one at a time.

    Without one the lease expires, and the allocation ends.
    """

    def __init__(self) -> None:
        self._pipe: SrunProcess | None = None

    @property
    def is_broken(self) -> bool:
        """Whether there was a pipe, and it has ended."""
        return self._pipe is not None and self._pipe.wait(0) is not None

    def open(self, way: SrunTransport) -> None:
        """Open a pipe to the lead; its keeper is ready on return.

        Raises `PreflightError` if a retry would not help, else `DistmagicError`.
        """
        node, pipe = way.node, way.hold()
        try:
            with TimeLimit(OPEN_S, pipe.close) as limit:
                answer = pipe.read()
            if limit.is_over:
                raise Unreachable(
                    node.name,
                    f"srun started nothing on this node within {OPEN_S:g} s.",
                    f"Try by hand: srun --jobid={node.job} --overlap -N1 -n1 -w {node.name} true",
                )
            if answer != b"ready\n":
                raise ConnectionLost(f"{node.name}: its keeper has ended.")
        except DistmagicError:
            pipe.close()
            raise
        before, self._pipe = self._pipe, pipe
        if before is not None:  # broken, or another thread's, opened meanwhile
            before.close()

    def renew(self) -> None:
        """Renew the lease. Raises `ConnectionLost` for a broken pipe; does nothing without one."""
        if self._pipe is not None:
            self._pipe.write(_RENEW)

    def give_up(self, word: bytes) -> bool:
        """Send `END` or `LEAVE` to the keeper, and close the pipe; return whether a working one
        existed.
        """
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return False
        try:
            pipe.write(word)
            pipe.close_stdin()
            pipe.wait(_TOLD_S)
        except DistmagicError:
            return False
        finally:
            pipe.close()
        return True
