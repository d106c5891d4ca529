"""What the magics hand their work to: the session with the hosts, the packer, the screen, the playground.

Opened when first needed, so that `%load_ext distmagic` imports neither torch nor paramiko; tests put their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from distmagic.connection.prompts import NotebookAsker
    from distmagic.planning.jobs import Job
    from distmagic.remote.wire.protocol import Template
    from distmagic.request.hosts import Host
    from distmagic.request.spec import Access, JobSpec
    from distmagic.state.hangs import Explanation


class Reaching(Protocol):
    """Hosts that are being reached in the background; `absent` says by place what is wrong with those that are down."""

    absent: dict[int, str]

    def cancel(self) -> None:
        """Stop reaching them. Safe to call at any time."""


class Session(Protocol):
    """The connections of this kernel."""

    def reach(
        self, hosts: tuple[Host, ...], access: Access, asker: NotebookAsker, spec: JobSpec | None = None,
        spare: tuple[Host, ...] = (),
    ) -> Reaching:  # fmt: skip
        """Begin to reach `hosts` in the background, and return at once. `spec` is the run that is to come, if any.

        A job that is followed may yet come to `spare` hosts.
        """

    def launch(self, reaching: Reaching, spec: JobSpec, payload: object, screen: object) -> object:
        """Run to the end and return the `Run`. Raises a `RunError` that carries it, or what kept it from starting."""

    def dry_run(self, reaching: Reaching, spec: JobSpec) -> str:
        """Return what every host would execute."""

    def jobs(self, reaching: Reaching) -> tuple[Job, ...]:
        """Return the jobs on these hosts."""

    def attach(self, reaching: Reaching, job: Job, screen: object) -> object:
        """Follow a job to its end, as `launch`."""

    def add(self, reaching: Reaching, job: Job, tell: Callable[[str, int], object]) -> None:
        """Have hosts come to an elastic job; `tell` hears of each, and which node it is."""

    def stop(self, reaching: Reaching, job: Job) -> None:
        """End a job."""

    def logs(self, reaching: Reaching, job: Job, rank: int) -> str | None:
        """Return what a rank has written, None if there is no such rank."""

    def stacks(self, reaching: Reaching, job: Job) -> Explanation:
        """Return where all ranks of a running job are."""

    def remove(self, reaching: Reaching, jobs: Sequence[Job]) -> int:
        """Remove what ended jobs have left; return the bytes."""

    def cached(self, reaching: Reaching, *, removes: bool = False) -> tuple[int, ...]:
        """Return the bytes that each host that is up keeps of what was sent; with `removes` they are gone."""

    def templates(self, reaching: Reaching) -> tuple[tuple[Template, ...] | None, ...]:
        """Return what each host keeps loaded for this kernel; None for one that is down."""

    def down(self) -> tuple[str, ...]:
        """End what hosts keep loaded, and all connections; return the hosts that could not be told."""

    def close(self) -> None:
        """The same without a new connection: hosts that can't be told so end what they keep with their lease."""


class Playground(Protocol):
    """Throw-away SSH hosts on this machine."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts, by the names in `ssh_config`."""

    @property
    def ssh_config(self) -> str:
        """Path of the OpenSSH configuration that leads to them."""

    def stop(self) -> None:
        """End them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The doors that the magics knock at."""

    session: Callable[[], Session]
    pack_call: Callable[..., object]
    pack_whole: Callable[..., object]
    screen_for: Callable[..., object]
    playground: Callable[[int], Playground]


def _lazily(module: str, name: str) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


BACKEND = Backend(
    session=_lazily("distmagic.api", "session"),
    pack_call=_lazily("distmagic.payload.pack", "pack_call"),
    pack_whole=_lazily("distmagic.payload.pack", "pack_whole"),
    screen_for=_lazily("distmagic.screens.screen", "screen_for"),
    playground=_lazily("distmagic.playground.playground", "start"),
)
