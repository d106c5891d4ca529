"""Starts ranks that stay: packs what their first cell imports, and begins a session of hosts.

Attaches to ranks that another kernel has left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from distmagic.connection.first_links import FirstLinks
from distmagic.payload import local_modules, on_ranks
from distmagic.payload.pack import Payload, dumped, write_code
from distmagic.planning.jobs import Job
from distmagic.remote.values.call import Stay
from distmagic.remote.values.seen import Seen
from distmagic.render.screen import Screen, UserRequest
from distmagic.request.cells.cell import CellPlan
from distmagic.request.flags import Request
from distmagic.session.background import BackgroundRun, BackgroundScreen
from distmagic.session.place import Place
from distmagic.session.session import Session
from distmagic.state.fold import begin
from distmagic.state.model import RunState
from distmagic.state.standstill import uses_gpus
from distmagic.staying import modules
from distmagic.staying.control import Control
from distmagic.staying.idle import IdleTime
from distmagic.staying.ranks import Ranks


def start(
    place: Place,
    session: Session,
    request: Request,
    plan: CellPlan,
    limit_bytes: int,
    *,
    can_type: bool,
) -> Ranks:
    """Start ranks that stay, at this place.

    `plan` is their first cell, whose modules are sent with them.
    """
    is_kept = request.spec.on_disconnect == "keep"
    control = Control(request.stay_idle_s if is_kept else None)
    idle = IdleTime(request.stay_idle_s or math.inf, time.monotonic)
    screen = SessionScreen(idle, can_type=can_type, is_kept=is_kept)
    name = request.stay or ""
    with place.given_up_after_error():
        payload = _payload(plan, name, limit_bytes)
        run = place.begin(payload, screen, name, control)
    there = {text.name: text for text in modules.texts_of(payload.modules)}
    ranks = Ranks(request, session, place.names, run, control, there, idle)
    screen.on_notice = ranks.show_idle_notice
    return ranks


def attach(
    first_links: FirstLinks,
    job: Job,
    session: Session,
    name: str,
    *,
    can_type: bool,
) -> Ranks:
    """Follow ranks that stay and outlive kernels, under this name in this kernel.

    `first_links` lead to the hosts of their job.
    """
    control = Control(job.terms.ends_idle_s)
    idle = IdleTime(job.terms.ends_idle_s or math.inf, time.monotonic)
    screen = SessionScreen(idle, can_type=can_type, is_kept=True)
    state = replace(begin(job.name, job.hosts, job.terms), variable=name)
    shown = BackgroundScreen(state, screen)
    follow = partial(session.attach, first_links, job, shown, name, control)
    open_link = first_links.opener.link_again
    run = BackgroundRun(job.name, shown, follow, first_links.cancel, open_link)
    session.background.add(run)
    for future in first_links.futures:
        future.add_done_callback(session.close_before_connections)
    ranks = Ranks(Request(stay=name), session, job.hosts, run, control, {}, idle)
    ranks.is_attached = True
    screen.on_notice = ranks.show_idle_notice
    return ranks


def _payload(plan: CellPlan, name: str, limit_bytes: int) -> Payload:
    """Return the payload of the session: the local modules that the first cell imports, and no
    call.
    """
    found = local_modules.found(local_modules.imports_of_text(plan.text))
    shown = on_ranks.look([(name, plan.text, None), *on_ranks.of_modules(found)])
    return Payload(
        call=dumped(Stay(), Seen(), None),
        code=write_code(found, {}, {}, shown),
        modules=found,
        title=f"%%ranks {name}",
        notice=shown.notice,
        limit_bytes=limit_bytes,
    )


class SessionScreen(Screen):
    """The screen of a session's own loop.

    It shows nothing: only cells are shown. It stops a session that is idle too long. Hosts stop one
    that `is_kept`, for its time without a cell alone. `on_notice` is called some time before that.
    """

    def __init__(self, idle: IdleTime, *, can_type: bool, is_kept: bool) -> None:
        self.on_notice: Callable[[], None] = lambda: None
        self._idle = idle
        self._can_type = can_type
        self._is_kept = is_kept
        self._looked_at_s = 0.0

    def show(self, state: RunState) -> None:
        """Look at new measurements of the ranks' GPUs."""
        if not self._is_kept and uses_gpus(state, self._looked_at_s):
            self._idle.note_gpu_use()
        looked_at_s = [node.looked_at_s for node in state.nodes]
        self._looked_at_s = max(looked_at_s, default=0.0)  # no host is known yet

    def requests(self) -> tuple[UserRequest, ...]:
        """Stop the session when its idle time is up."""
        if self._idle.notice_is_due():
            self.on_notice()
        return ("stop",) if not self._is_kept and self._idle.runs_out() else ()

    def can_type(self) -> bool:
        """Whether the user could type input where the first cell is shown."""
        return self._can_type
