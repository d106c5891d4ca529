"""Which processes may have a context of a GPU: what decides it runs everywhere."""

from __future__ import annotations

import pytest

from tests.gpu import checks

RANKS = {
    "ranks": frozenset({7, 8}),
    "torchruns": frozenset({5}),
    "with_contexts": frozenset(),
    "with_devices": frozenset({5, 7, 8}),
    "used_mib": 1060,
}


@pytest.mark.parametrize(
    ("seen", "is_fine"),
    [
        ({}, True),
        ({"used_mib": 1590}, False),  # one more context: torchrun's
        ({"used_mib": 530}, False),  # what is seen is not these ranks' memory
        ({"with_devices": frozenset({5, 6, 7, 8})}, False),
        ({"with_devices": frozenset({7, 8}), "used_mib": None}, True),
        ({"with_devices": frozenset({7})}, False),
        ({"with_contexts": frozenset({7, 8}), "used_mib": None}, True),
        ({"with_contexts": frozenset({5, 7, 8})}, False),
        ({"with_contexts": frozenset({7})}, False),
        ({"with_contexts": frozenset({70, 80})}, True),  # other pids than here
    ],
)
def test_who_has_a_context(seen, is_fine):
    found = checks.Seen(**RANKS | seen)
    if is_fine:
        checks.assert_only_ranks_have_contexts(found, 530)
        return
    with pytest.raises(AssertionError):
        checks.assert_only_ranks_have_contexts(found, 530)
