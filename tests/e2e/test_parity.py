"""A rank cannot tell warm from cold: the same probe, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import distmagic
from distmagic.api import session
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import RunError
from distmagic.outcome.run import Run
from distmagic.request.hosts import parse_hosts
from tests.e2e import runner
from tests.e2e.runner import as_value
from tests.lab import Lab

pytestmark = pytest.mark.needs("lab")

# Of each its own.
OF_THE_JOB = {
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "DISTMAGIC_JOB",
    "SSH_CLIENT",
    "SSH_CONNECTION",
    "TORCHELASTIC_ERROR_FILE",
}


def probe() -> dict[str, Any]:
    """Return all that a process can see of itself; under "drawn" what has to differ from rank to rank."""
    import atexit
    import gc
    import locale
    import logging
    import multiprocessing
    import os
    import random
    import resource
    import signal
    import subprocess
    import sys
    import threading
    import warnings

    main = sys.modules["__main__"]
    seen: dict[str, Any] = {
        "main": (main.__name__, sorted(vars(main)), main.__file__.rpartition("/")[2])
    }
    fds = [
        (fd, f"/proc/self/fd/{fd}")
        for fd in sorted(os.listdir("/proc/self/fd"), key=int)
    ]
    targets = [
        os.readlink(path).partition(":")[0]
        for fd, path in fds
        if os.path.exists(path) or fd < "3"  # noqa: PTH110
    ]
    # Sockets, the bundle.
    own = ("/tmp/distmagic-", os.path.expanduser("~/.distmagic/blobs/"))
    seen["fds"] = [target for target in targets if not target.startswith(own)]
    import numpy as np
    import torch

    status = dict(
        line.split(":\t", 1)
        for line in open("/proc/self/status").read().splitlines()  # noqa: SIM115
    )
    seen["status"] = {k: status[k] for k in ("Name", "Umask", "Threads", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "Groups",
                                            "CapEff", "NoNewPrivs", "Cpus_allowed")}  # fmt: skip
    seen["cmdline"] = open("/proc/self/cmdline").read().rstrip("\0").split("\0")  # noqa: SIM115
    seen["mark"] = (
        f"DISTMAGIC_JOB={os.environ['DISTMAGIC_JOB']}\0"
        in open("/proc/self/environ").read()  # noqa: SIM115
    )
    seen["parent"] = open(f"/proc/{os.getppid()}/cmdline").read().split("\0")[3]  # noqa: SIM115
    seen["threads"] = (
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        threading.active_count(),
    )
    seen["main thread"] = (
        threading.current_thread() is threading.main_thread(),
        threading.main_thread().name,
    )
    seen["environ"] = dict(os.environ)
    lines = subprocess.run(
        ["env"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    seen["inherited"] = {line.partition("=")[0] for line in lines}
    seen["argv"] = (
        sys.argv,
        sys.orig_argv,
        sys.executable,
        sys.path[1:],
        str(sys.flags),
        sys.getrecursionlimit(),
    )
    seen["signals"] = {
        int(n): str(signal.getsignal(n)).partition(" at 0x")[0]
        for n in signal.valid_signals()
    }
    seen["mask"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    seen["cwd"] = os.getcwd()  # noqa: PTH109
    seen["limits"] = [
        resource.getrlimit(getattr(resource, n))
        for n in dir(resource)
        if n.startswith("RLIMIT_")
    ]
    seen["session"] = (
        os.getsid(0) == os.getpid(),
        os.getpgid(0) == os.getpid(),
        os.nice(0),
    )
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        seen[name] = (
            type(stream).__name__, type(stream.buffer).__name__, stream.encoding, stream.errors, stream.line_buffering,
            stream.write_through, stream.newlines, stream.name, stream.mode, stream.fileno(), stream.isatty(),
            stream.seekable(), stream is getattr(sys, f"__{name}__"),
        )  # fmt: skip
    seen["gc"] = (gc.isenabled(), gc.get_threshold(), gc.callbacks, len(gc.garbage))
    seen["words"] = (
        locale.setlocale(locale.LC_ALL),
        sys.getfilesystemencoding(),
        str(logging.root.handlers),
    )
    seen["hooks"] = (
        sys.excepthook is sys.__excepthook__,
        sys.gettrace(),
        sys.getprofile(),
        str(warnings.filters),
    )
    seen["process"] = (
        multiprocessing.current_process().name,
        multiprocessing.parent_process(),
    )
    seen["torch"] = (
        torch.cuda._is_in_bad_fork(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )
    seen["drawn"] = (
        torch.initial_seed(), torch.rand(1).item(), random.random(), int(np.random.randint(1 << 60)), os.urandom(4),  # noqa: NPY002
    )  # fmt: skip
    atexit.register(print, "at exit")
    sys.stdout.write("no newline at the end")
    return seen


def both(
    lab: Lab, hosts: str, fn: Callable[..., Any], *args: Any
) -> tuple[Run | RunError, Run | RunError]:
    """Return how a function runs cold, and warm: from a template that was used before."""

    def outcome(**way: Any) -> Run | RunError:
        access = runner.access(lab, **way)
        try:
            return distmagic.run(
                as_value(fn), *args, hosts=hosts, access=access, screen=runner.Watch()
            )
        except RunError as error:
            return error

    if not is_warm(lab, hosts):
        outcome(warm_idle_s=900.0)
    warm = outcome(warm_idle_s=900.0)
    assert is_warm(lab, hosts), "else this compares nothing"
    return outcome(cold=True), warm


def is_warm(lab: Lab, hosts: str) -> bool:
    way = runner.access(lab, warm_idle_s=900.0)
    reaching = session().reach(parse_hosts(hosts), way, NotebookAsker(can_ask=False))
    return any(session().housekeeping.templates(reaching))


def test_a_probe_sees_the_same(lab):
    cold, warm = both(lab, "dm1:2,dm2:2", probe)
    try:
        assert isinstance(cold, Run)
        assert isinstance(warm, Run)
        drawn = []
        for rank in range(4):
            fresh, forked = cold.results[rank], warm.results[rank]
            drawn += [fresh.pop("drawn"), forked.pop("drawn")]
            for one in (fresh, forked):
                assert one["mark"]
                for name in OF_THE_JOB:
                    one["environ"].pop(name, None)
            assert forked == fresh
            assert (
                warm.logs(rank) == cold.logs(rank) == "no newline at the endat exit\n"
            )
        for values in zip(*drawn, strict=True):
            assert len(set(values)) == 8, "each rank of each run draws its own numbers"
    finally:
        session().close()
    lab.assert_clean()
