"""Commands about jobs of any kernel: `%distributed jobs | runs | attach | view | add | stop | logs
| stacks | profile | status`, and about ranks that stay.

Each command first asks hosts for their jobs (job_hosts.py), and then acts on the hosts of the job.
"""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from distmagic import sanitize
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Cancelled, UsageError
from distmagic.notebook import run_names
from distmagic.notebook.job_hosts import (
    all_jobs,
    find,
    known_hosts,
    reach,
)
from distmagic.notebook.job_tables import kept_table, table
from distmagic.notebook.settings import CommandLine, say
from distmagic.planning.jobs import Job, known_whereabouts
from distmagic.render.quantities import duration
from distmagic.request.flag_values import variable_name
from distmagic.request.hosts import Hosts, parse_hosts

if TYPE_CHECKING:
    from distmagic.diagnosis.profile import Profile
    from distmagic.staying.ranks import Ranks


def jobs(line: CommandLine) -> None:
    """Print the table of jobs."""
    from distmagic.names import owner

    line.notebook.listed = all_jobs(line)
    # Background runs that wait for devices: hosts do not know them yet.
    running = line.notebook.session().background.running
    waiting = [run.state for run in running if run.state.phase == "waiting"]
    print(table(line.notebook.listed, owner(), waiting))


def runs(line: CommandLine) -> None:
    """Show a comparison of this notebook's runs."""
    from distmagic.comparison.compare import Comparison

    notebook = line.notebook
    found = Comparison(notebook.session().history.runs, is_apart=True)
    page = {"text/plain": repr(found), "text/html": found._repr_html_()}
    notebook.show(page)


def stay(line: CommandLine) -> None:
    """Print the state of ranks that stay; with a name, restart the idle time of these ranks."""
    stayed = line.notebook.ranks
    if line.words:
        _stayed(line, "stay").keep()
    if not stayed:
        print("no ranks stay: a cell that begins with %%ranks starts some")
    for ranks in list(stayed.values()):
        if ranks.done:
            del stayed[ranks.name]
            ranks.raise_end()
        held = ranks.holdings() or ["no names yet"]
        text = "\n  ".join([repr(ranks), f"since {ranks.since}", *held])
        if math.isfinite(ranks.idle.left_s):
            left = duration(ranks.idle.left_s)
            text += f"\n  they end in {left} unless a cell runs before"
        line.notebook.say(text)


def end(line: CommandLine) -> None:
    """End ranks that stay."""
    ranks = _stayed(line, "end")
    del line.notebook.ranks[ranks.name]
    if ranks.done:
        ranks.raise_end()
    ranks.end()
    print(f"The {ranks.label} have ended.")


def debug(line: CommandLine) -> None:
    """Open pdb where a rank has failed: in a run, or in the last cell of ranks that stay."""
    given = line.flags.rank
    if given is not None and not re.fullmatch(r"\d{1,9}", given):
        raise UsageError(f"--rank {given} is not a rank.", "Write --rank 2.")
    rank = None if given is None else int(given)
    notebook = line.notebook
    stayed = notebook.ranks
    screen = notebook.screen()
    if not screen.can_type():
        raise UsageError(
            "%distributed debug needs a place to type, and this program has none.",
            "Run it in JupyterLab, in a notebook or in IPython.",
        )
    name = line.words[0] if line.words else ""
    if name in stayed or (stayed and not name):
        _stayed(line, "debug").debug(rank, screen)
    else:
        notebook.session().failed_runs.debug(name, rank)


def _stayed(line: CommandLine, command: str) -> Ranks:
    """Return the ranks that stay under the line's name, or the only ones. Raises `UsageError`."""
    there = line.notebook.ranks
    hint = f"Those that stay: {', '.join(there)}."
    if not there:
        hint = "The ranks of a run end with it; those of a %%ranks cell stay."
    names = line.words or tuple(there)
    if len(names) != 1:
        raise UsageError(
            f"%distributed {command} needs the name of ranks that stay.", hint
        )
    (name,) = names
    if name not in there:
        raise UsageError(f"This notebook has no ranks called {name} that stay.", hint)
    return there[name]


def attach(line: CommandLine) -> object:
    """Follow a job to its end and return its run, unless a variable gets it.

    Raises the errors of a run.
    """
    job_name, *variables = line.words
    if variables and line.notebook.shell is None:
        raise UsageError(
            f"A terminal has no notebook variable `{variables[0]}` for the run.",
            f"Write %distributed attach {job_name}.",
        )
    for name in variables:
        variable_name(name, f"%distributed attach {job_name}")
    job, hosts = find(line, job_name)
    notebook = line.notebook
    outlives_kernels = job.terms.ends_idle_s is not None
    if outlives_kernels and job.is_running and notebook.shell is not None:
        name = variables[0] if variables else job.ranks_name
        _attach_ranks(line, job, hosts, name)
        return None
    known = known_hosts(line, job.name)
    spare = tuple(host for host in known if host not in hosts)

    def follow() -> object:
        first_links = reach(line, hosts, job.name, spare)
        variable = run_names.variable_of(variables)
        screen = notebook.screen()
        return notebook.session().attach(first_links, job, screen, variable)

    return run_names.bound(notebook.shell, variables, follow)


def _attach_ranks(line: CommandLine, job: Job, hosts: Hosts, name: str) -> None:
    """Make ranks that stay, and that another kernel has left or still follows, those of this
    notebook.
    """
    from distmagic.staying.starting import attach as attach_to_ranks

    notebook = line.notebook
    ranks = notebook.ranks.get(name)
    if ranks is not None and ranks.job != job.name and not ranks.done:
        raise UsageError(
            f"{name} already stands for other ranks in this notebook.",
            f"%distributed attach {job.name} NAME gives these another name.",
        )
    if ranks is None or ranks.done:
        asker = NotebookAsker(can_ask=False)
        access = notebook.access(line.request, hosts)
        first_links = notebook.session().reach(hosts, access, asker)
        can_type = notebook.screen().can_type()
        ranks = attach_to_ranks(
            first_links, job, notebook.session(), name, can_type=can_type
        )
    notebook.ranks.pop(name, None)
    notebook.ranks[name] = ranks
    run_names.keep(notebook.shell, name, ranks)
    ranks.take_over(notebook.screen())
    names = ", ".join(sorted(ranks.theirs)) or "none yet"
    notebook.say(f"{ranks!r}\n  names: {names}")


def view(line: CommandLine) -> object:
    """Follow the named job, or else the newest running one, detached ones first.

    Otherwise like `attach`. A background run of this notebook gets one more live view, and the cell
    does not wait for it.
    """
    notebook = line.notebook
    if not line.words:
        newest = max(
            _running(line), key=lambda job: (job.is_detached, -job.began_ago_s)
        )
        line = replace(line, words=(newest.name,))
    run = notebook.session().background.find(line.words[0])
    if run is None:
        return attach(line)
    run.screen.add(notebook.screen(in_background=True))
    return None


def _running(line: CommandLine) -> list[Job]:
    """Return the running jobs. Raises `UsageError` if there are none."""
    running = [job for job in all_jobs(line) if job.is_running]
    if not running:
        raise UsageError(
            "No job runs on these hosts.",
            "%distributed jobs lists those that have ended.",
        )
    return running


def add(line: CommandLine) -> None:
    """Add hosts to a running elastic job."""
    new = parse_hosts(",".join(line.words[1:]))
    job, known = find(line, line.words[0], known_whereabouts)
    if not job.is_running:
        raise UsageError(f"Job {job.name} has already ended ({job.phase}).")
    if 0 not in job.known:
        raise UsageError(
            f"Cannot add hosts to {job.name}: its first host, {job.hosts[0]}, did not answer, and new hosts join through it."
        )

    def tell(host: str, node_rank: int) -> None:
        say(
            f"{host} has joined job {job.name} as node {node_rank}; its ranks start after the next rendezvous"
        )

    # The first host assigns node numbers, so it is connected to as well.
    line.housekeeping.add(reach(line, (known[0], *new), job.name), job, tell)


def stop(line: CommandLine) -> None:
    """Stop a job on those of its hosts that answer."""
    run = line.notebook.session().background.find(line.words[0])
    if run is not None and run.state.phase == "waiting":
        run.stop()
        say(f"Job {run.job} no longer waits for devices")
        return
    job, hosts = find(line, line.words[0], known_whereabouts)
    if not job.is_running:
        raise UsageError(f"Job {job.name} has already ended ({job.phase}).")
    stopped = line.housekeeping.stop(reach(line, hosts, job.name), job)
    if stopped.ended:
        say(f"Job {job.name} was stopped on {', '.join(stopped.ended)}")
    for name, error in stopped.unknown.items():
        say(f"{name}: processes of the job may still run. {error.message}")
    missing = tuple(dict.fromkeys(job.missing))
    if missing:
        say(f"{', '.join(missing)} did not answer")
    unknown = [*stopped.unknown, *missing]
    if unknown:
        text = f"What still runs on {', '.join(unknown)} {_what_ends(job)}."
        line.notebook.say(text)
    if stopped.was_interrupted:
        raise Cancelled(f"Interrupted while job {job.name} was being ended.")


def _what_ends(job: Job) -> str:
    """Return the predicate of a sentence about a host that did not receive the request: what ends
    the job on it.
    """
    if len(job.hosts) > 1:
        return "ends by itself when no heartbeat of the other hosts arrives"
    if job.is_detached:
        return f"ends when %distributed stop {job.name} reaches it"
    return f"ends when its lease of {job.terms.lease_s:g} s runs out"


def logs(line: CommandLine) -> None:
    """Print a rank's output; if it is very long, its newest part, and where the whole is."""
    name, rank = line.words
    if not re.fullmatch(r"-1|\d{1,9}", rank):
        raise UsageError(f"{rank!r} is not a rank.", "Write %distributed logs ID 0.")
    job, hosts = find(line, name, known_whereabouts)
    first_links = reach(line, hosts, job.name)
    text = line.housekeeping.logs(
        first_links, job, int(rank), by_time=line.flags.by_time
    )
    if text is None and job.missing:
        raise UsageError(
            f"Rank {rank} of {job.name} ran on none of the hosts that answered; {', '.join(job.missing)} did not."
        )
    if text is None:
        raise UsageError(
            f"Job {job.name} has no rank {rank}.",
            "Ranks are counted from 0; -1 is torchrun itself.",
        )
    text = text or f"rank {rank} of {job.name} has written nothing"
    # Later text in a terminal must not inherit colours.
    print(sanitize.closed(sanitize.log(text).removesuffix("\n")))


def stacks(line: CommandLine) -> None:
    """Show where the ranks of a running job are."""
    from distmagic import render

    job, hosts = _running_job(line)
    found = line.housekeeping.stacks(reach(line, hosts, job.name), job)
    page = {
        "text/plain": render.stacks_text(found, job.name),
        "text/html": render.stacks_html(found, job.name),
    }
    line.notebook.show(page)


def profile(line: CommandLine) -> Profile:
    """Return where running ranks of a job spend their time; in a terminal, after printing it."""
    steps = line.flags.steps or "3"
    if not re.fullmatch(r"\d{1,9}", steps):
        raise UsageError(
            f"--steps {steps} is not a number of steps.", "Write --steps 3."
        )
    job, hosts = _running_job(line)
    found = line.housekeeping.profile(reach(line, hosts, job.name), job, int(steps))
    if line.notebook.shell is None:
        print(found)
    return found


def _running_job(line: CommandLine) -> tuple[Job, Hosts]:
    """Return the named job and its hosts; without a name, the only running job.

    Raises `UsageError`.
    """
    if line.words:
        job, hosts = find(line, line.words[0])
        if not job.is_running:
            raise UsageError(
                f"Job {job.name} has already ended ({job.phase}): none of its ranks runs."
            )
        return job, hosts
    running = _running(line)
    if len(running) > 1:
        names = ", ".join(job.name for job in running)
        raise UsageError(
            f"{len(running)} jobs run on these hosts: {names}.",
            "Name one of them.",
        )
    return find(line, running[0].name)


def status(line: CommandLine) -> None:
    """Print the warm processes on the hosts."""
    hosts = known_hosts(line)
    print(kept_table(hosts, line.housekeeping.templates(reach(line, hosts))))
