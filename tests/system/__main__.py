"""Look for the system components; as root on Debian or Ubuntu install what is missing, and say so in one line.

`python -m tests.system` looks for what `make test` needs, `python -m tests.system sky` for what `make sky` needs.
`NO_APT=1` turns the installing off. What can't be installed is named, and its tests are skipped; with `CI=true`, and
for `make sky` always, that is a failure, with exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.system.components import (
    SKY_NEEDS,
    TEST_NEEDS,
    Component,
    in_ci,
    missing,
    reason_without,
)

_POLICY = Path("/usr/sbin/policy-rc.d")


def main(words: Sequence[str] = ()) -> int:
    """Run the check and return the exit code."""
    of_sky = list(words) == ["sky"]
    needs = SKY_NEEDS if of_sky else TEST_NEEDS
    must = of_sky or in_ci()
    lacking = missing(*needs)
    if lacking and _may_install():
        _install(lacking)
    reasons = {name: reason_without(name) for name in needs}
    for name, reason in reasons.items():
        if reason:
            print(
                f"system components: tests that need {name} {'fail' if must else 'are skipped'}: {reason}"
            )
    if not any(reasons.values()):
        print("system components: all there")
    return 1 if must and any(reasons.values()) else 0


def _may_install() -> bool:
    return (
        os.geteuid() == 0
        and not os.environ.get("NO_APT")
        and shutil.which("apt-get") is not None
    )


def _install(lacking: tuple[Component, ...]) -> None:
    packages = [package for component in lacking for package in component.packages]
    print(
        f"system components: installing with apt-get (NO_APT=1 turns this off): {' '.join(packages)}",
        flush=True,
    )
    apt = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    with _services_stay_down():
        _run([*apt, "update"])
        # One at a time where all at once fails: one package that is not on offer doesn't cost the others.
        install = [*apt, "install", "--yes", "--no-install-recommends"]
        if not _run([*install, *packages]) and len(packages) > 1:
            for package in packages:
                _run([*install, package])


def _run(argv: list[str]) -> bool:
    done = subprocess.run(
        argv,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(
            f"{' '.join(argv)} failed with exit code {done.returncode}:\n{done.stdout[-2000:]}",
            file=sys.stderr,
        )
    return done.returncode == 0


@contextlib.contextmanager
def _services_stay_down() -> Iterator[None]:
    """Keep a package's installation from starting its service: nobody asked for an SSH server on this machine."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
