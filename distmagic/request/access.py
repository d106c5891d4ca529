"""`Access` describes how to reach hosts. It checks all its values. Pure."""

from __future__ import annotations

import os
import shlex
import sys

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request.command_prefix import setup_line, words_before_python
from distmagic.request.flag_values import (
    DAY_S,
    Pairs,
    check_values,
    option,
    parse_duration,
    python,
    time_or_zero,
)
from distmagic.request.hosts import Host

CONNECT_TIMEOUT_S = 15.0  # the default
LEASE_S = 60.0
WARM_IDLE_S = 900.0


@frozen
class Access:
    """How to reach hosts.

    `pythons` maps a host's name to its interpreter; "" means all other hosts. Each field except
    `preload` is an option with a help text; times are in seconds. `connect_timeout_s` limits one
    connection, from name lookup to the end of authentication, not counting the user's typing.
    Raises `UsageError`.
    """

    pythons: Pairs = option(
        "hosts",
        "interpreter of all hosts, or of one, or env:NAME",
        "[HOST=]PATH",
        read=python,
        repeats=True,
        default=(),
        name="python",
    )
    setup: str = option(
        "hosts",
        "shell that every host runs before its Python: 'module load cuda'",
        "TEXT",
        default="",
        is_secret=True,
    )
    exec_prefix: str = option(
        "hosts",
        "program that starts each host's Python: 'apptainer exec --nv image.sif'",
        "COMMAND",
        not_with="export workflow",
        default="",
    )
    ssh_config: str | None = option(
        "hosts",
        "OpenSSH configuration instead of ~/.ssh/config",
        "FILE",
        not_with="export workflow",
    )
    ssh_command: str | None = option(
        "hosts",
        "reach hosts with the system's ssh program, such as ssh",
        "PROGRAM",
        not_with="export workflow",
    )
    connect_timeout_s: float = option(
        "hosts",
        f"longest time to connect ({CONNECT_TIMEOUT_S:g}s)",
        "TIME",
        read=parse_duration,
        within=(
            1e-9,
            DAY_S,
            "a time above 0, up to 1 day",
            "Use a number of seconds, such as 60.",
        ),
        not_with="export workflow",
        default=CONNECT_TIMEOUT_S,
    )
    lease_s: float = option(
        "times",
        f"how long ranks outlive a lost notebook ({LEASE_S:g}s)",
        "TIME",
        read=parse_duration,
        within=(
            1,
            DAY_S,
            "a time from 1 second to 1 day",
            "Use a number of seconds, such as 60.",
        ),
        not_with="export",
        default=LEASE_S,
    )
    warm_idle_s: float = option(
        "times",
        "how long hosts keep torch loaded for the next run (15m; 0: not at all)",
        "TIME",
        read=time_or_zero,
        within=(
            0,
            DAY_S,
            "a time from 0 to 1 day",
            "Use 0 (never), or a number of seconds.",
        ),
        not_with="export workflow",
        default=WARM_IDLE_S,
    )
    # Only a setting: modules for warm processes, in addition to imports in the job's text.
    preload: tuple[str, ...] = ()
    cold: bool = option(
        "times",
        "start every process new: no warm process is kept or used",
        not_with="export workflow",
        default=False,
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.before_python and any(path.startswith("~") for _, path in self.pythons):
            raise UsageError(
                "--python ~/...: with --setup or --exec-prefix no shell expands ~.",
                "Name the whole path; after --setup with an activated environment it is not needed.",
            )

    @property
    def before_python(self) -> tuple[str, ...]:
        """The words in front of Python on a host's command line: those of `--setup` and
        `--exec-prefix`.
        """
        return words_before_python(self.setup, self.exec_prefix)

    @property
    def setup_line(self) -> bytes:
        """The line that these words read first from stdin, b"" for none."""
        return setup_line(self.setup)

    @property
    def ssh_options(self) -> str:
        """Options with which an ssh program on the command line reaches the same hosts, each
        followed by a space.

        A jump host is written in a form that ssh-copy-id also accepts.
        """
        _, blank, options = (self.ssh_command or "").strip().partition(" ")
        options = options.replace("-J ", "-o ProxyJump=") + blank
        if self.ssh_config is not None:
            options += f"-F {shlex.quote(os.path.expanduser(self.ssh_config))} "
        return options

    def by_hand(self, host: Host) -> str:
        """Return the start of a command that runs a program on a host by hand."""
        client = (self.ssh_command or "ssh").strip().partition(" ")[0]
        return host.by_hand(f"{client} {self.ssh_options}".strip())

    def python_of(self, name: str) -> str | None:
        """Return the interpreter chosen for host `name`, or None."""
        table = dict(self.pythons)
        return table.get(name, table.get(""))

    def interpreter(self, host: Host) -> str:
        """Return the interpreter for a host: the chosen one; on this machine the notebook's own;
        else `python3`.
        """
        usual = sys.executable if host.is_local else "python3"
        return self.python_of(host.name) or usual
