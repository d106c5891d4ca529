"""Questions to the user while connecting to hosts: asked by worker threads, answered on the main
thread.

Only the main thread of a kernel may ask for input. So a connecting thread queues its question and
waits, and the main thread, which waits for the run anyway, asks the questions one by one.
"""

from __future__ import annotations

import getpass
import math
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import field
from typing import TYPE_CHECKING, Any

from distmagic.errors import AuthenticationError
from distmagic.remote.frozen import frozen

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_TURN_S = 0.02  # pause between checking the futures and checking the questions


@frozen
class _Question:
    prompt: str
    secret: bool
    answer: Future[str] = field(default_factory=Future)

    def leave(self) -> None:
        """End the wait of the thread that asks, without an answer."""
        host, _, words = self.prompt.partition(": ")
        error = AuthenticationError(
            host,
            f"asked {words.strip()!r}, and got no answer.",
            "Run the cell again and answer.",
        )
        self.answer.set_exception(error)


class NotebookAsker:
    """Asks in the notebook; without `can_ask`, every question raises the errors of `NoAsker` at
    once.
    """

    def __init__(self, *, can_ask: bool) -> None:
        self.can_ask = can_ask
        self.is_asking = False
        # None is an interrupt.
        self._questions: queue.Queue[_Question | None] = queue.Queue()
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, prompt: str, *, secret: bool) -> str:
        """Return the user's answer.

        Callable on any thread; blocks until the main thread has asked the question. Raises
        `AuthenticationError` if no user can answer, or if the run ended before the answer.
        """
        if not self.can_ask:
            from distmagic.transports.asking import NoAsker

            return NoAsker().ask(prompt, secret=secret)
        question = _Question(prompt=prompt, secret=secret)
        if threading.current_thread() is threading.main_thread():
            self.is_asking = True
            _answer(question)
            self.is_asking = False
        else:
            with self._lock:
                if self._closed:
                    question.leave()
                else:
                    self._questions.put(question)
        return question.answer.result()

    def confirm(self, question: str) -> bool:
        """Return whether the user confirms; False if no user can answer."""
        try:
            answer = self.ask(f"{question} [y/N] ", secret=False)
        except AuthenticationError:  # nobody can answer, or did
            return False
        return answer.strip().lower() in ("y", "yes")

    def serve(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for a question, and ask the user.

        Call it on the main thread only. Raises KeyboardInterrupt if another thread has called
        `interrupt`.
        """
        try:
            question = self._questions.get(timeout=timeout_s)
        except queue.Empty:
            return
        if question is None:
            raise KeyboardInterrupt
        _answer(question)

    def interrupt(self) -> None:
        """Interrupt the serving thread, as a user interrupts the main thread.

        Call it on any other thread.
        """
        self._questions.put(None)

    def serve_until_done(
        self, futures: Sequence[Future[Any]], patience_s: float = math.inf
    ) -> None:
        """Ask the user the questions until all futures are done. Call it on the main thread only.

        Once half of the futures are done, the others get twice that time plus `patience_s`. Time in
        which the user answers does not count.
        """
        turns = latest = done = 0
        while waiting := wait(futures, _TURN_S).not_done:
            self.serve(_TURN_S)
            turns += 1
            if len(futures) - len(waiting) > done:
                done, latest = len(futures) - len(waiting), turns
            spent_s = 2 * _TURN_S * (turns - 2 * latest)
            if done >= len(waiting) and spent_s > patience_s:
                return

    def close(self) -> None:
        """Release every thread that still waits for an answer, with an error.

        Safe to call twice.
        """
        with self._lock:
            self._closed = True
        while True:
            try:
                question = self._questions.get_nowait()
            except queue.Empty:
                return
            if question is not None:
                question.leave()


def asker_of(shell: InteractiveShell | None = None) -> NotebookAsker:
    """Return an asker for the current cell of `shell`; None means this process's own shell, if it
    has one.
    """
    ipython = sys.modules.get("IPython")
    shell = shell if shell is not None or ipython is None else ipython.get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        return NotebookAsker(can_ask=bool(getattr(kernel, "_allow_stdin", False)))
    return NotebookAsker(can_ask=sys.stdin is not None and sys.stdin.isatty())


def _answer(question: _Question) -> None:
    try:
        answer = (
            getpass.getpass(question.prompt)
            if question.secret
            else input(question.prompt)
        )
    except BaseException as error:  # an interrupt must also wake the waiting thread
        question.leave()
        if isinstance(error, EOFError):
            return
        raise
    question.answer.set_result(answer)
