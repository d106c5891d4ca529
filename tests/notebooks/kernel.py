"""A notebook whose cells are run one after the other in a real kernel, by nbclient as nbconvert uses it."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.blocking import BlockingKernelClient
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from tests.lab import Lab

REPOSITORY = Path(__file__).resolve().parents[2]
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class LiveNotebook:
    """A notebook and its kernel. `run` and `fail` append a cell, execute it, and return what it shows."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client
        self.node: NotebookNode = client.nb

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return self._client.km.provisioner.process.pid

    def interrupt(self) -> None:
        """Interrupt the kernel as the button in Jupyter does."""
        os.kill(self.pid, signal.SIGINT)

    def run(self, source: str) -> str:
        """Execute a cell that must succeed; return the text of all its outputs."""
        return text_of(self.cell(source))

    def cell(self, source: str) -> NotebookNode:
        """Execute a cell that must succeed; return it."""
        cell = nbformat.v4.new_code_cell(source)
        self.node.cells.append(cell)
        self._client.execute_cell(cell, len(self.node.cells) - 1)
        return cell

    def fail(self, source: str) -> str:
        """Execute a cell that must fail; return the text of all its outputs, the error last."""
        try:
            text = self.run(source)
        except CellExecutionError:
            return text_of(self.node.cells[-1])
        raise AssertionError(f"the cell did not fail, it shows:\n{text}")

    @contextlib.contextmanager
    def overheard(self) -> Iterator[Iterator[dict[str, Any]]]:
        """Give all that the kernel publishes from now on, as a second page of the notebook receives it."""
        client = BlockingKernelClient(connection_file=self._client.km.connection_file)
        client.load_connection_file()
        client.start_channels()
        try:
            client.wait_for_ready()
            yield iter(client.get_iopub_msg, None)
        finally:
            client.stop_channels()

    @contextlib.contextmanager
    def meanwhile(self, act: Callable[[], object]) -> Iterator[None]:
        """Let another thread `act` while the body of the `with` executes cells; the kernel ends if it fails."""

        def guarded() -> None:
            try:
                act()
            except BaseException:
                os.kill(self.pid, signal.SIGKILL)
                raise

        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(guarded)
            try:
                yield
            finally:
                acting.result()


def text_of(cell: NotebookNode) -> str:
    """Return what a cell shows as text, without colours.

    A kernel may send one line in several pieces: where its timer strikes between the text and its end, there are two.
    """
    shown = itertools.groupby(
        cell.outputs, key=lambda output: output.get("name", id(output))
    )
    return _ANSI.sub(
        "", "\n".join("".join(map(_text_of_output, same)) for _, same in shown)
    )


def _text_of_output(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return output.data.get("text/plain", "")


def environment(more: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of a kernel: this package is importable, and no test's variable leaks in."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DISTMAGIC_HOSTS")
    }
    return {**own, "PYTHONPATH": str(REPOSITORY), **more}


@contextlib.contextmanager
def live_notebook(
    folder: Path,
    env: Mapping[str, str] = {},
    connection_file: Path | None = None,
    *,
    timeout_s: int = 240,
) -> Iterator[LiveNotebook]:
    """Start a kernel that works in `folder`, with the extension loaded; end it afterwards.

    A Jupyter server starts a notebook's kernel with a `connection_file` called kernel-ID.json, and with the notebook's
    path in `env` as JPY_SESSION_NAME. `timeout_s` is how long a cell may take.
    """
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=timeout_s,
        startup_timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    if connection_file is not None:
        client.km = client.create_kernel_manager()
        client.km.connection_file = str(connection_file)
    with client.setup_kernel(env=environment(env)):
        notebook = LiveNotebook(client)
        assert notebook.run("%load_ext distmagic") == ""
        yield notebook


@contextlib.contextmanager
def notebook_on(lab: Lab, folder: Path, hosts: str) -> Iterator[LiveNotebook]:
    """Start such a kernel with these hosts of the lab, as from its environment; it leaves nothing on them."""
    lab.mend()
    with live_notebook(folder, {"DISTMAGIC_HOSTS": hosts}) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        yield notebook
    lab.assert_clean()
