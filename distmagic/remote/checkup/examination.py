"""Reads data about this host for the doctor, in a moment and without changes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from distmagic.remote.checkup import gpu_health, nccl_ras
from distmagic.remote.system import facts, threads
from distmagic.remote.system.memory import text_of
from distmagic.remote.wire import protocol

_VARIABLES = re.compile(
    r"(NCCL|GLOO|OMP|MKL|TORCH|PET|UCX|FI)_\w+|CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|MASTER_(ADDR|PORT)|LD_PRELOAD"
)
_WORD_CHARS = 200
_NAME_S = 1.5  # time limit for a name server, which may be down
_CAP_IPC_LOCK = 1 << 14
_VERBS, _PORTS = Path("/dev/infiniband"), "/sys/class/infiniband"


def examine(packages: tuple[str, ...]) -> protocol.Examined:
    """Return the doctor's data about this host, and the versions of these packages for this
    interpreter.
    """
    hostname = socket.gethostname()
    variables = {}
    for name, value in os.environ.items():
        if _VARIABLES.fullmatch(name):
            variables[name] = value[:_WORD_CHARS]
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm_bytes = -1
    with contextlib.suppress(OSError):
        disk = os.statvfs("/dev/shm")
        shm_bytes = disk.f_blocks * disk.f_frsize
    if _capabilities() & _CAP_IPC_LOCK:
        locked = resource.RLIM_INFINITY
    driver, driver_cuda, gpus = gpu_health.gpus()
    return protocol.Examined(
        hostname=hostname,
        name_addresses=_addresses_of(hostname),
        mtus={
            path.parent.name: int(text)
            for path, text in _read_all("/sys/class/net", "*/mtu")
        },
        shm_bytes=shm_bytes,
        open_files=_limit(open_files),
        locked_bytes=_limit(locked),
        is_root=os.geteuid() == 0,
        infiniband=_infiniband(),
        variables=dict(sorted(variables.items())),
        packages=_versions(packages),
        torch_cuda=facts.of_torch("cuda", "") or "",
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
        xid=gpu_health.last_xid() if gpus else "",
        nccl=nccl_ras.errors() if gpus else "",
    )


def _addresses_of(name: str) -> tuple[str, ...] | None:
    """Return the addresses of a name, () if it has none; None if unknown, as no name server answers
    in time.
    """
    found = []

    def resolve() -> None:
        with contextlib.suppress(OSError):
            for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
                found.append(str(entry[4][0]))

    with contextlib.suppress(RuntimeError):  # the system allows no further thread
        thread = threads.begin("dns", resolve)
        thread.join(_NAME_S)
        if not thread.is_alive():
            return tuple(dict.fromkeys(found))
    return None


def _infiniband() -> dict[str, str]:
    """Return the state of each port of InfiniBand or RoCE: `mlx5_0/1` is `4: ACTIVE`.

    A container without these devices still sees their ports, and NCCL does not use them.
    """
    devices = _VERBS.glob("uverbs*")
    if not any(os.access(one, os.R_OK | os.W_OK) for one in devices):
        return {}
    return {
        f"{path.parents[2].name}/{path.parent.name}": text
        for path, text in _read_all(_PORTS, "*/ports/*/state")
    }


def _capabilities() -> int:
    """Return the effective capabilities of this process, as a bit mask; 0 if unknown."""
    status = text_of(Path("/proc/self/status"))
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


def _limit(value: int) -> int:
    return -1 if value == resource.RLIM_INFINITY else value


def _read_all(folder: str, pattern: str) -> Iterator[tuple[Path, str]]:
    """Yield small files of the kernel, in order, with the content of the readable ones."""
    for path in sorted(Path(folder).glob(pattern)):
        with contextlib.suppress(OSError):
            yield path, path.read_text().strip()


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each package, "" for one that is missing."""
    found = dict.fromkeys(packages, "")
    for name in packages:
        # One that is missing, or metadata that is damaged.
        with contextlib.suppress(Exception):
            found[name] = metadata.version(name) or ""
    return found
