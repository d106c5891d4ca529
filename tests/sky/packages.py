"""Make build/sky: SkyPilot in a virtual environment, and a folder of wheels: `python -m tests.sky.packages PYTHON`.

SkyPilot's nodes install its runtime for Python 3.10 alone. So the same Python, and the same wheels, are used here.
This is the only step that needs a package index; pip finds it by its own configuration.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

FOLDER = REPOSITORY / "build/sky"
VENV = FOLDER / "venv"
WHEELS = FOLDER / "wheels"
_VERSION = "3.10"
_TELL = "import sys; print('%d.%d' % sys.version_info[:2])"


def main() -> int:
    """Make all of it anew, and return the exit code."""
    python = sys.argv[1]
    version = _version(python)
    if version != _VERSION:
        print(
            f"SkyPilot's nodes want Python {_VERSION}; {python} is {version or 'none'}. "
            "Say which with: make sky SKY_PYTHON=/where/python3.10",
            file=sys.stderr,
        )
        return 1
    wanted = requirements()
    print(f"installing {' '.join(wanted)} into {VENV}", flush=True)
    _run("sh", ".ci/make-venv", python, str(VENV))
    pip = (str(VENV / "bin/python"), "-m", "pip", "--quiet", "--no-input")
    # `pip wheel` also builds wheels of what is on offer as a source distribution only. Without --use-pep517 the pip of
    # Python 3.10 wants the package `wheel` for that, which a new environment does not have.
    build = ("wheel", "--use-pep517", "--wheel-dir", str(WHEELS))
    _run(*pip, *build, *wanted)
    found = ("--no-index", "--find-links", str(WHEELS))
    _run(*pip, "install", *found, *wanted)
    return 0


def _version(python: str) -> str:
    """Return "3.10", or "" where this is no Python."""
    if shutil.which(python) is None:
        return ""
    told = subprocess.run(
        [python, "-c", _TELL], capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


def requirements() -> list[str]:
    """Return the packages of the extra `sky`."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named: list[str] = project["optional-dependencies"]["sky"]
    return named


def _run(*argv: str) -> None:
    subprocess.run(argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    sys.exit(main())
