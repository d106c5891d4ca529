"""Nodes that meet, as Slurm starts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distmagic.inside.job_node import JobNode
from tests.builders.dialling import places


@pytest.fixture
def nodes() -> tuple[JobNode, JobNode]:
    """Two nodes of a step of Slurm."""
    first, second = places()
    key = f"slurm {first.key}"
    return replace(first, key=key), replace(second, key=key)
