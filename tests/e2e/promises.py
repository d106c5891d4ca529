"""What holds after any pair of faults, whatever the two did to each other. Nothing here knows what a pair should lead to.

1. The cell ends: with the results of all ranks, or with an error of ours that names a host or a rank, or the user's wish.
2. No process, no claim on a device and no temporary file of ours is left on a host that is up, nor a temporary file in
   the notebook.
3. What the ranks wrote was shown once and in order, and each journal counts its events without a gap, but on a host
   whose home was taken away or took nothing.
4. Results are those of this run, and those that could not be fetched come once the hosts are whole again, but for those
   that such a host has lost.
5. The kernel is as good as new: the next run, in the same session, is done.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import distmagic
from distmagic.api import session
from distmagic.errors import (
    Cancelled,
    DistmagicError,
    Hung,
    NoResult,
    TimedOut,
    UsageError,
)
from distmagic.outcome.run import Run
from distmagic.planning.jobs import whereabouts
from distmagic.remote.records import journal
from distmagic.request.hosts import parse_hosts
from tests.e2e import faults, runner
from tests.e2e.faults import Told
from tests.e2e.gpus import claims, give_gpus, take_gpus
from tests.e2e.pair_play import LEASE_S, Played, train
from tests.e2e.pairs import Pair, Strike
from tests.e2e.runner import as_value
from tests.lab import Lab, LabHost
from tests.lab.waiting import wait_until

# A host that this notebook lost keeps what it has until its lease has run out.
CLEAN_S = LEASE_S + 60.0
SOON_S = 3.0  # in which nobody looks in
# The last: where they all stand at the same place.
_NAMED = re.compile(r"\bdm[123]\b|\brank \d+\b|\ball \d+ ranks\b")
# The last: an exception as Python writes it.
_OWN_FAULT = re.compile(r"fault of distmagic|broke down|\b\w+Error\(")


def check(played: Played, lab: Lab, temporary: Path) -> None:
    """Assert all promises of a pair that was played; the lab is whole afterwards. `temporary` is TMPDIR of the notebook."""
    check_outcome(played)
    repair(lab)
    if not played.pair.job.is_warm:
        check_clean(played, lab)
    switch_on(played, lab)
    check_late_results(played, lab)
    check_next_run(played.pair, lab)
    session().down()
    check_clean(played, lab)
    check_shown(played, lab)
    check_journals(played, lab)
    for host in lab.hosts:
        assert claims(host) == "", host.name
        take_gpus(host)
    assert list(temporary.iterdir()) == [], "left in the notebook's TMPDIR"


# ---- 1. how it ended


def check_outcome(played: Played) -> None:
    """Assert that the cell ended well, or with an error that a user can act upon."""
    if played.is_void:
        assert played.pair.job.may_not_begin, "a job that had begun is not listed"
        return
    if played.error is None:
        check_results(played)
        return
    struck = {strike.row.process for strike in played.hits}
    if isinstance(played.error, KeyboardInterrupt):
        assert "notebook" in struck, "nobody has interrupted it"
        # Before there is a run, or after it.
        is_outside = bool(played.pair.phases & {"connecting", "fetching"})
        assert is_outside or isinstance(played.error, Cancelled), (
            "a run that is interrupted says how it stands"
        )
        return
    assert is_true(played), "nobody has asked a rank to end"
    assert isinstance(played.error, DistmagicError), "an exception that is none of ours"
    notices = played.seen.notices if played.seen is not None else ()
    for text in (played.error.message, *notices):
        assert not _OWN_FAULT.search(text), text
    if isinstance(played.error, TimedOut):
        assert "timeout_s" in played.pair.options, (
            "nobody has asked for a limit of time"
        )
    else:
        is_parted = any("what the lead sends" in strike.fault for strike in played.hits)
        assert is_parted or not isinstance(played.error, Hung), "it stood still"
        assert _NAMED.search(played.error.message), "it names neither a host nor a rank"
    assert not is_survived(played), "a run survives each of the two alone"


def is_true(played: Played) -> bool:
    """Whether a rank is not said to be ended from outside, where only torchrun or the agent did that."""
    return "SIGTERM: asked to end from outside" not in played.outcome


def is_survived(played: Played) -> bool:
    """Whether both faults are of those that a run survives, and struck when it was running."""
    pair = played.pair
    if not pair.options.keys() <= {"node_lost_after_s"}:
        return False  # a row may ask for a limit of time, which counts whether it strikes or not
    if pair.job.may_not_begin:
        return False  # it lacks a host from the beginning
    if pair.job.kind == "together":
        return (
            False  # ranks that talk to each other may fail of what others don't notice
        )
    for strike in pair.strikes:
        is_struck = strike in played.hits or strike.row.way.misdeed is not None
        has_begun = strike.moment.phase in (
            "beginning",
            "running",
            "growing",
            "noticed",
            "with the other",
        )
        is_harmless = strike.row.outcome.partition(";")[0] == "done"
        if pair.job.kind == "elastic":
            is_harmless = _is_survived_without_host(strike, pair)
        if is_struck and not (has_begun and is_harmless):
            return False
    return True


def _is_survived_without_host(strike: Strike, pair: Pair) -> bool:
    """Whether an elastic job goes on, at worst without the host that is struck; its lead is dm3, which no row strikes."""
    lost = ("torchrun", "agent", "contact", "sshd's", "link", "host")
    is_machine = strike.row.process.split()[0] in lost
    return pair.job.names[0] == "dm3" and is_machine and strike.row.way.misdeed is None


def _ranks_at_end(played: Played) -> int:
    """Return how many ranks there must be: of an elastic job, as many as its hosts say that there were at last."""
    if played.pair.job.kind != "elastic":
        return played.pair.job.ranks
    assert played.run is not None
    return played.run.state.world_size


# ---- 2. what is left


def repair(lab: Lab) -> None:
    """Take back what still disturbs hosts that are up."""
    for host in lab.hosts:
        if host.is_up:
            host.heal()
            host.undrop()
            host.thaw()
            host.make_home_writable()
            host.exec(["rm", "-f", "filler"])  # of a disk that is full
        # What a row has prepared for each log-in: a clock that is ahead.
        (host.home / ".bashrc").unlink(missing_ok=True)


def switch_on(played: Played, lab: Lab) -> None:
    """Switch all hosts on."""
    for host in lab.hosts:
        host.start()
        if played.pair.job.devices:
            give_gpus(host)


def check_clean(played: Played, lab: Lab) -> None:
    """Wait until all hosts are clean. Where an agent was killed, it may be the next contact that cleans up."""
    needs_contact = any(
        strike.row.process.split()[0] in ("agent", "tmp") for strike in played.hits
    )
    lately = time.monotonic() + SOON_S

    def is_clean() -> bool:
        if not any(host.leftovers() for host in lab.hosts):
            return True
        if needs_contact and time.monotonic() > lately:
            for host in lab.hosts:
                with contextlib.suppress(DistmagicError):
                    session().housekeeping.jobs(
                        runner.reach(lab, parse_hosts(host.name))
                    )
        return False

    with contextlib.suppress(AssertionError):
        wait_until(is_clean, "clean hosts", CLEAN_S)
    lab.assert_clean(0.0)


# ---- 3. what was shown


def check_shown(played: Played, lab: Lab) -> None:
    """Assert that what was shown of each rank is what it wrote, once and in order."""
    if played.run is None or played.pair.job.kind == "elastic":
        return  # in an elastic job a rank is several processes, on several hosts
    told = Told(outcome=played.outcome, **faults.seen(played.run.state))
    whole = [one for one in told.ranks if has_whole_records(played, one.host)]
    faults.assert_read_once(lab, replace(told, ranks=whole))
    for one in told.ranks:
        numbers = [int(line) for line in one.lines if line.isdecimal()]
        assert numbers == sorted(set(numbers)), f"the lines of rank {one.rank}"


def has_whole_records(played: Played, host: str) -> bool:
    """Whether nothing took from a host what it had of the job, nor kept it from writing: logs, journal, results."""
    if host != "dm2":  # no row does that to another one
        return True
    rows = [strike.row for strike in played.pair.strikes]
    hits = [strike.row for strike in played.hits]
    was_off = any(row.kind.startswith(("power off", "reset")) for row in hits)
    if was_off and any(row.process == "disk" for row in rows):
        return False  # a small disk goes with the power
    return not any(
        strike.row.process.split()[0] in ("disk", "home", "mount")
        # What is removed before the job has begun is none of its records.
        and not (
            strike.row.process == "home"
            and strike.moment.phase in ("connecting", "delivering")
            and played.pair.job.kind != "followed"
        )
        for strike in played.hits
    )


def check_journals(played: Played, lab: Lab) -> None:
    """Assert that each journal counts its events in order; from 1 on and without a gap, where its host kept all of it."""
    struck = played.seen.job if played.seen is not None else ""
    for host in lab.hosts:
        for folder in host.home.glob(".distmagic/jobs/*/*"):
            numbers = [number for number, _ in journal.read(folder)]
            wanted = list(range(1, len(numbers) + 1))
            if folder.parent.name == struck and not has_whole_records(
                played, host.name
            ):
                wanted = sorted(set(numbers))
            assert numbers == wanted, f"the journal of {folder.name}"


# ---- 4. results


def check_results(played: Played) -> None:
    """Assert that all ranks returned what this run returns. Where a disk takes nothing, a result may be missing: by name."""
    assert played.run is not None
    for rank in range(_ranks_at_end(played)):
        if rank in played.results:
            _check_result(played, rank, played.results[rank])
            continue
        if _is_unseen(played, rank):
            continue
        assert not _must_have_result(played, rank), f"there is no result of rank {rank}"
        with contextlib.suppress(NoResult):
            raise AssertionError(
                f"rank {rank} has a result after all: {played.run.results[rank]}"
            )


def _check_result(played: Played, rank: int, result: dict[str, object]) -> None:
    assert result["token"] == played.token, "a result of another run"
    assert (result["rank"], result["step"]) == (rank, played.pair.steps)
    assert result["data"] == bytes(played.pair.result_bytes)
    if played.pair.job.kind in ("together", "elastic"):
        assert result["total"] == played.pair.steps, "each step is made once"


def check_late_results(played: Played, lab: Lab) -> None:
    """Assert that results which ranks left come now, if they did not come while the hosts were disturbed."""
    if played.run is None:
        return
    for rank in played.run.results:
        try:
            result = played.run.results[rank]
        except NoResult:
            if _must_have_result(played, rank):
                raise
        else:
            _check_result(played, rank, result)

    if any(_is_unseen(played, rank) for rank in range(_ranks_at_end(played))):
        _check_whole_job(played, lab)


def _is_unseen(played: Played, rank: int) -> bool:
    """Whether an elastic job ended well while a host could not be followed, so that a rank, or its end, was never seen."""
    assert played.run is not None
    if played.error is not None or played.pair.job.kind != "elastic":
        return False
    worker = played.run.state.workers.get(rank)
    told = f"The result of rank {rank} is unknown: dm"
    if worker is not None:
        if worker.ended is not None:
            return False
        told = f"How rank {rank} (dm"
    with pytest.raises(NoResult, match=f"^{re.escape(told)}"):
        played.run.results[rank]
    return True


def _check_whole_job(played: Played, lab: Lab) -> None:
    """Assert that whoever attaches to the job, as the error advises, gets the results of all ranks that returned."""
    assert played.run is not None
    hosts = parse_hosts(played.pair.job.hosts_line)
    found = session().housekeeping.jobs(runner.reach(lab, hosts))
    (job,) = [one for one in found if one.name == played.run.state.job]
    reaching = runner.reach(lab, whereabouts(job, hosts))
    whole = session().attach(reaching, job, runner.Watch())
    assert isinstance(whole, Run)
    for rank in range(_ranks_at_end(played)):
        worker = whole.state.workers.get(rank)
        if (
            worker is None
        ):  # its agent is stopped, and had no room to write that it began
            with pytest.raises(NoResult):
                whole.results[rank]
            continue
        # Else it was at work when its host missed the others, or its agent is still stopped.
        ended = worker.ended
        if ended is not None and ended.outcome == "returned":
            _check_result(played, rank, whole.results[rank])


def _must_have_result(played: Played, rank: int) -> bool:
    assert played.run is not None
    return has_whole_records(played, played.run.state.workers[rank].host)


# ---- 5. the kernel


def check_next_run(pair: Pair, lab: Lab) -> None:
    """Assert that the next run of the same session is done, on the same hosts."""
    # What a host that was out of reach still runs ends with its lease; until then a run is refused.
    hosts = parse_hosts(pair.job.hosts_line)
    wait_until(
        lambda: (
            not any(
                job.is_running
                for job in session().housekeeping.jobs(runner.reach(lab, hosts))
            )
        ),
        "the job to end on all hosts",
        CLEAN_S,
    )
    token = f"{pair.seed}-next"
    access = runner.access(lab, warm_idle_s=900.0 if pair.job.is_warm else 0.0)

    def begin() -> Run | None:
        try:
            return distmagic.run(
                as_value(train), 2, token, 0.01, 10, kwargs={"together": False, "misdeeds": (), "payload": b""},
                hosts=pair.job.hosts_line, devices=pair.job.devices, access=access, screen=runner.Watch(),
            )  # fmt: skip
        except UsageError as error:
            # Of a start that was interrupted an agent may begin after the list was asked for.
            if "still runs on" not in error.message:
                raise
            return None

    run = wait_until(begin, "a run to be let in", CLEAN_S)
    assert run.state.phase == "done"
    assert [run.results[rank]["token"] for rank in run.results] == [
        token
    ] * pair.job.ranks
    # A connection of a host whose clock is wrong still has what makes it so.
    own = "its clock is"
    notices = [notice for notice in run.state.notices if own not in notice]
    assert notices == [], f"of a run that nothing disturbs: {notices}"
    check_half_files(lab)


def check_half_files(lab: Lab) -> None:
    """Assert that half of a file that a host was sent is removed an hour later: whoever received it was killed."""
    torn = [host for host in lab.hosts if half_files(host)]
    for host in torn:
        for name in half_files(host):
            host.exec(
                ["touch", "-d", "61 minutes ago", f".distmagic/blobs/{name}"]
            ).check_returncode()
        host.exec(["touch", "-d", "2 minutes ago", ".distmagic/tidied"])
    session().close()  # a conversation looks when it begins, if nobody has in the last minute
    for host in torn:
        session().housekeeping.jobs(runner.reach(lab, parse_hosts(host.name)))
        wait_until(
            partial(_has_no_half_files, host), f"half of a file to go from {host.name}"
        )


def _has_no_half_files(host: LabHost) -> bool:
    return half_files(host) == []


def half_files(host: LabHost) -> list[str]:
    """Return the names of payload files on a host that have not come wholly."""
    names = host.exec(["ls", "-A", ".distmagic/blobs"]).stdout.split()
    return [name for name in names if len(name) != 64]
