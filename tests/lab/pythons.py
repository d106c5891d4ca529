"""The Pythons that hosts of the lab have. The usual one has torch and nothing else of this project's needs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import venv
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

# "torch": torch, what it requires, and numpy. "full": the environment of the tests. "bare": no package. "none": no Python.
PythonKind = Literal["torch", "full", "bare", "none"]
_SYSTEM = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
)


def path_of(kind: PythonKind, folder: Path) -> str:
    """Return the PATH of a host with this Python. What has to be made for it is made below `folder`, once."""
    system = os.pathsep.join(_SYSTEM)
    if kind == "none":
        return str(_without_python(folder / "no-python"))
    if kind == "full":
        return f"{sys.prefix}/bin:{system}"
    root = folder / f"python-{kind}"
    if not root.exists():
        venv.EnvBuilder(symlinks=True, with_pip=False).create(root)
        if kind == "torch":
            _link_packages(root, ("torch", "numpy"))
    return f"{root}/bin:{system}"


def _without_python(folder: Path) -> Path:
    """Make a folder with a link to every program of this machine that is no Python."""
    if not folder.exists():
        folder.mkdir(parents=True)
        for directory in map(Path, reversed(_SYSTEM)):
            for program in directory.iterdir() if directory.is_dir() else ():
                if not program.name.startswith(("python", "pypy", "pyenv")):
                    link = folder / program.name
                    link.unlink(missing_ok=True)
                    link.symlink_to(program)
    return folder


def _link_packages(root: Path, names: tuple[str, ...]) -> None:
    site = next(root.glob("lib/python*/site-packages"))
    for name in required(names):
        distribution = importlib.metadata.distribution(name)
        tops = {
            file.parts[0]
            for file in distribution.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }
        for top in tops:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))


def required(names: tuple[str, ...]) -> set[str]:
    """Return these distributions and all that they require here."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in found or not _is_installed(name):
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue.append(requirement.name)
    return found


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def remove(folder: Path) -> None:
    """Remove what `path_of` made; links are removed, never what they lead to."""
    for made in (*folder.glob("python-*"), folder / "no-python"):
        shutil.rmtree(made, ignore_errors=True)
