"""What the working directory of a run is called: after the script, the notebook, or the directory that this process is in."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

from distmagic.payload.pack import Payload
from distmagic.remote.wire.protocol import WorkDir
from distmagic.request.spec import JobSpec
from distmagic.session.owner import notebook_path

_MOST_CHARS = 60


def work_dir(spec: JobSpec, payload: Payload | None = None) -> WorkDir:
    """Return the working directory of a run, before it is known which files it gets.

    One that the user has named is for all runs of that name; any other is for the runs of one notebook or script.
    """
    if spec.name is not None:
        return WorkDir(name=spec.name, is_fresh=spec.fresh)
    if payload is not None and payload.name:
        name, origin = payload.name, str(payload.script or Path.cwd() / payload.name)
    else:
        name, origin = _of_this_process()
    return WorkDir(
        name=_as_name(name),
        origin=f"{socket.gethostname()}:{origin}",
        is_fresh=spec.fresh,
    )


def own_origin() -> str:
    """Return the name of this notebook, or script, as hosts know the one that a working directory belongs to."""
    _, path = _of_this_process()
    return f"{socket.gethostname()}:{path}"


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


def _as_name(text: str) -> str:
    """Return a text as the name of a directory that needs no quotes anywhere."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip("._-")[:_MOST_CHARS] or "run"
