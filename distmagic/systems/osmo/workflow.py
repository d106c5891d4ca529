"""One run as an OSMO workflow: submitted, followed by its log, cancelled by an interrupt.

    submitted   `osmo workflow submit` has given it an ID
    followed    one thread polls its state with growing pauses; another reads its log, again if it
                breaks off
    over        OSMO reports its end, and the log was read once more from then, or `LAST_LINES_S`
                have passed

Promised: no call of `osmo` lasts forever, and no line of the log is used twice. Not promised: that
all lines arrive, because OSMO only keeps the last ones; then OSMO's state decides how the run
ended. If the kernel dies, the workflow runs on.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from distmagic.connection.link import Link
from distmagic.connection.parallel import threads_for
from distmagic.errors import Cancelled, DistmagicError, NodeLost, NoResult, RunError
from distmagic.outcome.run import Run
from distmagic.remote.contact.task import MOST_RESULT_BYTES
from distmagic.remote.system import threads
from distmagic.remote.wire import protocol
from distmagic.render.screen import Screen
from distmagic.runner import interrupts
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.run_loop import RunLoop, new_clock
from distmagic.state.events import Gone, Launched, Lost, Planned, StopRequested, Warned
from distmagic.state.fold import begin
from distmagic.state.verdict import verdict
from distmagic.systems.osmo import osmo, osmo_words
from distmagic.systems.osmo.osmo_words import COMPLETED, LogReader, WorkflowState

LAST_LINES_S = 15.0  # time for the log to end after its workflow
# Pauses between polls, in the first half minute and later.
_OFTEN_S, _LATER_S = 1.0, 10.0
_SOON = 30


class WorkflowRun:
    """One workflow from its submission to its end; each of its tasks is a node.

    `workflow_id` is "" before the submission.

    `text` is the workflow; `variable` the name of the run's variable.
    """

    def __init__(
        self,
        text: str,
        tasks: tuple[str, ...],
        planned: Planned,
        screen: Screen,
        variable: str,
    ) -> None:
        self.workflow_id = ""
        self._text, self._tasks = text, tasks
        clock = new_clock()
        self._queue = EventQueue(clock)
        self._reader = LogReader(self._tasks, self._queue.put)
        self._noted = interrupts.Interrupts()
        state = begin("", tasks)
        state = replace(state, began_unix_s=time.time(), variable=variable)
        self._loop = RunLoop(
            state, self._queue, screen, time.sleep, self._noted, clock, str
        )
        self._loop.note(planned)
        # The workflow has ended, or the user stopped waiting.
        self._is_over = threading.Event()
        self._has_left = threading.Event()  # the log is no longer read
        self._log: subprocess.Popen[bytes] | None = None

    def run(self) -> Run:
        """Submit and follow the workflow, on the main thread. Raises the run's error."""
        pool = threads_for(2, "osmo")
        try:
            with interrupts.sent_to(self._noted):
                with self._loop.opening():
                    self._submit(pool)
                following = pool.submit(self._follow)
                try:
                    self._loop.wait_for([following])
                except KeyboardInterrupt:
                    # A second interrupt stops waiting for the workflow's end.
                    self._loop.note(StopRequested(reason="interrupted"))
                    cancelling = pool.submit(osmo.cancel, self.workflow_id)
                    try:
                        self._loop.result(cancelling)
                        self._loop.wait_for([following])
                    except KeyboardInterrupt:
                        raise Cancelled(
                            f"Interrupted; OSMO workflow {self.workflow_id} may still run.",
                            _by_hand(self.workflow_id),
                        ) from None
                    except DistmagicError as error:
                        raise _not_cancelled(self.workflow_id, error) from None
                return self._finish(following.result())
        finally:
            self._has_left.set()
            self._is_over.set()
            self._end_log()
            self._queue.close()
            pool.shutdown(wait=False)

    def _submit(self, pool: ThreadPoolExecutor) -> None:
        """Submit the workflow; cancel it if an interrupt came meanwhile."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "workflow.yaml"
            path.write_text(self._text)
            submitting = pool.submit(osmo.submit, path)
            try:
                self.workflow_id = self._loop.result(submitting)
            except KeyboardInterrupt:
                left = submitting.result()
                try:
                    osmo.cancel(left)
                except DistmagicError as error:
                    raise _not_cancelled(left, error) from None
                raise Cancelled(
                    "Interrupted; the workflow that was being submitted was cancelled."
                ) from None
        self._loop.state = replace(self._loop.state, job=self.workflow_id)
        self._loop.note(Warned(text=f"OSMO workflow {self.workflow_id} was submitted."))

    # ---- following, on threads

    def _follow(self) -> WorkflowState | None:
        """Poll the workflow until it ends, reading its log; return its last state, None if the user
        stopped waiting.
        """
        log = threads.begin("osmo-log", self._read_log)
        state = self._last_state()
        self._is_over.set()
        for _ in range(2):  # the stream that was open, and one more that has all
            log.join(LAST_LINES_S)
            if log.is_alive():
                self._end_log()
        return state

    def _last_state(self) -> WorkflowState | None:
        told = ""
        for pause_s in _pauses():
            try:
                state = osmo.look(self.workflow_id)
            except DistmagicError as error:
                text = f"The state of OSMO workflow {self.workflow_id} is unknown: {error.message}"
            else:
                if state.is_over:
                    return state
                text = osmo_words.waiting(self.workflow_id, state)
            if text != told:
                told = text
                self._queue.tell(Warned(text=text))
            if self._is_over.wait(pause_s):
                break
        return None

    def _read_log(self) -> None:
        """Read the log from its start, again if it breaks off, until one pass has all of it."""
        for pause_s in _pauses():
            has_all = self._is_over.is_set()  # of a stream that is opened from now on
            with suppress(DistmagicError):  # the other thread reports the error
                self._log = osmo.open_log(self.workflow_id)
                if self._has_left.is_set():
                    self._end_log()
                self._reader.begin()
                for line in osmo.lines_of(self._log):
                    self._reader.read(line)
            is_whole = len(self._reader.finished) == len(self._tasks)
            if has_all or is_whole or self._has_left.is_set():
                return
            self._is_over.wait(pause_s)

    def _end_log(self) -> None:
        if self._log is not None:
            osmo.break_off(self._log)

    # ---- the end

    def _finish(self, state: WorkflowState | None) -> Run:
        """Return the finished run, from its log and its last state. Raises its error."""
        assert state is not None
        is_done = state.status == COMPLETED
        for node, name in enumerate(self._tasks):
            if node in self._reader.finished or self._loop.state.stopping:
                last: tuple[protocol.Message | Launched, ...] = (Gone(),)
            elif is_done:
                text = f"{name}: its last lines are not in the log; OSMO reports that it completed"
                done = protocol.EngineEnded(code=0), protocol.Final(reason="done")
                last = (Warned(text=text), *done, Gone())
            else:
                last = (Lost(why=f"OSMO ended the workflow as {state.status}"),)
            for event in last:
                self._queue.tell(event, node)
        self._loop.step(0.0)
        self._loop.finish()
        final = self._loop.state
        error = verdict(final)
        if not is_done and (error is None or type(error) in (RunError, NodeLost)):
            hint = f"Look at: osmo workflow logs {self.workflow_id}; osmo workflow events {self.workflow_id}"
            if error is not None and type(error) is RunError:
                hint = f"{error}\n{hint}"
            error = RunError(osmo_words.ended(self.workflow_id, state), hint)
        results = {}
        if self._reader.result is not None:
            results[0] = self._reader.result
        run = Run(final, results, self._open_link, shown=error is None)
        if error is not None:
            error.run = run
            raise error
        return run

    def _open_link(self, node: int) -> Link:
        raise NoResult(
            f"OSMO no longer gives access to {self._tasks[node]}. Only what rank 0 returned comes back by the log, "
            f"up to {MOST_RESULT_BYTES:,} bytes.",
            f"What ranks wrote: osmo workflow logs {self.workflow_id} -t {self._tasks[node]}. "
            "Write what should stay to files, with --results URL.",
        )


def _not_cancelled(workflow_id: str, error: DistmagicError) -> Cancelled:
    return Cancelled(
        f"Interrupted, but OSMO workflow {workflow_id} could not be cancelled: {error.message}",
        _by_hand(workflow_id),
    )


def _by_hand(workflow_id: str) -> str:
    return f"End it with: osmo workflow cancel {workflow_id}"


def _pauses() -> Iterator[float]:
    """Yield the pauses between two polls, which grow."""
    yield from [_OFTEN_S] * _SOON
    while True:
        yield _LATER_S
