"""Provides hosts for `--on sky`: uses, launches, lists and shuts down clusters."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from distmagic.connection.connections import Connect
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import UsageError
from distmagic.request.access import Access
from distmagic.request.allocation import SkyRequest
from distmagic.request.systems import Wanted
from distmagic.systems.skypilot import sky, sky_words
from distmagic.systems.skypilot.cluster import Cluster
from distmagic.transports.asking import Asker


def asked(place: str, wanted: Wanted) -> SkyRequest:
    """Return the request of a line: the cluster after sky:, or a new one, and its flags.

    Raises `UsageError`.
    """
    for option, _ in wanted.options:
        cure = "Write what a node has to have into a task of SkyPilot: --sky FILE.yaml."
        if option == "gpus-per-node":
            cure = "Write --gpus KIND:N, such as --gpus L4:4."
        raise UsageError(
            f"--{option} is for Slurm, and --on {place} asks SkyPilot.", cure
        )
    _, colon, name = place.partition(":")
    known = wanted.given("nodes", "gpus", "file", "idle_s")
    if colon and known:
        raise UsageError(
            f"{place} has its hosts already.",
            "Leave out --nodes, --gpus, --sky and --idle; --on sky launches another cluster.",
        )
    if colon and not name:
        raise UsageError(
            f"--on {place} names no cluster.",
            "Write --on sky:NAME, or --on sky for a new one.",
        )
    if wanted.file:
        # The path of a task of SkyPilot that only sets hosts up. Raises `UsageError`.
        path = Path(os.path.expanduser(wanted.file))
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not a text file"
            raise UsageError(
                f"--sky {wanted.file}: {why}.", "Check the path."
            ) from None
        if re.search(r"^[\"']?run[\"']?\s*:", text, re.MULTILINE):
            raise UsageError(
                f"--sky {wanted.file} has a run: block, which SkyPilot would run next to the cell.",
                "Remove that block; distmagic uses resources, setup and file_mounts.",
            )
        known["file"] = str(path.absolute())
    return SkyRequest(name=name, **known)


def preview(request: SkyRequest, _: Access, owner: str, *, is_elastic: bool) -> str:  # noqa: ARG001
    """Return the command for SkyPilot. Runs nothing."""
    if request.name:
        return f"The cluster {request.name} of SkyPilot would be used as it is."
    name = sky_words.name_for(owner, request)
    return shlex.join(("sky", *sky.launch_words(request, name)))


class SkyPool:
    """The clusters of one kernel."""

    def __init__(self, connect: Connect) -> None:  # noqa: ARG002 - as any pool
        self._made: list[Cluster] = []

    def get(
        self, request: SkyRequest, _: Access, __: Asker, owner: str, *, is_elastic: bool,  # noqa: ARG002 - as in any pool
    ) -> Cluster:  # fmt: skip
        """Return a cluster that will be found, or launched."""
        made = Cluster(request, owner)
        self._made.append(made)
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clusters that this kernel uses."""
        return tuple(one.cluster for one in self._made if one.is_alive)

    def listed(
        self, _: SkyRequest, __: Access, asker: NotebookAsker
    ) -> list[tuple[str, ...]]:
        """Return the rows of a table of all clusters of this user."""
        rows: list[tuple[str, ...]] = [("cluster", "state", "notebook")]
        known = sky.read_states(sky.SkyCommand(sky_words.STATUS), asker)
        for one in known.values():
            whose = "this notebook" if one.name in self.names else ""
            rows.append((one.name, one.status, whose))
        return rows if rows[1:] else [("SkyPilot has no cluster",)]

    def take_down(self, cluster: str, asker: NotebookAsker) -> str:
        """Shut a cluster down, even one that this kernel does not use, and return SkyPilot's
        message.

        Raises `UsageError` for an invalid name, such as an option or a pattern that matches other
        clusters, and `Unreachable`.
        """
        if not cluster:
            raise UsageError("--cluster names no cluster.", "Write --cluster NAME.")
        SkyRequest(name=cluster)  # which checks it
        for one in self._made:
            if one.cluster == cluster:
                one.leave()
        return sky.take_down(cluster, asker)

    def close(self) -> None:
        """Forget all clusters."""
        self._made = []


pool = SkyPool
