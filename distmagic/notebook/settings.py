"""The settings of a notebook: its hosts and its playground; the session of all its cells; and a
line of a command.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from distmagic import sanitize
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request import flags
from distmagic.request.access import Access
from distmagic.request.config import Chosen, Distmagic, choose_hosts
from distmagic.request.hosts import Host, Hosts

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distmagic.planning.jobs import Job
    from distmagic.playground.playground import Playground
    from distmagic.render.screen import Screen
    from distmagic.session.background import BackgroundRun
    from distmagic.session.housekeeping import Housekeeping
    from distmagic.session.inside import Part
    from distmagic.session.session import Session
    from distmagic.state.model import RunState
    from distmagic.staying.ranks import Ranks

# The second name is for notebooks in which another extension has the first.
MAGICS = ("distributed", "distmagic")
RANKS = "ranks"  # only a cell magic


class Notebook:
    """One shell with its settings; in a terminal, where `shell` is None, the settings of one
    command.

    `hosts` are those of `%distributed hosts`, None before that. `playground` is the running
    playground, if any. `synced` are the Pythons of environments made by `%distributed env sync`, by
    host. `listed` are the jobs of the last `%distributed jobs`. `ranks` are the ranks that stay, by
    name, last used at the end. `terminal_words` rewords a text, which may be about a job, for a
    terminal.
    """

    def __init__(
        self,
        shell: InteractiveShell | None,
        config: Distmagic,
        terminal_words: Callable[[str, str], str] | None = None,
    ) -> None:
        self.shell = shell
        self.config = config
        self._terminal_words = terminal_words
        self.hosts: Chosen | None = None
        self.playground: Playground | None = None
        self.synced: dict[str, str] = {}
        self.listed: tuple[Job, ...] = ()
        self._session: Session | None = None
        self.ranks: dict[str, Ranks] = {}

    def worded(self, text: str, job: str = "") -> str:
        """Return a text, which may be about a job, with commands as the user must type them."""
        if self._terminal_words is None:
            return text
        return self._terminal_words(text, job)

    def screen(self, *, in_background: bool = False) -> Screen:
        """Return the screen of a run; its notices have commands as the user must type them."""
        from distmagic.screens.changed import ChangedScreen
        from distmagic.screens.choose import screen_for

        screen = screen_for(self.shell, in_background=in_background)
        return screen if self.shell is not None else ChangedScreen(screen, self._typed)

    def _typed(self, state: RunState) -> RunState:
        notices = tuple(self.worded(text, state.job) for text in state.notices)
        return replace(state, notices=notices)

    def say(self, text: str) -> None:
        """Print a text with names from a host, without terminal control sequences."""
        say(self.worded(text))

    def show(self, page: Mapping[str, str]) -> None:
        """Show a page as HTML or Markdown; a terminal shows its text."""
        if self.shell is None:
            print(page["text/plain"])  # noqa: T201
        else:
            self.shell.display_pub.publish(page)

    def session(self) -> Session:
        """Return the session of this kernel, opened at the first call."""
        if self._session is None:
            # Only now: `%load_ext distmagic` imports neither torch nor paramiko.
            from distmagic.api import session

            self._session = session()
        return self._session

    def request(self, words: Sequence[str] = ()) -> flags.Request:
        """Return the request of a line's words, with this notebook's settings for what they leave
        open.

        Raises `UsageError`.
        """
        return flags.parse_words(words, self.config.defaults(os.environ))

    def choose(self, request: flags.Request) -> Chosen:
        """Return the hosts of `request`. Raises `UsageError`."""
        return choose_hosts(request, self.hosts, self.config, os.environ)

    def access(
        self, request: flags.Request, hosts: Hosts, *, synced: bool = True
    ) -> Access:
        """Return how to reach `hosts`: playground hosts use the playground's own SSH configuration.

        If the line names no Python, that of a `synced` environment is used. Raises `UsageError` if
        `--python HOST=PATH` names a host that is not among them.
        """
        names = {host.name for host in hosts}
        for name in request.python_hosts:
            if name not in names:
                raise UsageError(
                    f"--python {name}=...: {name} is not one of the hosts.",
                    f"They are {listed(hosts)}.",
                )
        access = self._with_synced(request.access, names) if synced else request.access
        own = self.playground
        if own is None or request.names_ssh_config:
            return access
        if not names <= {host.name for host in own.hosts}:
            return access
        return replace(access, ssh_config=own.ssh_config)

    def _with_synced(self, access: Access, names: set[str]) -> Access:
        usual = self.request().access.pythons
        named = {host for host, _ in set(access.pythons) - set(usual)}
        pythons = dict(access.pythons)
        for host in sorted(names & set(self.synced)):
            if host not in named and "" not in named:
                pythons[host] = self.synced[host]
        return replace(access, pythons=tuple(pythons.items()))

    def way(self, request: flags.Request) -> tuple[Hosts, Access]:
        """Return the hosts of `request` and how to reach them; for a scheduler's nodes no hosts.

        Raises `UsageError`.
        """
        if request.allocation is not None:
            return (), request.access
        hosts = self.choose(request).hosts
        return hosts, self.access(request, hosts)

    def place(self) -> tuple[Hosts, Access]:
        """Return the hosts of a cell without flags, and how to reach them; () if no hosts were set.

        Raises `UsageError`.
        """
        request = self.request()
        hosts, access = self.way(request)
        is_default = self.choose(request).is_default
        return () if is_default else hosts, access

    def part(self, request: flags.Request) -> Part | None:
        """Return this kernel's part in a job whose nodes all run this notebook; None outside of
        one, or if hosts are named.

        Raises `UsageError`.
        """
        if request.allocation is not None or request.ignores_system:
            return None
        if not self.choose(request).is_default:
            return None
        part = self.session().inside.part(os.environ)
        if part is not None and request.background:
            raise part.refusal("--background")
        return part

    def launch(
        self,
        request: flags.Request,
        digest: Callable[[], str],
        run_on: Callable[[Hosts, Access], Any],
        before: Callable[[], object] = lambda: None,
    ) -> Any:
        """Return the result of `run_on` for the hosts of `request`; as `Part.run` if all nodes run
        this notebook.

        A dry run on a scheduler's nodes prints the request for them instead.
        """
        if request.dry_run and request.allocation is not None:
            from distmagic.session.dry_run import preview

            say(preview(request))
            return None
        part = self.part(request)
        if part is None:
            return run_on(*self.way(request))
        return part.run(digest(), request.access, request.spec, run_on, before)

    def host_names(self) -> list[str]:
        """Return host names for completion: the notebook's, and those in the SSH configuration."""
        from distmagic.transports.ssh.config import host_names

        known = list((self.hosts or Chosen()).hosts)
        if self.playground is not None:
            known += self.playground.hosts
        names = [host.name for host in known]
        names += host_names(self.config.ssh_config or None)
        return list(dict.fromkeys(names))

    def job_names(self) -> tuple[str, ...]:
        """Return the names of the jobs that this kernel has started, newest first, and of those
        that it has listed.
        """
        begun = () if self._session is None else self._session.begun
        listed = [job.name for job in reversed(self.listed)]
        return tuple(dict.fromkeys([*begun, *listed]))

    def in_background(self) -> tuple[BackgroundRun, ...]:
        """Return this kernel's background runs."""
        return () if self._session is None else self._session.background.running

    def down(self) -> tuple[str, ...]:
        """End warm processes, and close all connections. Return the hosts on which that failed."""
        session, self._session = self._session, None
        return session.down() if session is not None else ()

    def close(self) -> None:
        """End the playground, unless it is kept, and the connections; both may be used again
        afterwards.
        """
        # Connections first: otherwise a host that ends would look lost.
        session, self._session = self._session, None
        if session is not None:
            session.close()
        own, self.playground = self.playground, None
        if own is not None:
            own.close()
            if self.hosts is not None and self.hosts.hosts == own.hosts:
                self.hosts = None


@frozen
class CommandLine:
    """One line `%distributed NAME WORD ...` during its execution."""

    notebook: Notebook
    # asks for passwords while connecting; closed when the command ends
    asker: NotebookAsker
    words: tuple[str, ...]  # all words that are not flags
    # its hosts and how to reach them, as far as its flags set them
    request: flags.Request
    # the command's own flags
    flags: argparse.Namespace = field(default_factory=argparse.Namespace)

    @property
    def housekeeping(self) -> Housekeeping:
        """Requests to hosts outside of a run."""
        return self.notebook.session().housekeeping


def say(text: str) -> None:
    """Print a text with names from a host, without terminal control sequences."""
    print(sanitize.lines(text))  # noqa: T201


def listed(hosts: Iterable[Host]) -> str:
    """Return `hosts` in the user's notation."""
    found = []
    for host in hosts:
        numbers = [str(one) for one in (host.port, host.slots) if one is not None]
        is_ipv6 = ":" in host.name
        name = f"[{host.name}]" if numbers and is_ipv6 else host.name
        login = f"{host.user}@{name}" if host.user else name
        found.append(":".join([login, *numbers]))
    return ", ".join(found)
