"""All errors that a user can meet, grouped by where the fault is.

- the user's request: `UsageError` and under it `NoResult`; `PayloadError`
- the hosts: `HostError` and under it `Unreachable`, `HostKeyError`, `AuthenticationError`,
  `PreflightError`; `AllocationEnded`
- the connection: `WireError` and under it `ConnectionLost`, `ProtocolError`
- the run: `RunError` and under it `WorkerFailed`, `RendezvousFailed`, `NodeLost`, `Hung`,
  `Cancelled`, `TimedOut`

A message states what happened, and on which host or rank. The hint states what to do next. Each
other library is imported in one module, which converts the library's exceptions to these.
"""

from __future__ import annotations

from distmagic import sanitize


class DistmagicError(Exception):
    """Base class of all errors of distmagic: a message, and a hint with the cure."""

    topic = ""  # the page of the manual that has more about such errors

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = sanitize.lines(message)  # it may contain text from a host
        self.hint = sanitize.lines(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback through distmagic's own
        frames.
        """
        lines = [f"{type(self).__name__}: {self.message}"]
        if self.hint:
            lines.append(self.hint)
        if self.topic and "%distributed help" not in str(self):
            lines.append(f"More: %distributed help {self.topic}")
        return lines


class UsageError(DistmagicError):
    """The request itself is wrong: a flag, a host list, a hostfile, a cell without a call."""


class NoResult(UsageError, KeyError):
    """A rank has no return value, or the run has no such rank."""


class PayloadError(DistmagicError):
    """The function, or a value that it uses, can't be sent to the hosts."""

    topic = "cell"


class PayloadTooLarge(PayloadError):
    """The data to send exceeds the limit; the message names the largest variables."""


class HostError(DistmagicError):
    """A host can't be used. `host` is its name as the user typed it.

    `step` is the step of the connection that failed, if known: name, TCP, banner, key, log-in.
    """

    step = ""
    topic = "troubles"

    def __init__(self, host: str, message: str, hint: str = "") -> None:
        super().__init__(f"{host}: {message}", hint)
        self.host = host


class Unreachable(HostError):
    """No SSH connection: unknown name, refused port, no answer."""


class HostKeyError(HostError):
    """The host's key is unknown or has changed."""


class AuthenticationError(HostError):
    """The host rejected every key, password and other answer of the user."""


class PreflightError(HostError):
    """The host was reached but can't run the job: Python, torch, disk, a directory."""


class AllocationEnded(DistmagicError):
    """The scheduler's job that held the hosts has ended: by its time limit, by scancel, or because
    a node failed.
    """


class HostErrors(DistmagicError):
    """Several hosts can't be used; `errors` holds one error for each."""

    topic = "troubles"

    def __init__(self, errors: tuple[DistmagicError, ...]) -> None:
        self.errors = errors
        lines = [f"{len(errors)} hosts can't be used; nothing was started."]
        for error in errors:
            indented = str(error).replace("\n", "\n  ")
            lines.append(f"- {indented}")
        super().__init__("\n".join(lines))


class WireError(DistmagicError):
    """The connection between the notebook and a host broke."""


class ConnectionLost(WireError):
    """The connection to a host ended before the run did."""


class ProtocolError(WireError):
    """A host sent data that violates distmagic's protocol."""


class RunError(DistmagicError):
    """The run itself failed; `run` is the `Run` up to the failure, with states, logs and metrics.

    `stacks` has the stack traces of the ranks if the run hung, identical ones only once; "" if none
    were collected.
    """

    def __init__(self, message: str, hint: str = "", stacks: str = "") -> None:
        super().__init__(message, hint)
        self.run: object | None = None
        self.stacks = sanitize.lines(stacks)

    def __str__(self) -> str:
        return "\n".join(
            part for part in (self.stacks, self.message, self.hint) if part
        )

    def _render_traceback_(self) -> list[str]:
        return [*self.stacks.splitlines(), *super()._render_traceback_()]


class WorkerFailed(RunError):
    """A rank raised an exception, exited with an error code, or was killed by a signal.

    `remote_traceback` is the text of its traceback on the host, "" if it left none.
    """

    def __init__(
        self, message: str, hint: str = "", remote_traceback: str = ""
    ) -> None:
        super().__init__(message, hint)
        self.remote_traceback = sanitize.lines(remote_traceback)

    def __str__(self) -> str:
        parts = (self.remote_traceback.rstrip(), self.message, self.hint)
        return "\n".join(part for part in parts if part)

    def _render_traceback_(self) -> list[str]:
        """Return what happened and the failing line of the user's code; the view above shows the
        whole traceback.
        """
        first, *rest = super()._render_traceback_()
        return [first, *_own_line(self.remote_traceback), *rest]


def _own_line(traceback: str) -> list[str]:
    """Return the location and the marked line of the innermost frame of the user's code in a
    traceback; [] if it has none.

    User code is every file outside the directories of Python's standard library and of installed
    packages.
    """
    lines = traceback.splitlines()
    for index in range(len(lines) - 2, -1, -1):
        line = lines[index]
        is_frame = line.startswith(('  File "', "  Cell In["))
        is_library = (
            "site-packages" in line or "dist-packages" in line or "/lib/python3" in line
        )
        if is_frame and not is_library and lines[index + 1].startswith("    "):
            return [line, f"--> {lines[index + 1].strip()}"]
    return []


class RendezvousFailed(RunError):
    """The nodes did not meet in the rendezvous; the message names the missing ones."""

    topic = "rendezvous"


class NodeLost(RunError):
    """The agent on a host, or the connection to it, ended while its ranks were running."""

    topic = "troubles"


class Hung(RunError):
    """No rank advanced for `--hang-timeout`. The message shows where the ranks were."""

    topic = "troubles"


class TimedOut(RunError):
    """The run was stopped after `--timeout`. If it hung, the message shows where the ranks were.

    Also: ranks that stay ended after the time of `--stay-idle`.
    """


class Cancelled(RunError, KeyboardInterrupt):
    """The user interrupted the run; every rank on every host was stopped."""
