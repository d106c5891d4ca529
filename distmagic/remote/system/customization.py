"""Finds code that Python runs at its start because of PYTHONPATH: `sitecustomize` and
`usercustomize`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_FILES = (
    "sitecustomize.py",
    "sitecustomize/__init__.py",
    "usercustomize.py",
    "usercustomize/__init__.py",
)


def customizing_file(env: Mapping[str, str]) -> str:
    """Return the first such file that a Python with these variables finds on PYTHONPATH, "" for
    none.

    A forked process does not run it again, so it would not see the variables of any rank.
    """
    for folder in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
        for name in _FILES:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                return path
    return ""
