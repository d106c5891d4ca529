"""A host with GPUs of NVIDIA, for every process that a log-in starts: as many as its own library says."""

from __future__ import annotations

from pathlib import Path

from tests.lab.clock import compiled
from tests.lab.host import LabHost

_FOLDER = ".nvml"


def give_nvidia_gpus(host: LabHost, count: int) -> None:
    """Have a host answer that it has so many GPUs, from the next log-in on."""
    folder = host.home / _FOLDER
    folder.mkdir()
    source = Path(__file__).with_suffix(".c")
    (folder / "libnvidia-ml.so.1").write_bytes(compiled(source))
    (host.home / ".bashrc").write_text(
        f"export LD_LIBRARY_PATH=$HOME/{_FOLDER} NVML_GPUS={count}\n"
    )
