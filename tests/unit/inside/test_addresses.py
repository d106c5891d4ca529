"""Where node 0 is dialled: by its name, or by the address that Slurm has for it."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.inside.addresses import address_of_lead
from tests.builders.dialling import places

SAYS = "echo NodeName=$4 NodeAddr=10.0.0.7 NodeHostName=dm2"


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that puts a program in place of scontrol."""

    def put(text: str) -> None:
        path = tmp_path / "scontrol"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return put


def of_slurm(lead: str):
    place, _ = places()
    return replace(place, key="slurm 7.0", lead=lead)


def test_a_name_of_slurm_that_is_no_name_of_a_host(scontrol):
    scontrol(SAYS)
    assert address_of_lead(of_slurm("no-such-host.invalid")) == "10.0.0.7"


def test_a_name_that_resolves_is_dialled_as_it_is(scontrol):
    scontrol("echo NodeAddr=10.0.0.9")
    assert address_of_lead(of_slurm("localhost")) == "localhost"


@pytest.mark.parametrize(
    "text", ["exit 1", "echo Node x not found; exit 1", "exec /nowhere"]
)
def test_where_slurm_has_no_answer_the_name_may_resolve_late(scontrol, text):
    scontrol(text)
    assert address_of_lead(of_slurm("late.invalid")) == "late.invalid"


def test_other_systems_are_not_asked_of_slurm(scontrol):
    scontrol(SAYS)
    place = replace(of_slurm("late.invalid"), key="sing test")
    assert address_of_lead(place) == "late.invalid"
