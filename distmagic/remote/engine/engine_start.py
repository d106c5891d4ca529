"""How an agent starts torchrun: by exec, or by fork where the agent itself comes from a template."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from distmagic.remote.engine import engine, forking, process_title
from distmagic.remote.system import processes


def start_engine(torchrun: Sequence[str], cwd: str, env: dict[str, str], umask: int) -> tuple[int, int, int]:
    """Return the pid of torchrun, in its own session with the user's `umask`, and the reading ends of its stdout and stderr."""
    argv = [*torchrun, sys.path[0], "worker"]
    pipes = [os.pipe() for _ in ("stdout", "stderr")]
    writing = [pipe[1] for pipe in pipes]
    if forking.inherited.is_warm:
        pid = forking.fork(partial(_be_engine, argv, cwd, env, (writing[0], writing[1], umask)))
    else:
        child = subprocess.Popen(
            [sys.executable, "-u", sys.path[0], "engine", *argv], stdin=subprocess.DEVNULL, stdout=writing[0],
            stderr=writing[1], cwd=cwd, env=env, start_new_session=True, umask=umask,
        )  # fmt: skip
        child.returncode = 0  # the agent reaps all its children; Popen must not try
        pid = child.pid
    for fd in writing:
        os.close(fd)
    return pid, pipes[0][0], pipes[1][0]


def _be_engine(argv: list[str], cwd: str, env: dict[str, str], told: tuple[int, int, int]) -> None:
    out, err, umask = told
    os.umask(umask)
    forking.settle({**env, **forking.inherited.variables}, (os.open(os.devnull, os.O_RDONLY), out, err), cwd=cwd)
    process_title.show("engine", env[processes.MARK])
    sys.argv[:] = [sys.path[0], "engine", *argv]
    forking.leave(partial(engine.main, argv))
