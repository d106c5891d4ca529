"""A real IPython kernel in which cells are run and timed, as a notebook would."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A tool that kills by name finds nothing but its own here, and what it leaves behind ends with its kernel.
OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A cell that was run: when it was sent (seconds since the epoch), how long it took, what it showed."""

    began_at: float
    took_s: float
    shown: str


class CellFailed(RuntimeError):
    """A cell raised; the text is its traceback."""


class Kernel:
    """A kernel that lives in a `with`. `prefix` are words before the Python's command line."""

    def __init__(
        self,
        python: Path | str,
        cwd: Path,
        env: Mapping[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        self._manager = KernelManager()
        argv = [
            *prefix,
            str(python),
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
        ]
        self._manager._kernel_spec = KernelSpec(
            argv=argv, display_name="bench", language="python"
        )
        self._cwd, self._env = str(cwd), dict(env)
        # Whatever it has started ends with it.
        self._is_apart = tuple(prefix) == OWN_PROCESSES
        self._client: Any = None

    def __enter__(self) -> Kernel:  # noqa: PYI034 - typing.Self is of Python 3.11
        self._manager.start_kernel(
            cwd=self._cwd,
            env=self._env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=kind is not None or self._is_apart)

    @property
    def pid(self) -> int:
        """The kernel's process, as seen from here; with a prefix it is the prefix's."""
        return int(self._manager.provisioner.process.pid)  # type: ignore[union-attr]

    def run(self, source: str, timeout_s: float = 180) -> Ran:
        """Run a cell. Raises `CellFailed` if it raises, TimeoutError if it takes too long."""
        shown: list[str] = []
        began_at, began = time.time(), time.monotonic()
        reply = self._client.execute_interactive(
            source,
            timeout=timeout_s,
            allow_stdin=False,
            output_hook=lambda message: shown.append(_text(message)),
        )
        took_s = time.monotonic() - began
        text = _ANSI.sub("", "".join(shown))
        if reply["content"]["status"] != "ok":
            raise CellFailed(text[-3000:])
        return Ran(began_at=began_at, took_s=took_s, shown=text)


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    kind = message["msg_type"]
    if kind == "stream":
        return str(content["text"])
    if kind == "error":
        return "\n".join(content["traceback"])
    return (
        str(content.get("data", {}).get("text/plain", "")) if kind != "comm_msg" else ""
    )
