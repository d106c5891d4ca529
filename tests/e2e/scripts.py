"""Run scripts on hosts of the lab as `%distributed run` does. For the tests of this folder."""

from __future__ import annotations

from typing import Any

from distmagic.api import session
from distmagic.connection.prompts import NotebookAsker
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.request import flags
from distmagic.request.flags import split_program
from distmagic.request.hosts import parse_hosts
from distmagic.session.programs import run_program
from tests.e2e import runner
from tests.lab import Lab


def run(
    lab: Lab,
    line: str,
    *,
    hosts: str = "dm1:1",
    screen: runner.Watch | None = None,
    **way: Any,
) -> Run:
    """Run `%distributed run LINE` on hosts of the lab."""
    found = _begin(lab, line, hosts, screen or runner.Watch(), way)
    assert isinstance(found, Run)
    return found


def run_warm(lab: Lab, line: str, **way: Any) -> Run:
    """Run `%distributed run LINE` on hosts that keep torch loaded for the next test, which are the fixture `warm_lab`."""
    return run(lab, line, warm_idle_s=900.0, **way)


def detached(lab: Lab, line: str, *, hosts: str = "dm1:1") -> Detached:
    """Begin `%distributed run --detach LINE`."""
    found = _begin(lab, f"--detach {line}", hosts, runner.Watch(), {})
    assert isinstance(found, Detached)
    return found


def _begin(
    lab: Lab, line: str, hosts: str, screen: runner.Watch, way: dict[str, Any]
) -> Run | Detached:
    words, program = split_program(flags.split(line))
    request = flags.parse_words(words, flags.Defaults(access=runner.access(lab, **way)))
    asker = NotebookAsker(can_ask=False)
    return run_program(
        session(),
        request,
        program,
        parse_hosts(hosts),
        request.access,
        asker,
        lambda: screen,
        "run",
    )
