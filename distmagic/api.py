"""The same from plain Python: one call from function to result; and the one session of this process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from typing import Any

from distmagic.connection.prompts import asker_of
from distmagic.payload.pack import pack_call
from distmagic.render.screen import Screen
from distmagic.request.hosts import Host, parse_hosts
from distmagic.request.spec import PAYLOAD_LIMIT_BYTES, Access, check_system, from_options
from distmagic.runner.outcome import Detached, Run
from distmagic.screens.choose import screen_for
from distmagic.session.session import Session


@cache
def session() -> Session:
    """Return this process's one session."""
    found = Session()
    atexit.register(found.close)
    return found


def run(
    fn: Callable[..., Any], *args: Any, hosts: str | Sequence[Host] | None = None,
    kwargs: Mapping[str, Any] | None = None, access: Access | None = None, screen: Screen | None = None,
    payload_limit_bytes: int = PAYLOAD_LIMIT_BYTES, **options: Any,
) -> Run | Detached:  # fmt: skip
    """Call `fn(*args, **kwargs)` on every rank of a job, from plain Python, and return the `Run`.

    With `detach=True` it returns a `Detached` as soon as the job runs.

    `hosts` is written as after `--hosts`; None means DISTMAGIC_HOSTS, else this machine. `options` are those of the
    magic under the names that `JobSpec` and `Access` have for them: nproc_per_node, nnodes (min, max), max_restarts,
    rdzv_backend, env (a dict), cwd, timeout_s, hang_timeout_s and so on; ssh_config, ssh_command, lease_s,
    connect_timeout_s, and python: one interpreter for all hosts, or a dict by host. They change `access`, if one is
    given. `screen` is where the run is shown; None takes the one that fits: widgets, a terminal, or plain lines.

    Raises what the magic raises: `SpecError`, `PayloadError`, a `HostError` (or `HostErrors`), a `RunError`, which
    carries the `Run`.
    """
    check_system()
    job, way = from_options(options, access or Access())
    text = hosts if hosts is not None else os.environ.get("DISTMAGIC_HOSTS", "")
    chosen = (parse_hosts(text) if text else ()) if isinstance(text, str) else tuple(text)
    with closing(asker_of()) as asker:
        reaching = session().reach(chosen, way, asker, job)
        try:
            payload = pack_call(partial(fn, *args, **(kwargs or {})), limit_bytes=payload_limit_bytes, labels={})
            screen = screen or screen_for()
        except BaseException:
            reaching.cancel()
            raise
        return session().launch(reaching, job, payload, screen)
