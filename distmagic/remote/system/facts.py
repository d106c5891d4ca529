"""Gathers the facts about a host for a plan, in some milliseconds, without importing torch or using
a device.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distmagic.remote.system import logout
from distmagic.remote.system.memory import text_of
from distmagic.remote.wire import protocol

_TRIES = 10
_LOOPBACK = "lo"
_TEXT_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE; other texts of NVML are shorter


def gather(home: Path, host_id: str) -> protocol.Facts:
    """Return the facts about this host; `home` and `host_id` come from `places`."""
    address, interface = route("")
    free_bytes, write_error = 0, ""
    try:
        free_bytes = shutil.disk_usage(home).free
    except OSError as error:  # an error of the home's file server
        write_error = str(error)
    return protocol.Facts(
        executable=sys.executable,
        torch=torch_version(),
        gpus=count_gpus(),
        cpus=len(os.sched_getaffinity(0)),  # those that this process may use
        address=address,
        interface=interface,
        free_port=free_port(address),
        free_bytes=free_bytes,
        write_error=write_error,
        state_dir=str(home),
        host_id=host_id,
        logout=logout.warning(),
    )


def torch_version() -> str | None:
    """Return the version of the torch that this interpreter would import, read from its files; None
    without torch.
    """
    return of_torch("__version__", "unknown")


def of_torch(name: str, unknown: str) -> str | None:
    """Return the value of a name in torch's `version.py`, `unknown` if it is missing; None without
    torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    text = text_of(Path(spec.origin).parent / "version.py")
    found = re.search(rf"^{name}\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return found.group(1) if found else unknown


def count_gpus() -> int:
    """Return the number of GPUs that a rank could use.

    NVML counts NVIDIA's, the kernel's topology counts AMD's.
    """
    found = _count_nvidia()
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not found:
        found = _count_amd()
        mask = os.environ.get(
            "HIP_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES", mask)
        )
    return visible(found, mask)


def visible(found: int, mask: str | None) -> int:
    """Return how many of `found` devices a mask like CUDA_VISIBLE_DEVICES leaves. None is no mask.

    As in CUDA, the list ends at the first invalid entry, such as "-1" or "NoDevFiles". A list that
    names a device twice leaves none. A process sees at most one MIG instance of a GPU.
    """
    if mask is None:
        return found
    names = []
    for part in mask.split(","):
        word = part.strip()
        is_index = re.fullmatch(r"\d+", word)
        # Otherwise it may be the start of a device's UUID.
        if int(word) >= found if is_index else not word.startswith(("GPU-", "MIG-")):
            break
        name = str(int(word)) if is_index else word
        if name in names:
            return 0
        names.append(name)
        if name.startswith("MIG-"):
            break
    return min(len(names), found)  # a UUID may be that of a device that is not here


def nvidia_uuids() -> tuple[str, ...]:
    """Return the UUIDs of NVIDIA's GPUs, in the order of NVML's indices; () for none.

    A GPU has the same UUID in all containers and allocations of this machine. The index replaces a
    UUID that can't be read.
    """
    with open_nvml() as nvml:
        return tuple(uuid for uuid, _ in nvml_gpus(nvml))


def _count_nvidia() -> int:
    with open_nvml() as nvml:
        return _count_nvml(nvml)


class _Memory(ctypes.Structure):
    """NVML's `nvmlMemory_t`, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _MemoryV2(ctypes.Structure):
    """NVML's `nvmlMemory_v2_t`, in bytes: what the driver reserves is not among the used."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def nvml_memory(nvml: Any, handle: ctypes.c_void_p) -> tuple[int, int] | None:
    """Return the used and the total memory of a GPU in bytes, as nvidia-smi prints them; None if
    the library gives none.
    """
    new = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | 2 << 24)
    if ask_nvml(nvml, "nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(new)):
        return new.used, new.total
    old = _Memory()
    if ask_nvml(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(old)):
        return old.used, old.total
    return None


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield NVIDIA's library NVML, None without a library or driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def ask_nvml(nvml: Any, name: str, *arguments: object) -> bool:
    """Return whether the library has this function, and the call succeeds."""
    function = getattr(nvml, name, None)
    return function is not None and function(*arguments) == 0


def nvml_number(nvml: Any, name: str, *arguments: object) -> int | None:
    """Return the number that a function of the library gives; None if it gives none."""
    found = ctypes.c_ulonglong()  # the widest of them; all hosts are little-endian
    is_given = ask_nvml(nvml, name, *arguments, ctypes.byref(found))
    return found.value if is_given else None


def nvml_text(nvml: Any, name: str, *arguments: object) -> str:
    """Return the text that a function of the library gives; "" if it gives none."""
    found = ctypes.create_string_buffer(_TEXT_BYTES)
    is_given = ask_nvml(nvml, name, *arguments, found, _TEXT_BYTES)
    return found.value.decode(errors="replace") if is_given else ""


def nvml_gpus(nvml: Any) -> list[tuple[str, ctypes.c_void_p]]:
    """Return the UUID and the handle of each GPU known to the library; [] without one."""
    found = []
    for number in range(_count_nvml(nvml)):
        handle = ctypes.c_void_p()
        ask_nvml(nvml, "nvmlDeviceGetHandleByIndex_v2", number, ctypes.byref(handle))
        uuid = nvml_text(nvml, "nvmlDeviceGetUUID", handle) if handle else ""
        found.append((uuid or str(number), handle))
    return found


def _count_nvml(nvml: Any) -> int:
    return nvml_number(nvml, "nvmlDeviceGetCount_v2") or 0


def _count_amd() -> int:
    count = 0
    for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        # A container sees devices that it may not use, and can't read their properties. A CPU has
        # no simd.
        if re.search(r"^simd_count [1-9]", text_of(node), re.MULTILINE):
            count += 1
    return count


def route(peer: str) -> tuple[str, str]:
    """Return this host's own address on the route to `peer`, and the network interface that has the
    address.

    Without a `peer` ("") the address is the one to which the SSH client has connected. If that is a
    loopback address or no longer exists, the address is the one towards DISTMAGIC_CLIENT, such as a
    scheduler's log-in node. The interface is "" if there is none. Raises OSError if no route leads
    to `peer`.
    """
    address = _address_towards(peer) if peer else _address_of_contact()
    return address, interface_of(address)


def _address_of_contact() -> str:
    # Client address, client port, server address, server port.
    words = os.environ.get("SSH_CONNECTION", "").split()
    dialled = words[2] if len(words) == 4 else ""
    interface = interface_of(dialled)
    if interface and interface != _LOOPBACK:
        return dialled
    # For a scheduler's node, the address of the log-in node; for a host behind a forwarded port, an
    # address outside.
    client = os.environ.get("DISTMAGIC_CLIENT", "")
    if client:
        with suppress(OSError):
            return _address_towards(client)
    # No SSH, or an outdated variable: its address is gone, as on a laptop that changed networks.
    return dialled if interface else "127.0.0.1"


def _address_towards(peer: str) -> str:
    with socket.socket(family_of(peer), socket.SOCK_DGRAM) as probe:
        # UDP: nothing is sent, the kernel only chooses the address.
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family: IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def free_port(address: str) -> int:
    """Return a port of `address` that is free for TCP (torch's store) and for UDP (heartbeats).

    Raises OSError if the address is not this host's own.
    """
    family = family_of(address)
    for _ in range(_TRIES):
        with (
            socket.socket(family) as probe,
            socket.socket(family, socket.SOCK_DGRAM) as other,
        ):
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
            with suppress(OSError):
                other.bind((address, port))
                break
    return port


def reserve_port(address: str) -> tuple[int, socket.socket]:
    """Return a free port that no other distmagic run on this host uses, and a socket that reserves
    it while it is open.

    torchrun binds the port only later. Until then its number is reserved by a name in the abstract
    namespace of unix sockets, which all users of a network namespace share. No process can connect
    to it. Raises OSError as `free_port`.
    """
    for _ in range(_TRIES):
        port = free_port(address)
        with suppress(OSError):  # another run has it
            return port, named_socket(f"distmagic-port-{port}")
    return port, socket.socket(socket.AF_UNIX)


def named_socket(name: str) -> socket.socket:
    """Return a socket with a name in the abstract namespace. Raises OSError if another has it."""
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(f"\0{name}")
    except OSError:
        made.close()
        raise
    return made


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_uint16), ("data", ctypes.c_uint8 * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (  # the start of struct ifaddrs, getifaddrs(3)
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.POINTER(_SockAddr)),
)


def interface_of(address: str) -> str:
    """Return the interface that has `address`; "" if there is none."""
    if not address:
        return ""
    libc = ctypes.CDLL(None)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return ""
    wanted = address.partition("%")[0]
    try:
        entry = first
        while entry:
            item = entry.contents
            if item.addr and _address_in(item.addr.contents) == wanted:
                return str(item.name.decode().partition(":")[0])
            entry = item.next
        return ""
    finally:
        libc.freeifaddrs(first)


def _address_in(found: _SockAddr) -> str:
    raw = bytes(found.data)
    if found.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[2:6])
    if found.family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, raw[6:22])
    return ""
