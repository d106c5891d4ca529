"""`%distributed hosts | playground | allocations | down | doctor`: the hosts that the notebook's
cells use.
"""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import os
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from distmagic.errors import Cancelled, DistmagicError, UsageError
from distmagic.notebook.job_hosts import known_hosts, reach
from distmagic.notebook.settings import CommandLine, Notebook, listed, say
from distmagic.render.table import aligned
from distmagic.request import systems
from distmagic.request.access import CONNECT_TIMEOUT_S
from distmagic.request.config import Chosen, read_hostfile
from distmagic.request.flags import Request
from distmagic.request.hosts import Hosts, parse_hosts

if TYPE_CHECKING:
    from distmagic.diagnosis.report import Report
    from distmagic.playground.playground import Playground

VERBS = ("freeze", "thaw", "cut", "heal", "off", "on")  # of a playground's host
_COLLECTIVES_S = 180.0  # a generous limit: hosts may start slowly
_IDLE_S = 5.0  # for the warm processes that the measuring run starts


def hosts(line: CommandLine) -> None:
    """Set the notebook's hosts, and how to reach them, if the line has them; print the hosts."""
    notebook = line.notebook
    _set(line)
    chosen = notebook.choose(Request())
    part = notebook.part(Request())
    if part is not None:
        print(f"{', '.join(part.place.names)}  ({part.place.words})")
        return
    # The settings for reaching the hosts.
    config = notebook.config
    parts = [f"--python {config.python}"] if config.python else []
    parts += [f"--python {name}={path}" for name, path in config.pythons.items()]
    if config.ssh_config:
        parts.append(f"--ssh-config {config.ssh_config}")
    way = "  " + " ".join(parts) if parts else ""
    print(f"{listed(chosen.hosts)}  ({chosen.source}){way}")


def _set(line: CommandLine) -> None:
    """Set what the line requests, or nothing if one of its words is wrong."""
    request, names = line.request, line.words
    chosen = line.notebook.hosts
    for name in names:
        if name.startswith("-"):
            raise UsageError(
                f"{name!r} names no hosts.",
                "Write gpu-a:4,gpu-b:2 or --hostfile FILE, and after it --python PATH or --ssh-config FILE.",
            )
    if request.access.setup or request.access.exec_prefix:
        raise UsageError(
            "--setup and --exec-prefix are for one cell, or for one command.",
            "Leave them out of %distributed hosts.",
        )
    if names and (request.hosts is not None or request.hostfile is not None):
        raise UsageError(
            "The line names hosts twice: as a list, and by --hosts or --hostfile.",
            "Keep one of them.",
        )
    if request.hostfile is not None:
        source = f"%distributed hosts --hostfile {request.hostfile}"
        chosen = Chosen(hosts=read_hostfile(request.hostfile), source=source)
    elif names or request.hosts is not None:
        named = request.hosts or parse_hosts(" ".join(names))
        chosen = Chosen(hosts=named, source="%distributed hosts")
    line.notebook.hosts = chosen
    config, access = line.notebook.config, request.access
    pythons = dict(access.pythons)
    config.python = pythons.pop("", "")
    config.pythons = pythons
    config.ssh_config = access.ssh_config or ""
    config.ssh_command = access.ssh_command or ""
    config.connect_timeout_s = access.connect_timeout_s


def playground(line: CommandLine) -> None:
    """Start a playground, end it, show it, or break one of its hosts.

    Hosts in DISTMAGIC_HOSTS take precedence over it.
    """
    from distmagic.playground.playground import found, start

    notebook = line.notebook
    count, *rest = line.words or ("",)
    keep = rest == ["--keep"]
    is_start = count.isdecimal() and int(count) >= 1 and (keep or not rest)
    named = os.environ.get("DISTMAGIC_HOSTS")
    if is_start and named:
        print(f"{named}  (DISTMAGIC_HOSTS; no playground was started)")
        return
    own = notebook.playground
    if keep and own is not None and not own.is_kept:
        notebook.close()
    if keep or (own is None and not is_start):
        # An earlier kernel's. This kernel's own may have ended meanwhile.
        own = notebook.playground = found()
    if not is_start and line.words != ("stop",):
        if own is not None and notebook.hosts is None:
            notebook.hosts = _played(own)
        _play(notebook, line.words)
        return
    is_same = keep and own is not None and own.is_kept and len(own.hosts) == int(count)
    if own is not None and not is_same:
        notebook.close()
        own.stop()
    if not is_start:
        return
    if own is None or not is_same:
        own = notebook.playground = start(int(count), keep=keep)
    notebook.hosts = _played(own)
    print(
        f"{listed(own.hosts)}  ({notebook.hosts.source}; %distributed playground stop ends them)"
    )


def _played(own: Playground) -> Chosen:
    return Chosen(hosts=own.hosts, source="throw-away SSH hosts on this machine")


def _play(notebook: Notebook, words: tuple[str, ...]) -> None:
    """Break or mend one of the playground's hosts, if `words` request it; print the state of all of
    them.
    """
    own = notebook.playground
    if own is None:
        raise UsageError(
            "No playground runs: %distributed playground needs a number of hosts.",
            "Write %distributed playground 2.",
        )
    names = [host.name for host in own.hosts]
    if words and (len(words) != 2 or words[0] not in VERBS or words[1] not in names):
        raise UsageError(
            f"{' '.join(words)!r} is not a command of the playground.",
            f"Write one of {', '.join(VERBS)}, and one of {', '.join(names)}.",
        )
    rows = [("host", "state", "processes", "by hand")]
    for name, state, count in own.order(*words):
        rows.append((name, state, str(count), f"ssh -F {own.ssh_config} {name}"))
    print(aligned(rows))


def allocations(line: CommandLine) -> None:
    """List a scheduler's allocations of this user, or use one of them."""
    from distmagic.names import owner

    held = line.notebook.session().allocations
    for system in systems.systems():
        if system.takes_down and not line.words:
            names = ", ".join(held.pool(system.name).names)
            if names:
                what = f"{system.takes_down}s of {system.title}"
                print(f"{what} in this notebook: {names}")
                return
    place = line.words[0] if line.words else "slurm"
    system = systems.at(place)
    if "hosts" not in system.can:
        raise UsageError(f"{system.title} gives no hosts.", "Leave it out.")
    request = system.part("hosts").asked(place, systems.Wanted())
    access = line.request.access
    if not request.is_there:
        rows = held.pool(system.name).listed(request, access, line.asker)
        say(aligned(rows))
        return
    taken = held.get(request, access, line.asker, owner())
    nodes = taken.wait(line.asker, say)
    print(f"{taken.title}: {listed(nodes)}")


def down(line: CommandLine) -> None:
    """End the hosts' warm processes, all connections and this notebook's allocations; or shut down
    one cluster.
    """
    words = [part for word in line.words for part in word.split("=", 1)]
    flags_of = {
        f"--{one.takes_down}": one for one in systems.systems() if one.takes_down
    }
    if len(words) == 2 and words[0] in flags_of and words[1]:
        pool = line.notebook.session().allocations.pool(flags_of[words[0]].name)
        say(pool.take_down(words[1], line.asker))
        return
    if words:
        flags_text = " or ".join(f"{flag} NAME" for flag in flags_of)
        raise UsageError(
            f"%distributed down takes nothing after it, except {flags_text}.",
            "Alone it ends the connections to all hosts, and this notebook's allocations.",
        )
    running = [run.job for run in line.notebook.in_background()]
    if running:
        raise UsageError(
            f"{', '.join(running)} would lose the connections: what runs in the background is this notebook's.",
            "run.wait() waits for the end of a run, run.stop() ends it.",
        )
    unreached = line.notebook.down()
    if unreached:
        print(
            f"{', '.join(unreached)} could not be reached; their warm processes end when the lease runs out"
        )


# ---- the doctor


def doctor(line: CommandLine) -> Report:
    """Return the doctor's report; in a terminal, after printing it; with --json as data for
    programs.

    With --collective, also the speed between pairs of hosts, if a run can start.
    """
    from distmagic.diagnosis.report import without_pairs
    from distmagic.session.doctor import CONNECT_S, examine, imported

    notebook, hosts = line.notebook, known_hosts(line)
    access = line.request.access
    if access.connect_timeout_s == CONNECT_TIMEOUT_S:  # the user has not set it
        # This machine needs more time for many hosts.
        seconds = max(CONNECT_S, min(len(hosts) / 4, CONNECT_TIMEOUT_S))
        access = replace(access, connect_timeout_s=seconds)
        line = replace(line, request=replace(line.request, access=access))
    packages = imported(notebook.shell.user_ns) if notebook.shell is not None else ()
    # First, because a scheduler may take its time: connections would wait meanwhile.
    reported = notebook.session().allocations.findings(hosts, line.asker)
    first_links = reach(line, hosts)
    found = examine(first_links, packages, reported=reported)
    if line.flags.collective and len(hosts) > 1:
        is_well = not found.has_errors
        found = _with_collectives(line, found, hosts) if is_well else without_pairs(found)  # fmt: skip
    cures = [replace(one, cure=notebook.worded(one.cure)) for one in found.findings]
    found = replace(found, findings=tuple(cures), is_data=line.flags.json)
    if notebook.shell is None:
        say(repr(found))
    return found


def _with_collectives(line: CommandLine, found: Report, hosts: Hosts) -> Report:
    """Return the report with the measurements of a run with one rank on each host.

    That run uses the hosts' warm processes. New ones end soon, so it leaves nothing on the hosts.
    """
    from distmagic import api
    from distmagic.diagnosis.report import with_failure, with_pairs
    from distmagic.names import owner
    from distmagic.outcome.run import Run
    from distmagic.remote.checkup.collective import measure
    from distmagic.render.screen import Screen

    began = time.monotonic()
    name = f"doctor-{secrets.token_hex(4)}"
    way = line.notebook.access(line.request, hosts)
    run: object | None
    try:
        run = api.run(
            measure,
            hosts=[replace(host, slots=1) for host in hosts],
            access=replace(way, warm_idle_s=min(way.warm_idle_s, _IDLE_S)),
            screen=Screen(),  # only the report is printed, possibly for a program
            timeout_s=_COLLECTIVES_S,
            name=name,
        )
        assert isinstance(run, Run)
        speeds, judged = run.results[0]
        found = with_pairs(found, speeds, judged, time.monotonic() - began)
    except Cancelled:
        raise
    except DistmagicError as error:
        found = with_failure(found, error)
        run = getattr(error, "run", None)
    jobs = line.housekeeping.jobs(reach(line, hosts))
    ours = [job for job in jobs if job.name == getattr(run, "job", "")]
    line.housekeeping.remove(reach(line, hosts), ours, owner())
    kept = {host.name: [name] for host in hosts if not host.is_local}
    line.housekeeping.remove_work_dirs(reach(line, hosts), kept)
    return found
