"""The table of external systems, with what each supports.

Pure, except that it looks for installed packages.

`--on` and `--export`, their help, errors and completion, and the detection of a surrounding job are
derived from this table. Each capability is a module in the system's folder, imported when needed:

    hosts.py    `asked`, `preview` and `pool`: provides hosts; systems/protocol.py has their types
    run.py      `check` and `run`: runs a whole job instead of providing hosts
    export.py   `files(job)` and `readme(job)`: a folder that starts the job on the system
    inside.py   `place(environ)`: the place of this process in a job that the system started

Other packages can add systems: an entry point in the group `distmagic.systems` whose object is a
`System`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Mapping
from dataclasses import field
from importlib import metadata
from typing import Any

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request.flag_values import Pairs

GROUP = "distmagic.systems"


@frozen
class System:
    """One external system."""

    name: str  # the word after `--export`
    title: str  # its name in sentences
    folder: str  # the package of its modules
    can: frozenset[str]  # the names of the modules that it has
    # Its page of the manual; a system of another package has it in its folder, as `PAGE.md`.
    page: str = ""
    on: str = ""  # the word after `--on`
    places: str = ""  # the forms that start with it, as listed in the help
    takes_options: bool = False  # whether its files accept any sbatch option
    # Whether its own job runs `--setup`, instead of each host.
    takes_setup: bool = False
    chooses_hosts: bool = True  # whether a user names no hosts
    # The flag of `%distributed down` that ends one of its places by name, "" if they end with their
    # notebook.
    takes_down: str = ""

    def part(self, name: str) -> Any:
        """Return a module of this system's folder: `hosts`, `run`, `export` or `inside`."""
        return importlib.import_module(f"{self.folder}.{name}")


@frozen
class Wanted:
    """Requirements for nodes from the flags of a line: None, or empty, if not given."""

    nodes: int | None = None
    options: Pairs = ()  # sbatch's, by their long names
    setup: str | None = field(default=None, repr=False)  # may hold secrets
    idle_s: float | None = None
    gpus: str | None = None
    file: str | None = None  # the file of `--sky`
    # the notebook's own variables
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    def given(self, *names: str) -> dict[str, Any]:
        """Return the given ones of some fields."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def _own(name: str, title: str, can: str, **more: Any) -> System:
    folder = f"distmagic.systems.{name}"
    return System(
        name=name, title=title, folder=folder, can=frozenset(can.split()), **more
    )


# A system that may run on another one comes before it: SkyPilot's clusters may be Slurm steps, and
# any of them may start torchrun.
_OWN = (
    _own(
        "slurm",
        "Slurm",
        "hosts inside export",
        page="slurm",
        on="slurm",
        places="slurm, slurm:LOGIN, slurm:JOB, slurm:LOGIN:JOB",
        takes_options=True,
        takes_setup=True,
    ),
    _own(
        "skypilot",
        "SkyPilot",
        "hosts inside export",
        page="sky",
        on="sky",
        places="sky: a cluster that SkyPilot launches; sky:NAME: a running one",
        takes_down="cluster",
    ),
    _own(
        "osmo",
        "OSMO",
        "run inside export",
        page="osmo",
        on="osmo",
        places="osmo",
        takes_setup=True,
    ),
    _own("sing", "SING Cloud", "inside export", page="export"),
    _own("torchrun", "torchrun", "inside export", page="export", chooses_hosts=False),
)


def other_packages() -> metadata.EntryPoints:
    """Return the systems of other installed packages, not loaded; it looks at all packages."""
    return metadata.entry_points(group=GROUP)


@functools.cache
def systems() -> tuple[System, ...]:
    """Return all systems: distmagic's, then those of installed packages.

    Warns about one that can't be loaded.
    """
    found = {system.name: system for system in _OWN}
    for entry in other_packages():
        try:
            system = entry.load()
            name = system.name
        except Exception as error:  # noqa: BLE001 - whatever a package does
            warnings.warn(
                f"{GROUP}: {entry.value} can't be loaded: {error!r}", stacklevel=2
            )
            continue
        found.setdefault(name, system)
    return tuple(found.values())


def that_can(what: str) -> tuple[System, ...]:
    """Return the systems that have this module, in the order of the table."""
    return tuple(system for system in systems() if what in system.can)


def by_name() -> dict[str, System]:
    """Return all systems by their names."""
    return {system.name: system for system in systems()}


def part(system: str, name: str) -> Any:
    """Return a module of the system of that name, which made the request."""
    return by_name()[system].part(name)


def places() -> str:
    """Return all words allowed after `--on`, except none."""
    return "; ".join(system.places for system in systems() if system.on)


def at(place: str) -> System:
    """Return the system for the text after `--on`, by the word before a colon.

    Raises `UsageError`.
    """
    word = place.partition(":")[0]
    for system in systems():
        if system.on and system.on == word:
            return system
    other = by_name().get(word)
    if other is not None and not other.on:
        raise UsageError(
            f"--on {word}: a notebook can't get hosts from {other.title}.",
            f"--export {word} DIR writes the files of a job. Inside a job, leave out --on. "
            f"More: %distributed help {other.page}.",
        )
    raise UsageError(
        f"--on {place!r} is not known.", f"Write one of these: {places()}; none."
    )
