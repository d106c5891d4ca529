"""Hosts as a plan is made for them."""

from __future__ import annotations

from dataclasses import replace

from distmagic.planning.plan import Plan, Reached, make_plan, terms_of
from distmagic.remote.wire.protocol import Facts, Route, WorkDir
from distmagic.request.hosts import Host
from distmagic.request.spec import JobSpec

WORK = WorkDir(name="train", origin="here:/nb/train.ipynb")
FACTS = Facts(
    executable="/usr/bin/python3", torch="2.13.0", gpus=0,
    cpus=16, address="10.0.0.1", interface="eth0", free_port=40001, free_bytes=1 << 40,
    state_dir="/home/me/.distmagic",
)  # fmt: skip


def reached(
    name: str = "gpu-a",
    address: str = "10.0.0.1",
    interface: str = "eth0",
    slots=None,
    **facts,
) -> Reached:
    return Reached(
        host=Host(name=name, slots=slots),
        facts=replace(FACTS, address=address, **facts),
        route=Route(address=address, interface=interface),
    )


A, B = reached(), reached("gpu-b", "10.0.0.2", "ib0", free_port=50001)


def plan_for(
    spec: JobSpec, *hosts: Reached, job: str = "j-1", awaited: tuple[str, ...] = ()
) -> Plan:
    """Return the plan of notebook "nb" for these hosts; `awaited` are to come later."""
    terms = replace(terms_of(spec, lease_s=60.0, owner="nb"), awaited=awaited)
    return make_plan(spec, hosts, job=job, terms=terms, local_cwd="/nb", work=WORK)
