"""An agent changes its own process, which is this one: that is changed back."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest


@pytest.fixture
def own_process() -> Iterator[None]:
    """Change the mask and the limit of files back, as the end of an agent's process does."""
    umask, limits = os.umask(0o022), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    os.umask(umask)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
