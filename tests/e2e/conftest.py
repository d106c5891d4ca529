"""What scenes on real Slurm share: a kernel of their own, and the rule that nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distmagic import api
from distmagic.session.session import Session
from tests.lab.slurm import SlurmLab


@pytest.fixture
def kernel(slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A kernel's session of its own for each test; afterwards nothing is left, in Slurm or on any host."""
    made = Session()
    monkeypatch.setattr(api, "session", lambda: made)
    yield made
    made.down()
    slurm.assert_clean()
