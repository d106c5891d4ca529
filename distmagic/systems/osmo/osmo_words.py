"""What the program `osmo` says, understood: workflows and their tasks, refusals, lines of a log. Pure.

Read in the public source of its command line (src/cli/workflow.py and src/service/core/workflow/objects.py, August 2026):
`-t json` makes submit, query and cancel print JSON, and so an error, as {"message", "code"}; its exit code is 1 for a
refused workflow, 2 for a user's mistake, 10 where the service can't be reached, 75 where it has too much to do.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from distmagic import sanitize
from distmagic.connection.limits import DECODER
from distmagic.errors import DistmagicError, Unreachable, UsageError
from distmagic.remote.contact.task import MOST_RESULT_BYTES
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
_MOST_SAID = 1000
_MOST_CHARS = 500
_MOST_TASKS = 10_000
_MEANING = {
    "FAILED_SUBMISSION": "OSMO could not start it as it was submitted",
    "FAILED_SERVER_ERROR": "OSMO itself failed",
    "FAILED_EXEC_TIMEOUT": "it ran longer than the pool allows",
    "FAILED_QUEUE_TIMEOUT": "it waited longer than the pool allows",
    "FAILED_CANCELED": "somebody cancelled it",
    "FAILED_BACKEND_ERROR": "something went wrong in the cluster",
    "FAILED_IMAGE_PULL": "its image can't be had: look at --image",
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


@dataclass(frozen=True, kw_only=True)
class TaskState:
    """One task of a workflow: its name, its state in OSMO's word, and what OSMO says of a failure."""

    name: str
    status: str
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkflowState:
    """A workflow as OSMO has it."""

    status: str
    tasks: tuple[TaskState, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run any more."""
        return self.status not in _ALIVE


def read_id(out: str) -> str:
    """Return the ID of a workflow that was submitted. Raises `DistmagicError` for any other answer."""
    name = _document(out).get("name")
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise DistmagicError(
            f"osmo workflow submit names no workflow: {_short(out)}",
            "Look for it with: osmo workflow list",
        )
    return name


def read_state(out: str) -> WorkflowState:
    """Return what `osmo workflow query` says. Raises `DistmagicError` for what is no such answer."""
    document = _document(out)
    status = document.get("status")
    if not isinstance(status, str):
        raise DistmagicError(f"osmo workflow query reports no status: {_short(out)}")
    tasks: list[TaskState] = []
    groups = document.get("groups")
    for group in groups if isinstance(groups, list) else []:
        for task in group.get("tasks", []) if isinstance(group, dict) else []:
            if isinstance(task, dict) and len(tasks) < _MOST_TASKS:
                tasks.append(
                    TaskState(
                        name=_short(str(task.get("name", ""))),
                        status=_short(str(task.get("status", ""))),
                        message=_short(str(task.get("failure_message") or "")),
                    )
                )
    return WorkflowState(status=_short(status), tasks=tuple(tasks))


def was_cancelled(out: str) -> bool:
    """Whether `osmo workflow cancel` did it: where it can't, it says so in words, with exit code 0."""
    return isinstance(_document(out).get("name"), str)


def waiting(workflow_id: str, state: WorkflowState) -> str:
    """Return a sentence for a workflow that is not over."""
    tasks = ", ".join(f"{task.name} {task.status}" for task in state.tasks[:8])
    return (
        f"OSMO workflow {workflow_id} is {state.status}{': ' if tasks else ''}{tasks}."
    )


def ended(workflow_id: str, state: WorkflowState) -> str:
    """Return a sentence for a workflow that failed."""
    meaning = _MEANING.get(state.status, "")
    text = f"OSMO workflow {workflow_id} ended as {state.status}"
    text += f": {meaning}." if meaning else "."
    for task in state.tasks:
        if task.message:
            return f"{text} {task.name}: {task.message}"
    return text


def refused(what: str, code: int, out: str, err: str) -> DistmagicError:
    """Return the error of a call of `osmo` that failed; `what` are its words."""
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


def _document(out: str) -> dict[str, object]:
    """Return the JSON object of an answer, which warnings may stand before; {} where there is none."""
    begin = out.find("{")
    try:
        found = json.loads(out[begin:]) if begin >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(text: str) -> str:
    return sanitize.line(" ".join(text.split()))[:_MOST_CHARS]


# ---- the log


def log_line(line: str) -> tuple[str, str]:
    """Return the task of a line of a log, "" where it names none, and what the task wrote."""
    found = _LOG.match(line)
    return (found[1], line[found.end() :]) if found else ("", line)


class LogReader:
    """Reads lines, calls `put` with a task's number, an event and its size. Lines that came before are passed over.

    `finished` are the tasks whose last log line has come, `results` what ranks returned, by task and rank: only the
    first task writes what rank 0 returned, and no other one is kept.
    """

    def __init__(self, tasks: tuple[str, ...], put: Put) -> None:
        self.finished: set[int] = set()
        self.results: dict[tuple[int, int], bytes] = {}
        self._numbers = {name: number for number, name in enumerate(tasks)}
        self._put = put
        self._joining: dict[int, Joining] = {}
        self._last: dict[int, int] = {}  # the number of the last event, by task
        self._shown: dict[int, int] = {}  # how many lines of others, by task
        self._shown_now: dict[int, int] = {}  # and in this reading
        self._said: set[str] = set()  # what `osmo` itself has said
        self._offset = 0

    def begin(self) -> None:
        """Begin with the log's first line, again where it was read before."""
        self._joining = {}
        self._shown_now = {}

    def read(self, line: str) -> None:
        """Take one line. No line raises anything."""
        name, text = log_line(line)
        task = self._numbers.get(name)
        if task is None:
            # Show a line of no task, but for what `osmo` says around each reading.
            is_known = not text.strip() or _AROUND.match(text)
            begin = text[:_MOST_CHARS]
            if (
                not is_known
                and begin not in self._said
                and len(self._said) < _MOST_SAID
            ):
                self._said.add(begin)
                self._show(0, text)
            return
        part = log_lines.read(text)
        if part is None:
            # Show a line of a task that is none of ours, once: a log that is read again begins anew.
            now = self._shown_now[task] = self._shown_now.get(task, 0) + 1
            if now > self._shown.get(task, 0):
                self._shown[task] = now
                self._show(task, text)
            return
        whole = self._joining.setdefault(task, Joining()).add(part)
        if whole is None:
            return
        if part.kind == log_lines.RESULT:
            self._take_result(task, part.number, whole)
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

    def _take_result(self, task: int, rank: int, text: str) -> None:
        if (task, rank) != (0, 0) or len(text) > 2 * MOST_RESULT_BYTES:
            return
        try:
            self.results[task, rank] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            self._show(task, "the result of rank 0 came damaged")

    def _show(self, task: int, text: str) -> None:
        output = protocol.Output(
            rank=-1, stream="stdout", offset=self._offset, text=f"{text}\n"
        )
        self._offset += len(output.text.encode(errors="replace"))
        # Through the limits that count for all that a host says.
        _, event = DECODER.decode(protocol.encode(output))
        assert event is not None
        self._put(task, event, len(text))
