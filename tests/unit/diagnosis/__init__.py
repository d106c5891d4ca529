"""The doctor's judgement, of hosts as they might have answered."""

from __future__ import annotations

from dataclasses import replace

from distmagic.diagnosis.finding import Subject
from tests.builders.plans import FACTS


def healthy(count: int) -> list[Subject]:
    """Return hosts gpu-1, gpu-2 ... of which little is known, and nothing bad."""
    return [
        Subject(
            name=f"gpu-{number}",
            python=(3, 11, 2),
            facts=replace(FACTS, host_id=f"{number}"),
        )
        for number in range(1, count + 1)
    ]
