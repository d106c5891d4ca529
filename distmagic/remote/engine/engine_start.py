"""Starts torchrun for an agent: by exec, or by fork if the agent itself comes from a template."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from distmagic.remote.engine import engine, forking, process_title
from distmagic.remote.system import processes


def start_engine(
    torchrun: Sequence[str], cwd: str, env: dict[str, str], umask: int
) -> tuple[int, int, int]:
    """Start torchrun with these flags, in its own session, with the user's `umask`.

    Return its pid, and the reading ends of its stdout and stderr. Raises OSError if it can't be
    started.
    """
    argv = [*torchrun, sys.path[0], "worker"]
    out, out_writing = os.pipe()
    err, err_writing = os.pipe()
    if forking.inherited.is_warm:
        pid = forking.fork(
            partial(_be_engine, argv, cwd, env, out_writing, err_writing, umask)
        )
    else:
        child = subprocess.Popen(
            [*processes.command("engine"), *argv],
            stdin=subprocess.DEVNULL,
            stdout=out_writing,
            stderr=err_writing,
            cwd=cwd,
            env=env,
            start_new_session=True,
            umask=umask,
        )
        # The agent reaps all its children itself; with a code set, Popen does not try.
        child.returncode = 0
        pid = child.pid
    os.close(out_writing)
    os.close(err_writing)
    return pid, out, err


def _be_engine(
    argv: list[str], cwd: str, env: dict[str, str], out: int, err: int, umask: int
) -> None:
    os.umask(umask)
    forking.reset_process({**env, **forking.inherited.variables}, out, err, cwd=cwd)
    process_title.show("engine", env[processes.MARK])
    sys.argv[:] = [sys.path[0], "engine", *argv]
    forking.exit_like_python(partial(engine.main, argv))
