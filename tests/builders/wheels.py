"""Wheels of packages that exist in tests only, for an index that is a folder."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path


def wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    requires: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write the wheel of a package into a folder, and return it; `files` by their path in site-packages."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for line in requires:
        metadata += f"Requires-Dist: {line}\n"
    content = {
        **(files or {f"{name}/__init__.py": f"VERSION = {version!r}\n"}),
        f"{about}/METADATA": metadata,
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in content)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in content.items():
            info = zipfile.ZipInfo(inner)
            info.external_attr = (0o100755 if "/scripts/" in inner else 0o100644) << 16
            info.create_system = 3  # Unix: whose the mode is
            archive.writestr(info, text)
        archive.writestr(f"{about}/RECORD", f"{record}{about}/RECORD,,\n")
    return path


def played_uv(folder: Path) -> Path:
    """Write a wheel whose program `uv` has the environment's pip do what `uv pip install --python PYTHON` asks for."""
    program = """#!python
import os, sys
pip, install, _, python, *rest = sys.argv[1:]
os.environ["PIP_CONFIG_FILE"] = os.devnull
for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
    os.environ.pop(name, "")
os.execv(python, [python, "-m", pip, install, *rest])
"""
    return wheel(folder, "uv", files={"uv-1.0.data/scripts/uv": program})


def unpacked(
    site: Path,
    name: str,
    *,
    files: Mapping[str, str] | None = None,
    version: str = "1.0",
) -> None:
    """Install such a package into a folder of packages."""
    made = wheel(site, name, version, files=files)
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site)
    made.unlink()
