"""The names by which hosts identify this process: the owner of its jobs, and the working directory
of its runs.

The owner of a job is a user at a machine, with the notebook or the script:

    ann@laptop:/home/ann/train.ipynb          a notebook whose path is known; the same after a
                                              restart
    ann@laptop:notebook (kernel 5f0c...)      a kernel with an unknown notebook: the name of its
                                              connection file
    ann@laptop:train.py (process 812-3fa9c1)  a script, or IPython in a terminal: one name for
                                              each process

The part in brackets distinguishes kernels without a notebook path. A host drops it when it sums up
disk use by owner (`listing.kept_for`).

The origin of a working directory has the user and the whole path, so that the next kernel finds the
directory again:

    ann@laptop:/home/ann/train.ipynb          a notebook whose path is known
    ann@laptop:/home/ann/train.py             a script
    ann@laptop:/home/ann                      any other kernel or process in this folder

So several owners may use one directory. It records its owners, and `clean all` does not remove it
while another one uses it.
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
# The prefix of a connection file's name in Jupyter and VS Code.
_KERNEL_FILE = "kernel-"


def owner() -> str:
    """Return the name of this process as an owner of jobs.

    Only a kernel of the same notebook has the same name.
    """
    # The notebook of this kernel; "" if this process is no kernel.
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
    """Return `user@machine:what`, the owner name for a notebook or script `what`."""
    host = socket.gethostname()
    try:
        person = f"{getpass.getuser()}@{host}"
    except (KeyError, OSError):  # in a container, a user may have no name
        person = host
    # Sanitized as in a host's list of jobs; otherwise it would not be recognized in it.
    return sanitize.line(f"{person}:{what}")[:_MOST_CHARS]


def new_job() -> str:
    """Return a new unique name for a job: the time, and random digits."""
    return time.strftime("%m%d-%H%M%S-") + secrets.token_hex(4)


def notebook_path() -> str:
    """Return the path of this kernel's notebook; "" if this process is no kernel or the path is
    unknown.

    A kernel's children inherit its variables. So a program started by `!python` must not count as
    the notebook. Neither must a notebook executed by papermill or nbclient, whose connection file
    has another kind of name.
    """
    connection_file = _connection_file()
    if not connection_file:
        return ""
    path = str(getattr(sys.modules["__main__"], "__vsc_ipynb_file__", ""))
    if not path and connection_file.startswith(_KERNEL_FILE):
        path = os.environ.get("JPY_SESSION_NAME", "")
    return path


def _connection_file() -> str:
    """Return the name of this kernel's connection file without its extension; "" if this process is
    no kernel.
    """
    module = sys.modules.get("ipykernel.kernelapp")
    if module is None or not module.IPKernelApp.initialized():
        return ""
    return Path(module.IPKernelApp.instance().connection_file).stem


@functools.cache
def _script(pid: int) -> str:
    """Return the name of this script's process.

    `pid` is its own pid, so that a forked child gets another name.
    """
    script = Path(sys.argv[0] if sys.argv else "")
    # The first form is for `python -m NAME`.
    name = script.parent.name if script.name == "__main__.py" else script.name
    if name in ("", "-c"):
        name = "python"
    return f"{name} (process {pid}-{secrets.token_hex(3)})"


def work_dir(spec: JobSpec, payload: Payload | None = None) -> WorkDir:
    """Return the working directory of a run, before its files are known.

    A directory that the user names is shared by all runs with that name. Any other belongs to one
    user's runs of one notebook or script.
    """
    if spec.name is not None:
        return WorkDir(name=spec.name, is_fresh=spec.fresh)
    if payload is not None and payload.name:
        name, origin = payload.name, str(payload.script or Path.cwd() / payload.name)
    else:
        name, origin = _of_this_process()
    # A directory name that needs no quoting in any shell.
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:_MOST_NAME_CHARS]
    return WorkDir(
        name=plain or "run",
        origin=_of_this_person(origin),
        is_fresh=spec.fresh,
    )


def own_origin() -> str:
    """Return the origin of this process's working directories: user, machine, and path of the
    notebook or script.
    """
    _, path = _of_this_process()
    return _of_this_person(path)


def _of_this_process() -> tuple[str, str]:
    """Return the short name and the whole path of the notebook or script in this process."""
    path = notebook_path()
    if path.endswith(".ipynb"):  # a console gets a new name each time
        return Path(path).stem, path
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        path = str(Path(script).absolute())
        is_package = Path(path).stem == "__main__"
        return (Path(path).parent.name if is_package else Path(path).stem), path
    folder = Path.cwd()
    return folder.name, str(folder)
