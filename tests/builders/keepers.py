"""A keeper that runs on this machine as if it were a node of a job, and a transport through its ushers."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

from distmagic.transports import Process, local, program_text
from tests.lab.waiting import HANG_S, wait_until


class LocalKeeper:
    """A keeper inside a `with`, of a job that no Slurm knows. It implements `Transport`: a process a start."""

    warnings: tuple[str, ...] = ()

    def __init__(
        self, *, leads: bool = True, first_lease_s: float = 60, lease_s: float = 60, idle_s: float = 60,
        step: tuple[str, ...] = (), needs_others: bool = True, log: IO[str] | None = None, node: str = "here",
    ) -> None:  # fmt: skip
        """Each keeper removes what dead ones of its `node` have left, also those of a test that runs beside this one."""
        self.job = str(secrets.randbelow(10**9))
        self.folder = Path(f"/tmp/distmagic-{os.getuid()}-slurm.{self.job}.{node}")
        self._node = node
        self._settings = {
            "leads": leads, "first_lease_s": first_lease_s, "lease_s": lease_s, "idle_s": idle_s, "step": step,
            "needs_others": needs_others,
        }  # fmt: skip
        self._log = log
        self._local = local.LocalTransport()

    def __enter__(self) -> LocalKeeper:  # noqa: PYI034 - typing.Self is of Python 3.11
        node = {"SLURM_JOB_ID": self.job, "SLURMD_NODENAME": self._node}
        python, *words = program_text.command(sys.executable, "keeper", self._settings)
        # Without any package: on a node there is none of ours before the bundle has come.
        self.process = subprocess.Popen(
            [python, "-I", "-S", *words], env={**os.environ, **node},
            stdin=subprocess.PIPE, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._local.close()
        self.process.terminate()
        self.process.wait(HANG_S)
        assert self.process.stdin is not None
        self.process.stdin.close()

    def usher(self, request: dict[str, object], patience_s: float = 20) -> Process:
        """Start one usher, as a step of srun would."""
        words = program_text.command(
            sys.executable,
            "usher",
            {"job": self.job, "patience_s": patience_s, **request},
        )
        return self._local.start(
            (
                "env",
                f"SLURMD_NODENAME={self._node}",
                "SLURM_LAUNCH_NODE_IPADDR=10.0.0.9",
                *words,
            )
        )

    def start(self, argv: tuple[str, ...]) -> Process:
        """Start `argv` through an usher."""
        return self.usher({"argv": argv})

    def close(self) -> None:
        """Let go of all pipes."""
        self._local.close()

    def wait_ended(self) -> int:
        """Return the exit code of the keeper, which must end by itself."""
        wait_until(lambda: self.process.poll() is not None, "the keeper to end")
        assert not self.folder.exists()
        return self.process.returncode


def request_of(command: tuple[str, ...]) -> dict[str, object]:
    """Return the request in a command of `program_text`."""
    found = json.loads(command[-1])
    assert isinstance(found, dict)
    return found
