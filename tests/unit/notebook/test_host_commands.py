"""What `%distributed doctor` asks of a run that measures pairs of hosts."""

from __future__ import annotations

import pytest

from distmagic import api
from distmagic.diagnosis.report import report
from distmagic.errors import Cancelled
from distmagic.session import doctor
from tests.unit.diagnosis import healthy


@pytest.mark.parametrize(("setting", "idle_s"), [("", 5.0), ("2", 2.0), ("0", 0.0)])
def test_the_run_that_measures_uses_warm_processes_and_keeps_new_ones_briefly(
    lab, monkeypatch, setting, idle_s
):
    ways = []

    def run(*_: object, access: object, **__: object) -> None:
        ways.append(access)
        raise Cancelled("", "")

    monkeypatch.setattr(api, "run", run)
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: report(healthy(2), ""))
    monkeypatch.setattr(lab.session.allocations, "findings", lambda *_: (), raising=False)  # fmt: skip
    lab.value("%distributed hosts gpu-1,gpu-2")
    if setting:
        lab.value(f"%config Distmagic.warm_idle_s = {setting}")
    lab.run("%distributed doctor --collective")
    (way,) = ways
    assert (way.cold, way.warm_idle_s) == (False, idle_s)
