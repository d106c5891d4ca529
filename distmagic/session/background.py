"""The runs of a session that go on while the notebook does other things. They end with its process."""

from __future__ import annotations

import atexit
import os
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from distmagic.connection.link import Link
from distmagic.errors import SpecError
from distmagic.payload.pack import Payload
from distmagic.render.screen import Screen
from distmagic.request.spec import JobSpec
from distmagic.runner.outcome import Detached, Run
from distmagic.session.background_run import BackgroundRun, BackgroundScreen
from distmagic.session.names import new_job
from distmagic.state import fold

if TYPE_CHECKING:  # these two know of this module
    from distmagic.connection.reach import Reaching
    from distmagic.session.place import Place
    from distmagic.session.session import Session

# For ranks to end when the process does. A kernel that takes more than five seconds is killed, and then hosts end what
# was left when its lease runs out.
_LAST_WAIT_S = 4.0


class BackgroundRuns:
    """The runs that go on in the background."""

    def __init__(self) -> None:
        # The thread of a run keeps it as long as it goes on; afterwards nothing here does.
        self._runs: WeakValueDictionary[str, BackgroundRun] = WeakValueDictionary()
        self._owner = os.getpid()

    @property
    def running(self) -> tuple[BackgroundRun, ...]:
        """Those that are not over, the oldest first."""
        return tuple(run for run in self._runs.values() if not run.done)

    def find(self, job: str) -> BackgroundRun | None:
        """Return the one that runs a job; None where the job is over, or was not begun in the background.

        `job` may be the beginning of a name that only one of them has.
        """
        fits = [run for run in self.running if job and run.job.startswith(job)]
        return fits[0] if len(fits) == 1 else None

    def begin(
        self,
        session: Session,
        place: Place,
        spec: JobSpec,
        payload: Payload,
        screen: Screen,
    ) -> BackgroundRun:
        """Begin a run and return it at once. `screen` is shown the first state now: that makes the output of this cell."""
        job = new_job()
        state = fold.begin(job, place.names, spec.max_restarts)
        state = replace(
            state, call=payload.title, name=spec.name or "", began_unix_s=time.time()
        )
        shown = BackgroundScreen(state, screen)
        reached: list[Reaching] = []

        def launch() -> Run | Detached:
            try:
                reaching = place.reach(shown)
            except BaseException:
                place.cancel()
                raise
            reached.append(reaching)
            for future in reaching.futures:
                future.add_done_callback(self._end_before_connections)
            return session.launch(reaching, spec, payload, shown, job)

        def give_up() -> None:
            if not reached and not place.is_known:
                place.cancel()

        def open_link(node_rank: int) -> Link:
            (reaching,) = reached  # there is a node
            name = shown.state.nodes[node_rank].host
            for host in reaching.known:
                if host.name == name:
                    return session.link_to(host, reaching.access)
            raise SpecError(f"{name} is not among the hosts of this run.")

        run = BackgroundRun(job, shown, launch, give_up, open_link)
        self._runs[job] = run
        return run

    def _end_before_connections(self, _: Future[Link]) -> None:
        """Have `close` called when Python ends: last registered, it comes before paramiko closes all connections."""
        atexit.unregister(self.close)
        atexit.register(self.close)

    def close(self) -> None:
        """End all of them, as an interrupt ends the run of a cell. It takes at most a few seconds."""
        if os.getpid() != self._owner:
            return  # a forked child that runs its parent's atexit functions
        running = self.running
        for run in running:
            run.ask_to_stop()
        end_s = time.monotonic() + _LAST_WAIT_S
        for run in running:
            run.wait_until_over(max(0.0, end_s - time.monotonic()))
