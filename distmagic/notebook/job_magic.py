"""`%distributed jobs | attach | add | stop | logs | stacks | clean | status`: what is found on the hosts, from any kernel."""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from distmagic import sanitize
from distmagic.connection.prompts import NotebookAsker, asker_of
from distmagic.errors import RunError, SpecError
from distmagic.planning.jobs import Job, choose, known_whereabouts, whereabouts
from distmagic.request import flags
from distmagic.request.hosts import LOCALHOST, Host, parse_hosts

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distmagic.notebook.backend import Backend, Reaching
    from distmagic.notebook.line_magic import Notebook
    from distmagic.remote.wire.protocol import Template


class JobCommands:
    """The commands about jobs, for one shell."""

    def __init__(self, shell: InteractiveShell, notebook: Notebook, backend: Backend) -> None:
        self._shell, self._notebook, self._backend = shell, notebook, backend
        self._asker: NotebookAsker
        self.table: dict[str, Callable[[list[str]], object]] = {
            "jobs": self._list, "attach": self._attach, "add": self._add, "stop": self._stop, "logs": self._logs, "stacks": self._stacks,
            "clean": self._clean, "status": self._status,
        }  # fmt: skip

    def line(self, words: list[str]) -> object:
        """Do one command; `words[0]` is one of `table`."""
        with closing(asker_of(self._shell)) as self._asker:
            return self.table[words[0]](words[1:])

    # ---- commands

    def _list(self, words: list[str]) -> None:
        _expect(words, 0, 0, "%distributed jobs takes nothing after it.")
        print(table(self._jobs(), time.time()))

    def _attach(self, words: list[str]) -> object:
        _expect(words, 1, 2, "%distributed attach needs the name of a job.")
        for name in words[1:]:
            flags.variable_name(name, f"%distributed attach {words[0]}")
        job, hosts = self._find(words[0])
        try:
            spare = tuple(host for host in self._hosts() if host not in hosts)
            reaching = self._reach(hosts, spare)
            run = self._notebook.session().attach(reaching, job, self._backend.screen_for(self._shell))
        except RunError as error:
            self._shell.push(dict.fromkeys(words[1:], error.run))
            raise
        self._shell.push(dict.fromkeys(words[1:], run))
        return run

    def _add(self, words: list[str]) -> None:
        _expect(words, 2, 10_000, "%distributed add needs the name of a job and a list of hosts.")
        new = parse_hosts(",".join(words[1:]))
        job, known = self._find_known(words[0])
        if not job.is_running:
            raise SpecError(f"Job {job.name} has ended already ({job.phase}).")
        if 0 not in job.known:
            raise SpecError(f"{job.hosts[0]}, the first host of {job.name}, did not answer; it takes in all others.")

        def tell(host: str, node_rank: int) -> None:
            print(f"{host} has come to {job.name} as node {node_rank}; its ranks begin when the nodes have met anew")

        self._notebook.session().add(self._reach((known[0], *new)), job, tell)

    def _stop(self, words: list[str]) -> None:
        _expect(words, 1, 1, "%distributed stop needs the name of a job.")
        job, hosts = self._find_known(words[0])
        if not job.is_running:
            raise SpecError(f"Job {job.name} has ended already ({job.phase}).")
        self._notebook.session().stop(self._reach(hosts), job)
        print(f"{job.name} was stopped on {', '.join(dict.fromkeys(job.hosts[node] for node in job.known))}")
        if job.missing:
            print(
                f"{', '.join(dict.fromkeys(job.missing))} could not be asked; there it ends when it no longer hears the others"
            )

    def _logs(self, words: list[str]) -> None:
        _expect(words, 2, 2, "%distributed logs needs the name of a job and a rank.")
        if not re.fullmatch(r"-1|\d{1,9}", words[1]):
            raise SpecError(f"{words[1]!r} is not a rank.", "Write %distributed logs ID 0.")
        job, hosts = self._find_known(words[0])
        text = self._notebook.session().logs(self._reach(hosts), job, int(words[1]))
        if text is None:
            raise _no_rank(job, words[1])
        text = text or f"rank {words[1]} of {job.name} has written nothing"
        print(sanitize.log(text), end="" if text.endswith("\n") else "\n")

    def _stacks(self, words: list[str]) -> None:
        from distmagic import render

        _expect(words, 0, 1, "%distributed stacks takes the name of one job, or nothing where only one runs.")
        job, hosts = self._find(words[0]) if words else self._running()
        if not job.is_running:
            raise SpecError(f"Job {job.name} has ended already ({job.phase}), so its ranks are nowhere.")
        found = self._notebook.session().stacks(self._reach(hosts), job)
        page = {"text/plain": render.stacks_text(found, job.name), "text/html": render.stacks_html(found, job.name)}
        self._shell.display_pub.publish(page)

    def _running(self) -> tuple[Job, tuple[Host, ...]]:
        running = [job for job in self._jobs() if job.is_running]
        if len(running) != 1:
            names = ", ".join(job.name for job in running)
            raise SpecError(
                f"{len(running)} jobs run on these hosts: {names}." if running else "No job runs on these hosts.",
                "Write %distributed stacks ID." if running else "%distributed jobs lists those that have ended.",
            )
        return running[0], whereabouts(running[0], self._hosts())

    def _clean(self, words: list[str]) -> None:
        _expect(words, 0, 1, "%distributed clean takes the name of one job, or all.")
        jobs = self._jobs()
        ended = [job for job in jobs if not job.is_running]
        chosen = ended if words in ([], ["all"]) else [choose(jobs, words[0])]
        if any(job.is_running for job in chosen):
            raise SpecError(f"Job {chosen[0].name} still runs.", f"%distributed stop {chosen[0].name} ends it.")
        print(table(chosen, time.time()))
        session, hosts = self._notebook.session(), self._hosts()
        if not words:
            kept = sum(session.cached(self._reach(hosts)))
            print(f"kept of what was sent for jobs that are over: {kept / 1e6:,.1f} MB")
            print("Remove all of it with %distributed clean all, or one job with %distributed clean ID.")
            return
        freed = session.remove(self._reach(hosts), chosen)
        if words == ["all"]:
            freed += sum(session.cached(self._reach(hosts), removes=True))
        print(f"removed: {freed / 1e6:,.1f} MB")

    def _status(self, words: list[str]) -> None:
        _expect(words, 0, 0, "%distributed status takes nothing after it.")
        hosts = self._hosts()
        print(kept_table(hosts, self._notebook.session().templates(self._reach(hosts))))

    # ---- where

    def _hosts(self) -> tuple[Host, ...]:
        return self._notebook.choose(flags.Request(), os.environ).hosts or (LOCALHOST,)

    def _reach(self, hosts: tuple[Host, ...], spare: tuple[Host, ...] = ()) -> Reaching:
        request = flags.parse_line("", self._notebook.config.defaults(os.environ))
        return self._notebook.session().reach(hosts, self._notebook.access(request, hosts), self._asker, spare=spare)

    def _jobs(self) -> tuple[Job, ...]:
        reaching = self._reach(self._hosts())
        found = self._notebook.session().jobs(reaching)
        for why in reaching.absent.values():
            print(f"{why} What it has of jobs is not known.")
        return found

    def _find_known(self, name: str) -> tuple[Job, tuple[Host, ...]]:
        """Return a job, and those of its hosts that have told of it."""
        job = choose(self._jobs(), name)
        return job, known_whereabouts(job, self._hosts())

    def _find(self, name: str) -> tuple[Job, tuple[Host, ...]]:
        job = choose(self._jobs(), name)
        return job, whereabouts(job, self._hosts())


def _no_rank(job: Job, rank: str) -> SpecError:
    if job.missing:
        silent = ", ".join(job.missing)
        return SpecError(f"Rank {rank} of {job.name} ran on none of the hosts that answered; {silent} did not.")
    return SpecError(f"Job {job.name} has no rank {rank}.", "Ranks are counted from 0; -1 is torchrun itself.")


def _expect(words: list[str], low: int, high: int, message: str) -> None:
    if not low <= len(words) <= high:
        raise SpecError(message, "%distributed alone lists all commands.")


def table(jobs: tuple[Job, ...] | list[Job], now_s: float) -> str:
    """Return the table of jobs, `now_s` seconds after 1970."""
    if not jobs:
        return "no jobs on these hosts"
    rows = [["job", "state", "hosts", "began", "on disk"]]
    for job in jobs:
        age_min = int(min(max(0.0, (now_s - job.began_s) / 60), 1e9))  # whatever its clock says, also no number
        ago = f"{age_min} min ago" if age_min < 120 else f"{age_min // 60} h ago"
        told = (job.name, job.phase, ", ".join(dict.fromkeys(job.hosts)), ago, f"{job.size_bytes / 1e6:,.1f} MB")
        rows.append([sanitize.lines(text) for text in told])
    return _aligned(rows)


def kept_table(hosts: tuple[Host, ...], kept: tuple[tuple[Template, ...] | None, ...]) -> str:
    """Return the table of what hosts keep loaded; a host that keeps nothing, or is down (None), has a line as well."""
    rows = [["host", "torch loaded", "memory", "last used"]]
    for host, templates in zip(hosts, kept, strict=True):
        rows += [
            [host.name, f"{_minutes(one.age_s)} ago", f"{one.size_bytes / 1e6:,.0f} MB", f"{_minutes(one.idle_s)} ago"]
            for one in templates or ()
        ] or [[host.name, "no answer" if templates is None else "no", "", ""]]
    return _aligned(rows)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
