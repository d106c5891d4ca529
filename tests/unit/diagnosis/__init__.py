"""The doctor's judgement, of hosts as they might have answered."""

from __future__ import annotations

from dataclasses import replace

from distmagic.diagnosis.finding import Subject
from distmagic.remote.wire.protocol import Examined, Route
from tests.builders.plans import FACTS


def healthy(count: int) -> list[Subject]:
    """Return hosts gpu-1, gpu-2 ... of which little is known, and nothing bad."""
    found = []
    for number in range(1, count + 1):
        name, address = f"gpu-{number}", f"10.0.0.{number}"
        examined = Examined(
            hostname=name,
            name_addresses=(address,),
            shm_bytes=8 << 30,
            route=Route(address=address, interface="eth0"),
        )
        found.append(
            Subject(
                name=name,
                by_hand=f"ssh {name}",
                python=(3, 11, 2),
                facts=replace(FACTS, host_id=f"{number}"),
                examined=examined,
            )
        )
    return found
