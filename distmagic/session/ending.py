"""The end of a run in a session: its `Run`, its error, or the job that runs on detached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from distmagic import sanitize
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.link_opener import UNKNOWN_HOST, Fleet, LinkOpener
from distmagic.connection.prompts import NotebookAsker, asker_of
from distmagic.diagnosis.as_text import in_words
from distmagic.diagnosis.finding import MEMORY, NCCL
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import left
from distmagic.outcome.shown import shell
from distmagic.planning.jobs import Job, choose, known_whereabouts, whereabouts
from distmagic.remote.frozen import frozen
from distmagic.render.screen import Screen
from distmagic.request.hosts import Host, Hosts
from distmagic.runner.launch import Followed
from distmagic.screens.choose import screen_for
from distmagic.session import doctor
from distmagic.session.background import Left
from distmagic.session.local_hints import error_of
from distmagic.state.model import RunState
from distmagic.state.verdict import may_be_of_hosts

if TYPE_CHECKING:
    from distmagic.session.session import Session


def left_of(
    session: Session, followed: Followed, opener: LinkOpener, screen: Screen
) -> Left:
    """Return the `Run` of a finished run; the `Detached` of a job that runs on.

    Raises the error of a failed run; its attribute `run` is the `Run`.
    """
    state = followed.state
    if not state.is_over:
        return _leave(session, followed, opener.fleet, screen)

    session.history.add(state)
    error = error_of(state, was_interrupted=followed.was_interrupted)
    if error is not None:
        if may_be_of_hosts(state, error):
            error.hint = f"{error.hint}\n{diagnosed(session, state, opener.fleet)}"
            error.hint = sanitize.lines(error.hint.strip())
        session.allocations.advise(opener.fleet.hosts, error)
    small_results = {}
    for rank, worker in state.workers.items():
        data = followed.small_results.get((worker.node_rank, rank))
        if data is not None:
            small_results[rank] = data
    first = session.failed_runs.add(state, small_results)
    is_cause = first is not None and state.first_failure in (None, first)
    can_debug = shell() is not None and screen.can_type()
    if error is not None and is_cause and can_debug:
        offer = f"%distributed debug {state.job} opens pdb where rank {first} failed."
        error.hint = f"{error.hint}\n{offer}".strip()
    host_indices = followed.host_indices

    def open_link(node_rank: int) -> Link:
        return opener.link_again(host_indices[node_rank])

    try:
        return left(state, small_results, open_link, error)
    finally:
        # The error's traceback refers to this frame: a reference cycle would keep both, and the
        # run, alive
        del error


def diagnosed(session: Session, state: RunState, fleet: Fleet) -> str:
    """Return the doctor's findings on the hosts of a failed run; "" if there are none, or if
    the doctor fails.
    """
    seconds = min(fleet.access.connect_timeout_s, doctor.CONNECT_S)
    access = replace(fleet.access, connect_timeout_s=seconds)
    port = 0
    for reason in () if state.chose_port else state.unreached.values():
        port = doctor.port_in(reason)
    with closing(NotebookAsker(can_ask=False)) as asker:
        try:
            # First: it may fail, and nothing closes connections then.
            reported = session.allocations.findings(fleet.hosts, asker)
            first_links = session.reach(fleet.hosts, access, asker)
            found = doctor.examine(first_links, port=port, reported=reported)
        except (Exception, KeyboardInterrupt):  # noqa: BLE001
            return ""  # the run's own error is raised, whatever fails here
    # The memory of GPUs stops no network, and NCCL reports of a job that still runs: both are
    # of other runs of the same user.
    causes = [
        one
        for one in found.findings
        if not one.check.startswith(MEMORY) and one.check != NCCL
    ]
    return in_words(causes)


def _leave(
    session: Session, followed: Followed, fleet: Fleet, screen: Screen
) -> Detached:
    """Stop following a detached job, which runs on; return the object that attaches to it or
    stops it.
    """
    state = followed.state
    hosts = []
    for index in dict.fromkeys(followed.host_indices):
        if index != UNKNOWN_HOST and fleet.known[index] not in hosts:
            hosts.append(fleet.known[index])
    # An elastic job may have moved to other hosts since.
    spare = [host for host in fleet.known if host not in hosts]
    fleet = Fleet(hosts=tuple(hosts), access=fleet.access, spare=tuple(spare))
    again = JobHandle(session=session, job=state.job, fleet=fleet)
    names = tuple(host.name for host in hosts)
    alone = Detached(state.job, names, attach=again.attach, stop=again.stop)
    notices = (*state.notices, str(alone))
    screen.finish(replace(state, notices=notices, seen_unix_s=time.time()))
    return alone


@frozen
class JobHandle:
    """A detached job, which runs on.

    It is found on the hosts of `fleet`; it may have moved to the spare hosts.
    """

    session: Session
    job: str
    fleet: Fleet

    def attach(self) -> Left:
        """Follow the job to its end, as `Session.attach`."""
        with closing(asker_of()) as asker:
            found = self._find(whereabouts, asker)
            return self.session.attach(*found, screen_for())

    def stop(self) -> None:
        """End the job. Raises the error of a host that has not confirmed its end."""
        with closing(asker_of()) as asker:
            found = self._find(known_whereabouts, asker)
            self.session.housekeeping.stop(*found).raise_unknown()

    def _find(
        self,
        where: Callable[[Job, Sequence[Host]], Hosts],
        asker: NotebookAsker,
    ) -> tuple[FirstLinks, Job]:
        known, access = self.fleet.known, self.fleet.access
        asked = self.session.reach(self.fleet.hosts, access, asker)
        job = choose(self.session.housekeeping.jobs(asked), self.job)
        hosts = where(job, known)
        spare = tuple(host for host in known if host not in hosts)
        return self.session.reach(hosts, access, asker, spare=spare), job
