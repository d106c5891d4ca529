"""`%distributed`: what the user sets once for the notebook, its hosts and its playground."""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from distmagic.errors import SpecError
from distmagic.notebook.backend import Backend, Playground, Session
from distmagic.notebook.completion import SUBCOMMANDS
from distmagic.request import flags
from distmagic.request.config import Chosen, Distmagic, choose_hosts, read_hostfile
from distmagic.request.hosts import Host, parse_hosts
from distmagic.request.spec import Access

_USAGE = """\
%distributed hosts LIST              set the hosts of this notebook: gpu-a:4,gpu-b:2
%distributed hosts --hostfile FILE   the same from a file with a host a line: gpu-a slots=4
%distributed hosts                   show the hosts
%distributed playground N            start N throw-away SSH hosts on this machine
%distributed playground stop         end them
%distributed jobs                    list the jobs on these hosts, running and ended
%distributed attach ID [NAME]        follow a running job, or see an ended one; its run goes into the variable NAME
%distributed add ID LIST             have hosts come to a running elastic job
%distributed stop ID                 end a job
%distributed logs ID RANK            show all that a rank has written
%distributed stacks [ID]             say where the ranks of a running job are, and who stands out
%distributed clean [ID|all]          show what ended jobs keep on the hosts; remove it
%distributed status                  show what hosts keep loaded for the next run, and its memory
%distributed down                    end that, and the connections to all hosts
%distributed --help                  the flags of a %%distributed cell, too"""


class Notebook:
    """The settings of one notebook, changed by `line`, and the session that its cells share."""

    def __init__(self, config: Distmagic, backend: Backend) -> None:
        self.config = config
        self._backend = backend
        self._chosen: Chosen | None = None
        self._playground: Playground | None = None
        self._session: Session | None = None

    def line(self, line: str) -> None:
        """Set the notebook's hosts, start a playground, end connections. `%distributed` alone lists the commands."""
        words = flags.split(line)
        commands = {"hosts": self._hosts, "playground": self._play, "down": self._down}
        if not words:
            print(_USAGE)
        elif words[0] in ("-h", "--help", "help"):
            print(f"{_USAGE}\n\n{flags.help_text()}")
        elif words[0] in commands:
            commands[words[0]](words[1:])
        else:
            raise _unknown(words[0])

    def session(self) -> Session:
        """Return the session of this kernel, opened at the first call."""
        if self._session is None:
            self._session = self._backend.session()
        return self._session

    def choose(self, request: flags.Request, environ: Mapping[str, str]) -> Chosen:
        """Return the hosts of `request`. Raises `SpecError`."""
        return choose_hosts(request, self._chosen, self.config, environ)

    def access(self, request: flags.Request, hosts: tuple[Host, ...]) -> Access:
        """Return the way to `hosts`: playground hosts are reached with the playground's own SSH configuration."""
        names = {host.name for host in hosts}
        for name in request.python_hosts:
            if name not in names:
                raise SpecError(f"--python {name}=...: {name} is not one of the hosts.", f"They are {listed(hosts)}.")
        own = self._playground
        if own is not None and names <= {host.name for host in own.hosts} and not request.names_ssh_config:
            return replace(request.access, ssh_config=own.ssh_config)
        return request.access

    def host_names(self) -> list[str]:
        """Return the names to complete: the notebook's hosts and those of the SSH configuration."""
        from distmagic.transports.ssh.config import host_names

        own = [host.name for host in (*(self._chosen or Chosen()).hosts, *self._playground_hosts())]
        return list(dict.fromkeys([*own, *host_names(self.config.ssh_config or None)]))

    def close(self) -> None:
        """End the playground and the connections; both may be used again afterwards."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        own, self._playground = self._playground, None
        if own is not None:
            own.stop()
            if self._chosen is not None and self._chosen.hosts == own.hosts:
                self._chosen = None

    def _playground_hosts(self) -> tuple[Host, ...]:
        return self._playground.hosts if self._playground is not None else ()

    def _hosts(self, words: list[str]) -> None:
        if words:
            self._chosen = _named_hosts(words)
        chosen = self.choose(flags.Request(), os.environ)
        print(f"{listed(chosen.hosts)}  ({chosen.source})")

    def _play(self, words: list[str]) -> None:
        if words == ["stop"]:
            self.close()  # connections too: first, else the hosts would look lost
            return
        if len(words) != 1 or not words[0].isdecimal() or int(words[0]) < 1:
            raise SpecError("%distributed playground needs a number of hosts.", "Write %distributed playground 2.")
        if self._playground is not None:
            self.close()
        self._playground = self._backend.playground(int(words[0]))
        self._chosen = Chosen(hosts=self._playground.hosts, source="throw-away SSH hosts on this machine")
        print(f"{listed(self._chosen.hosts)}  ({self._chosen.source}; %distributed playground stop ends them)")

    def _down(self, words: list[str]) -> None:
        if words:
            raise SpecError(
                "%distributed down takes nothing after it.",
                "It ends the connections to all hosts.",
            )
        session, self._session = self._session, None
        untold = session.down() if session is not None else ()
        if untold:
            print(f"{', '.join(untold)} could not be told; what is loaded there ends when its lease runs out")


def _unknown(word: str) -> SpecError:
    if word.startswith("-"):
        return SpecError(
            f"%distributed takes no flag {word}: flags belong to a cell, under %%distributed.",
            "For all cells of this notebook: %distributed hosts LIST, or %config Distmagic.",
        )
    close = difflib.get_close_matches(word, SUBCOMMANDS, n=1)
    guess = f"Did you mean {close[0]}? " if close else ""
    return SpecError(f"%distributed {word} is not known.", f"{guess}Known are: {', '.join(SUBCOMMANDS)}.")


def _named_hosts(words: list[str]) -> Chosen:
    if not words[0].startswith("-"):
        return Chosen(hosts=parse_hosts(" ".join(words)), source="%distributed hosts")
    flag, _, path = words[0].partition("=")
    path = path or " ".join(words[1:])
    if flag != "--hostfile" or not path:
        raise SpecError(f"{words[0]!r} names no hosts.", "Write gpu-a:4,gpu-b:2 or --hostfile FILE.")
    return Chosen(hosts=read_hostfile(path), source=f"%distributed hosts --hostfile {path}")


def listed(hosts: Iterable[Host]) -> str:
    """Return `hosts` as the user may write them."""
    return ", ".join(_written(host) for host in hosts)


def _written(host: Host) -> str:
    numbers = [str(number) for number in (host.port, host.slots) if number is not None]
    name = f"[{host.name}]" if numbers and ":" in host.name else host.name
    return ":".join([f"{host.user}@{name}" if host.user else name, *numbers])
