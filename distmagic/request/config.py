"""Defaults of the notebook: `%config Distmagic`, `ipython_config.py`, `DISTMAGIC_HOSTS`,
hostfiles.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, fields, replace
from pathlib import Path

from traitlets import Dict, Float, List, TraitError, Unicode, Union
from traitlets.config import Configurable

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request.access import (
    CONNECT_TIMEOUT_S,
    LEASE_S,
    WARM_IDLE_S,
    Access,
)
from distmagic.request.flag_values import check_number, parse_size
from distmagic.request.flags import Defaults, Request
from distmagic.request.hosts import (
    LOCALHOST,
    Hosts,
    parse_hostfile,
    parse_hosts,
    parse_slots,
)
from distmagic.request.spec import PAYLOAD_LIMIT_BYTES


class Distmagic(Configurable):  # type: ignore[misc, unused-ignore]  # traitlets' base may be untyped
    """Defaults for every %%distributed cell; a cell's own line overrides them."""

    hosts = Union(
        [Unicode(), List(Unicode())],
        help="Hosts and their ranks, such as 'gpu-a:4,gpu-b:2'.",
    )
    hostfile = Unicode(
        "", help="A file with one host per line, such as 'gpu-a slots=4'."
    )
    ssh_config = Unicode("", help="OpenSSH configuration instead of ~/.ssh/config.")
    ssh_command = Unicode("", help="Reach hosts with this program, such as 'ssh'.")
    python = Unicode("", help="Python interpreter on the hosts.")
    pythons = Dict(
        value_trait=Unicode(),
        key_trait=Unicode(),
        help="Interpreters of single hosts, by the host's name.",
    )
    nproc_per_node = Unicode("", help="Ranks per host: a number, gpu, cpu or auto.")
    payload_limit = Unicode(
        f"{PAYLOAD_LIMIT_BYTES >> 20}M", help="Largest captured data."
    )
    lease_s = Float(LEASE_S, help="Seconds that ranks outlive a lost notebook.")
    warm_idle_s = Float(
        WARM_IDLE_S,
        help="Seconds that hosts keep torch loaded after a run; 0: not at all.",
    )
    preload = List(
        Unicode(),
        help="Packages that hosts keep loaded, too, such as ['lightning'].",
    )
    connect_timeout_s = Float(
        CONNECT_TIMEOUT_S, help="Longest time to connect to a host, in seconds."
    )

    def defaults(self, environ: Mapping[str, str]) -> Defaults:
        """Return these settings as the magic's defaults. Raises `UsageError` naming the setting."""
        for one in fields(Access):
            if self.has_trait(one.name):
                check_number(one, getattr(self, one.name), f"Distmagic.{one.name}:")
        # "" means all hosts that are not named.
        pythons = {"": self.python} if self.python else {}
        pythons.update(self.pythons)
        nproc = self.nproc_per_node
        return Defaults(
            access=Access(
                ssh_config=self.ssh_config or None,
                ssh_command=self.ssh_command or None,
                pythons=tuple(pythons.items()),
                connect_timeout_s=self.connect_timeout_s,
                lease_s=self.lease_s,
                warm_idle_s=self.warm_idle_s,
                preload=tuple(self.preload),
            ),
            nproc_per_node=parse_slots(nproc, "Distmagic.nproc_per_node")
            if nproc
            else None,
            payload_limit_bytes=parse_size(
                self.payload_limit, "Distmagic.payload_limit"
            ),
            environ=environ,
        )


for _setting in Distmagic.class_own_traits().values():
    _setting.tag(config=True)


def settings_of(parent: Configurable) -> Distmagic:
    """Return the settings in this shell's configuration.

    Raises `UsageError` for one of a wrong type.
    """
    try:
        return Distmagic(parent=parent)
    except TraitError as error:
        hint = "Correct it where it is set: with %config Distmagic.NAME = VALUE, or in ipython_config.py."
        raise UsageError(f"A setting can't be used: {error}", hint) from None


@frozen
class Chosen:
    """The hosts of a run. `source` describes where they were set."""

    hosts: Hosts = field(default=(LOCALHOST,))
    source: str = "no hosts are named: this machine"

    @property
    def is_default(self) -> bool:
        """Whether no hosts were set."""
        return self.source == Chosen().source


def choose_hosts(
    request: Request,
    notebook: Chosen | None,
    config: Distmagic,
    environ: Mapping[str, str],
) -> Chosen:
    """Return the hosts by precedence: the line, `%distributed hosts`, `%config`, `DISTMAGIC_HOSTS`,
    this machine.

    `--nproc-per-node` on the line overrides numbers of ranks that come with hosts from elsewhere.
    Reads a hostfile if one is named. Raises `UsageError`.
    """
    if request.hosts is not None:
        return Chosen(hosts=request.hosts, source="--hosts")
    if request.hostfile is not None:
        return Chosen(
            hosts=read_hostfile(request.hostfile),
            source=f"--hostfile {request.hostfile}",
        )
    chosen = notebook or _of_settings(config, environ)
    if request.names_nproc:
        without_ranks = tuple(replace(host, slots=None) for host in chosen.hosts)
        return replace(chosen, hosts=without_ranks)
    return chosen


def _of_settings(config: Distmagic, environ: Mapping[str, str]) -> Chosen:
    if config.hosts:
        text = config.hosts if isinstance(config.hosts, str) else ",".join(config.hosts)
        return Chosen(
            hosts=_named(text, "Distmagic.hosts"), source="%config Distmagic.hosts"
        )
    if config.hostfile:
        return Chosen(
            hosts=read_hostfile(config.hostfile), source="%config Distmagic.hostfile"
        )
    if environ.get("DISTMAGIC_HOSTS"):
        return Chosen(
            hosts=_named(environ["DISTMAGIC_HOSTS"], "DISTMAGIC_HOSTS"),
            source="DISTMAGIC_HOSTS",
        )
    return Chosen()


def _named(text: str, where: str) -> Hosts:
    try:
        return parse_hosts(text)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from None


def read_hostfile(path: str) -> Hosts:
    """Return the hosts of the hostfile at `path` (`~` is the home).

    Raises `UsageError` naming file and line.
    """
    if not path:
        raise UsageError("--hostfile names no file.", "Write --hostfile FILE.")
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(
            f"{path}: the hostfile can't be read: {why.lower()}.", "Check the path."
        ) from None
    return parse_hostfile(text, path)
