"""The table of system components, and whether this machine has them. Nothing is installed here."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

_SEARCHED = os.pathsep.join(
    (
        os.environ.get("PATH", os.defpath),
        "/usr/local/sbin",
        "/usr/sbin",
        "/sbin",
        "/usr/lib/systemd",
        "/lib/systemd",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A program that tests start. It is there if one of `programs` is; `packages` are Debian's and Ubuntu's."""

    name: str
    programs: tuple[str, ...]
    packages: tuple[str, ...]

    def path(self) -> str | None:
        """Return where its program lies, None where it is missing."""
        found = (shutil.which(program, path=_SEARCHED) for program in self.programs)
        return next((path for path in found if path), None)


COMPONENTS = {
    component.name: component
    for component in (
        Component(name="ssh", programs=("ssh",), packages=("openssh-client",)),
        Component(name="sshd", programs=("sshd",), packages=("openssh-server",)),
        Component(name="ip", programs=("ip",), packages=("iproute2",)),
        Component(name="nft", programs=("nft",), packages=("nftables",)),
        Component(name="nsenter", programs=("nsenter",), packages=("util-linux",)),
        Component(name="mount", programs=("mount",), packages=("mount",)),
        Component(name="cc", programs=("cc", "gcc"), packages=("gcc", "libc6-dev")),
        Component(name="fish", programs=("fish",), packages=("fish",)),
        Component(
            name="systemd",
            programs=("systemd",),
            packages=("systemd", "dbus", "dbus-user-session", "libpam-systemd"),
        ),
        Component(name="munged", programs=("munged",), packages=("munge",)),
        Component(name="slurmctld", programs=("slurmctld",), packages=("slurmctld",)),
        Component(name="slurmd", programs=("slurmd",), packages=("slurmd",)),
        Component(name="srun", programs=("srun",), packages=("slurm-client",)),
        Component(name="csh", programs=("csh", "tcsh"), packages=("csh",)),
        Component(
            name="browser",
            programs=("chromium", "chromium-browser", "google-chrome", "chrome"),
            packages=("chromium", "fonts-dejavu-core"),
        ),
        Component(name="rsync", programs=("rsync",), packages=("rsync",)),
    )
}
_SETS = {  # what is made of several of them
    "lab": ("ssh", "sshd", "ip", "nft", "nsenter", "mount", "cc"),
    "slurm": ("munged", "slurmctld", "slurmd", "srun"),
}
_OF_SETS = {part for parts in _SETS.values() for part in parts}
_OF_SKY = ("rsync",)  # no test of `make test` needs it
# What a test says that it needs.
TEST_NEEDS = (
    *_SETS,
    *(name for name in COMPONENTS if name not in _OF_SETS and name not in _OF_SKY),
)
SKY_NEEDS = ("lab", "slurm", *_OF_SKY)


def in_ci() -> bool:
    """Return whether a missing component is a failure rather than a reason to skip."""
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def missing(*names: str) -> tuple[Component, ...]:
    """Return which of these components this machine lacks. Raises KeyError for what is not in the table."""
    wanted = [part for name in names for part in _SETS.get(name, (name,))]
    found = (COMPONENTS[part] for part in wanted)
    return tuple(component for component in found if component.path() is None)


def reason_without(*names: str) -> str:
    """Return why a test that needs these components can't run here, "" if it can.

    "lab" stands for all that the lab of SSH hosts is made of, "slurm" for Slurm's daemons and commands.
    Raises KeyError for what is not in the table.
    """
    lacking = missing(*names)
    if "lab" in names and not sys.platform.startswith("linux"):
        return "the lab of SSH hosts is made of Linux namespaces"
    if "lab" in names and os.geteuid() != 0:
        return "the lab of SSH hosts needs root, to make network namespaces"
    if not lacking:
        return ""
    programs = ", ".join(component.name for component in lacking)
    packages = " ".join(
        package for component in lacking for package in component.packages
    )
    return f"missing here: {programs} (Debian, Ubuntu: apt-get install {packages})"
