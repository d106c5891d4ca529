"""The names under which hosts know this process: who begins its jobs, and the working directory of its runs.

Who begins a job is a person, with the notebook or the script:

    ann@laptop:/home/ann/train.ipynb             a notebook: Jupyter and VS Code tell its path; the same after a restart
    ann@laptop:notebook (kernel 5f0c...)         a kernel of which only the connection file is known
    ann@laptop:train.py (process 812-3fa9c1)     a script, or IPython in a terminal: each process for itself

What is in the last brackets tells kernels apart that have no name of their own; a host that counts what it keeps of
somebody leaves it away (`listing.kept_for`).

The origin of a working directory has the person and the whole path, so that the next kernel finds it again:

    ann@laptop:/home/ann/train.ipynb             a notebook whose path is known
    ann@laptop:/home/ann/train.py                a script
    ann@laptop:/home/ann                         any other kernel or process in this folder

Several owners may so use one directory. It remembers who they are, and `clean all` takes it from none of them.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import secrets
import socket
import sys
import time
from pathlib import Path

from distmagic import sanitize
from distmagic.payload.pack import Payload
from distmagic.remote.wire.protocol import WorkDir
from distmagic.request.spec import JobSpec

_MOST_CHARS = 1000
_MOST_NAME_CHARS = 60
_KERNEL_FILE = "kernel-"  # how a Jupyter server, and VS Code, begin the name of a kernel's connection file


def owner() -> str:
    """Return the name of this process as the owner of jobs: another kernel has the same one only for the same notebook."""
    # The notebook that this process is the kernel of, "" if it is no kernel.
    connection_file = _connection_file()
    if not connection_file:
        notebook = ""
    else:
        notebook = (
            notebook_path()
            or f"notebook (kernel {connection_file.removeprefix(_KERNEL_FILE)})"
        )
    return _of_this_person(notebook or _script(os.getpid()))


def _of_this_person(what: str) -> str:
    """Return who has begun something here: the user, the machine, and what it is."""
    host = socket.gethostname()
    try:
        person = f"{getpass.getuser()}@{host}"
    except (KeyError, OSError):  # a container's user without a name
        person = host
    # As a host may list it: else it would not be known again.
    return sanitize.line(f"{person}:{what}")[:_MOST_CHARS]


def new_job() -> str:
    """Return a name for a job that this process begins: when, and what no other job has."""
    return time.strftime("%m%d-%H%M%S-") + secrets.token_hex(4)


def notebook_path() -> str:
    """Return the path of the notebook that this process is the kernel of, "" where it is none or nobody has told.

    A kernel's children inherit its variables: what a notebook begins with `!python` is no part of it, and neither is a
    notebook that is executed from within it (papermill, nbclient), whose connection file has another kind of name.
    """
    connection_file = _connection_file()
    if not connection_file:
        return ""
    path = str(getattr(sys.modules["__main__"], "__vsc_ipynb_file__", ""))
    if not path and connection_file.startswith(_KERNEL_FILE):
        path = os.environ.get("JPY_SESSION_NAME", "")
    return path


def _connection_file() -> str:
    """Return the name of this kernel's connection file without its ending, "" in a process that is no kernel."""
    module = sys.modules.get("ipykernel.kernelapp")
    if module is None or not module.IPKernelApp.initialized():
        return ""
    return Path(module.IPKernelApp.instance().connection_file).stem


@functools.cache
def _script(pid: int) -> str:
    """Return the name of this process; `pid` is its own: a forked child is another one."""
    script = Path(sys.argv[0] if sys.argv else "")
    # The first: python -m NAME.
    name = script.parent.name if script.name == "__main__.py" else script.name
    if name in ("", "-c"):
        name = "python"
    return f"{name} (process {pid}-{secrets.token_hex(3)})"


def work_dir(spec: JobSpec, payload: Payload | None = None) -> WorkDir:
    """Return the working directory of a run, before it is known which files it gets.

    One that the user has named is for all runs of that name; any other is for one person's runs of one notebook or script.
    """
    if spec.name is not None:
        return WorkDir(name=spec.name, is_fresh=spec.fresh)
    if payload is not None and payload.name:
        name, origin = payload.name, str(payload.script or Path.cwd() / payload.name)
    else:
        name, origin = _of_this_process()
    # A directory's name that needs no quotes anywhere.
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:_MOST_NAME_CHARS]
    return WorkDir(
        name=plain or "run",
        origin=_of_this_person(origin),
        is_fresh=spec.fresh,
    )


def own_origin() -> str:
    """Return the name of this notebook, or script, as hosts know the one that a working directory belongs to."""
    _, path = _of_this_process()
    return _of_this_person(path)


def _of_this_process() -> tuple[str, str]:
    """Return the name and the whole path of what runs here."""
    path = notebook_path()
    if path.endswith(".ipynb"):  # a console has a new name each time
        return Path(path).stem, path
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        path = str(Path(script).absolute())
        is_package = Path(path).stem == "__main__"
        return (Path(path).parent.name if is_package else Path(path).stem), path
    folder = Path.cwd()
    return folder.name, str(folder)
