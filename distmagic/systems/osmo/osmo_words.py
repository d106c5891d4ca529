"""Parses output of the program `osmo`: workflows and their tasks, refusals, lines of a log. Pure.

Source: the public code of its command line (src/cli/workflow.py and
src/service/core/workflow/objects.py, August 2026). With `-t json`, submit, query and cancel print
JSON, also for an error: {"message", "code"}. Its exit code is 1 for a refused workflow, 2 for a
user's mistake, 10 if the service is unreachable, 75 if it is overloaded.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distmagic import sanitize
from distmagic.connection.limits import DECODER
from distmagic.errors import DistmagicError, Unreachable, UsageError
from distmagic.remote.contact.task import MOST_RESULT_BYTES
from distmagic.remote.frozen import frozen
from distmagic.remote.wire import log_lines, protocol
from distmagic.remote.wire.codec import BadLine
from distmagic.remote.wire.log_lines import Joining

COMPLETED = "COMPLETED"
_ALIVE = ("PENDING", "RUNNING", "WAITING")
_ID = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]{0,200}")
_LOG = re.compile(
    r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d \[([A-Za-z0-9_-]+)(?: retry-\d+)?\] "
)
_AROUND = re.compile(r"Workflow \S+ has (error )?logs:|Log stream has timed out")
_MOST_CHARS = 500
_NO_TASK = -1  # for a line of `osmo` itself
_MEANING = {
    "FAILED_SUBMISSION": "OSMO could not start it as it was submitted",
    "FAILED_SERVER_ERROR": "OSMO itself failed",
    "FAILED_EXEC_TIMEOUT": "it ran longer than the pool allows",
    "FAILED_QUEUE_TIMEOUT": "it waited longer than the pool allows",
    "FAILED_CANCELED": "somebody cancelled it",
    "FAILED_BACKEND_ERROR": "something went wrong in the cluster",
    "FAILED_IMAGE_PULL": "its image can't be pulled: look at --image",
    "FAILED_EVICTED": "a node had no room left for it: ask for more with --mem",
    "FAILED_START_ERROR": "a container could not be started",
    "FAILED_START_TIMEOUT": "a container took too long to start",
    "FAILED_PREEMPTED": "a workflow of higher priority took its place",
}

_OF_A_NODE = (
    protocol.Hello,
    protocol.Endpoint,
    protocol.Worker,
    protocol.Progress,
    protocol.Output,
    protocol.Ended,
    protocol.EngineEnded,
    protocol.Notice,
    protocol.NodeStopping,
    protocol.Skipped,
    protocol.Final,
    protocol.Picture,
    protocol.Hardware,
)

Put = Callable[[int, protocol.Message, int], object]


@frozen
class TaskState:
    """One task of a workflow: its name, OSMO's state, and OSMO's message about a failure."""

    name: str
    status: str
    message: str = ""


@frozen
class WorkflowState:
    """The state of a workflow in OSMO."""

    status: str
    tasks: tuple[TaskState, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the workflow has ended."""
        return self.status not in _ALIVE


def read_id(out: str) -> str:
    """Return the ID of a submitted workflow. Raises `DistmagicError` for any other answer."""
    name = _document(out).get("name")
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise DistmagicError(
            f"osmo workflow submit names no workflow: {_short(out) or 'it printed nothing'}",
            "Look for it with: osmo workflow list",
        )
    return name


def read_state(out: str) -> WorkflowState:
    """Return the output of `osmo workflow query`, parsed.

    Raises `DistmagicError` for any other text.
    """
    document = _document(out)
    tasks = []
    try:
        for group in document.get("groups") or ():
            for task in group.get("tasks") or ():
                state = TaskState(
                    name=_short(task["name"]),
                    status=_short(task["status"]),
                    message=_short(task.get("failure_message") or ""),
                )
                tasks.append(state)
        return WorkflowState(status=_short(document["status"]), tasks=tuple(tasks))
    except (KeyError, TypeError, AttributeError):
        said = _short(out)
        raise DistmagicError(f"osmo workflow query reports no status: {said}") from None


def was_cancelled(out: str) -> bool:
    """Whether `osmo workflow cancel` succeeded: on failure it prints a text, with exit code 0."""
    return isinstance(_document(out).get("name"), str)


def waiting(workflow_id: str, state: WorkflowState) -> str:
    """Return a sentence about a workflow that has not ended."""
    tasks = ", ".join(f"{task.name} {task.status}" for task in state.tasks[:8])
    return (
        f"OSMO workflow {workflow_id} is {state.status}{': ' if tasks else ''}{tasks}."
    )


def ended(workflow_id: str, state: WorkflowState) -> str:
    """Return a sentence about a failed workflow."""
    meaning = _MEANING.get(state.status, "")
    text = f"OSMO workflow {workflow_id} ended as {state.status}"
    text += f": {meaning}." if meaning else "."
    for task in state.tasks:
        if task.message:
            return f"{text} {task.name}: {task.message}"
    return text


def refused(what: str, code: int, out: str, err: str) -> DistmagicError:
    """Return the error of a failed call of `osmo`; `what` are its arguments."""
    message = _document(out).get("message")
    said = _short(message if isinstance(message, str) else out or err)
    text = f"{what} failed: {said or f'exit code {code}'}"
    if "login" in said.lower():
        return UsageError(text, "Log in with: osmo login URL, then run it again.")
    if code in (10, 75):
        return Unreachable("OSMO", text, "Try it again when OSMO's service answers.")
    return UsageError(
        text, "Try the same command by hand; distmagic only passes on its answer."
    )


def _document(out: str) -> dict[str, Any]:
    """Return the JSON object in an answer, possibly after warnings; {} if there is none."""
    begin = out.find("{")
    try:
        found = json.loads(out[begin:]) if begin >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(text: str) -> str:
    return sanitize.line(" ".join(text.split()))[:_MOST_CHARS]


# ---- the log


class LogReader:
    """Reads lines, and calls `put` with a task's number, an event and its size.

    Lines read before are skipped. `finished` are the tasks whose last log line has come, `result`
    is rank 0's return value, which the first task writes.
    """

    def __init__(self, tasks: tuple[str, ...], put: Put) -> None:
        self.finished: set[int] = set()
        self.result: bytes | None = None
        self._numbers = {name: number for number, name in enumerate(tasks)}
        self._put = put
        self._joining: dict[int, Joining] = {}
        self._last: dict[int, int] = {}  # the number of the last event, by task
        # The number of ordinary lines, by task: in all, and in this reading.
        self._shown: Counter[int] = Counter()
        self._shown_now: Counter[int] = Counter()
        self._offset = 0

    def begin(self) -> None:
        """Start with the log's first line, possibly again."""
        self._joining = {}
        self._shown_now.clear()

    def read(self, line: str) -> None:
        """Handle one line. Never raises."""
        prefix = _LOG.match(line)
        text = line[prefix.end() :] if prefix else line
        task = self._numbers.get(prefix[1] if prefix else "", _NO_TASK)
        if task == _NO_TASK and (not text.strip() or _AROUND.match(text)):
            return
        part = log_lines.read(text) if task != _NO_TASK else None
        if part is None:
            self._shown_now[task] += 1
            if self._shown_now[task] > self._shown[task]:
                self._shown[task] += 1
                self._show(task, text)
            return
        whole = self._joining.setdefault(task, Joining()).add(part)
        if whole is None:
            return
        if part.kind == log_lines.RESULT:
            if task == part.number == 0 and len(whole) <= 2 * MOST_RESULT_BYTES:
                with suppress(ValueError):  # it arrived damaged
                    self.result = base64.b64decode(whole, validate=True)
        elif part.number > self._last.get(task, 0):
            self._last[task] = part.number
            self._take_event(task, whole)

    def _take_event(self, task: int, text: str) -> None:
        try:
            _, event = DECODER.decode(text.encode())
        except BadLine:
            self._show(task, text)
            return
        if isinstance(event, _OF_A_NODE):
            self._put(task, event, len(text))
        if isinstance(event, protocol.Final):
            self.finished.add(task)

    def _show(self, task: int, text: str) -> None:
        shown = f"{sanitize.line(text)}\n"
        output = protocol.Output(
            rank=-1, stream="stdout", offset=self._offset, text=shown
        )
        self._offset += len(shown.encode(errors="replace"))
        self._put(max(task, 0), output, len(text))
