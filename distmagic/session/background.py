"""Runs in the background: the thread of each, the requests of other cells to it, and its end.

They end with the process of their session, except ranks that stay and outlive it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from distmagic.comparison.metrics import Metrics, Plot, metrics_of, plot_of
from distmagic.connection.link import Link
from distmagic.diagnosis.profile import Profile
from distmagic.errors import DistmagicError, UsageError
from distmagic.outcome.detached import Detached
from distmagic.outcome.results import Results
from distmagic.outcome.run import Returned, Run
from distmagic.outcome.shown import cell_number, display_page
from distmagic.remote.frozen import frozen
from distmagic.remote.system import threads
from distmagic.remote.wire.protocol import FoundFile
from distmagic.render.screen import Screen, UserRequest
from distmagic.state.explanation import Explanation
from distmagic.state.hangs import explain_dump, unanswered
from distmagic.state.model import RunState

Left = Run | Detached  # of a run: the job of a Detached runs on
_ANSWER_S = 20.0  # time for ranks to send their stacks
# Time for ranks to end when the process ends. Jupyter kills a kernel after five seconds; the hosts
# then end the rest when the lease expires.
_LAST_WAIT_S = 4.0


class BackgroundScreen(Screen):
    """Shows a background run on any number of screens, keeps its last state, and forwards requests
    of other cells.

    The run's own thread calls `show` and `requests`; any thread may call the rest. Only `close`
    shows the end, because only then its error is known.
    """

    def __init__(self, state: RunState, screen: Screen) -> None:
        self.state = state
        self.has_changed = threading.Condition()
        self._screens: list[Screen] = []
        self._asked: deque[UserRequest] = deque()
        self._drawing = threading.Lock()
        self._is_closed = False
        self.add(screen)

    def add(self, screen: Screen) -> None:
        """Show the run on one more screen, which belongs to the current cell."""
        with self._drawing:
            screen.show(self.state)
            if self._is_closed:  # the run has ended meanwhile
                screen.finish(self.state)
            else:
                self._screens.append(screen)

    def ask(self, request: UserRequest) -> None:
        """Send a request to the run, as a click on a button does."""
        self._asked.append(request)

    def show(self, state: RunState) -> None:
        """Show a state on all screens."""
        self._keep(state)
        with self._drawing:
            for screen in self._screens:
                screen.show(state)

    def finish(self, state: RunState) -> None:
        """Keep the last state."""
        self._keep(state)

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the requests to this run: by its methods, and on its screens."""
        found = []
        while self._asked:
            found.append(self._asked.popleft())
        for screen in tuple(self._screens):
            found += screen.requests()
        return tuple(found)

    def can_type(self) -> bool:
        """Whether the user can type where the run is shown."""
        return any(screen.can_type() for screen in tuple(self._screens))

    def close(self, error: BaseException | None) -> None:
        """Show the last state for good, with the text of `error`: the user may never look at the
        run itself.
        """
        state = self.state
        if error is not None:
            message, hint = repr(error), ""
            if isinstance(error, DistmagicError):
                message, hint = error.message, error.hint
            if not state.is_over:
                state = replace(state, abandoned=message.partition("\n")[0])
            notices = (*state.notices, *hint.splitlines())
            state = replace(state, notices=notices)
        self._keep(state)
        with self._drawing:
            self._is_closed = True
            for screen in self._screens:
                screen.finish(state)
            self._screens = []

    def _keep(self, state: RunState) -> None:
        with self.has_changed:
            self.state = state
            self.has_changed.notify_all()


class BackgroundRun(Returned):
    """A run in the background, while the notebook does other things.

    `state` is its current state, `done` whether it has ended. `wait()` returns its `Run`, or raises
    its error; so do `results` and `run[rank]` after its end. `stop()` ends it, `stacks()` returns
    the stacks of every rank. `logs`, `metrics`, `files` and `fetch` are those of a `Run`, and work
    during the run.
    """

    def __init__(
        self,
        job: str,
        screen: BackgroundScreen,
        launch: Callable[[], Left],
        give_up: Callable[[], object],
        open_link: Callable[[int], Link],
    ) -> None:
        """Start the run. `launch` is called on a thread; `give_up` ends its wait for hosts."""
        self.job = job
        self.screen = screen
        self._variable = screen.state.variable
        self._give_up = give_up
        self.open_link = open_link
        self._is_over = threading.Event()
        self._left: Left | None = None
        self._error: BaseException | None = None
        self._shown_in = cell_number()
        threads.begin("run", self._run, launch)

    def _run(self, launch: Callable[[], Left]) -> None:
        try:
            self._left = launch()
        except BaseException as error:  # noqa: BLE001  # whoever waits for the run gets it
            self._error = error
            self._left = getattr(error, "run", None)
            if isinstance(error, DistmagicError):
                # A traceback is useless here, and its frames would keep everything about the run
                # alive.
                error.__traceback__ = error.__context__ = None
        try:
            self.screen.close(self._error)
        finally:
            self._is_over.set()

    @property
    def state(self) -> RunState:
        """The current state of the run."""
        return self.screen.state

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return self._is_over.is_set()

    def wait(self, timeout_s: float | None = None) -> Left:
        """Wait for the end, and return the `Run`, or the `Detached` of a job that runs on.

        Raises the errors of a cell with this run, and `TimeoutError` after `timeout_s`. An
        interrupt only ends the wait.
        """
        if not self._is_over.wait(timeout_s):
            raise TimeoutError(f"job {self.job} still runs after {timeout_s:g} s")
        return self._ended()

    def _ended(self) -> Left:
        if not self.done:
            raise UsageError(
                f"Job {self.job} still runs.",
                f"{self._variable}.wait() waits for its end, %distributed stop {self.job} ends it.",
            )
        if self._error is not None:
            raise self._error
        assert self._left is not None
        return self._left

    def ask_to_stop(self) -> None:
        """Stop every rank on every host, without waiting. A second call kills them at once."""
        self.screen.ask("stop")

    def stop_waiting(self) -> None:
        """End the run's wait for hosts. A scheduler may take some seconds for that."""
        self._give_up()

    def stop(self) -> None:
        """Stop every rank on every host, and wait until all have ended.

        An interrupt ends only the wait.
        """
        if not self.done:
            self.ask_to_stop()
            self.stop_waiting()
        self._is_over.wait()

    def wait_until_over(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end; return whether the run has ended."""
        return self._is_over.wait(timeout_s)

    def stacks(self) -> RunStacks:
        """Ask every rank for its stack, and return the answers; the run continues.

        Raises `UsageError` if none runs.
        """
        self._check_running()
        screen = self.screen
        with screen.has_changed:
            before = screen.state.wanted_stacks
            screen.ask("stacks")
            screen.has_changed.wait_for(lambda: self._has_answers(before), _ANSWER_S)
            state = screen.state
        dump = state.stack_dumps.get(state.wanted_stacks)
        if dump is None or state.wanted_stacks == before:
            raise UsageError(f"No rank of job {self.job} has reported where it is.")
        return RunStacks(explanation=explain_dump(state, dump), job=self.job)

    def _check_running(self) -> None:
        if self.done or self.state.phase != "running":
            phase = self.state.phase if self._error is None else "failed"
            raise UsageError(
                f"No rank of job {self.job} runs: it is {phase}.",
                "%distributed jobs lists the jobs that run.",
            )

    def _has_answers(self, before: str) -> bool:
        """Whether all ranks have answered a request made after `before`, or no answer can come."""
        state = self.screen.state
        request_id = state.wanted_stacks
        dump = state.stack_dumps.get(request_id)
        is_answered = request_id != before and dump is not None
        return state.is_over or (is_answered and not unanswered(state, dump))

    @property
    def metrics(self) -> Metrics:
        """All values reported so far, as `Run.metrics`."""
        return metrics_of(self.state)

    @property
    def results(self) -> Results:
        """The return values of the ranks.

        Raises `UsageError` during the run, and the run's error if it failed.
        """
        left = self._ended()
        return left.results  # a `Detached` raises an explanation

    def plot(self, *names: str) -> Plot:
        """Return the curves so far, as `Run.plot`."""
        return plot_of(self.state, names)

    def logs(
        self, rank: int, stream: str | None = None, *, by_time: bool = False
    ) -> str:
        """Return a rank's output so far, as `Run.logs` does."""
        return self._so_far().logs(rank, stream, by_time=by_time)

    def files(self, rank: int = 0, pattern: str = "**") -> tuple[FoundFile, ...]:
        """Return the files in the working directory of a rank's host, as `Run.files`."""
        return self._so_far().files(rank, pattern)

    def fetch(
        self, pattern: str, to: str = ".", rank: int = 0, *, ranks: str | None = None
    ) -> list[Path]:
        """Copy files of a rank's working directory to the folder `to`, as `Run.fetch`."""
        return self._so_far().fetch(pattern, to, rank, ranks=ranks)

    def profile(self, steps: int = 3) -> Profile:
        """Profile the next steps of all ranks, while training continues; return where their time
        goes, and which rank they wait for.

        One trace of all ranks is written to the current directory. A step is a call of an
        optimizer's `step`. Raises `UsageError`, and `NoResult` if no rank makes that many steps in
        two minutes.
        """
        from distmagic.connection.requests import profile_requests

        self._check_running()
        state = self.state
        hosts = [node.host for node in state.nodes]
        links: dict[int, Link] = {}
        try:
            for node_rank in range(len(hosts)):
                if node_rank not in state.lost:
                    links[node_rank] = self.open_link(node_rank)
            return profile_requests.profile(links, hosts, self.job, steps)
        finally:
            for link in links.values():
                link.close()

    def _so_far(self) -> Run:
        """Return a `Run` with the current state."""
        if isinstance(self._left, Run):
            return self._left
        return Run(self.state, {}, self.open_link, shown=False)

    def __repr__(self) -> str:
        from distmagic import render

        return render.text(self.state)

    def _repr_html_(self) -> str:
        from distmagic import render

        return render.html(self.state)

    def _ipython_display_(self) -> None:
        """Show the run's state, except in the cell that has its live view."""
        if self._shown_in is None or self._shown_in != cell_number():
            html = self._repr_html_()
            display_page({"text/plain": repr(self), "text/html": html})


@frozen
class RunStacks:
    """Where the ranks of a job are: `explanation` has them in groups.

    A cell shows it as text and as HTML.
    """

    explanation: Explanation
    job: str

    def __repr__(self) -> str:
        from distmagic import render

        return render.stacks_text(self.explanation, self.job)

    def _repr_html_(self) -> str:
        from distmagic import render

        return render.stacks_html(self.explanation, self.job)


class BackgroundRuns:
    """All background runs of a session."""

    def __init__(self) -> None:
        # A run's thread keeps it alive until its end; afterwards this table does not.
        self._runs: WeakValueDictionary[str, BackgroundRun] = WeakValueDictionary()
        self._owner = os.getpid()
        self.is_closed = False

    @property
    def running(self) -> tuple[BackgroundRun, ...]:
        """Those that have not ended, oldest first."""
        # A copy: a thread of a sweep may add one meanwhile.
        runs = [ref() for ref in self._runs.valuerefs()]
        return tuple(run for run in runs if run is not None and not run.done)

    def find(self, job: str) -> BackgroundRun | None:
        """Return the background run of a job; None if the job has ended, or is not in the
        background.

        `job` may be a unique prefix of its name.
        """
        fits = [run for run in self.running if job and run.job.startswith(job)]
        return fits[0] if len(fits) == 1 else None

    def add(self, run: BackgroundRun) -> None:
        """Add a run that has just started."""
        self._runs[run.job] = run

    def close(self) -> None:
        """End the background runs that do not outlive this process, as an interrupt ends the run of
        a cell.

        It takes at most a few seconds.
        """
        if os.getpid() != self._owner:
            return  # a forked child that runs its parent's atexit functions
        self.is_closed = True
        # Ranks that stay go on after the end of this process: their hosts end them.
        running = [run for run in self.running if run.state.terms.ends_idle_s is None]
        for run in running:
            run.ask_to_stop()
        # Last: an unreachable scheduler must not delay the requests to hosts.
        for run in running:
            run.stop_waiting()
        end_s = time.monotonic() + _LAST_WAIT_S
        for run in running:
            run.wait_until_over(max(0.0, end_s - time.monotonic()))
