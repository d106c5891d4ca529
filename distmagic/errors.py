"""Every error a user can meet, by whose turn it is to act.

- the user's request: `UsageError` and under it `NoResult`; `PayloadError`
- the hosts: `HostError` and under it `Unreachable`, `HostKeyError`, `AuthenticationError`, `PreflightError`;
  `AllocationEnded`
- the wire: `WireError` and under it `ConnectionLost`, `ProtocolError`
- the run: `RunError` and under it `WorkerFailed`, `RendezvousFailed`, `NodeLost`, `Hung`, `Cancelled`, `TimedOut`

A message says what happened and to which host or rank; the hint says what to do now. Exceptions of foreign
libraries become one of these in the one file that imports the library.
"""

from __future__ import annotations

from distmagic import sanitize


class DistmagicError(Exception):
    """Base of all errors of distmagic: a message, and a hint with the cure."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = sanitize.lines(message)  # there may be words of a host in it
        self.hint = sanitize.lines(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines instead of a traceback through distmagic's own frames."""
        lines = [f"{type(self).__name__}: {self.message}"]
        if self.hint:
            lines.append(self.hint)
        return lines


class UsageError(DistmagicError):
    """The request itself is wrong: a flag, a host list, a hostfile, a cell without a call."""


class NoResult(UsageError, KeyError):
    """A rank has no return value, or the run has no such rank."""


class PayloadError(DistmagicError):
    """The function or a value that it uses can't travel to the hosts."""


class PayloadTooLarge(PayloadError):
    """More than the limit would be sent; the message names the largest variables."""


class HostError(DistmagicError):
    """A host can't be used. `host` is the name the user typed.

    `step` is the first step of the connection that failed, if it is known: name, TCP, banner, key, log-in.
    """

    step = ""

    def __init__(self, host: str, message: str, hint: str = "") -> None:
        super().__init__(f"{host}: {message}", hint)
        self.host = host


class Unreachable(HostError):
    """No SSH connection: unknown name, refused port, no answer."""


class HostKeyError(HostError):
    """The host's key is unknown or has changed."""


class AuthenticationError(HostError):
    """The host refused every key and every answer of yours."""


class PreflightError(HostError):
    """The host was reached but can't run the job: Python, torch, disk, a directory."""


class AllocationEnded(DistmagicError):
    """The scheduler's job that held the hosts has ended: a time limit, scancel, a node that failed."""


class HostErrors(DistmagicError):
    """Several hosts can't be used; `errors` holds one error for each."""

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
    """A host sent something that is not of our protocol."""


class RunError(DistmagicError):
    """The run itself failed; `run` is the `Run` so far, with states, logs and metrics.

    `stacks` has the stacks of the ranks if the run stood still, identical ones once; "" if none were collected.
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
    """A rank raised, exited with a code or was ended by a signal.

    `remote_traceback` is the text of its traceback on the host ("" where there was none).
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
        """IPython shows what happened and the user's own line; the view above has the whole traceback."""
        first, *rest = super()._render_traceback_()
        return [first, *_own_line(self.remote_traceback), *rest]


def _own_line(traceback: str) -> list[str]:
    """Return where a traceback's innermost frame of the user's own code is, and that line, marked; [] for none.

    Own code is what is in no library: no file below the directories in which Python keeps its own and others' packages.
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
    """The nodes did not find each other; the message names those that are missing."""


class NodeLost(RunError):
    """A host's agent or connection ended while its ranks were running."""


class Hung(RunError):
    """No rank had advanced for the time of `--hang-timeout`. The message names where the ranks were."""


class TimedOut(RunError):
    """The run was stopped because `--timeout` ran out. If it had stood still, the message names where the ranks were."""


class Cancelled(RunError, KeyboardInterrupt):
    """The user interrupted the run; every rank on every host was stopped."""
