"""Distinguishes a rank's success, its own failure, and a failure caused by another rank's. Pure.

It also has advice for common failures. The patterns match error messages of torch, CUDA and HIP.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from distmagic.failures import network_errors
from distmagic.remote.wire.protocol import Ended, Exit

_ECHOES = (
    "closed by peer",
    "remote peer closed",
    "connection was likely closed",
    "reset by peer",
    "broken pipe",
    "socket closed",
    "pair closure",
    "remote process exited",
    "ncclremoteerror",
)
# Advice for unclear errors of torch; `{host}` is the rank's host.
_CURES = (
    (
        r"(?:CUDA|HIP) (?:error: )?out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED",
        (
            "A GPU of {host} has no memory left. Use smaller batches, or fewer ranks on that host (--nproc-per-node); "
            "nvidia-smi on that host lists the processes that use it."
        ),
    ),
    (
        r"(?:CUDA|HIP) error: device-side assert",
        (
            "A kernel on a GPU of {host} found a value that is not allowed, for example an index out of range; stderr names "
            "the assertion. The traceback may show a later line than the cause: run it again with "
            "--env CUDA_LAUNCH_BLOCKING=1, which shows the cause."
        ),
    ),
    (
        r"(?:CUDA|HIP) error: invalid device ordinal",
        (
            "A rank on {host} asked for a GPU that it does not have. Use LOCAL_RANK, not RANK: "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])). If the host has fewer GPUs than ranks, leave the number '
            "after its name out: then it gets a rank for each GPU."
        ),
    ),
    (
        r"Duplicate GPU detected",
        (
            "Two ranks use one GPU, which NCCL refuses. Before init_process_group, each rank takes its own: "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])). Where there are fewer GPUs than ranks, give a host a rank '
            "for each GPU, or use the backend gloo."
        ),
    ),
    (
        (
            r"No (?:CUDA|HIP) GPUs are available|no (?:CUDA|ROCm)-capable device|Found no NVIDIA driver"
            r"|no GPUs found"
        ),
        (
            "The ranks on {host} see no GPU. Check CUDA_VISIBLE_DEVICES on that host, and that nvidia-smi lists one; or ask "
            "torch.cuda.is_available() before a GPU is used."
        ),
    ),
    (
        r"doesn't have NCCL built in",
        (
            "The torch on {host} has no NCCL, which is for NVIDIA's GPUs. Write init_process_group() without a backend, or "
            'with "gloo"; or name a Python of that host whose torch has CUDA: --python.'
        ),
    ),
    (
        r"Torch not compiled with CUDA enabled|has no attribute '_cuda_",
        (
            "The torch on {host} was built without CUDA. Ask torch.cuda.is_available() before a GPU is used; or name a Python "
            "of that host whose torch has CUDA: --python."
        ),
    ),
    (
        r"Default process group has not been initialized",
        (
            "This rank had no process group yet. Call torch.distributed.init_process_group() at the start of the function that "
            "the ranks run."
        ),
    ),
    (
        r"EADDRINUSE|address already in use",
        (
            "The port is taken on {host}, by another program or by a second process group on the same port. Leave MASTER_ADDR "
            "and MASTER_PORT as torchrun has set them, or name a free port: --master-port."
        ),
    ),
    (
        r"^(?:bdb\.)?BdbQuit\b|EOF when reading a line|^EOFError:?\s*$",
        (
            "breakpoint(), pdb or input() got no answer: somebody typed q, or nobody can type in this run. Run it in an open "
            "notebook, or in a terminal: distmagic run."
        ),
    ),
    (
        (
            r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for"
            r"|(?:allreduce|broadcast|barrier|all_?gather|reduce_?scatter)\w* .{0,80}timed out"
        ),
        (
            "A rank waited longer than the time limit in a collective call. Another rank is slow, or did not make that call.\n"
            "Run again with a --hang-timeout below that limit, such as 5m. This flag shows where each rank waits, and ends the run."
        ),
    ),
)
_ASSERTION = re.compile(r"Assertion `[^`']{1,200}['`] failed")
_NAME = re.compile(r"NameError: (?:global )?name '(?P<name>\w{1,100})' is not defined")


def is_good(end: Ended) -> bool:
    """Whether the rank returned, or exited with code 0."""
    return end.outcome == "returned" or (end.outcome == "exited" and end.code == 0)


def is_echo(end: Ended, *, has_lost_peer: bool) -> bool:
    """Whether the rank failed because a peer was gone, judged by messages of gloo, NCCL and torch's
    store.

    The user's code may have raised another exception from theirs: then the traceback has both.
    NCCL's watchdog aborts the process. `has_lost_peer`: stderr had its message.
    """
    if _is_by(end, signal.SIGABRT):
        return has_lost_peer
    if end.failure is None:
        return False
    message = end.failure.message.lower()
    # Indented lines are the user's source.
    chained = (line for line in end.failure.traceback.splitlines() if line[:1].strip())
    return any(word in message for word in _ECHOES) or any(
        map(network_errors.has_lost_peer, chained)
    )


def writes_of_lost_peer(text: str) -> bool:
    """Whether a text has a line in which NCCL or gloo reports that a peer was gone."""
    if "NCCL" not in text and "gloo" not in text:
        return False
    return any(map(network_errors.has_lost_peer, text.splitlines()))


def is_by_sigterm(end: Ended) -> bool:
    """Whether SIGTERM ended the rank: torchrun and the agent send it."""
    return _is_by(end, signal.SIGTERM)


def is_by_sigint(end: Ended) -> bool:
    """Whether SIGINT ended the rank, or its cell: the agent sends it for a notebook."""
    return _is_by(end, signal.SIGINT)


def is_by_sigkill(end: Ended) -> bool:
    """Whether SIGKILL ended the rank: the system without memory, or torchrun and the agent after a
    SIGTERM without effect.
    """
    return _is_by(end, signal.SIGKILL)


def _is_by(end: Ended, number: signal.Signals) -> bool:
    return end.outcome == "signalled" and end.code == -number


def has_failed_afterwards(end: Ended | None, exit_: Exit | None) -> bool:
    """Whether a rank's process failed by itself after the rank had succeeded."""
    if end is None or exit_ is None or not is_good(end):
        return False
    return exit_.code not in (0, -signal.SIGTERM)


def cure_in_words(text: str, host: str, *, stays: bool = False) -> str:
    """Return advice for an unclear error of torch, or for a missing name; "" for none.

    `stays`: the rank keeps the names of earlier cells.
    """
    text = text[:20_000]
    for pattern, words in _CURES:
        if re.search(pattern, text, re.IGNORECASE):
            return words.format(host=host)
    found = _NAME.search(text)
    if found is None:
        return ""
    usual = "The usual cause is a missing import, or a misspelled name."
    if stays:
        return f"{usual} No earlier cell has defined {found['name']} on this rank."
    return (
        f"{usual} If an earlier run has made {found['name']}: ranks are "
        "new processes in each cell, so return it from that run and pass it on."
    )


def assertion_in_words(text: str, stderr: Iterable[str]) -> str:
    """Return the failed assertion of a GPU kernel, "" for other errors: CUDA only writes it to
    stderr.
    """
    if "device-side assert" in text:
        for line in stderr:
            if found := _ASSERTION.search(line):
                return f"{found[0]}."
    return ""
