"""The foreign systems that distmagic works with: a row each, which says what it can. Pure, but for what is installed.

`--on` and `--export`, their help, their errors and the Tab key follow this table, and so does what is looked for around a
process. What a system can is a module of its folder, which is imported when it is needed:

    hosts.py    `asked`, `preview` and `pool`: gives hosts; systems/protocol.py has their types
    run.py      `check` and `run`: runs a whole job in place of hosts
    export.py   `files(job)` and `readme(job)`: a folder that starts the job there
    inside.py   `place(environ)`: this process among those that the system has started on all nodes

Others bring their own: an entry point of the group `distmagic.systems` whose object is a `System`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from distmagic.errors import UsageError

GROUP = "distmagic.systems"


@dataclass(frozen=True, kw_only=True)
class System:
    """One foreign system. `name` stands after `--export`, `title` in sentences.

    `page` is its page of the manual; a system of another package has it in its folder, as `PAGE.md`.
    `folder` is the package of its modules, `can` the names of those that it has. `on` is the word after `--on`, with which
    each of the forms in `places` begins, as help lists them. `takes_options`: its files have any option of sbatch.
    `takes_setup`: its own job runs `--setup`, not each host. `chooses_hosts`: a user names none for it. `takes_down` is the
    flag of `%distributed down` that ends one of its places by name, "" where they end with their notebook.
    """

    name: str
    title: str
    folder: str
    can: frozenset[str]
    page: str = ""
    on: str = ""
    places: str = ""
    takes_options: bool = False
    takes_setup: bool = False
    chooses_hosts: bool = True
    takes_down: str = ""

    def part(self, name: str) -> Any:
        """Return the module with one of the things that it can."""
        return importlib.import_module(f"{self.folder}.{name}")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What flags of a line say of nodes: None, or empty, where they say nothing.

    `options` are sbatch's, by their long names; `file` is that of `--sky`. `environ` is the notebook's own.
    """

    nodes: int | None = None
    options: tuple[tuple[str, str], ...] = ()
    setup: str | None = field(default=None, repr=False)  # may hold secrets
    idle_s: float | None = None
    gpus: str | None = None
    file: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of some fields that are given."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def _own(name: str, title: str, can: str, **more: Any) -> System:
    folder = f"distmagic.systems.{name}"
    return System(
        name=name, title=title, folder=folder, can=frozenset(can.split()), **more
    )


# A system that may run on another one stands below it: SkyPilot's clusters may be steps of Slurm, and torchrun is
# started by any of them.
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


@functools.cache
def systems() -> tuple[System, ...]:
    """Return all systems: our own, then those that installed packages bring. One that can't be loaded is warned of."""
    found = {system.name: system for system in _OWN}
    for entry in metadata.entry_points(group=GROUP):
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


def named(name: str) -> System | None:
    """Return the system of that name, None where there is none."""
    return {system.name: system for system in systems()}.get(name)


def places() -> str:
    """Return all that may stand after `--on`, but for none."""
    return "; ".join(system.places for system in systems() if system.on)


def at(place: str) -> System:
    """Return the system of what follows `--on`: by the word before a colon. Raises `UsageError`."""
    word = place.partition(":")[0]
    for system in systems():
        if system.on and system.on == word:
            return system
    other = named(word)
    if other is not None and not other.on:
        raise UsageError(
            f"--on {word}: {other.title} gives a notebook no hosts.",
            f"--export {word} DIR writes the files of such a job; inside one no --on is needed. "
            f"More: %distributed help {other.page}.",
        )
    raise UsageError(
        f"--on {place!r} is not known.", f"Write one of these: {places()}; none."
    )
